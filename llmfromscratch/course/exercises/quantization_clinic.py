"""Chapter 7's bug hunts of rounding: a scale, a zero point and a sum, each in the wrong place or too narrow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.course import differences
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import NamedParts, Tolerance
from llmfromscratch.course.exercises.attention_checks import random_numbers
from llmfromscratch.course.exercises.rounding_checks import EACH
from llmfromscratch.course.failures import CheckFailed

# ---- 7.a ---------------------------------------------------------------------------------------------------------

AXIS_STORY = """
"Int8 with a scale for each output channel. On the keys' and the feed-forward layers it stops with an error about
sizes, so we left them alone. On the queries' and the output layers, which are square, it runs, and the model answers
nonsense." Below, how far products of small square weights are off, and what one scale for the whole weight does.
"""


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T with the weight in int8, symmetric, a scale for each output channel.

    x: float32 [tokens, width]; weight: float32 [rows, width]. Row r is about scales[r] * codes[r], and the scales come
    after the products, as a kernel does it. Returns float32 [tokens, rows].
    """
    scales = weight.abs().amax(dim=0) / 127
    codes = (weight / scales).round().to(torch.int8)
    return (x @ codes.float().T) * scales


def _in_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Row by row, in float64; a row of zeros is left as it is."""
    numbers = []
    for row in weight.double():
        scale = row.abs().max() / 127
        numbers.append((row / scale).round() * scale if scale else row)
    return (x.double() @ torch.stack(numbers).T).float()


def _square(kind: str, size: int = 16, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """An input and a weight; kind: which row or column of the weight is 30 times as large as the others."""
    x, weight = random_numbers(4, size, seed=1), random_numbers(rows or size, size, seed=2)
    if kind == "row":
        weight[3] *= 30
    if kind == "column":
        weight[:, 3] *= 30
    return x, weight


def show_axis() -> None:
    """How far off the products are."""
    print("relative error of the product      this code   one scale for all")
    for kind, text in (("", "all numbers alike"), ("row", "row 3 is 30 times as large"),
                       ("column", "column 3 is 30 times as large")):  # fmt: skip
        x, weight = _square(kind)
        right = x @ weight.T
        step = weight.abs().max() / 127
        errors = [_apart(got, right) for got in (int8_product(x, weight), x @ ((weight / step).round() * step).T)]
        print(f"weight [16, 16], {text:<28} {errors[0]:8.4f} {errors[1]:10.4f}")
    try:
        int8_product(*_square("", 16, 24))
    except RuntimeError as error:
        print(f"weight [24, 16]: {error}")


def _apart(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def axis_cases() -> list[Case]:
    """What the mended product is tried on; no number of a weight lies in the middle of two levels."""
    return [
        Case("x [[1, 2]], weight [[1, 100], [2, 3]]", torch.tensor([[1.0, 2.0]]),
             torch.tensor([[1.0, 100.0], [2.0, 3.0]])),
        Case("x [1, 3], weight [2, 3]", random_numbers(1, 3, seed=3), random_numbers(2, 3, seed=4)),
        *(Case(f"x [4, 16], weight [{rows}, 16]{text}", *_square(kind, 16, rows))
          for rows, kind, text in ((16, "", ""), (16, "row", ", row 3 is 30 times as large"),
                                   (24, "column", ", column 3 is 30 times as large"), (4, "row", ""))),
        Case("x [2, 8], weight [3, 8], row 1 all 0", random_numbers(2, 8, seed=5),
             random_numbers(3, 8, seed=6) * torch.tensor([[1.0], [0.0], [1.0]])),
    ]  # fmt: skip


def check_axis(mended: Callable[..., Tensor]) -> None:
    """Against row by row."""
    compare(
        mended,
        _in_rows,
        axis_cases(),
        expected="x times the rounded weight: a scale for each row, from the row's largest number in size",
        mistakes=combined(_int8, _AXIS, at_once=2),
        explain=_of_sizes,
        diagnose=_of_product,
        tolerance=Tolerance(relative=1e-5),
    )


def _of_sizes(error: BaseException, case: Case) -> str:
    if isinstance(error, RuntimeError) and "must match the size" in str(error):
        return (
            "a tensor [rows] meets the columns of [rows, width], and a tensor [width] those of [tokens, rows]: scales "
            "belong to rows, which stand in a column for the weight, and in a row for the product"
        )
    return ""


def _of_product(got: Any, want: Any) -> str:
    if isinstance(got, Tensor) and got.shape != want.shape:
        return "the product is [tokens, rows]: the weight's rows stand along its last dimension, and so do their scales"
    if isinstance(got, Tensor) and bool(torch.isnan(got).any()):
        return "a row of zeros has the scale 0, and 0 / 0 is NaN: it takes another scale, 1 say"
    return ""


_COLUMNS = "the scales are those of the columns still, multiplied into rows: dim=0 is what amax takes away"
_AXIS: list[tuple[str, dict[str, Any]]] = [
    (_COLUMNS, {"over": "columns", "on": "rows"}),
    ("a scale for each column, which a product cannot take out of its sum: right numbers, but the rows keep no scale "
     "of their own, and a kernel has nothing to multiply behind the sum", {"over": "columns"}),
    ("one scale for the whole weight: it fits any shape, and rows of small numbers keep few of the levels",
     {"over": "all"}),
    ("the scales are those of the rows, and are divided into columns", {"divide": "columns"}),
    ("the product is not multiplied by the scales", {"on": "nothing"}),
    ("the product is multiplied by the scales twice", {"on": "twice"}),
    ("the weight is not rounded any more", {"to_code": lambda steps: steps}),
    ("the steps are cut down to whole numbers; the nearest is meant", {"to_code": torch.trunc}),
    ("128 in place of 127: int8 has no 128", {"top": 128}),
]  # fmt: skip


def _int8(
    over: str = "rows",
    on: str = "own",
    divide: str = "own",
    to_code: Callable[[Tensor], Tensor] = lambda steps: steps.round().to(torch.int8).float(),
    top: int = 127,
) -> Callable[..., Tensor]:
    """The product, with mistakes switched on."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        sizes = weight.abs()
        largest = {"rows": sizes.amax(1, True), "columns": sizes.amax(0, True), "all": sizes.max().view(1, 1)}
        scales = largest[over] / top
        scales = torch.where(scales == 0, 1, scales)
        codes = to_code(weight / (scales.T if divide == "columns" else scales))
        if on == "rows":
            return x @ codes.T * scales
        factor = {"own": scales, "nothing": torch.ones(()), "twice": scales**2}[on]
        return x @ (codes * factor).T

    return run


