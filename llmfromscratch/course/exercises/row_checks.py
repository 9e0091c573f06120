"""The check of chapter 7's vectors in int8, each with a scale of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.course import differences
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import NamedParts
from llmfromscratch.course.exercises.attention_checks import random_numbers
from llmfromscratch.course.exercises.rounding_checks import EACH, Pair, ends_of, in_pair


def vector_by_vector(x: Tensor) -> NamedParts:
    """Each vector by itself, in Python's own numbers."""
    codes, scales = [], []
    for row in x.double().tolist():
        scales.append(max(abs(number) for number in row) / 127 or 1.0)
        codes.append([round(number / scales[-1]) for number in row])
    return NamedParts(codes=torch.tensor(codes, dtype=torch.int8), scales=torch.tensor(scales))


def _vectors_case(text: str, x: Any) -> Case:
    x = x if isinstance(x, Tensor) else torch.tensor(x)
    return Case(text or f"x {differences.shown(x)}", x)


def vectors_cases() -> list[Case]:
    """What `quantize_rows` is tried on."""
    return [
        _vectors_case("", [[127.0, 1.0]]),
        _vectors_case("", [[254.0, -3.6], [1.27, 0.5]]),
        _vectors_case("", [[-12.7, 3.0], [1.0, 0.24]]),
        _vectors_case("", [[0.0, 0.0], [5.0, 2.0]]),
        _vectors_case("random vectors [3, 3]", random_numbers(3, 3, seed=1)),
        _vectors_case("random vectors [2, 40], the second 100 times as large",
                      random_numbers(2, 40, seed=2) * torch.tensor([[1.0], [100.0]])),
        _vectors_case("a random vector [1, 16]", random_numbers(1, 16, seed=3)),
        _vectors_case("random vectors [4, 12] in bfloat16", random_numbers(4, 12, seed=5).bfloat16()),
        _vectors_case("random vectors [4, 12] in float16, up to 60000", (2e4 * random_numbers(4, 12, seed=6)).half()),
        _vectors_case("random vectors [2, 8] in float64", random_numbers(2, 8, seed=7).double()),
    ]  # fmt: skip


def check_quantize_rows(quantize_rows: Pair) -> None:
    """Against one vector after the other."""
    compare(
        in_pair(quantize_rows, "codes", "scales"),
        vector_by_vector,
        vectors_cases(),
        expected="each vector in int8 from -127 to 127, and its own scale in float32: x is about codes * scales",
        mistakes=combined(_in_int8, _VECTOR_MISTAKES, at_once=2),
        diagnose=_of_vectors,
        explain=_of_columns,
        tolerance=EACH,
    )


def _of_columns(error: BaseException, case: Case) -> str:
    if isinstance(error, RuntimeError) and "must match the size" in str(error):
        return "a scale for each row has to stand in a column, [rows, 1], for the division: unsqueeze(-1) or keepdim"
    return ""


def _of_vectors(got: Any, want: Any) -> str:
    if not isinstance(got, NamedParts) or not all(isinstance(part, Tensor) for part in got.values()):
        return ""
    codes, scales = got["codes"], got["scales"]
    if scales.shape != want["scales"].shape:
        return "one scale for each row, float32 [rows]: no column of them, and not one for all"
    if codes.dtype.is_floating_point and codes.shape == want["codes"].shape:
        return "codes are whole numbers, in int8"
    zero = (want["codes"] == 0).all(dim=1)
    if bool((zero & (scales != 1)).any()) or not bool(torch.isfinite(scales).all()):
        return _ZEROS
    steps = 127 * want["scales"][~zero] / scales[~zero]
    told = next((told for told, by in _STEPS_OF if len(steps) and bool(((steps - by).abs() < 0.01).all())), "")
    return told or _of_range(want["codes"][~zero], steps)


def _of_range(codes: Tensor, steps: Tensor) -> str:
    """What to say of scales that come of the whole range of each row, as the right codes tell it."""
    wide = codes.float().amax(-1) - codes.float().amin(-1)
    by = steps * wide / 127  # how many steps the range was divided into
    return _RANGE if len(by) and bool(((by - 254.5).abs() < 4).all()) and bool((wide < 245).any()) else ""


_ZEROS = "a row of zeros has the scale 1, so that nothing is divided by 0: its codes are 0"
_BY_128 = "128 in place of 127: the largest code would be 128, which int8 does not have; it becomes -128"
_BY_128_KEPT = "128 in place of 127: the largest code would be 128, which int8 does not have; that it is kept at 127 " \
    "costs the largest number, and all others a little"  # fmt: skip
_BY_255 = "255 in place of 127: codes reach from -127 to 127"
_BY_HALF = "127.5 in place of 127: no whole number of steps, so that the largest number falls between two codes"
_KEPT: list[dict[str, Any]] = [{}, {"keep": (-128, 127)}, {"keep": (-127, 127)}]
_AVERAGE = "the scale comes of an average; it is the largest size that becomes 127, or larger numbers do not fit"
_OTHER_SIZES: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    (_AVERAGE, lambda x: x.abs().mean(-1)),
    (_AVERAGE, lambda x: x.std(-1)),
]
_RANGE = (
    "the scale comes of the whole range, from the smallest to the largest number; there is no minimum here that would "
    "be added again: 127 steps reach from 0 to the number largest in size"
)
_FROM_0 = (
    "the codes of an 8-bit grid count from 0 up, and the number 0 is code 128: subtract 128 before they become int8"
)


