"""The checks of chapter 7's rounding: grids and codes, number by number."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.course import differences
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import NamedParts, Tolerance
from llmfromscratch.course.exercises.attention_checks import random_numbers
from llmfromscratch.course.failures import CheckFailed

# numbers of one group may be far larger than those of another: each has to be right by itself
EACH = Tolerance(relative=2e-6, absolute=1e-12)
Pair = Callable[..., tuple[Tensor, Tensor]]


def in_pair(function: Callable[..., Any], first: str, second: str) -> Callable[..., NamedParts]:
    """The function, with the two things that it gives under their names; raises CheckFailed where it gives others."""

    @functools.wraps(function)
    def run(*arguments: Any) -> NamedParts:
        result = function(*arguments)
        if isinstance(result, tuple | list) and len(result) == 2:
            return NamedParts(zip((first, second), result, strict=True))
        raise CheckFailed(
            f"two things, {first} and {second}",
            case=f"got {differences.shown(result)}",
            mistake=differences.MISSING_RETURN if result is None else f"return both: {first}, {second}",
        )

    return run


# ---- 7.1 a grid --------------------------------------------------------------------------------------------------


def grid_by_hand(numbers: Sequence[float], bits: int, symmetric: bool) -> tuple[float, float]:
    """The scale and the minimum of one group."""
    if symmetric:
        scale = max(abs(number) for number in numbers) / (2 ** (bits - 1) - 1) or 1.0
        return scale, -scale * 2 ** (bits - 1)
    return (max(numbers) - min(numbers)) / (2**bits - 1) or 1.0, min(numbers)


def group_by_group(groups: Tensor, bits: int, symmetric: bool) -> NamedParts:
    """The grids of groups [..., size], one after the other, in Python's own numbers."""
    rows = groups.double().reshape(-1, groups.shape[-1]).tolist()
    grids = torch.tensor([grid_by_hand(row, bits, symmetric) for row in rows], dtype=torch.float64).float()
    scales, minimums = (part.reshape(groups.shape[:-1]) for part in grids.unbind(1))
    return NamedParts(scales=scales, minimums=minimums)


def kind_of(symmetric: bool) -> str:
    """What a grid is called."""
    return "symmetric" if symmetric else "asymmetric"


def _grid_case(text: str, groups: Any, bits: int, symmetric: bool) -> Case:
    groups = groups if isinstance(groups, Tensor) else torch.tensor(groups, dtype=torch.float32)
    return Case(f"{text or f'groups {differences.shown(groups)}'}, bits {bits}, {kind_of(symmetric)}", groups, bits,
                symmetric)  # fmt: skip


def grid_cases() -> list[Case]:
    """What `grid_of` is tried on; only groups of equal numbers have the scale 1."""
    wide = torch.tensor([[-60000.0, 10.0, 60000.0, 3.0], [0.1, 0.2, 0.3, 0.4]]).half()
    return [
        _grid_case("", [1, 2, 7], 2, False),
        _grid_case("", [-6, 1, 3], 3, True),
        _grid_case("", [[1, 2, 7], [-3, 0, 27]], 4, False),
        _grid_case("", [[4, 14, -2], [-28, 0, 1]], 4, True),
        _grid_case("", [[0, 0], [1, 7]], 2, False),
        _grid_case("", [[5, 5, 5], [-5, 0, 25]], 4, False),
        _grid_case("", [[0, 0], [14, -14]], 4, True),
        _grid_case("", [[-9, -4], [-3, -1]], 3, False),
        _grid_case("groups [[-60000, 10, 60000, 3], [0.1, 0.2, 0.3, 0.4]] in float16", wide, 4, False),
        *(
            _grid_case(f"random groups {list(shape)}", 3 * random_numbers(*shape, seed=bits) + 1, bits, symmetric)
            for shape, bits in (((3, 3), 4), ((4, 7), 8), ((2, 3, 16), 3), ((64,), 5))
            for symmetric in (False, True)
        ),
        _grid_case("random groups [3, 9] in bfloat16", random_numbers(3, 9, seed=20).bfloat16(), 4, True),
        _grid_case("random groups [3, 9] in float64", random_numbers(3, 9, seed=21).double(), 4, False),
    ]