# ---- 7.b ---------------------------------------------------------------------------------------------------------

ZERO_STORY = """
"Keys in 4 bits, each group with a scale and a zero point. Most groups are fine. In a few everything is wrong, always
the same ones, and their numbers are not even large." Below, groups of eight numbers, their zero points, and how far the
worst number is off, in fifteenths of the group's range; half of one is what rounding costs.
"""


def to_codes(numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Groups of numbers in 4 bits: a number is about scale * (code - zero).

    numbers: float32 [groups, size]. Returns codes uint8 [groups, size], scales float32 [groups] and zeros uint8
    [groups]. Codes and zeros are 0 to 15: a zero is the code that means 0, and is packed like one. No level lies
    further out than the numbers, or 0, ask for. A group of zeros has the scale 1.
    """
    lowest, highest = numbers.amin(dim=-1), numbers.amax(dim=-1)
    scales = (highest - lowest) / 15
    zeros = (-lowest / scales).round().to(torch.uint8)
    codes = (numbers / scales.unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return codes.clamp(0, 15).to(torch.uint8), scales, zeros


_RANGES = ((-0.9, 1.1), (-0.3, 1.8), (0.5, 2.0), (2.0, 2.5), (-3.0, -2.0), (10.0, 11.0))


def _group(low: float, high: float, size: int = 8) -> Tensor:
    """Numbers between two, both ends among them."""
    inner = torch.rand(size - 2, generator=torch.Generator().manual_seed(int(10 * high))) * (high - low) + low
    return torch.cat([torch.tensor([low]), inner, torch.tensor([high])])


def show_zero() -> None:
    """Zero points, as they are and in the four bits in which they are packed, and the worst number of each group."""
    for low, high in _RANGES:
        numbers = _group(low, high)
        codes, scales, zeros = (part[0] for part in to_codes(numbers.unsqueeze(0)))
        packed = zeros & 15
        off = (scales * (codes.float() - packed.float()) - numbers).abs().max() / ((high - low) / 15)
        print(f"numbers from {low:5.1f} to {high:4.1f}   zero point {int(zeros):>3}, packed {int(packed):>2}   "
              f"the worst number is off by {float(off):5.1f} steps")  # fmt: skip


def zero_cases() -> list[Case]:
    """What the mended codes are tried on; no number, and no zero point, lies in the middle of two levels."""
    return [
        Case("a group from 1 to 4", torch.tensor([[1.0, 1.9, 4.0]])),
        Case("a group from -4 to -1", torch.tensor([[-4.0, -2.1, -1.0]])),
        Case("a group from -1 to 2", torch.tensor([[-1.0, 0.35, 2.0]])),
        *(Case(f"a group of 8 numbers from {low:g} to {high:g}", _group(low, high).unsqueeze(0))
          for low, high in _RANGES),
        Case("groups of 8 numbers from -0.3 to 1.8 and from 2 to 2.5",
             torch.stack([_group(-0.3, 1.8), _group(2.0, 2.5)])),
        Case("a group of numbers that are all 3", torch.full((1, 4), 3.0)),
        Case("groups [[0, 0], [3, -1]]", torch.tensor([[0.0, 0.0], [3.0, -1.0]])),
    ]  # fmt: skip


def check_zero(mended: Callable[..., Any]) -> None:
    """Against one group after the other, in Python's own numbers."""
    compare(
        partial(_by_name, mended),
        group_by_group,
        zero_cases(),
        expected="scale * (code - zero) to be the number up to rounding, in codes and zeros from 0 to 15",
        mistakes=combined(_zeroed, _ZERO, at_once=2),
        diagnose=_of_range,
        tolerance=EACH,
    )


def _by_name(function: Callable[..., Any], numbers: Tensor) -> NamedParts:
    result = function(numbers)
    if not isinstance(result, tuple | list) or len(result) != 3:
        raise CheckFailed("codes, scales and zeros", case=f"got {differences.shown(result)}")
    codes, scales, zeros = result
    return NamedParts(scales=scales, zeros=zeros, codes=codes)


def group_by_group(numbers: Tensor) -> NamedParts:
    """Scales, zeros and codes of each group: the levels reach from the smallest number to the largest, and to 0."""
    scales, zeros, codes = [], [], []
    for group in numbers.double().tolist():
        lowest, highest = min(*group, 0.0), max(*group, 0.0)
        scales.append((highest - lowest) / 15 or 1.0)
        zeros.append(round(-lowest / scales[-1]))
        codes.append([min(max(round(number / scales[-1]) + zeros[-1], 0), 15) for number in group])
    return NamedParts(scales=torch.tensor(scales), zeros=torch.tensor(zeros, dtype=torch.uint8),
                      codes=torch.tensor(codes, dtype=torch.uint8))  # fmt: skip


def _of_range(got: Any, want: Any) -> str:
    if not isinstance(got, NamedParts) or not all(isinstance(part, Tensor) for part in got.values()):
        return ""
    zeros, scales = got["zeros"], got["scales"]
    if zeros.dtype != torch.uint8 or scales.shape != want["scales"].shape:
        return _WIDER if zeros.dtype != torch.uint8 else ""
    if not bool(torch.isfinite(scales).all()) or bool((scales == 0).any()):
        return "a group of zeros has the scale 0, and 0 / 0 is NaN: it takes another scale, 1"
    return _OUTSIDE if int(zeros.max()) > 15 else ""


_WIDER = "a wider type holds any zero point, but four bits do not: it has to be a code, so 0 has to be among the levels"
_OUTSIDE = "a zero point lies outside of 0 to 15: where all numbers of a group lie on one side of 0, 0 is no level"
_ZERO: list[tuple[str, dict[str, Any]]] = [
    (_OUTSIDE, {"low": lambda lowest: lowest, "high": lambda highest: highest}),
    ("groups of positive numbers are mended, those of negative ones are not: 0 lies above them",
     {"high": lambda highest: highest}),
    ("groups of negative numbers are mended, those of positive ones are not: 0 lies below them",
     {"low": lambda lowest: lowest}),
    ("the zero point is kept from 0 to 15, and the scale stays: now it fits, and means another number",
     {"kept": True, "low": lambda lowest: lowest, "high": lambda highest: highest}),
    (_WIDER, {"kind": torch.int16}),
    (_WIDER, {"kind": torch.int32}),
    (_WIDER, {"kind": torch.float32}),
    ("the levels reach as far to either side of 0: half of them lie where there are no numbers", {"balanced": True}),
    ("a group of zeros has the scale 0, and 0 / 0 is NaN: it takes another scale, 1", {"guard": 0.0}),
]  # fmt: skip


def _zeroed(
    low: Callable[[Tensor], Tensor] = lambda lowest: lowest.clamp(max=0),
    high: Callable[[Tensor], Tensor] = lambda highest: highest.clamp(min=0),
    kind: torch.dtype = torch.uint8,
    kept: bool = False,
    balanced: bool = False,
    guard: float = 1.0,
) -> Callable[..., NamedParts]:
    """The codes, with mistakes switched on."""

    def run(numbers: Tensor) -> NamedParts:
        lowest, highest = low(numbers.amin(-1)), high(numbers.amax(-1))
        if balanced:
            highest = torch.maximum(highest, -lowest)
            lowest = -highest
        scales = (highest - lowest) / 15
        scales = torch.where(scales == 0, guard, scales)
        zeros = (-lowest / scales).round()
        zeros = (zeros.clamp(0, 15) if kept else zeros).to(kind)
        codes = ((numbers / scales.unsqueeze(-1)).round() + zeros.unsqueeze(-1)).clamp(0, 15).to(torch.uint8)
        return NamedParts(scales=scales, zeros=zeros, codes=codes)

    return run


# ---- 7.c ---------------------------------------------------------------------------------------------------------

SUM_STORY = """
"Activations and weights both in int8, so that the product is one of whole numbers. The layer's test passed, it was four
numbers wide. In the model nothing is right." Below, products of random codes at several widths: how many are the same
as in whole numbers of Python; then the size of the largest product, as this code has it and as it should be.
"""


def product_of_codes(codes: Tensor, scales: Tensor, weight_codes: Tensor, weight_scales: Tensor) -> Tensor:
    """The product of quantized vectors with a quantized weight, in whole numbers, scaled at the end.

    The sums are exact up to 133,000 columns, whatever the codes.
    codes: int8 [tokens, width], scales: float32 [tokens]; weight_codes: int8 [rows, width], weight_scales: float32
    [rows]. Returns float32 [tokens, rows].
    """
    sums = codes @ weight_codes.T
    return sums.float() * scales.unsqueeze(-1) * weight_scales


def _codes(tokens: int, rows: int, width: int, top: int = 127) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    codes = torch.randint(-top, top + 1, (tokens + rows, width), generator=generator).to(torch.int8)
    scales = 0.01 + torch.rand(tokens + rows, generator=generator)
    return codes[:tokens], scales[:tokens], codes[tokens:], scales[tokens:]


def show_sum() -> None:
    """How many of the products are right."""
    for width, top in ((4, 3), (4, 127), (64, 3), (64, 127), (576, 127)):
        codes, _, weight_codes, _ = _codes(4, 8, width, top)
        found = product_of_codes(codes, torch.ones(4), weight_codes, torch.ones(8))
        right = _in_whole_numbers(codes, torch.ones(4), weight_codes, torch.ones(8))
        print(f"width {width:>3}, codes up to {top:>3}: {int((found == right).sum()):>2} of {right.numel()} right, "
              f"the largest {int(found.abs().max()):>4}, it should be {int(right.abs().max())}")  # fmt: skip


def _in_whole_numbers(codes: Tensor, scales: Tensor, weight_codes: Tensor, weight_scales: Tensor) -> Tensor:
    """Number by number, in Python's own whole numbers."""
    sums = [[sum(a * b for a, b in zip(token, row, strict=True)) for row in weight_codes.tolist()]
            for token in codes.tolist()]  # fmt: skip
    factors = scales.double().unsqueeze(-1) * weight_scales.double()
    return (torch.tensor(sums, dtype=torch.float64) * factors).float()


def sum_cases() -> list[Case]:
    """What the mended product is tried on; the last is as wide as the model's widest, with all codes at the end."""
    full = torch.full((1, 1536), 127, dtype=torch.int8)
    near = torch.cat([full, full])
    near[1, 0] = -126
    return [
        Case("codes [[100, 100]], weight codes [[1, 1]], scales 1", torch.tensor([[100, 100]], dtype=torch.int8),
             torch.ones(1), torch.tensor([[1, 1]], dtype=torch.int8), torch.ones(1)),
        Case("codes [[16]], weight codes [[16]], scales 1", torch.tensor([[16]], dtype=torch.int8), torch.ones(1),
             torch.tensor([[16]], dtype=torch.int8), torch.ones(1)),
        *(Case(f"codes [{tokens}, {width}] up to {top}, {rows} rows", *_codes(tokens, rows, width, top))
          for tokens, rows, width, top in ((1, 1, 4, 3), (2, 3, 8, 127), (3, 3, 64, 127), (5, 4, 576, 127))),
        Case("codes [1, 1536], all 127, and a weight of such rows", full, torch.ones(1), near, torch.ones(2)),
    ]  # fmt: skip


def far_case() -> Case:
    """A sum that goes far beyond what float32 holds exactly, not beyond int32, and comes back to a small one.

    So wide, and with codes so large, it does so in whatever order a product adds, in 32 sums side by side too.
    """
    there = torch.randint(120, 128, (2, 66_000), generator=torch.Generator().manual_seed(9)).to(torch.int8)
    back = torch.stack([there[0], -there[1]])
    back[1, -3:] += 2
    codes, row = torch.cat([there, back], dim=1).unsqueeze(1)
    return Case("codes [1, 132000] from 120 to 127; a row of about the same, negative in its second half",
                codes, torch.ones(1), row, torch.ones(1))  # fmt: skip


def check_sum(mended: Callable[..., Tensor]) -> None:
    """Against whole numbers that have no end; then where only the last digits of long sums tell."""
    expected = "the sums as whole numbers, whatever their size, times both scales"
    compare(
        mended,
        _in_whole_numbers,
        sum_cases(),
        expected=expected,
        mistakes=combined(_summed, _SUM, at_once=2),
        explain=_of_types,
        tolerance=Tolerance(relative=2e-6),
    )
    compare(mended, _in_whole_numbers, [far_case()], expected=expected, diagnose=_of_digits)


def _of_digits(got: Any, want: Any) -> str:
    near = isinstance(got, Tensor) and got.shape == want.shape and float((got - want).abs().max()) < 1e6
    return _DIGITS if near else ""


def _of_types(error: BaseException, case: Case) -> str:
    text = str(error)
    if "same dtype" in text or "expected scalar type" in text or "but found" in text:
        return "both factors of a product have to be of one type: widen both"
    if "_int_mm" in text or "self.size(0)" in text:
        return "torch._int_mm has wishes about sizes on some devices; widening both before the product has none"
    return ""


_DIGITS = (
    "the sums are not exact: float32 holds every whole number up to 2^24 only, 1,040 products of 127 * 127, and a sum "
    "that goes further has lost its last digits when it comes back; int32 holds 133,144 of them"
)
_WRAPS = "the sums are widened when they have wrapped around already: the numbers before them have to be wider"
_SUM: list[tuple[str, dict[str, Any]]] = [
    ("the sums are int8 still: whatever lies beyond 127 wraps around", {"sums": torch.int8}),
    (_WRAPS, {"sums": torch.int8, "products": torch.int8}),
    ("each product is int8 still, before it is added to the sum: 16 * 16 has wrapped around", {"products": torch.int8}),
    ("int16 holds two products, 2 * 127 * 127, and wraps around at the third", {"sums": torch.int16}),
    ("float16 ends at 65504, and is not exact beyond 2048", {"sums": torch.float16}),
    ("bfloat16 is exact up to 256 only", {"sums": torch.bfloat16}),
    ("float16 or bfloat16 in place of whole numbers: their digits end early", {"late": torch.float16}),
    ("float16 or bfloat16 in place of whole numbers: their digits end early", {"late": torch.bfloat16}),
    ("the sums are kept from -128 to 127: nothing wraps around, and nothing larger is told", {"clamped": 127}),
    ("the sums are kept within int16", {"clamped": 32767}),
    ("the vectors' scales are not multiplied in", {"tokens": False}),
    ("the rows' scales are not multiplied in", {"rows": False}),
]  # fmt: skip


def _summed(
    sums: torch.dtype = torch.int64,
    products: torch.dtype = torch.int64,
    late: torch.dtype | None = None,
    clamped: int | None = None,
    tokens: bool = True,
    rows: bool = True,
) -> Callable[..., Tensor]:
    """The product, with mistakes switched on."""

    def run(codes: Tensor, scales: Tensor, weight_codes: Tensor, weight_scales: Tensor) -> Tensor:
        left, right = codes.long(), weight_codes.long()
        each = (left.unsqueeze(1) * right).to(products).long()
        if sums.is_floating_point:
            total = (codes.to(sums) @ weight_codes.to(sums).T).float()
        else:
            total = each.sum(-1).to(sums).long().float()
        total = total.to(late).float() if late else total
        total = total.clamp(-clamped - 1, clamped) if clamped else total
        total = total * scales.unsqueeze(-1) if tokens else total
        return total * weight_scales if rows else total

    return run
