"""Decoder layers over packed weights: few rows go through all layers in one call of compiled code, as float ones do.

    decode steps, drafts      `compiled_layers`: bytes are read where they lie, by kernels for each kind
    prompts                   the layer's own parts, product by product (`quantized_linear`)

Nothing is fused: seven parts of a layer may be of seven kinds (a GGUF's values have often more bits than its queries),
and compiled code takes each where it is. A layer that compiled code cannot read, such as one with columns in an order
of their own, with integer products, or with a part that was left in float, stays as it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmfromscratch import compiled_layers, fused_layers, model, quantized_linear
from llmfromscratch.calibration import PRODUCTS
from llmfromscratch.kernels import block_kinds
from llmfromscratch.quantized_linear import QuantizedLinear

_OWN_WAY = ("torch", "plain")  # kernels of a part that stand for another way to compute


def is_quantized(network: Any) -> bool:
    """Whether a part of one of its layers is packed."""
    return any(map(quantized_linear.is_packed, network.layers.modules()))


def lacking(kind: str, network: Any) -> str | None:
    """Why layers of a kind cannot be had for a quantized network, in one sentence; None where they can."""
    if kind in ("fused", "triton"):
        return "the weights are quantized, and these layers join weights in float."
    if kind != "compiled":
        return None
    if not any(map(reads, network.layers)):
        return "no layer has only weights that compiled layers can read where they lie, on the CPU."
    dtype = network.embed_tokens.weight.dtype
    floats = None if all(map(is_packed, network.layers)) else compiled_layers.unavailable(dtype)
    return floats or compiled_layers.unavailable(dtype, packed=True)


def use(network: model.Model) -> None:
    """Exchanges the layers that compiled code can read for a `QuantizedLayer`, in place, and float ones for a
    `FusedLayer`."""
    for index, layer in enumerate(network.layers):
        if reads(layer):
            network.layers[index] = QuantizedLayer(layer, network.config, "compiled")
        elif not is_packed(layer):
            network.layers[index] = fused_layers.FusedLayer(layer, network.config, "compiled")
    if type(network.lm_head) is torch.nn.Linear:
        network.lm_head = fused_layers.Head(network.lm_head)
    fused_layers.stack(network)


def reads(layer: Any) -> bool:
    """Whether compiled code can read all seven parts of a layer."""
    return all(
        isinstance(part, QuantizedLinear)
        and part.order is None
        and part.kind in block_kinds.NUMBERS
        and part.data.device.type == "cpu"
        for part in parts_of(layer)
    )


def is_packed(layer: Any) -> bool:
    """Whether a part of a layer is not float."""
    return any(not isinstance(part, torch.nn.Linear) for part in parts_of(layer))


def parts_of(layer: Any) -> tuple[Any, ...]:
    """The seven products of a layer, in the order of the stream."""
    return tuple(layer.get_submodule(name) for name in PRODUCTS)


class QuantizedLayer(fused_layers.FusedLayer):
    """A decoder layer made of the parts of another, whose seven products are QuantizedLinear: the same function.

    Where compiled code serves, their bytes are its operands; elsewhere they compute. A part that is given other bytes,
    another bias or a kernel of its own is seen at the next pass.
    """

    most_rows = compiled_layers.MAX_PACKED_ROWS

    @torch.inference_mode(False)
    def fuse(self) -> None:
        """Notes what the parts hold now."""
        self.folded = False
        self._parts = parts_of(self)
        self._note()

    @property
    def source(self) -> Tensor:
        """See `FusedLayer`."""
        first: Any = self._parts[0]._buffers["data"]
        return first

    @property
    def dtype(self) -> torch.dtype:
        """What the layer computes in."""
        dtype: torch.dtype = self._parts[0].dtype
        return dtype

    def is_watched(self) -> bool:
        """Whether somebody has hooks on its parts, or has chosen another kernel for one of them."""
        return any(self._hooks) or any(part.kernel in _OWN_WAY for part in self._parts)

    def operands(self) -> tuple[tuple[Any, ...], tuple[Tensor | None, ...]]:
        """See `FusedLayer`; weights are tuples of packed parts."""
        q, k, v, o, gate, up, down = self._parts
        packed = [tuple(part.packed() for part in group) for group in ((q, k, v), (o,), (gate, up), (down,))]
        return tuple(packed), (_joined(q, k, v), o.bias, _joined(gate, up), down.bias)

    def _of_qkv(self, x: Tensor) -> Tensor:
        return torch.cat([self._of(x, part) for part in self._projections], dim=-1)

    def _of_gate_up(self, x: Tensor) -> Tensor:
        return torch.cat([self._of(x, part) for part in self._gates], dim=-1)

    def _of(self, x: Tensor, part: Any) -> Tensor:
        with fused_layers._label("llm::product"):
            output: Tensor = part(x)
            return output


def _joined(*parts: Any) -> Tensor | None:
    """The biases of parts that stand under each other, which become views of it; None where none of them has one, zeros
    where one has none."""
    like = next((part.bias.detach() for part in parts if part.bias is not None), None)
    if like is None:
        return None
    biases = [like.new_zeros(part.out_features) if part.bias is None else part.bias.detach() for part in parts]
    joined = torch.cat(biases)
    for part, own in zip(parts, joined.split([part.out_features for part in parts]), strict=True):
        if part.bias is not None:
            part.bias.data = own
    return joined