def check_grid_of(grid_of: Pair) -> None:
    """Against one group after the other."""
    compare(
        in_pair(grid_of, "scales", "minimums"),
        group_by_group,
        grid_cases(),
        expected="the scale and the minimum of each group in float32. Asymmetric: 2**bits levels from end to end; "
        "symmetric: level 2**(bits - 1) is 0, and the number largest in size lies 2**(bits - 1) - 1 steps from it",
        mistakes=combined(_gridded, _GRID_MISTAKES, at_once=2),
        diagnose=_of_grids,
        explain=_of_dimensions,
        tolerance=EACH,
    )


def _of_grids(got: Any, want: Any) -> str:
    if isinstance(got, NamedParts) and all(isinstance(part, Tensor) for part in got.values()):
        scales, right = got["scales"], want["scales"]
        if scales.shape != right.shape:
            return f"a number for each group: groups of [..., size] give {list(right.shape)} here, without the size"
        if not bool(torch.isfinite(scales).all()):
            return "a scale is not finite: float16 ends at 65504, so the groups have to be made float32 first"
        if bool(((right == 1) & (scales != 1)).any()):
            return _EQUAL
        return _of_steps(got, want)
    return ""


def _of_steps(got: NamedParts, want: NamedParts) -> str:
    """What symmetric scales tell that reach from -m to m, whatever else is wrong; want's 0 lies `half` steps up."""
    half = -want["minimums"] / want["scales"]
    for told, above in ((_SHORT, half), (_EVENLY, half - 0.5)):
        own = {"scales": want["scales"] * (half - 1) / above, "minimums": -want["scales"] * (half - 1)}
        if all(got[name].shape == part.shape and torch.allclose(got[name], part) for name, part in own.items()):
            return told
    return ""


def _of_dimensions(error: BaseException, case: Case) -> str:
    return _FIRST if isinstance(error, RuntimeError) and "must match the size" in str(error) else ""


