"""GPTQ and AWQ over a whole network: each layer rounded for what it reads, then packed, or only given rounded weights.

    for each layer:  moments of its inputs -> AWQ's factors, folded -> GPTQ or rounding -> into place, all at once

AWQ multiplies the columns of a product by factors and divides its input by them. The division costs nothing when the
network runs, as it goes into what makes that input:

    q, k, v     the gain of the norm before          gate, up    the gain of the norm before
    o           the rows of v: a key/value head serves several query heads, which therefore share its factors
    down        the rows of up
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llmfromscratch import calibration, model, quantization
from llmfromscratch.errors import RequestError
from llmfromscratch.packed_weight import PackedWeight
from llmfromscratch.progress import progress_bar
from llmfromscratch.quantized_linear import QuantizedLinear
from llmfromscratch.quantized_model import finite, place

METHODS = ("gptq", "awq", "awq+gptq")
TENSOR = "tensor"  # in the place of a group: one grid for a whole matrix
_MAKERS = {  # what makes the input of the products that begin with this one
    "self_attn.q_proj": "input_layernorm",
    "self_attn.o_proj": "self_attn.v_proj",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.down_proj": "mlp.up_proj",
}
Tensors = dict[str, Tensor]  # of a layer, by their names in it


# ---- a network ---------------------------------------------------------------------------------------------------


@torch.inference_mode(False)
@torch.no_grad()
def quantize(
    network: model.Model, method: str, windows: Tensor, bits: int = 4, group: int | None = 32, simulate: bool = False
) -> None:
    """Quantizes the seven products of every layer, in place, one layer after the other; embedding and head stay.

    method: of METHODS. windows: token ids to calibrate on, int64 [count, length] (`calibration.windows`). bits, group:
    of the grids, as in `quantization.grids_of`. Products become `QuantizedLinear`, which takes up to 4 bits, groups of
    a multiple of 32 columns and widths that 32 divides; with `simulate` they stay float products that hold the rounded
    values, which takes any.

    A layer changes when all of it has been computed, so an interrupted call leaves a network that works: the layers
    behind are quantized, the others are not. Raises RequestError (an unknown method, layers that hold no float
    products, too few tokens, what cannot be packed), CheckpointError (weights that are NaN or infinite).
    """
    if method not in METHODS:
        raise RequestError(f"method is {method!r}; expected one of {', '.join(METHODS)}.")

    def change(index: int, moments: Tensors) -> None:
        layer = network.layers[index]
        tensors = _read(layer)
        if "awq" in method:
            protect(network.config, tensors, moments, bits, group)
        rounded = _round(tensors, moments, "gptq" in method, bits, group)
        _put(layer, _simulated(layer, tensors, rounded) if simulate else _packed(layer, tensors, rounded))

    _check(network)
    calibration.layer_by_layer(network, windows, change, f"Quantizing ({method})")


@torch.inference_mode(False)
@torch.no_grad()
def round_off(network: model.Model, bits: int, group: int | str | None, symmetric: bool = False) -> None:
    """Gives the seven products of every layer the values that plain rounding makes of theirs, which methods must beat.

    group: columns that share a grid; None: each row has one; TENSOR: each matrix. Products stay in float, and no text
    is read. Raises RequestError, CheckpointError, as `quantize`.
    """
    _check(network)
    for layer in progress_bar(network.layers, "Rounding", delay=1.0, leave=False, unit="layer"):
        tensors = _read(layer)
        for name in (f"{product}.weight" for product in calibration.PRODUCTS):
            weight = tensors[name]
            if group == TENSOR:
                rounded = quantization.quantize(weight.view(1, -1), bits, None, symmetric)
            else:
                rounded = quantization.quantize(weight, bits, group, symmetric)  # type: ignore[arg-type]
            tensors[name] = rounded.dequantize().view_as(weight)
        _put(layer, {name: _like(layer, name, value) for name, value in tensors.items()})


# ---- a layer -----------------------------------------------------------------------------------------------------


def protect(config: Any, tensors: Tensors, moments: Tensors, bits: int, group: int | None) -> None:
    """Folds AWQ's factors for all inputs of a layer into its weights, and what they do to the inputs into the moments.

    tensors: the layer's parameters, float32, by name; moments: as `calibration.layer_by_layer` gives them; both are
    changed. The layer computes the same afterwards.
    """
    for names in calibration.INPUTS:
        seen = moments[names[0]]
        weight = torch.cat([tensors[f"{name}.weight"] for name in names])
        size = _shared_size(config, seen) if names[0] == "self_attn.o_proj" else None
        factors = quantization.awq_scale(weight, seen, bits, group, size)
        fold(config, tensors, names, factors)
        moments[names[0]] = seen / (factors[:, None] * factors)


def fold(config: Any, tensors: Tensors, names: tuple[str, ...], factors: Tensor) -> None:
    """Multiplies the columns of products that read one input, and divides what makes this input: the same function.

    names: a row of `calibration.INPUTS`. factors: [width]; those of o's input are equal for all query heads of a
    key/value head.
    """
    for name in names:
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] * factors
    maker = _MAKERS[names[0]]
    if names[0] == "self_attn.o_proj":
        factors = factors.view(config.num_kv_heads, -1, config.head_dim)[:, 0].flatten()
    for name in (f"{maker}.weight", f"{maker}.bias"):
        if name in tensors:  # a matrix has rows, a gain or a bias has numbers
            tensors[name] = tensors[name] / (factors[:, None] if tensors[name].dim() == 2 else factors)


def _shared_size(config: Any, moments: Tensor) -> Tensor:
    """The root mean square of o's input by channel, over all query heads that look at the same values: [width]."""
    squares = moments.diagonal().view(config.num_kv_heads, -1, config.head_dim)
    return squares.mean(dim=1, keepdim=True).expand_as(squares).sqrt().flatten()


