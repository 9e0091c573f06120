"""The checks of chapter 7's matrices: every group of every row by itself, and two codes in every byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.course import differences
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import NamedParts
from llmfromscratch.course.exercises.attention_checks import random_numbers
from llmfromscratch.course.exercises.called_pieces import Known, pieces_at_fault
from llmfromscratch.course.exercises.rounding_checks import (
    EACH,
    Pair,
    check_codes_of,
    check_grid_of,
    coded,
    grid_by_hand,
    group_by_group,
    in_pair,
    kind_of,
    nearest_level,
)
from llmfromscratch.course.failures import CheckFailed

# ---- 7.3 a matrix ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantized:
    """What `quantize` gives, in the order in which it comes to be: where the grids are wrong, the codes are too."""

    scales: Tensor
    minimums: Tensor
    codes: Tensor
    bits: int
    group: int


def row_by_row(weight: Tensor, bits: int, group: int | None, symmetric: bool = False) -> Quantized:
    """Every group of every row by itself, its grid rounded to float16 where there are groups."""
    size = group or weight.shape[1]
    grids: list[list[tuple[float, float]]] = []
    codes: list[list[int]] = []
    for row in weight.double().tolist():
        grids.append([])
        codes.append([])
        for start in range(0, len(row), size):
            scale, minimum = grid_by_hand(row[start : start + size], bits, symmetric)
            stored = torch.tensor([scale, minimum]).to(torch.float16 if group else torch.float32).tolist()
            grids[-1].append((stored[0] or 1.0, stored[1]))
            codes[-1] += [nearest_level(number, *grids[-1][-1], bits) for number in row[start : start + size]]
    scales, minimums = torch.tensor(grids).unbind(-1)
    return Quantized(scales, minimums, torch.tensor(codes, dtype=torch.uint8), bits, size)


def _matrix_case(text: str, weight: Any, bits: int, group: int | None, symmetric: bool = False) -> Case:
    weight = weight if isinstance(weight, Tensor) else torch.tensor(weight)
    text = text or f"weight {differences.shown(weight)}"
    return Case(f"{text}, bits {bits}, group {group}, {kind_of(symmetric)}", weight, bits, group, symmetric)


def matrix_cases() -> list[Case]:
    """What `quantize` is tried on: whole rows, groups, a shorter last group, grids that float16 rounds."""
    tiny = 1e-9 * random_numbers(2, 8, seed=3)
    return [
        _matrix_case("", [[0.0, 3.0], [1.0, 7.0]], 2, None),
        _matrix_case("", [[0.0, 3.0, 1.0, 4.0]], 2, 2),
        _matrix_case("", [[0.0, 3.0, 1.0, 4.0], [-1.0, 5.0, 2.0, 2.0]], 2, 2),
        _matrix_case("", [[0.0, 3.0, 1.0, 4.0, 9.0]], 2, 2),
        _matrix_case("", [[-7.0, 1.0, 3.0, 4.0]], 4, 2, True),
        *(
            _matrix_case(f"a random weight {[rows, width]}", random_numbers(rows, width, seed=rows), bits, group, kind)
            for rows, width, bits, group, kind in (
                (4, 4, 4, 2, False), (3, 12, 4, None, True), (6, 12, 4, 4, False), (5, 40, 8, 16, False),
                (2, 70, 3, 32, True), (7, 64, 8, 32, True), (8, 10, 8, None, False),
            )
        ),
        _matrix_case("a weight [2, 8] whose scales are 0 in float16", tiny, 4, 4),
        _matrix_case("a random weight [3, 32] in bfloat16", random_numbers(3, 32, seed=11).bfloat16(), 4, 16),
    ]  # fmt: skip


def check_quantize(quantize: Callable[..., Any]) -> None:
    """Against every group by itself. Where it fails because of a piece that it calls, that piece is named."""
    try:
        compare(
            quantize,
            row_by_row,
            matrix_cases(),
            expected="a Quantized: a grid for each group of columns of each row, as it is stored, and the codes on it",
            mistakes=combined(_matrix, _MATRIX_MISTAKES, at_once=2),
            diagnose=_of_matrix,
            explain=_of_split,
            tolerance=EACH,
        )
    except CheckFailed as failure:
        failure.mistake = next(pieces_at_fault(quantize, _PIECES), failure.mistake)
        raise


def _check_grids_of(grids_of: Pair) -> None:
    right: Callable[..., NamedParts] = in_pair(lambda *args: _grids(row_by_row(*args)), "scales", "minimums")
    compare(in_pair(grids_of, "scales", "minimums"), right, matrix_cases(), expected="", tolerance=EACH)


def _grids(quantized: Quantized) -> tuple[Tensor, Tensor]:
    return quantized.scales, quantized.minimums


_PIECES: Known = {
    "grid_of": (check_grid_of, 'check("7.1", grid_of)'),
    "codes_of": (check_codes_of, 'check("7.2", codes_of)'),
    "grids_of": (_check_grids_of, "the chapter gives it; take the module's, quantization.grids_of"),
}


def _of_split(error: BaseException, case: Case) -> str:
    text = str(error)
    if case.args[2] is None and isinstance(error, TypeError | RuntimeError):
        return "group None means whole rows: a group of as many columns as there are"
    if "Sizes of tensors must match" in text or "stack expects" in text or "invalid for input of size" in text:
        return "the last group of a row may be shorter than the others: torch.cat along dim=1 takes parts of any width"
    return ""


def _of_matrix(got: Any, want: Quantized) -> str:
    if got is None or type(got).__name__ != "Quantized":
        return differences.MISSING_RETURN if got is None else "return Quantized(codes, scales, minimums, bits, group)"
    codes, scales = got.codes, got.scales
    if not isinstance(codes, Tensor) or not isinstance(scales, Tensor):
        return "codes, scales and minimums are tensors, in this order"
    if codes.shape != want.codes.shape and scales.shape == want.scales.shape:
        return "a code for each number of the weight, [rows, width]: torch.cat with dim=1 puts parts beside each other"
    if scales.shape != want.scales.shape:
        return (
            f"a grid for each group of each row: scales and minimums are [rows, groups], here {list(want.scales.shape)}"
        )
    return _wrong_parts(got, want)


def _wrong_parts(got: Any, want: Quantized) -> str:
    """What is told where the shapes are right: which of the parts are."""
    wrong = {
        name
        for name in ("scales", "minimums", "codes", "bits", "group")
        if differences.find(getattr(got, name), getattr(want, name), EACH)
    }
    if wrong & {"scales", "minimums"}:
        return "the grids are wrong already: grids_of gives them, as they are stored"
    if "codes" in wrong:
        return (
            "the grids are right, the codes are not: each part of the columns is coded on its own column of the grids"
        )
    if wrong == {"bits", "group"} and (got.bits, got.group) == (want.group, want.bits):
        return "bits and group are exchanged: Quantized takes codes, scales, minimums, bits, group"
    if "bits" in wrong:
        return "codes and grids are right; `bits` is that of a code, as it was given"
    return f"here codes and grids are right, only `group` is not: {_ITS_WIDTH}, and of groups it is their size"


_ITS_WIDTH = "of whole rows, `group` is their width"
_WRONG_AXIS = "the groups run down the columns; a group is neighbours of one row, which a product adds up"
_FLOAT16 = "the grids of groups are stored in float16, so they are rounded to it (grids_of does that), and the codes " \
    "are made for the rounded ones"  # fmt: skip
_MATRIX_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    (_WRONG_AXIS, {"axis": "down"}),
    (_WRONG_AXIS, {"axis": "turned"}),
    ("one grid for the whole weight; each group of each row has its own", {"shared": "all"}),
    ("one grid for a whole row; each group of it has its own", {"shared": "row"}),
    ("all groups of a row are coded on the grid of the first", {"grid": "first"}),
    ("all groups of a row are coded on the grid of the last", {"grid": "last"}),
    (_FLOAT16, {"stored": lambda grid, group: grid}),
    ("the codes are made for the grids before they are rounded to float16; those that are stored are what is read",
     {"made_for": "unrounded"}),
    ("the grids of whole rows are rounded to float16 too; only those of groups are",
     {"stored": lambda grid, group: grid.half().float()}),
    ("a scale that float16 rounds to 0 becomes 1 (grids_of does that)", {"guard": 0.0}),
    ("the last group is lost where it is shorter", {"last": False}),
    ("`symmetric` is not handed on", {"kind": lambda symmetric: False}),
    ("`symmetric` is turned round", {"kind": lambda symmetric: not symmetric}),
    (_ITS_WIDTH, {"told": lambda group, width: group}),
    ("scales and minimums are exchanged: Quantized takes codes, scales, minimums, bits, group", {"exchanged": True}),
    ("the grids have as many levels as 8 bits give, whatever `bits` is", {"grid_bits": 8}),
]  # fmt: skip


def _matrix(
    axis: str = "along",
    shared: str = "",
    grid: str = "own",
    stored: Callable[[Tensor, int | None], Tensor] = lambda grid, group: grid.half().float() if group else grid,
    made_for: str = "stored",
    guard: float = 1.0,
    last: bool = True,
    kind: Callable[[bool], bool] = lambda symmetric: symmetric,
    told: Callable[[int | None, int], int | None] = lambda group, width: group or width,
    exchanged: bool = False,
    grid_bits: int | None = None,
) -> Callable[..., Any]:
    """The matrix, part by part, with mistakes switched on."""

    def run(weight: Tensor, bits: int, group: int | None, symmetric: bool = False) -> Any:
        width, source = weight.shape[1], weight if axis == "along" else weight.T
        size = group or source.shape[1]
        parts = [part for part in source.split(size, 1) if last or part.shape[1] == size]
        seen = {"all": lambda part: weight.flatten().expand(len(part), -1), "row": lambda part: source}
        grids = [group_by_group(seen.get(shared, lambda part: part)(part), grid_bits or bits, kind(symmetric))
                 for part in parts]  # fmt: skip
        exact = [torch.stack([grid[name] for grid in grids], 1) for name in ("scales", "minimums")]
        kept = [stored(part, group) for part in exact]
        kept[0] = torch.where(kept[0] == 0, guard, kept[0])
        use = exact if made_for == "unrounded" else kept
        place = {"first": lambda i: 0, "last": lambda i: -1}.get(grid, lambda i: i)
        codes = torch.cat([coded()(part, use[0][:, place(i)], use[1][:, place(i)], bits)
                           for i, part in enumerate(parts)], 1)  # fmt: skip
        codes = codes if axis == "along" else codes.T
        kept = [part.T for part in kept] if axis == "turned" else kept
        kept = kept[::-1] if exchanged else kept
        return Quantized(kept[0], kept[1], codes, bits, told(group, width))  # type: ignore[arg-type]

    return run


# ---- 7.4 two codes in a byte -------------------------------------------------------------------------------------


def byte_by_byte(codes: Tensor) -> Tensor:
    """Each byte by itself: of every 32 columns, i in the lower half and i + 16 in the upper."""
    rows = [
        [row[start + i] + 16 * row[start + 16 + i] for start in range(0, len(row), 32) for i in range(16)]
        for row in codes.tolist()
    ]
    return torch.tensor(rows, dtype=torch.uint8)


def packing_cases() -> list[Case]:
    """What `pack_int4` is tried on."""
    two = torch.tensor([[1] * 16 + [2] * 16], dtype=torch.uint8)
    counted = torch.tensor([list(range(16)) + [15 - i for i in range(16)]], dtype=torch.uint8)
    generator = torch.Generator().manual_seed(4)
    return [
        Case("a row of 32 columns, sixteen codes 1, then sixteen 2", two),
        Case("a row of 32 columns, codes 0 to 15, then 15 to 0", counted),
        *(
            Case(f"random codes {list(shape)}", torch.randint(0, 16, shape, generator=generator).to(torch.uint8))
            for shape in ((1, 64), (2, 32), (3, 96), (4, 128))
        ),
        Case("codes [2, 64], all 15", torch.full((2, 64), 15, dtype=torch.uint8)),
    ]


def check_pack_int4(pack_int4: Callable[[Tensor], Tensor]) -> None:
    """Against one byte after the other."""
    compare(
        pack_int4,
        byte_by_byte,
        packing_cases(),
        expected="in each 32 columns' 16 bytes: column i in the lower half of byte i, column i + 16 in its upper half",
        mistakes=combined(_packed, _PACKING_MISTAKES, at_once=2),
        diagnose=_of_bytes,
        what="the bytes",
    )


def _of_bytes(got: Any, want: Tensor) -> str:
    if isinstance(got, Tensor) and got.numel() == 2 * want.numel():
        return "a code still takes a byte: two codes share one, so that there are half as many bytes as columns"
    if isinstance(got, Tensor) and got.dim() != 2:
        return "the bytes of a row stand in a row, [rows, width / 2]"
    return ""


_SHIFTED = "the upper half begins at bit 4: a code goes there by << 4"
_PACKING_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("neighbours share a byte, columns 0 and 1 the first; it is columns i and i + 16 of each 32",
     {"order": lambda width: (range(0, width, 2), range(1, width, 2))}),
    ("the first half of a row shares its bytes with the second; each block of 32 columns is packed by itself",
     {"order": lambda width: (range(width // 2), range(width // 2, width))}),
    ("blocks of 16 columns are packed, i with i + 8; blocks have 32 columns",
     {"order": lambda width: _blocks(width, 16)}),
    ("blocks of 64 columns are packed, i with i + 32; blocks have 32 columns",
     {"order": lambda width: _blocks(width, 64) if width % 64 == 0 else _blocks(width, 32)}),
    ("the halves of the bytes are exchanged: columns 0 to 15 of a block go into the lower ones", {"swapped": True}),
    ("only columns 0 to 15 of each 32 are in the bytes", {"shift": 0, "upper": False}),
    ("the upper code is not moved: both lie in the lower half, on top of each other", {"shift": 0}),
    *((_SHIFTED, {"shift": shift}) for shift in (1, 2, 3, 5, 8)),
    ("only columns 16 to 31 of each 32 are in the bytes", {"lower": False}),
    ("& keeps what both have; | puts them together", {"join": torch.bitwise_and}),
    ("the bytes of each row stand in the order last to first", {"turned": True}),
]  # fmt: skip


def _blocks(width: int, size: int) -> tuple[list[int], list[int]]:
    """The columns that go into lower halves, and those for upper ones, where i and i + size / 2 share a byte."""
    columns = [column for column in range(width) if column % size < size // 2]
    return columns, [column + size // 2 for column in columns]


def _packed(
    order: Callable[[int], tuple[Any, Any]] = lambda width: _blocks(width, 32),
    shift: int = 4,
    lower: bool = True,
    upper: bool = True,
    join: Callable[[Tensor, Tensor], Tensor] = torch.bitwise_or,
    **wrong: bool,
) -> Callable[[Tensor], Tensor]:
    """The bytes, with mistakes switched on."""

    def run(codes: Tensor) -> Tensor:
        low, high = (codes[:, list(columns)] for columns in order(codes.shape[1]))
        low, high = (high, low) if wrong.get("swapped") else (low, high)
        packed = join(low if lower else 0 * low, (high if upper else 0 * high) << shift)
        return packed.flip(1) if wrong.get("turned") else packed

    return run
