"""Fewer bits for a weight: what a number costs, what rounding breaks, and two ways to break less.

    weights ─▶ groups ─▶ a grid for each (scale, minimum) ─▶ codes ─▶ packed bits
                            value = minimum + scale * code,  code = 0, 1, ... 2**bits - 1

One format serves all: symmetric grids have minimum = -scale * (number of levels below 0). The ideas are here, each a
small function; what runs them stands elsewhere: `quantized_linear` (layers), `calibration` (layer by layer over a
text), `kernels/` (products), `quantized_cache` (keys and values).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmfromscratch.kernels.words import per_line, prefetch

AHEAD = 8  # rows of codes that are fetched before they are needed
BLOCK = 128  # columns that GPTQ rounds before it tells those beyond

# ---- a grid for a group of numbers -------------------------------------------------------------------------------


def grid_of(groups: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """The scale and the minimum of each group: its 2**bits levels are minimum + scale * code, code = 0 to 2**bits - 1.

    groups: float [..., size]. Returns two of [...], in float32.
    Asymmetric: the lowest level is the group's smallest number, the highest its largest. Symmetric: level
    2**(bits - 1) is 0 exactly, and the number largest in size (either sign) lies 2**(bits - 1) - 1 steps from it.
    A group whose scale would be 0 (all zero; asymmetric, all equal) has the scale 1, so that nothing is divided by 0;
    its minimum still makes an asymmetric code 0 right.
    """
    groups = groups.float()
    if symmetric:
        half = 2 ** (bits - 1)
        scales = groups.abs().amax(dim=-1) / (half - 1)
        scales = torch.where(scales == 0, 1, scales)
        return scales, -half * scales
    lowest = groups.amin(dim=-1)
    scales = (groups.amax(dim=-1) - lowest) / (2**bits - 1)
    return torch.where(scales == 0, 1, scales), lowest


def codes_of(groups: Tensor, scales: Tensor, minimums: Tensor, bits: int) -> Tensor:
    """The nearest level of each number: uint8 [..., size], from 0 to 2**bits - 1; numbers beyond the grid take its end.

    groups: float [..., size]; scales, minimums: [...].
    """
    steps = (groups.float() - minimums.unsqueeze(-1)) / scales.unsqueeze(-1)
    return steps.round().clamp(0, 2**bits - 1).to(torch.uint8)


@dataclass(frozen=True)
class Quantized:
    """A matrix in few bits. codes: uint8 [rows, width], one a byte. scales, minimums: float32 [rows, groups].

    bits: of a code. group: columns that share a grid; the last group of a row may be shorter.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor
    bits: int
    group: int

    def dequantize(self) -> Tensor:
        """The matrix, float32 [rows, width]."""
        width = self.codes.shape[1]
        scales, minimums = (x.repeat_interleave(self.group, dim=1)[:, :width] for x in (self.scales, self.minimums))
        return minimums + scales * self.codes


def grids_of(weight: Tensor, bits: int, group: int | None, symmetric: bool = False) -> tuple[Tensor, Tensor]:
    """The grid of every group of columns, as it will be stored: scales and minimums, float32 [rows, groups].

    weight: [rows, width]; group: columns a group, the last of a row may be shorter; None: whole rows (one grid for each
    output channel). Those of groups are rounded to float16, which is what a group of 32 can afford; codes made for the
    rounded grid are right for what will be read.
    """
    parts = weight.split(group or weight.shape[1], dim=1)
    grids = [grid_of(part, bits, symmetric) for part in parts]
    scales, minimums = (torch.stack(each, dim=1) for each in zip(*grids, strict=True))
    if group is None:
        return scales, minimums
    scales, minimums = scales.half().float(), minimums.half().float()
    return torch.where(scales == 0, 1, scales), minimums


