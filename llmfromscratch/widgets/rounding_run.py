"""A tensor rounded to few bits, group by group, as `weight_histogram` draws it, and tensors of a model to try it on.

Grids, codes and clips are those of `quantization`; what they give is held against what they promise, so that a wrong
one is told by a sentence as well as by its error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmfromscratch import quantization
from llmfromscratch.errors import RequestError
from llmfromscratch.reading import Window, logits_of, windows_of

TENSOR, ROW = "one grid for all", "one for each row"
GROUPS: Mapping[str, int | str] = {
    TENSOR: TENSOR, ROW: ROW, "groups of 128": 128, "groups of 64": 64, "groups of 32": 32,
}  # fmt: skip
BITS = (2, 3, 4, 5, 6, 8)
NONE, LEAST = "nothing", "what lessens the squared error"
CLIPS: Mapping[str, float] = {NONE: 1.0, "beyond 99.9 % of a group": 0.999, "beyond 99 % of a group": 0.99, LEAST: 0.0}
_MOST = 1 << 19  # numbers of a tensor that are rounded: enough for every figure, and soon done
_TOKENS = 256  # of a text whose activations are kept
_PRODUCTS = ("q", "k", "v", "o", "gate", "up", "down")
_READ = {"q": "q, k and v", "o": "o", "gate": "gate and up", "down": "down"}  # of products with one input, the first


@dataclass(frozen=True)
class Grid:
    """One group: where it lies, in words; its numbers [size]; its levels [2**bits], lowest first."""

    place: str
    values: Tensor
    levels: Tensor


@dataclass(frozen=True)
class Rounding:
    """values, rounded: float32 [rows, width]. rows: of the whole tensor, of which these are evenly spaced ones. grids:
    the group with the narrowest range, the one in the middle, the widest; or the only one. cut: share of the numbers
    that lie beyond the end of their grid. groups: how many. problems: sentences on what a grid or a code got wrong."""

    values: Tensor
    rounded: Tensor
    rows: int
    grids: tuple[Grid, ...]
    cut: float
    groups: int
    bits_each: float
    problems: tuple[str, ...]

    @property
    def relative(self) -> float:
        """The sum of squared errors, as a share of the sum of the numbers' squares, their power."""
        power = float(self.values.double().square().sum())
        return self.squared / power if power else 0.0

    @property
    def squared(self) -> float:
        """The sum of squared errors."""
        return float((self.rounded - self.values).double().square().sum())

    def worst(self) -> tuple[float, int, int]:
        """The largest error, and the row and the column where it is."""
        errors = (self.rounded - self.values).abs().nan_to_num(nan=torch.inf)
        place = int(errors.argmax())
        return float(errors.flatten()[place]), place // errors.shape[1], place % errors.shape[1]


def round_tensor(
    tensor: Tensor, bits: int = 4, group: int | str = 32, clip: str = NONE, symmetric: bool = False
) -> Rounding:
    """Rounds a tensor [rows, width] (of a large one, evenly spaced rows). group, clip: of GROUPS and CLIPS.

    Raises ValueError for what is no matrix of finite numbers, and for grids or codes of another form than asked for.
    """
    values = _sample(tensor)
    shapes = {TENSOR: [values.reshape(1, -1)], ROW: [values]}
    parts = shapes[str(group)] if isinstance(group, str) else list(values.split(group, dim=1))
    made = [_round_part(part, bits, clip, symmetric) for part in parts]
    rounded = torch.cat([minimums[:, None] + scales[:, None] * codes for scales, minimums, codes in made], dim=1)
    problems = [problem for part, each in zip(parts, made, strict=True) for problem in _check(part, *each, bits, clip,
                                                                                              symmetric)]  # fmt: skip
    beyond = sum(int(_beyond(part, each[0], each[1], bits).sum()) for part, each in zip(parts, made, strict=True))
    size = values.numel() if group == TENSOR else parts[0].shape[1]
    kept = (16 if symmetric else 32) * (1 if isinstance(group, int) else 2)  # half precision for groups, else float32
    return Rounding(
        values, rounded.reshape(values.shape), len(tensor), tuple(_grids(parts, made, bits, group)),
        beyond / values.numel(), sum(len(part) for part in parts), bits + kept / size, tuple(problems[:2]),
    )  # fmt: skip