def _whole_range(x: Tensor) -> Tensor:
    return x.amax(-1) - x.amin(-1)


def _from_the_lowest(x: Tensor, scale: Tensor) -> Tensor:
    return (x - x.amin(-1, keepdim=True)) / scale


_STEPS_OF = [(_BY_128, 128), (_BY_255, 255), (_BY_HALF, 127.5)]  # what is said of the scales alone
_CUT = "the codes are cut down to whole numbers; the nearest is meant: round"
_SIGN = "the largest number sets the scale; it is the largest in size, whatever its sign"
_VECTOR_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    (_BY_128, {"top": 128}),
    (_BY_128_KEPT, {"top": 128, "keep": (-128, 127)}),
    (_BY_128_KEPT, {"top": 128, "keep": (-127, 127)}),
    (_BY_HALF, {"top": 127.5, "keep": (-128, 127)}),
    (_BY_HALF, {"top": 127.5, "keep": (-127, 127)}),
    (_BY_255, {"top": 255}),
    (_BY_255, {"top": 255, "keep": (-128, 127)}),
    (_BY_255, {"top": 255, "keep": (-127, 127)}),
    ("126 in place of 127: the largest code is 127", {"top": 126}),
    ("one scale for the whole tensor; each vector has its own, so that a large one does not cost the others",
     {"over": "all"}),
    ("one scale for the whole tensor; each vector has its own, so that a large one does not cost the others",
     {"over": "all, for each"}),
    ("the scales are those of the columns; each vector is a row, and has one", {"over": "first"}),
    (_ZEROS, {"guard": 0.0}),
    *((_ZEROS, {"guard": tiny}) for tiny in (1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4)),
    (_CUT, {"to_whole": torch.trunc}),
    (_CUT, {"to_whole": torch.floor}),
    ("the codes are raised to the next whole number; the nearest is meant: round", {"to_whole": torch.ceil}),
    (_SIGN, {"size": lambda x: x}),
    (_SIGN, {"size": lambda x: x, "keep": (-128, 127)}),
    (_SIGN, {"size": lambda x: x, "keep": (-127, 127)}),
    *((said, {"largest": largest, **kept}) for said, largest in _OTHER_SIZES for kept in _KEPT),
    *((_RANGE, {"largest": _whole_range, "top": top, **kept}) for top in (255, 254, 127) for kept in _KEPT),
    (_RANGE, {"largest": _whole_range, "top": 255, "code": lambda x, scale: _from_the_lowest(x, scale) - 128}),
    *((_RANGE, {"largest": _whole_range, "top": 255, "code": _from_the_lowest, "by_way_of": torch.uint8, "kind": kind})
      for kind in (torch.int8, torch.uint8)),
    *((_FROM_0, {"code": lambda x, scale: x / scale + 128, "by_way_of": torch.uint8, "kind": kind})
      for kind in (torch.int8, torch.uint8)),
    ("the codes are uint8, which has no negative numbers", {"kind": torch.uint8}),
    ("the scales meet the columns; each belongs to a row, and has to stand in a column for it: unsqueeze(-1)",
     {"divisor": lambda scales: scales}),
    ("multiplied by the scale; a code is how many steps of this size a number has",
     {"code": lambda x, scale: x * scale}),
    ("the scale is not used: a code is how many steps of this size a number has", {"code": lambda x, scale: x}),
    ("the scales are turned over: codes * scales is to give x", {"turned": True}),
    ("the scale is the largest size itself; it is a step, 127 of which make the largest", {"top": 1}),
    ("codes and scales are exchanged", {"exchanged": True}),
    ("the arithmetic is in x's own half precision; make it float32 first", {"wide": "never"}),
    ("the arithmetic is in x's own half precision; make it float32 first", {"wide": "late"}),
    ("the scales are computed in x's own half precision; make it float32 first", {"wide": "codes"}),
]  # fmt: skip


def _in_int8(
    top: float = 127,
    over: str = "group",
    guard: float = 1.0,
    to_whole: Callable[[Tensor], Tensor] = torch.round,
    size: Callable[[Tensor], Tensor] = torch.abs,
    kind: torch.dtype = torch.int8,
    code: Callable[[Tensor, Tensor], Tensor] = lambda x, scale: x / scale,
    divisor: Callable[[Tensor], Tensor] = lambda scales: scales.unsqueeze(-1),
    wide: str = "first",
    keep: tuple[int, int] | None = None,
    largest: Callable[[Tensor], Tensor] | None = None,
    by_way_of: torch.dtype | None = None,
    **wrong: bool,
) -> Callable[..., NamedParts]:
    """The vectors, with mistakes switched on."""

    def run(x: Tensor) -> NamedParts:
        x = x.float() if wide == "first" else x
        scales = (largest(x) if largest else ends_of(size(x), over)[1]) / top
        scales = torch.where(scales == 0, guard, scales)
        numbers = x.float() if wide == "codes" else x
        codes = to_whole(code(numbers, scales if over in ("first", "all") else divisor(scales)))
        codes = (codes.clamp(*keep) if keep else codes).to(by_way_of or kind).to(kind)
        scales = 1 / scales if wrong.get("turned") else scales
        scales = scales.float() if wide == "late" else scales
        both = (scales, codes) if wrong.get("exchanged") else (codes, scales)
        return NamedParts(zip(("codes", "scales"), both, strict=True))

    return run