def quantize(weight: Tensor, bits: int, group: int | None, symmetric: bool = False) -> Quantized:
    """Rounds a matrix to the nearest level of the grid of each group of columns.

    weight: [rows, width]; group: columns that share a grid, the last of a row may be fewer; None: whole rows.
    The grids are grids_of(weight, bits, group, symmetric): scales and minimums as they are stored, both float32
    [rows, groups]. Returns Quantized(codes, scales, minimums, bits, group), codes uint8 [rows, width]; its group is
    never None: of whole rows it is their width.
    """
    width = weight.shape[1]
    scales, minimums = grids_of(weight, bits, group, symmetric)
    parts = weight.split(group or width, dim=1)
    codes = [codes_of(part, scales[:, i], minimums[:, i], bits) for i, part in enumerate(parts)]
    return Quantized(torch.cat(codes, dim=1), scales, minimums, bits, group or width)


def best_clip(groups: Tensor, bits: int, symmetric: bool, tries: int = 20) -> Tensor:
    """How much to shorten each group's grid, so that the squared error is least: float32 [...], 1 to 1/2.

    groups: float [..., size]. A grid that does not reach the outermost numbers cuts them off, and lies closer around
    all others. Tries the factors 1, ... 1/2 in equal steps; numbers are clipped to factor * themselves' extremes.
    The largest of equally good factors counts, so that without a gain nothing is clipped.
    """
    groups = groups.float()
    lowest, highest = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    best, least = torch.ones(groups.shape[:-1]), torch.full(groups.shape[:-1], torch.inf)
    for factor in torch.linspace(1, 0.5, tries).tolist():
        clipped = groups.clamp(factor * lowest.clamp(max=0), factor * highest.clamp(min=0))
        scales, minimums = grid_of(clipped, bits, symmetric)
        levels = minimums.unsqueeze(-1) + scales.unsqueeze(-1) * codes_of(groups, scales, minimums, bits)
        error = (levels - groups).square().sum(dim=-1)
        best, least = torch.where(error < least, factor, best), torch.minimum(error, least)
    return best


# ---- packed ------------------------------------------------------------------------------------------------------


def pack_int4(codes: Tensor) -> Tensor:
    """Two codes in a byte: uint8 [rows, width], each below 16, to uint8 [rows, width / 2].

    In every block of 32 columns, byte i holds column i in its lower half and column i + 16 in its upper half, so that
    16 bytes at once give 16 neighbours twice. width is a multiple of 32. (GGUF's Q4_0 and Q4_1 lie so too.)
    """
    low, high = codes.view(len(codes), -1, 2, 16).unbind(dim=2)
    return (low | (high << 4)).flatten(1)


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of `pack_int4`: uint8 [rows, width / 2] to uint8 [rows, width]."""
    blocks = packed.view(len(packed), -1, 1, 16)
    return torch.cat([blocks & 15, blocks >> 4], dim=2).flatten(1)


# ---- products that read codes ------------------------------------------------------------------------------------


def multiply_int8_rows(
    x: np.ndarray, codes: np.ndarray, scales: np.ndarray, output: np.ndarray, first: int, end: int
) -> None:
    """output[m, row] = scales[row] * (x[m] · codes[row]), for the rows from `first` to before `end`.

    x: float32 [inputs, width], few. codes: int8 [rows, width]; scales: float32 [rows]. output: float32 [inputs, rows];
    only these rows are written. As `optimization.multiply_rows`, with half the bytes: a code is read, widened by
    np.float32(code), and multiplied; the scale, which the whole row shares, comes last.
    Before a row is read, prefetch(codes, row + AHEAD, column) asks for the row AHEAD further on, once for each of its
    lines: column = 0, per_line(codes), 2 * per_line(codes), ... It never asks behind the last row of codes: at the end,
    leaving out the call and asking for the last row are both right.
    Numba compiles it, so the sums are loops over single numbers: it has no products of arrays, @ or np.dot.
    """
    inputs, width = x.shape
    last = codes.shape[0] - 1
    for row in range(first, end):
        for column in range(0, width, per_line(codes)):
            prefetch(codes, min(row + AHEAD, last), column)
        for m in range(inputs):
            total = np.float32(0)
            for i in range(width):
                total += x[m, i] * np.float32(codes[row, i])
            output[m, row] = total * scales[row]


# ---- activations too ---------------------------------------------------------------------------------------------


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors in int8, each with a scale of its own, found when it comes: int8 [rows, width] and float32 [rows].

    Symmetric: the number largest in size (either sign) has the code 127 or -127, all others the nearest code, so that
    x is about codes * scales. A row of zeros has the scale 1.
    """
    scales = x.float().abs().amax(dim=-1) / 127
    scales = torch.where(scales == 0, 1, scales)
    return (x.float() / scales.unsqueeze(-1)).round().to(torch.int8), scales