def _sample(tensor: Tensor) -> Tensor:
    if tensor.dim() != 2 or not tensor.numel() or not tensor.is_floating_point():
        raise ValueError(f"expected a matrix of floating-point numbers, not {list(tensor.shape)} {tensor.dtype}")
    step = -(-tensor.numel() // _MOST)
    values = tensor[::step].detach().float().cpu().contiguous()
    if not bool(values.isfinite().all()):
        raise ValueError("the tensor holds NaN or infinite numbers: there is no grid for them")
    return values


def _round_part(part: Tensor, bits: int, clip: str, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Scales and minimums [groups], codes [groups, size] of groups [groups, size]."""
    scales, minimums = quantization.grid_of(_clipped(part, bits, clip, symmetric), bits, symmetric)
    codes = quantization.codes_of(part, scales, minimums, bits)
    if scales.shape != part.shape[:1] or minimums.shape != part.shape[:1]:
        raise ValueError(f"grid_of gave {list(scales.shape)} scales and {list(minimums.shape)} minimums for "
                         f"{len(part)} groups; it gives one of each for every group")  # fmt: skip
    if codes.shape != part.shape:
        raise ValueError(f"codes_of gave {list(codes.shape)} codes for groups {list(part.shape)}")
    return scales.float(), minimums.float(), codes


def _clipped(part: Tensor, bits: int, clip: str, symmetric: bool) -> Tensor:
    """The groups as their grids see them."""
    if clip == NONE:
        return part
    if clip == LEAST:
        factor = quantization.best_clip(part, bits, symmetric).unsqueeze(-1)
        low, high = part.amin(dim=-1, keepdim=True).clamp(max=0), part.amax(dim=-1, keepdim=True).clamp(min=0)
        return part.clamp(factor * low, factor * high)
    share = CLIPS[clip]
    if symmetric:
        most = part.abs().quantile(share, dim=-1, keepdim=True)
        return part.clamp(-most, most)
    return part.clamp(part.quantile(1 - share, dim=-1, keepdim=True), part.quantile(share, dim=-1, keepdim=True))


def _beyond(part: Tensor, scales: Tensor, minimums: Tensor, bits: int) -> Tensor:
    """Which numbers lie more than half a step beyond the ends of their grid."""
    steps = (part - minimums[:, None]) / scales[:, None]
    return (steps < -0.501) | (steps > 2**bits - 0.499)


def _check(
    part: Tensor, scales: Tensor, minimums: Tensor, codes: Tensor, bits: int, clip: str, symmetric: bool
) -> Iterator[str]:
    """What the first wrong group of these got wrong."""
    top = 2**bits - 1
    wild = ~(scales.isfinite() & minimums.isfinite() & (scales > 0))
    if bool(wild.any()):
        where = int(wild.nonzero()[0])
        yield f"grid_of: a scale is {float(scales[where]):.4g}, a minimum {float(minimums[where]):.4g}."
        return
    if codes.dtype != torch.uint8 or int(codes.max()) > top:
        yield f"codes_of: codes are {str(codes.dtype)[6:]} up to {int(codes.max())}; they are uint8, at most {top}."
    levels = minimums[:, None] + scales[:, None] * codes
    inside = (part >= minimums[:, None]) & (part <= (minimums + scales * top)[:, None])
    far = inside & ((levels - part).abs() > 0.51 * scales[:, None] + 1e-6 * part.abs())
    if bool(far.any()):
        row, column = (int(each) for each in far.nonzero()[0])
        yield (
            f"codes_of: {float(part[row, column]):.4g} became {float(levels[row, column]):.4g}, though levels are "
            f"{float(scales[row]):.4g} apart and a nearer one is there."
        )
    zero = minimums + scales * 2 ** (bits - 1)
    if symmetric and bool((zero.abs() > 1e-3 * scales).any()):
        yield f"grid_of: level {2 ** (bits - 1)} of a symmetric grid is {float(zero[zero.abs().argmax()]):.4g}, not 0."
    if clip == NONE and bool(_beyond(part, scales, minimums, bits).any()):
        yield "grid_of: numbers lie beyond the ends of their grid, though nothing was to be cut off."


def _grids(
    parts: Sequence[Tensor], made: Sequence[tuple[Tensor, Tensor, Tensor]], bits: int, group: int | str
) -> Iterator[Grid]:
    ranges = torch.stack([part.amax(dim=-1) - part.amin(dim=-1) for part in parts], dim=1).flatten()  # row by row
    order = ranges.argsort(stable=True).tolist()
    for place in [order[0]] if len(order) == 1 else [order[0], order[len(order) // 2], order[-1]]:
        row, index = place // len(parts), place % len(parts)
        scales, minimums, _ = made[index]
        levels = minimums[row] + scales[row] * torch.arange(2**bits)
        first = index * group if isinstance(group, int) else 0
        where = {TENSOR: "all numbers", ROW: f"row {row}"}.get(
            str(group), f"row {row}, from {first} to {first + parts[index].shape[1] - 1}"
        )
        yield Grid(where, parts[index][row], levels)


# ---- tensors to try it on ----------------------------------------------------------------------------------------


def record_tensors(side: Any, text: Any, layers: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Weights of a model, and what its products read while it reads a text, by name: each [rows, width].

    side: an `LLM` made with layers="plain", or a `model.Model`. text: text or token ids, of which the first 256 count.
    layers: None takes the first, the middle and the last. Weights are the model's own memory. Raises RequestError.
    """
    network = getattr(side, "model", side)
    count = len(network.layers)
    chosen = sorted({0, count // 2, count - 1}) if layers is None else list(layers)
    if not chosen or any(not 0 <= layer < count for layer in chosen):
        raise RequestError(f"layers are {chosen}; the model has layers 0 to {count - 1}.")
    ids = windows_of(side, text, _TOKENS)[0].ids
    found: dict[str, Tensor] = {}
    kept: dict[tuple[int, str], Tensor] = {}
    with _watched(network, chosen, kept):
        logits_of(network, Window(ids, len(ids) - 1))
    for layer in chosen:
        for name in _PRODUCTS:
            weight = getattr(_product(network, layer, name), "weight", None)
            if isinstance(weight, Tensor) and weight.is_floating_point():
                found[f"layer {layer}, weight of {name}"] = weight.detach()
        for name, words in _READ.items():
            if (layer, name) in kept:
                found[f"layer {layer}, what {words} read{'' if ' ' in words else 's'}"] = kept[layer, name]
    if not kept:
        raise RequestError('nothing could be watched: the layers are fused; give an LLM(..., layers="plain").')
    return found


def _product(network: Any, layer: int, name: str) -> nn.Module:
    part = "self_attn" if name in ("q", "k", "v", "o") else "mlp"
    return getattr(getattr(network.layers[layer], part), f"{name}_proj")


@contextmanager
def _watched(network: Any, layers: Sequence[int], kept: dict[Any, Tensor]) -> Iterator[None]:
    """Keeps the first input of the products that read something of their own."""

    def keep(key: tuple[int, str], inputs: Any) -> None:
        kept.setdefault(key, inputs[0].detach().float().cpu().clone())

    handles = [
        _product(network, layer, name).register_forward_pre_hook(lambda _, inputs, key=(layer, name): keep(key, inputs))
        for layer in layers for name in _READ
    ]  # fmt: skip
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