_FIRST = "the ends are taken along the first dimension; a group lies along the last, dim=-1"
_EQUAL = "a group of equal numbers has the scale 1: with 0, or a tiny number in its place, the codes are NaN or huge"
_OVER_ALL = "the ends are those of the whole tensor; each group has its own, along the last dimension"
_HALF_ONE = "the number largest in size lies 2**(bits - 1) - 1 steps from 0: one level fewer lies above 0 than below"
_SHORT = (
    "symmetric, the largest size is divided by all 2**(bits - 1) steps below 0, and above 0 there is one fewer: the "
    "number largest in size, whatever its sign, lies 2**(bits - 1) - 1 steps from 0"
)
_EVENLY = (
    "symmetric, the levels lie evenly from the largest size to its negative, and 0 is none of them; level "
    "2**(bits - 1) is to be 0"
)
_IN_HALF = "the arithmetic is in the groups' own half precision; make them float32 first"
_GRID_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("2**bits levels have 2**bits - 1 steps between them; the range is divided by 2**bits here",
     {"steps": lambda bits: 2**bits}),
    ("the range is divided by half as many steps as there are", {"steps": lambda bits: 2 ** (bits - 1) - 1}),
    ("the range is divided by half as many steps as there are", {"steps": lambda bits: 2 ** (bits - 1)}),
    ("the range is divided by the bits; so many bits make 2**bits levels", {"steps": lambda bits: bits}),
    (_HALF_ONE, {"above": lambda bits: 2 ** (bits - 1)}),
    (_SHORT, {"above": lambda bits: 2 ** (bits - 1), "minimum": lambda scales, lowest, size, bits: -size}),
    (_EVENLY, {"above": lambda bits: (2**bits - 1) / 2, "minimum": lambda scales, lowest, size, bits: -size}),
    ("symmetric, the size is divided by all steps; only those above 0 are meant, 2**(bits - 1) - 1",
     {"above": lambda bits: 2**bits - 1}),
    ("symmetric, half of 2**bits - 1 steps is no whole number: 0 itself would be no level",
     {"above": lambda bits: (2**bits - 1) / 2}),
    ("symmetric, the minimum is the largest size with its sign turned; one more level lies below, so that the level "
     "2**(bits - 1) is 0", {"minimum": lambda scales, lowest, size, bits: -size}),
    ("symmetric, as many levels lie below 0 as above; one more lies below, 2**(bits - 1) of them",
     {"below": lambda bits: 2 ** (bits - 1) - 1}),
    ("symmetric, the minimum lies below 0: its sign is missing", {"below": lambda bits: -(2 ** (bits - 1))}),
    ("symmetric, the minimum is 0; level 2**(bits - 1) is to be 0, and the minimum lies that many steps below",
     {"below": lambda bits: 0}),
    ("symmetric, the minimum is counted in steps; it is a number: that many steps times the scale",
     {"minimum": lambda scales, lowest, size, bits: torch.full_like(scales, -(2 ** (bits - 1)))}),
    ("symmetric, the minimum of a group of zeros is taken before its scale has become 1; it is -2**(bits - 1) * scale "
     "there too", {"minimum": lambda scales, lowest, size, bits: -size * 2 ** (bits - 1) / (2 ** (bits - 1) - 1)}),
    ("symmetric, the minimum is the group's smallest number; it is -2**(bits - 1) * scale",
     {"minimum": lambda scales, lowest, size, bits: lowest}),
    ("symmetric, the largest number counts; it is the largest in size, whatever its sign",
     {"size": lambda groups: groups}),
    *((_OVER_ALL, {which: over}) for which in ("over", "sizes_over") for over in ("all", "all, for each")),
    *((_FIRST, {which: "first"}) for which in ("over", "sizes_over")),
    (_EQUAL, {"guard": 0.0}),
    *((_EQUAL, {"guard": tiny}) for tiny in (1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4)),
    ("all groups are treated as asymmetric", {"kind": lambda symmetric: False}),
    ("all groups are treated as symmetric", {"kind": lambda symmetric: True}),
    ("symmetric and asymmetric are exchanged", {"kind": lambda symmetric: not symmetric}),
    ("asymmetric, the minimum is the group's largest number", {"end": "highest"}),
    ("asymmetric, the minimum is 0 whatever the group is", {"end": "zero"}),
    ("asymmetric, the minimum is given as a number of steps (a zero point); it is the smallest number itself",
     {"end": "steps"}),
    ("asymmetric, the grid is stretched to hold 0; its ends are the group's own", {"stretched": True}),
    *(("the scale is turned over: it is what a step is worth, not how many make 1", {which: True})
      for which in ("turned", "turned_symmetric")),
    *(("scales and minimums are exchanged", {which: True}) for which in ("exchanged", "exchanged_symmetric")),
    (_IN_HALF, {"wide": "never"}),
    (_IN_HALF, {"wide": "late"}),
]  # fmt: skip


def ends_of(numbers: Tensor, over: str) -> tuple[Tensor, Tensor]:
    """The smallest and the largest number of each group; over: of what else, where that is the mistake."""
    if over in ("group", "first"):
        dim = -1 if over == "group" else 0
        return numbers.amin(dim), numbers.amax(dim)
    if over == "all":
        return numbers.min(), numbers.max()
    return numbers.min().expand(numbers.shape[:-1]), numbers.max().expand(numbers.shape[:-1])