# ---- AWQ ---------------------------------------------------------------------------------------------------------


def output_error(weight: Tensor, rounded: Tensor, moments: Tensor) -> float:
    """What rounding does to the product, not to the weights: the sum over calibration tokens of |W x - W' x|².

    weight, rounded: [rows, width]; moments: float [width, width], the sum of x xᵀ over the tokens.
    """
    difference = (weight - rounded).to(moments)
    return float(((difference @ moments) * difference).sum())


def awq_scale(
    weight: Tensor, moments: Tensor, bits: int, group: int | None, size: Tensor | None = None, steps: int = 20
) -> Tensor:
    """The factor for each input column, float32 [width], that protects the columns with large activations best.

    A column multiplied by s before rounding, and its input divided by s, computes the same with a rounding error
    smaller by s where s is large. s = size**α, with size the root mean square of the column's input (the root of the
    diagonal of moments) where none is given; then s is divided by the root of its largest times its smallest number,
    so that these two multiply to 1. α is the best of 0, 1/steps, ... 1 by `output_error`, the smallest of equals. α = 0
    is plain rounding, so it never gets worse. Columns without any input count as the weakest that has one; where none
    has, all count as 1. Lin et al. 2023, "AWQ", section 3.2.
    Two columns of sizes 1 and 100, α = 1/2: s = 1 and 10, divided by the root of 10: 0.32 and 3.2.
    """
    size = moments.diagonal().clamp(min=0).sqrt().float() if size is None else size
    alive = size > 0
    size = torch.where(alive, size, size[alive].min() if alive.any() else 1)
    best, best_error = torch.ones_like(size), torch.inf
    for step in range(steps + 1):
        scale = size ** (step / steps)
        scale = scale / (scale.max() * scale.min()).sqrt()
        error = output_error(weight, quantize(weight * scale, bits, group).dequantize() / scale, moments)
        if error < best_error:
            best, best_error = scale, error
    return best


# ---- GPTQ --------------------------------------------------------------------------------------------------------


def gptq(weight: Tensor, moments: Tensor, bits: int, group: int | None, act_order: bool = True) -> Quantized:
    """Rounds column after column, and lets the columns still to come make up for the error of each.

    weight: [rows, width]; moments: [width, width], the sum of x xᵀ over calibration tokens. act_order: columns with the
    largest moments first, as their errors cost most and many others can still make up for them; else left to right. The
    grids are `grids_of` the weight as it comes, so that groups stay neighbours; codes stand at their own columns.

    1. Damp: add 1 % of the mean of the moments' diagonal to the diagonal. Few tokens leave them without an inverse.
    2. Put rows and columns of the damped moments into the order. factor is the upper Cholesky factor of their inverse
       (factorᵀ factor = inverse; in float64). Its row i says how the columns after i make up for an error of column i.
    3. For each column i in the order: find its codes; error = (what it has become - its level) / factor[i, i]; every
       column j after it loses error * factor[i, j].

    Columns of the same block of BLOCK are told after each column, those beyond it only at the end of the block, of all
    its errors in one product. Without blocks the result is the same, only slower. Frantar et al. 2022, "GPTQ",
    algorithm 1.
    """
    width = weight.shape[1]
    scales, minimums = grids_of(weight, bits, group)
    diagonal = moments.diagonal()
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(width)
    damped = moments.double() + (0.01 * diagonal.double().mean() + 1e-12) * torch.eye(width, dtype=torch.float64)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped[order][:, order]))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    left, codes = weight.float()[:, order], torch.empty(weight.shape, dtype=torch.uint8)
    for start in range(0, width, BLOCK):  # what lies beyond a block hears of its errors in one product
        end = min(start + BLOCK, width)
        errors = torch.zeros(len(weight), end - start)
        for place in range(start, end):
            column, grid = order[place], order[place] // (group or width)
            codes[:, column] = codes_of(left[:, place, None], scales[:, grid], minimums[:, grid], bits)[:, 0]
            rounded = minimums[:, grid] + scales[:, grid] * codes[:, column]
            errors[:, place - start] = (left[:, place] - rounded) / factor[place, place]
            left[:, place:end] -= errors[:, place - start, None] * factor[place, place:end]
        left[:, end:] -= errors @ factor[start:end, end:]
    return Quantized(codes, scales, minimums, bits, group or width)


