"""Which weights mind: the damage that each product of each layer does when it alone is rounded.

    for each product, for each number of bits:  round its weight, read the windows, compare, put the weight back

What lies before the rounded layer does not change, so its result is computed once and every trial begins at its layer.
A hundred tokens or two tell the parts apart, and all trials of a small model take some minutes. The damages of parts
add up to about that of all together as long as each is small, which is what `quantization.choose_bits` counts on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmfromscratch import kv_cache, model, quantization
from llmfromscratch.batch import Batch
from llmfromscratch.calibration import PRODUCTS
from llmfromscratch.errors import RequestError
from llmfromscratch.progress import progress_bar
from llmfromscratch.reading import Window, windows_of

OUTSIDE = ("embed_tokens", "lm_head")  # a tied head is rounded with the embedding, and goes by its name
GROUP = 32  # columns that share a grid below 8 bits
_UNROUNDED = 16  # bits of a weight that stays as it is
_REQUEST = 0  # the caches are private, so any number will do


@dataclass(frozen=True)
class Sensitivity:
    """Damage by part. damage: name of the part, as in `layers.3.mlp.down_proj` -> bits -> KL in nats a token when only
    this part has so many bits. sizes: name -> its weights. Both in the order of the network, for `choose_bits`:
    list(s.damage.values()), list(s.sizes.values())."""

    damage: dict[str, dict[int, float]]
    sizes: dict[str, int]

    @property
    def bits(self) -> tuple[int, ...]:
        """The numbers of bits that were tried, most first."""
        return tuple(sorted({bits for each in self.damage.values() for bits in each}, reverse=True))

    def worst(self, bits: int, count: int = 5) -> list[tuple[str, float]]:
        """The parts that do most damage at so many bits, most first."""
        ranked = sorted(self.damage, key=lambda name: -self.damage[name][bits])
        return [(name, self.damage[name][bits]) for name in ranked[:count]]

    def __str__(self) -> str:
        lines = [f"{len(self.damage)} parts, each rounded alone; KL in nats a token"]
        for bits in self.bits:
            whole = sum(each[bits] for each in self.damage.values())
            parts = ", ".join(f"{name} {kl:.4f}" for name, kl in self.worst(bits))
            lines.append(f"  {bits} bits: {whole:.4f} added up; most of it {parts}")
        return "\n".join(lines)


def sensitivity(
    side: Any, text: Any, bits: Sequence[int] = (8, 4, 3), parts: Sequence[str] = (*PRODUCTS, *OUTSIDE),
    group: int = GROUP,
) -> Sensitivity:  # fmt: skip
    """The damage of every part of a network at every number of bits, all else staying as it is.

    side: a `model.Model` with float weights, or an LLM made with layers="plain". text: as in `evaluation.damage`; the
    log-probabilities of all its tokens are kept (float32), so some hundred tokens are meant. bits: 2 to 8, and 16,
    which stand for the weight as it is; 8 have a symmetric grid for each row, fewer an asymmetric one for each `group`
    columns. parts: of PRODUCTS and OUTSIDE. Raises RequestError.
    """
    network = getattr(side, "model", side)
    chosen = _check(network, bits, parts)
    runs = _Runs(network, windows_of(side, text))
    damage: dict[str, dict[int, float]] = {name: {} for name in chosen}
    with torch.inference_mode(), progress_bar(total=len(chosen) * len(bits), description="sensitivity", unit="") as bar:
        for name, (modules, layer) in chosen.items():
            for each in bits:
                if each == _UNROUNDED:
                    damage[name][each] = 0.0
                else:
                    with _rounded(modules, each, group):
                        damage[name][each] = runs.damage(layer)
                bar.update()
    return Sensitivity(damage, {name: _weight(modules).numel() for name, (modules, _) in chosen.items()})


def _check(network: model.Model, bits: Sequence[int], parts: Sequence[str]) -> dict[str, tuple[list[nn.Module], int]]:
    """Name of each part -> the modules that hold its weight, and the first layer that hears of it."""
    unknown = [part for part in parts if part not in (*PRODUCTS, *OUTSIDE)]
    if unknown or not parts:
        raise RequestError(f"parts are {list(parts)}; choose some of {', '.join((*PRODUCTS, *OUTSIDE))}.")
    if not bits or any(not isinstance(each, int) or each not in (*range(2, 9), _UNROUNDED) for each in bits):
        raise RequestError(f"bits are {list(bits)}; give whole numbers from 2 to 8, or 16.")
    modules = dict(network.named_modules())
    found = {}
    for layer in range(len(network.layers)):
        names = [f"layers.{layer}.{part}" for part in PRODUCTS if part in parts]
        found.update({name: ([modules.get(name)], layer) for name in names})
    embedding, head = network.embed_tokens, network.lm_head
    tied = hasattr(head, "weight") and head.weight.data_ptr() == getattr(embedding, "weight", head.weight).data_ptr()
    if "embed_tokens" in parts or (tied and "lm_head" in parts):
        found["embed_tokens"] = ([embedding, head] if tied else [embedding], 0)
    if "lm_head" in parts and not tied:
        found["lm_head"] = ([head], len(network.layers))
    for name, (holders, _) in found.items():
        if any(not isinstance(each, nn.Linear | nn.Embedding) for each in holders):
            raise RequestError(f'{name} has no float weight of its own; give a network of LLM(..., layers="plain").')
    return found  # type: ignore[return-value]


def _weight(modules: Sequence[nn.Module]) -> Tensor:
    return modules[0].weight  # type: ignore[return-value]


@contextmanager
def _rounded(modules: Sequence[nn.Module], bits: int, group: int) -> Iterator[None]:
    """The modules share a weight; meanwhile they share the values that rounding makes of it."""
    weight = _weight(modules)
    made = quantization.quantize(weight.float(), bits, None if bits == 8 else group, bits == 8)
    kept = nn.Parameter(made.dequantize().to(weight.dtype), requires_grad=False)
    before = [module.weight for module in modules]
    try:
        for module in modules:
            module.weight = kept
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            module.weight = old


class _Runs:
    """Passes over some windows that begin at any layer, and what the network says when nothing is rounded."""

    @torch.inference_mode()
    def __init__(self, network: model.Model, windows: Sequence[Window]):
        self.network, self.windows = network, windows
        self.batches = [Batch.of([(_REQUEST, each.ids, 0)], all_logits=True) for each in windows]
        self.states: list[list[Tensor]] = [[] for _ in network.layers]  # what enters each layer, for each window
        self.expected = []
        for place in range(len(windows)):
            self.expected.append(self._logits(place, 0, keep=True).float().log_softmax(dim=-1))

    def damage(self, layer: int) -> float:
        """KL in nats a token now that a weight of this layer, or of one behind it, has changed."""
        total = tokens = 0.0
        for place, expected in enumerate(self.expected):
            each = quantization.divergence(expected, self._logits(place, layer))
            total, tokens = total + float(each.double().sum()), tokens + len(expected)
        return total / tokens

    def _logits(self, place: int, first: int, keep: bool = False) -> Tensor:
        network, batch = self.network, self.batches[place]
        if first == 0:
            x = network.embed_tokens(batch.token_ids.to(network.embed_tokens.weight.device))
        elif first < len(network.layers):
            x = self.states[first][place]
        else:
            x = self.states[-1][place]
            first = len(network.layers) - 1  # only the head has changed: its input is the last layer's result
        cache = kv_cache.ConcatKVCache(len(network.layers))
        cos, sin = network.rotary(batch.positions)
        for index in range(first, len(network.layers)):
            layer = network.layers[index]
            device = next(layer.parameters()).device
            x, cos, sin = x.to(device), cos.to(device), sin.to(device)
            if keep:
                self.states[index].append(x)
            x = layer(x, cos, sin, batch, cache)
        rows = self.windows[place]
        x = network.norm(x.to(network.norm.weight.device)[rows.first - 1 : len(rows.ids) - 1])
        return network.lm_head(x.to(network.lm_head.weight.device))