def _gridded(
    steps: Callable[[int], float] = lambda bits: 2**bits - 1,
    above: Callable[[int], float] = lambda bits: 2 ** (bits - 1) - 1,
    below: Callable[[int], float] = lambda bits: 2 ** (bits - 1),
    minimum: Callable[[Tensor, Tensor, Tensor, int], Tensor] | None = None,
    size: Callable[[Tensor], Tensor] = torch.abs,
    kind: Callable[[bool], bool] = lambda symmetric: symmetric,
    over: str = "group",
    sizes_over: str = "group",
    guard: float = 1.0,
    end: str = "lowest",
    wide: str = "first",
    **wrong: bool,
) -> Callable[..., NamedParts]:
    """The grids, with mistakes switched on."""

    def run(groups: Tensor, bits: int, symmetric: bool) -> NamedParts:
        groups = groups.float() if wide == "first" else groups
        lowest, highest = ends_of(groups.clone(), over)
        if kind(symmetric):
            sizes = ends_of(size(groups), sizes_over)[1]
            scales = sizes / above(bits)
            scales = torch.where(scales == 0, guard, scales)
            minimums = minimum(scales, lowest, sizes, bits) if minimum else -below(bits) * scales
        else:
            if wrong.get("stretched"):
                lowest, highest = lowest.clamp(max=0), highest.clamp(min=0)
            scales = (highest - lowest) / steps(bits)
            scales = torch.where(scales == 0, guard, scales)
            ends = {"lowest": lowest, "highest": highest, "zero": 0 * lowest, "steps": -(lowest / scales).round()}
            minimums = ends[end]
        which = "_symmetric" if kind(symmetric) else ""
        scales = 1 / scales if wrong.get(f"turned{which}") else scales
        if wide == "late":
            scales, minimums = scales.float(), minimums.float()
        both = (minimums, scales) if wrong.get(f"exchanged{which}") else (scales, minimums)
        return NamedParts(zip(("scales", "minimums"), both, strict=True))

    return run


# ---- 7.2 codes ---------------------------------------------------------------------------------------------------


def nearest_level(number: float, scale: float, minimum: float, bits: int) -> int:
    """The level that lies nearest, found by looking at all."""
    return min(range(2**bits), key=lambda code: abs(minimum + scale * code - number))


def level_by_level(groups: Tensor, scales: Tensor, minimums: Tensor, bits: int) -> Tensor:
    """The codes of groups [..., size], each the nearest of all levels."""
    rows = zip(groups.reshape(-1, groups.shape[-1]).tolist(), scales.flatten().tolist(), minimums.flatten().tolist(),
               strict=True)  # fmt: skip
    codes = [[nearest_level(number, scale, minimum, bits) for number in row] for row, scale, minimum in rows]
    return torch.tensor(codes, dtype=torch.uint8).reshape(groups.shape)


def _codes_case(text: str, groups: Any, scales: Any, minimums: Any, bits: int) -> Case:
    parts = [part if isinstance(part, Tensor) else torch.tensor(part) for part in (groups, scales, minimums)]
    told = (f"{name} {differences.shown(part)}" for name, part in zip(("groups", "scales", "minimums"), parts,
                                                                      strict=True))  # fmt: skip
    return Case(f"{text or ', '.join(told)}, bits {bits}", *parts, bits)