# ---- the cache ---------------------------------------------------------------------------------------------------


def key_frame(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The middle and the spread of each channel of each head: float32 [kv_heads, head_dim] twice.

    keys: [tokens, kv_heads, head_dim], of some text. From the largest and the smallest number of a channel over all
    tokens: middle = (largest + smallest) / 2 and spread = (largest - smallest) / 2, so that (key - middle) / spread,
    which is what is stored, reaches from -1 to 1. A channel that never changes has the spread 1.

    Some channels of keys are far larger than all others of their head; a grid for the head would have no levels left
    for the rest. Where all keys share a frame, attention needs neither undone: the scores of a query with keys that
    were all moved by the same vector all move by the same amount, which softmax does not see, and query · (spread *
    key) is (spread * query) · key. Keys turn with their position, so the engine has a frame for each stretch of
    positions.
    """
    highest, lowest = keys.float().amax(dim=0), keys.float().amin(dim=0)
    spread = (highest - lowest) / 2
    return (highest + lowest) / 2, torch.where(spread == 0, 1, spread)


# ---- damage ------------------------------------------------------------------------------------------------------


def divergence(logits: Tensor, other: Tensor) -> Tensor:
    """How far another model's next-token distributions are from the first's: KL(p || q) in nats, float32 [tokens].

    logits, other: [tokens, vocab]. Sum over the vocabulary of p * (log p - log q), p and q their softmax; computed in
    float32 from log-softmax, so that neither overflows nor takes the logarithm of 0.
    """
    ours, theirs = logits.float().log_softmax(dim=-1), other.float().log_softmax(dim=-1)
    return (ours.exp() * (ours - theirs)).sum(dim=-1)


# ---- choosing ----------------------------------------------------------------------------------------------------


def choose_bits(damage: Sequence[dict[int, float]], sizes: Sequence[int], budget: float) -> list[int]:
    """Bits for each part of a model, so that all stay within a budget and the damage is small.

    damage[i][bits]: what part i costs at so many bits a weight; sizes[i]: its weights; budget: bits in all. Greedy:
    every part begins at the fewest bits that its dict has. A step takes one part from `now` to any larger number `then`
    of its dict; it costs sizes[i] * (then - now) bits and wins damage[i][now] - damage[i][then]. As long as one fits
    into the budget, the step that wins most for a bit is taken, of equal ones the first part's; one that wins nothing
    is not. Raises ValueError where not even the fewest bits fit.
    """
    chosen = [min(each) for each in damage]
    spent = sum(size * bits for size, bits in zip(sizes, chosen, strict=True))
    if spent > budget:
        raise ValueError(f"the fewest bits already take {spent:,.0f} bits; the budget is {budget:,.0f}.")
    while True:
        steps = [
            ((damage[part][now] - damage[part][bits]) / (sizes[part] * (bits - now)), -part, bits)
            for part, now in enumerate(chosen)
            for bits in damage[part]
            if bits > now and spent + sizes[part] * (bits - now) <= budget and damage[part][bits] < damage[part][now]
        ]
        if not steps:
            return chosen
        _, negative, bits = max(steps)
        spent += sizes[-negative] * (bits - chosen[-negative])
        chosen[-negative] = bits