def _round(
    tensors: Tensors, moments: Tensors, compensate: bool, bits: int, group: int | None
) -> dict[str, quantization.Quantized]:
    """Every product rounded; those that read one input together, as they share what GPTQ makes of its moments."""
    rounded = {}
    for names in calibration.INPUTS:
        weights = [tensors[f"{name}.weight"].float() for name in names]
        if compensate:
            whole = quantization.gptq(torch.cat(weights), moments[names[0]], bits, group)
        else:
            whole = quantization.quantize(torch.cat(weights), bits, group)
        first = 0
        for name, weight in zip(names, weights, strict=True):
            rows = slice(first, first + len(weight))
            codes, scales, minimums = whole.codes[rows], whole.scales[rows], whole.minimums[rows]
            rounded[name] = quantization.Quantized(codes, scales, minimums, whole.bits, whole.group)
            first = rows.stop
    return rounded


# ---- in and out of a layer ---------------------------------------------------------------------------------------


def _check(network: model.Model) -> None:
    """Before anything is changed: whether every layer can be quantized. Raises RequestError, CheckpointError."""
    for index, layer in enumerate(network.layers):
        _check_layer(layer, index)
        for name, value in layer.named_parameters():
            finite(value, f"layers.{index}.{name}")


def _check_layer(layer: Any, index: int) -> None:
    fused = hasattr(layer, "fuse")
    if fused or any(not isinstance(layer.get_submodule(name), nn.Linear) for name in calibration.PRODUCTS):
        found = "fused" if fused else "quantized already"
        raise RequestError(f'layer {index} is {found}; give a network as LLM(..., layers="plain") has it, in float.')


def _read(layer: Any) -> Tensors:
    """The layer's parameters on the CPU, in float32 at least."""
    wide = {name: torch.promote_types(value.dtype, torch.float32) for name, value in layer.named_parameters()}
    return {name: value.detach().cpu().to(wide[name]) for name, value in layer.named_parameters()}


def _simulated(layer: Any, tensors: Tensors, rounded: dict[str, quantization.Quantized]) -> dict[str, Any]:
    """The layer's new parameters by name."""
    tensors = {**tensors, **{f"{name}.weight": each.dequantize() for name, each in rounded.items()}}
    return {name: _like(layer, name, value) for name, value in tensors.items()}


def _packed(layer: Any, tensors: Tensors, rounded: dict[str, quantization.Quantized]) -> dict[str, Any]:
    """The layer's new products, and its new parameters beside them, by name."""
    parts: dict[str, Any] = {}
    for name, each in rounded.items():
        weight = layer.get_submodule(name).weight
        packed, name_of_bias = PackedWeight.of(each, compact=True).to(weight.device), f"{name}.bias"
        bias = _like(layer, name_of_bias, tensors[name_of_bias]) if name_of_bias in tensors else None
        parts[name] = QuantizedLinear(packed, bias, weight.dtype)
    outside = [name for name in tensors if name.rpartition(".")[0] not in rounded]
    return {**parts, **{name: _like(layer, name, tensors[name]) for name in outside}}


def _like(layer: Any, name: str, value: Tensor) -> nn.Parameter:
    old = layer.get_parameter(name)
    return nn.Parameter(value.to(old), requires_grad=False)


def _put(layer: Any, parts: dict[str, Any]) -> None:
    for name, part in parts.items():
        place(layer, name, part)