def _on_a_grid(*shape: int, bits: int, seed: int, beyond: float = 0.1) -> tuple[Tensor, Tensor, Tensor]:
    """Groups, scales and minimums; no number lies in the middle of two levels, and some lie beyond the grid."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.rand(*shape, generator=generator) * (1 + 2 * beyond) - beyond
    steps = (places * (2**bits - 1)).round() + 0.8 * torch.rand(*shape, generator=generator) - 0.4
    scales = 0.1 + torch.rand(*shape[:-1], generator=generator)
    minimums = -scales * (2**bits - 1) * torch.rand(*shape[:-1], generator=generator)
    return minimums.unsqueeze(-1) + scales.unsqueeze(-1) * steps, scales, minimums


def codes_cases() -> list[Case]:
    """What `codes_of` is tried on."""
    wide, scales, minimums = _on_a_grid(2, 8, bits=4, seed=31)
    return [
        _codes_case("", [0.0, 1.0, 1.8, 3.2], 1.0, 0.0, 2),
        _codes_case("", [1.0, 3.4, 4.8, 7.0], 2.0, 1.0, 2),
        _codes_case("", [[-0.9, 0.2], [0.6, 2.4]], [0.5, 1.0], [-1.0, 0.0], 3),
        _codes_case("", [-5.0, 0.0, 9.0], 1.0, -2.0, 2),
        _codes_case("", [0.0, 100.0, 200.0, 255.0], 1.0, 0.0, 8),
        _codes_case("", [-400.0, 10.0, 700.0], 1.0, 0.0, 8),
        *(
            _codes_case(f"random groups {list(shape)}", *_on_a_grid(*shape, bits=bits, seed=bits), bits)
            for shape, bits in (((3, 3), 4), ((5, 2), 3), ((4, 4), 8), ((2, 3, 16), 4), ((2, 2, 2), 2))
        ),
        _codes_case("random groups [2, 8] in float64", wide.double(), scales, minimums, 4),
    ]  # fmt: skip


def check_codes_of(codes_of: Callable[..., Tensor]) -> None:
    """Against looking for the nearest of all levels."""
    compare(
        codes_of,
        level_by_level,
        codes_cases(),
        expected="the nearest of the levels minimum + scale * code, as uint8; beyond the grid its first or last",
        mistakes=combined(coded, _CODE_MISTAKES, at_once=2),
        explain=_of_groups,
        what="the codes",
    )


_ONE_EACH = "scales and minimums have one number for each group: unsqueeze(-1) makes a column of them"
_ENDS = "numbers beyond the grid take its first or last level: the steps have to be kept from 0 to 2**bits - 1"


def _of_groups(error: BaseException, case: Case) -> str:
    text = str(error)
    if "must match the size" in text or "broadcast" in text:
        return _ONE_EACH
    if "has no attribute 'unsqueeze'" in text or "cannot be converted to Scalar" in text:
        return "scales and minimums are tensors, with a number for each group; .item() and float() take one only"
    return ""


_CODE_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("the steps are cut down; the nearest level may be the one above", {"to_whole": torch.floor}),
    ("the steps are cut down; the nearest level may be the one above", {"to_whole": torch.trunc}),
    ("the steps are raised; the nearest level may be the one below", {"to_whole": torch.ceil}),
    (_ENDS, {"keep": lambda steps, bits: steps}),
    (f"{_ENDS}. The lower end is not kept", {"keep": lambda steps, bits: steps.clamp(max=2**bits - 1)}),
    (f"{_ENDS}. The upper end is not kept", {"keep": lambda steps, bits: steps.clamp(min=0)}),
    ("the last code is 2**bits - 1; 2**bits is let through", {"keep": lambda steps, bits: steps.clamp(0, 2**bits)}),
    ("the codes stop one short: the last is 2**bits - 1", {"keep": lambda steps, bits: steps.clamp(0, 2**bits - 2)}),
    ("the codes are kept from -2**(bits - 1) to 2**(bits - 1) - 1; they begin at 0, also those of a symmetric grid",
     {"keep": lambda steps, bits: steps.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)}),
    ("the codes become uint8 before they are kept within the grid: by then what lay beyond has wrapped around",
     {"early": torch.uint8}),
    ("the codes are int8, which ends at 127: larger ones wrap around; uint8 goes to 255", {"kind": torch.int8}),
    ("the minimum is not taken off: code 0 is the minimum, not 0", {"start": lambda x, low, scale: x / scale}),
    ("the minimum is added; it is taken off", {"start": lambda x, low, scale: (x + low) / scale}),
    ("the minimum is taken off after the division: it is a number, not a count of steps",
     {"start": lambda x, low, scale: x / scale - low}),
    ("multiplied by the scale; how many steps a number is from the minimum is a division",
     {"start": lambda x, low, scale: (x - low) * scale}),
    ("the scale is not used", {"start": lambda x, low, scale: x - low}),
    ("the level's number comes back; its code is asked for", {"back": True}),
    (_ONE_EACH, {"column": lambda part: part}),
]  # fmt: skip


def coded(
    to_whole: Callable[[Tensor], Tensor] = torch.round,
    keep: Callable[[Tensor, int], Tensor] = lambda steps, bits: steps.clamp(0, 2**bits - 1),
    early: torch.dtype | None = None,
    kind: torch.dtype = torch.uint8,
    start: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda x, low, scale: (x - low) / scale,
    back: bool = False,
    column: Callable[[Tensor], Tensor] = lambda part: part.unsqueeze(-1),
) -> Callable[..., Tensor]:
    """The codes, with mistakes switched on."""

    def run(groups: Tensor, scales: Tensor, minimums: Tensor, bits: int) -> Tensor:
        steps = to_whole(start(groups.float(), column(minimums), column(scales)))
        steps = keep(steps.to(early) if early else steps, bits)
        if back:
            return column(minimums) + column(scales) * steps
        return steps.to(kind)

    return run
