"""Where two models part: the first layer and operation whose results differ on the same prompt.

Wrong output says nothing about its cause. The first wrong intermediate result usually names it: everything before it
is right, everything after it only inherits the fault.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmfromscratch import kv_cache
from llmfromscratch.batch import Batch
from llmfromscratch.errors import RequestError

_REQUEST = -1  # a number that the engine gives to nobody
# Results that are no module's output, but the input of the module that follows them.
_INPUTS = {
    "self_attn.o_proj": "self_attn: rotary embedding and attention, before o_proj",
    "mlp.down_proj": "mlp: activation times up, before down_proj",
}


@dataclass(frozen=True)
class Divergence:
    """layer: None outside the layers. position: the first token (row) that differs. difference: the largest, absolute;
    scale: the largest value of a's result, to read it against."""

    operation: str
    layer: int | None
    position: int
    difference: float
    scale: float

    def __str__(self) -> str:
        place = "outside the layers" if self.layer is None else f"in layer {self.layer}"
        return (
            f"the two part {place}, at {self.operation}, first at token {self.position}: "
            f"largest difference {self.difference:.3g} where values reach {self.scale:.3g}"
        )


def diverges_at(a: Any, b: Any, prompt: str | Sequence[int], tolerance: float = 1e-3) -> Divergence | None:
    """The first operation in which a and b differ by more than `tolerance` times a's largest value; None if nowhere.

    a, b: an `LLM`, a `model.Model`, or a transformers model of the same architecture. An LLM computes through its own
    cache, in several passes, so that one with kv_cache="none" shows where another's cache goes wrong. prompt: token
    ids, or text if one of the two has a tokenizer. Only operations that both have, under the same name, are compared.
    Raises RequestError where the two share no operation.
    """
    ids = _token_ids(prompt, a, b)
    trace_a, trace_b = _trace(a, ids), _trace(b, ids)
    shared = [name for name in trace_a if name in trace_b]
    if not shared:
        raise RequestError("the two models have no operation of the same name: they are not of the same architecture.")
    for name in shared:
        left, right = trace_a[name], trace_b[name]
        if left.shape != right.shape:
            return Divergence(
                f"{name} (shape {list(left.shape)} against {list(right.shape)})", _layer(name), 0, 0.0, 0.0
            )
        scale = left.abs().max().item()
        # written so that a NaN on either side counts as a difference
        wrong = ~((left - right).abs() <= tolerance * max(scale, 1e-12))
        if wrong.any():
            row = int(wrong.flatten(1).any(dim=1).nonzero()[0])
            return Divergence(name, _layer(name), row, (left - right).abs().max().item(), scale)
    return None


def _token_ids(prompt: str | Sequence[int], a: Any, b: Any) -> list[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    for side in (a, b):
        if getattr(side, "tokenizer", None) is not None:
            return side.tokenizer.encode(prompt)
    raise RequestError("neither model has a tokenizer; give the prompt as token ids.")


def _trace(side: Any, ids: list[int]) -> dict[str, Tensor]:
    """Every operation's result in the order they are computed, each float64 [tokens, ...]."""
    network: nn.Module = getattr(side, "model", side) if not isinstance(side, nn.Module) else side
    # transformers' configs call it so; its models take and give a batch dimension, always 1 here
    batched = hasattr(getattr(network, "config", None), "num_hidden_layers")
    with _recording(network, batched) as trace, torch.inference_mode():
        if batched:
            network(input_ids=torch.tensor([ids]), use_cache=False)
        else:
            _feed(network, getattr(side, "cache", None), ids)
    return trace


def _feed(network: nn.Module, cache: kv_cache.KVCache | None, ids: list[int]) -> None:
    """Runs all ids through a model of ours. Through an LLM's own cache they go in passes of several sizes, as in use:
    half of the text, some tokens one by one, the rest. What a cache gets wrong shows only in a later pass."""
    half = len(ids) // 2
    edges = [0, *range(half, min(half + 4, len(ids))), len(ids)] if half else [0, len(ids)]
    if cache is None or isinstance(cache, kv_cache.NoKVCache):
        edges = [0, len(ids)]
    if cache is None:
        cache = kv_cache.ConcatKVCache(len(network.layers))  # type: ignore[arg-type]
    try:
        for start, end in itertools.pairwise(edges):
            network(Batch.of([(_REQUEST, ids[start:end], start)], all_logits=True), cache)
    finally:
        cache.release(_REQUEST)


@contextmanager
def _recording(network: nn.Module, batched: bool) -> Iterator[dict[str, Tensor]]:
    trace: dict[str, Tensor] = {}

    def keep(name: str, value: Any) -> None:
        if isinstance(value, tuple):
            value = value[0] if value else None
        if isinstance(value, Tensor) and value.is_floating_point():
            value = (value[0] if batched else value).detach().to("cpu", torch.float64)
            trace[name] = torch.cat([trace[name], value]) if name in trace else value

    handles = []
    for path, module in network.named_modules():
        name = path.removeprefix("model.")
        if "rotary" in name or not name or isinstance(module, nn.Identity):
            continue  # tables of other shapes in other code; what they do shows in the attention's result
        for suffix, label in _INPUTS.items():
            if name.endswith(suffix):
                label = name.removesuffix(suffix) + label
                handles.append(module.register_forward_pre_hook(lambda _, inputs, n=label: keep(n, inputs)))
        handles.append(module.register_forward_hook(lambda _, inputs, output, n=name: keep(n, output)))
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def _layer(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "layers" else None
