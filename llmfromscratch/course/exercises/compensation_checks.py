"""The check of chapter 7's GPTQ, in float64: the inverse of what is left is made smaller by one column at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.course import differences
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import Tolerance
from llmfromscratch.course.exercises.attention_checks import random_numbers
from llmfromscratch.course.exercises.calibration_checks import Grids, grids, inputs, moments_of
from llmfromscratch.course.exercises.called_pieces import Known, pieces_at_fault
from llmfromscratch.course.exercises.matrix_checks import Quantized
from llmfromscratch.course.exercises.rounding_checks import check_codes_of, check_grid_of
from llmfromscratch.course.failures import CheckFailed


def damped(moments: Tensor, share: float = 0.01) -> Tensor:
    """The moments in float64, with 1 % of the mean of their diagonal added to it."""
    wide = moments.double()
    return wide + share * wide.diagonal().mean() * torch.eye(len(wide), dtype=torch.float64)


def order_of(moments: Tensor, act_order: bool) -> list[int]:
    """The columns, the loudest first where the order is that of activations."""
    diagonal = moments.diagonal().tolist()
    return sorted(range(len(diagonal)), key=lambda column: -diagonal[column] if act_order else column)


def column_by_column(
    weight: Tensor, moments: Tensor, bits: int, group: int | None, act_order: bool = True
) -> Quantized:
    """Rounds the columns one after the other (`steps_of`)."""
    scales, minimums = grids(weight, bits, group)
    codes = steps_of(weight, moments, bits, group, act_order).round().clamp(0, 2**bits - 1).to(torch.uint8)
    return Quantized(scales.float(), minimums.float(), codes, bits, group or weight.shape[1])


def steps_of(weight: Tensor, moments: Tensor, bits: int, group: int | None, act_order: bool = True) -> Tensor:
    """How many steps each number lies from its minimum when its turn comes, float64 [rows, width].

    An error of column c is best made up for by -error * inverse[c, rest] / inverse[c, c], with the inverse of what is
    left (optimal brain surgeon, Hassibi and Stork 1993): when a column is done, it is eliminated from the inverse.
    """
    size, now, found = group or weight.shape[1], weight.double().clone(), torch.empty(weight.shape, dtype=torch.float64)
    (scales, minimums), left = grids(weight, bits, group), order_of(moments, act_order)
    inverse = torch.linalg.inv(damped(moments))
    while left:
        column, rest = left[0], left[1:]
        scale, minimum = scales[:, column // size], minimums[:, column // size]
        found[:, column] = (now[:, column] - minimum) / scale
        error = now[:, column] - minimum - scale * found[:, column].round().clamp(0, 2**bits - 1)
        now[:, rest] -= torch.outer(error, inverse[column, rest] / inverse[column, column])
        inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        left = rest
    return found


def from_a_tie(steps: Tensor, bits: int) -> float:
    """How near any number comes to the middle between two levels that it could have, in steps."""
    middles = (steps - steps.floor() - 0.5).abs()
    return float(middles[(steps > -0.5) & (steps < 2**bits - 0.5)].min())


# rows, width, bits, group, act_order, tokens, seed: no number comes near the middle of two levels
_RANDOM_ROUNDING: tuple[tuple[int, int, int, int | None, bool, int, int], ...] = (
    (2, 3, 3, None, False, 20, 19), (3, 3, 4, None, True, 20, 2), (2, 8, 3, 4, False, 40, 180),
    (2, 8, 4, 4, True, 40, 91), (3, 10, 3, 4, True, 60, 173), (4, 12, 8, None, True, 60, 57),
    (3, 12, 3, None, True, 5, 188), (2, 20, 2, 8, True, 12, 109), (2, 140, 4, None, False, 300, 24),
    (2, 150, 3, 32, True, 400, 30),
)  # fmt: skip


def _rounding_case(text: str, weight: Tensor, moments: Tensor, bits: int, group: int | None, act_order: bool) -> Case:
    return Case(f"{text}, bits {bits}, group {group}, act_order {act_order}", weight, moments, bits, group, act_order)


@cache
def rounding_cases() -> tuple[Case, ...]:
    """What `gptq` is tried on: columns that see the same, others alone, more columns than a block, singular moments."""
    twins = torch.tensor([[4.0, 3.6, 0, 0], [3.6, 3.8, 0, 0], [0, 0, 2, 0], [0, 0, 0, 1]])
    cases = [
        _rounding_case("weight [[0.4, 0.4, 3, 0]], columns 0 and 1 see nearly the same",
                       torch.tensor([[0.4, 0.4, 3.0, 0.0]]), twins, 2, None, False),
        _rounding_case("weight [[0.4, 0.3, 3, 0]], columns 0 and 1 see nearly the same, and column 1 more of it",
                       torch.tensor([[0.4, 0.3, 3.0, 0.0]]), twins[[1, 0, 2, 3]][:, [1, 0, 2, 3]], 2, None, True),
        _rounding_case("a random weight [2, 4], moments of inputs that are all alike", random_numbers(2, 4, seed=1),
                       9 * torch.eye(4), 3, None, True),
    ]  # fmt: skip
    for rows, width, bits, group, act_order, tokens, seed in _RANDOM_ROUNDING:
        text = f"a random weight [{rows}, {width}], moments of {tokens} tokens"
        moments = moments_of(inputs(tokens, width, seed=seed, loud=0.5, own=0.1))
        cases.append(
            _rounding_case(text, random_numbers(rows, width, seed=500 + seed), moments, bits, group, act_order)
        )
    return tuple(cases)


def check_gptq(gptq: Callable[..., Any]) -> None:
    """Against the inverse of what is left. Where it fails because of a piece that it calls, that piece is named."""
    try:
        compare(
            gptq,
            column_by_column,
            rounding_cases(),
            expected="a Quantized whose grids are those of the weight, and whose codes are those nearest to what each "
            "number has become when its turn comes: every column before it has told its error",
            mistakes=combined(_rounding, _GPTQ_MISTAKES, at_once=2),
            diagnose=_of_rounding,
            explain=_of_inverse,
            tolerance=Tolerance(relative=1e-6),
        )
    except CheckFailed as failure:
        known: Known = {
            "grid_of": (check_grid_of, 'check("7.1", grid_of)'),
            "codes_of": (check_codes_of, 'check("7.2", codes_of)'),
        }
        named = failure.mistake or (_TWICE if _twice_divided(gptq) else "")
        if not named.startswith(_DAMPING) and _right_once_damped(gptq):
            named = f"{_DAMPING}; it is missing, or far too small"
        failure.mistake = next(pieces_at_fault(gptq, known), named)
        raise


def _right_once_damped(gptq: Callable[..., Any]) -> bool:
    """Whether all results are right with moments that are damped before they come."""

    def run(weight: Tensor, moments: Tensor, *others: Any) -> Any:
        return gptq(weight, damped(moments).float(), *others)

    try:
        compare(run, column_by_column, rounding_cases(), expected="", tolerance=Tolerance(relative=1e-6))
    except Exception:  # noqa: BLE001 - the learner's code may fail in any way
        return False
    return True


def _twice_divided(gptq: Callable[..., Any]) -> bool:
    """Whether the narrow cases tell so: the errors grow from column to column, and soon float32 makes its own codes."""
    narrow = [case for case in rounding_cases() if case.args[0].shape[1] <= _NARROW]
    try:
        compare(gptq, _rounding(divided=lambda one, row: one**2), narrow, expected="")
    except Exception:  # noqa: BLE001 - the learner's code may fail in any way
        return False
    return True


def _of_inverse(error: BaseException, case: Case) -> str:
    text = str(error)
    if "not positive-definite" in text or "singular" in text:
        return _SINGULAR if _has_no_inverse(case.args[1]) else _NOT_SYMMETRIC
    if ("unsupported operand" in text and case.args[3] is None) or "integer division" in text:
        return "group None means whole rows: a group of as many columns as there are"
    if isinstance(error, IndexError):
        return "the grids are [rows, groups]: a column's is that of its group, whatever its turn"
    return ""


def _has_no_inverse(moments: Tensor) -> bool:
    """Whether these moments need damping before float32 finds their inverse."""
    sizes = torch.linalg.eigvalsh(moments.double())
    return bool(sizes[0] < 1e-5 * sizes[-1])


_NOT_SYMMETRIC = (
    "what is handed to cholesky has to be symmetric, and positive on its diagonal: the order is that of the rows and "
    "of the columns of the damped moments, both of them (these moments have an inverse with damping or without)"
)
_SINGULAR = (
    "the moments of few tokens, or of columns that see the same, have no inverse: 1 % of the mean of their diagonal is "
    "added to the diagonal first. And what is handed to cholesky has to be symmetric"
)


def _of_rounding(got: Any, want: Quantized) -> str:
    if got is None or type(got).__name__ != "Quantized":
        return differences.MISSING_RETURN if got is None else "return Quantized(codes, scales, minimums, bits, group)"
    if not isinstance(got.codes, Tensor) or not isinstance(got.scales, Tensor):
        return "codes, scales and minimums are tensors, in this order"
    if got.scales.shape != want.scales.shape or any(
        differences.find(getattr(got, name), getattr(want, name), Tolerance(relative=1e-6))
        for name in ("scales", "minimums")
    ):
        return (
            "the grids are wrong already: they are those of the weight as it came, not of what its columns have become"
        )
    return ""


_PLAIN = (
    "this is plain rounding: no column hears of the errors of those before it, or its codes do not know of it (rows of "
    "a lower factor have nothing behind the diagonal: it is the upper one)"
)
_ALL_INVERSE = (
    "the errors are spread by the inverse of all columns; those rounded already cannot move any more, so it is the "
    "inverse of what is left: a row of the Cholesky factor of the inverse, upper"
)
_NARROW = 8  # columns
_TWICE = "the errors are divided by the diagonal of the factor twice; once is enough"
_DAMPING = "the damping is 1 % of the mean of the diagonal of the moments, added to the diagonal"
_GPTQ_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    (_PLAIN, {"told": "nobody"}),
    ("the errors are told to the next column only; all that are still to come can make up for them", {"told": "next"}),
    ("the errors are told inside a block only; columns beyond it have to hear of them too", {"told": "block"}),
    ("the columns of a block do not hear of each other's errors; only those beyond it do", {"told": "beyond"}),
    ("columns beyond a block hear of its errors twice: at once, and again at its end", {"told": "twice"}),
    ("columns beyond a block hear only of its last column's error", {"told": "last of block"}),
    ("the sign is turned: what a column has lost, the others make up for", {"sign": -1.0}),
    ("the sign is turned inside a block only: what a column has lost, those after it make up for, with -=",
     {"told": "turned inside"}),
    ("the sign is turned beyond a block only: columns beyond it lose what its errors tell them too, with -=",
     {"told": "turned beyond"}),
    ("the errors are those of the weight as it came; a column's error is measured from what it has become when its "
     "turn comes, as its codes are", {"measured": "as it came"}),
    ("the errors are not divided by the diagonal of the factor", {"divided": lambda one, row: 1.0}),
    ("the errors are multiplied by the diagonal of the factor; they are divided by it",
     {"divided": lambda one, row: 1 / one}),
    ("the factor is that of the moments; it is that of their inverse",
     {"factor": lambda wide: torch.linalg.cholesky(wide).T}),
    ("the factor is the inverse of the moments' own factor; it is the factor of the inverse",
     {"factor": lambda wide: torch.linalg.inv(torch.linalg.cholesky(wide)).T}),
    (_ALL_INVERSE, {"factor": torch.linalg.inv}),
    ("the moments themselves are in the place of the factor of their inverse", {"factor": lambda wide: wide}),
    ("act_order is not used: the columns go from left to right", {"order": lambda diagonal, act: range(len(diagonal))}),
    ("act_order is not used: the loudest columns go first always", {"order": lambda diagonal, act: _loudest(diagonal)}),
    ("act_order is turned round: without it the columns go from left to right",
     {"order": lambda diagonal, act: range(len(diagonal)) if act else _loudest(diagonal)}),
    ("the quietest columns go first; the loudest are meant, whose errors cost most",
     {"order": lambda diagonal, act: _loudest(-diagonal) if act else range(len(diagonal))}),
    ("the columns' codes stand in the order of their turns; each belongs to its own column", {"undone": "not"}),
    ("the order is undone the wrong way round: argsort of the order, or codes[:, order] = ...", {"undone": "again"}),
    ("a column's grid is that of its group; here it is that of its turn", {"grid": lambda place, column: place}),
    ("the weight is put into the order, the moments are not", {"moments": "as they came"}),
    ("the moments are put into the order, the weight is not", {"weight": "as it came"}),
    (f"{_DAMPING}; it is missing", {"share": 0.0}),
    (f"{_DAMPING}; this is 10 %", {"share": 0.1}),
    *((f"{_DAMPING}; this is another share", {"share": share}) for share in (0.001, 0.005, 0.02, 0.05, 0.5)),
    (f"{_DAMPING}; this is all of it", {"share": 1.0}),
    (f"{_DAMPING}; it is added to every number of the moments here", {"everywhere": True}),
    (f"{_DAMPING}, not of its largest", {"mean": lambda diagonal: diagonal.max()}),
    (f"{_DAMPING}, not of its sum", {"mean": lambda diagonal: diagonal.sum()}),
    (f"{_DAMPING}, not of its median", {"mean": lambda diagonal: diagonal.median()}),
    (f"{_DAMPING}; here it is 0.01 whatever the moments are", {"mean": lambda diagonal: 1.0}),
    (f"{_DAMPING}; here it is 1 whatever the moments are", {"mean": lambda diagonal: 100.0}),
    (f"{_DAMPING}; it is the mean of the diagonal, not of all numbers of the moments", {"of_all": lambda wide: wide}),
    (f"{_DAMPING}; it is the mean of the diagonal, not of all numbers of the moments", {"of_all": torch.abs}),
    (f"{_DAMPING}: the same for all columns, not 1 % of each column's own", {"own": True}),
    ("the grids are symmetric; those of grids_of are not, where nothing is said", {"symmetric": True}),
    ("one grid for a whole row; each group of it has its own", {"group": lambda group: None}),
    ("scales and minimums are exchanged: Quantized takes codes, scales, minimums, bits, group", {"exchanged": True}),
    ("of whole rows, `group` is their width", {"width": False}),
]  # fmt: skip


def _loudest(diagonal: Tensor) -> list[int]:
    return diagonal.argsort(descending=True, stable=True).tolist()


def _by_order(diagonal: Tensor, act_order: bool) -> Sequence[int]:
    return _loudest(diagonal) if act_order else range(len(diagonal))


def _of_rest(wide: Tensor) -> Tensor:
    return torch.linalg.cholesky(torch.linalg.inv(wide), upper=True)


def _rounding(
    told: str = "all",
    sign: float = 1.0,
    divided: Callable[[Tensor, Tensor], Any] = lambda one, row: one,
    factor: Callable[[Tensor], Tensor] = _of_rest,
    order: Callable[[Tensor, bool], Sequence[int]] = _by_order,
    undone: str = "yes",
    grid: Callable[[int, int], int] = lambda place, column: column,
    share: float = 0.01,
    mean: Callable[[Tensor], Any] = lambda diagonal: diagonal.mean(),
    group: Callable[[int | None], int | None] = lambda group: group,
    **wrong: Any,
) -> Callable[..., Quantized]:
    """The rounding, with mistakes switched on: the factor's rows, in float64, without blocks."""

    def run(weight: Tensor, moments: Tensor, bits: int, given: int | None, act_order: bool = True) -> Quantized:
        rows, width = weight.shape
        size, turns = group(given) or width, list(order(moments.diagonal(), act_order))
        scales, minimums = grids(weight, bits, group(given), wrong.get("symmetric", False))
        wide = _with_damping(moments.double(), share, mean, wrong)
        spread = factor(wide if wrong.get("moments") else wide[turns][:, turns])
        now = weight.double().clone() if wrong.get("weight") else weight.double()[:, turns]
        codes, came = torch.empty(rows, width, dtype=torch.float64), now.clone()
        for place, column in enumerate(turns):
            number = grid(place, column) // size
            codes[:, place] = ((now[:, place] - minimums[:, number]) / scales[:, number]).round().clamp(0, 2**bits - 1)
            lost = (
                (came if wrong.get("measured") else now)[:, place]
                - minimums[:, number]
                - scales[:, number] * codes[:, place]
            )
            row = spread[place] / divided(spread[place, place], spread[place])
            now[:, place + 1 :] -= sign * torch.outer(lost, (row * _who(told, place, width))[place + 1 :])
        return _in_place(codes, turns, (scales, minimums), undone, bits, given, wrong)

    return run


def _with_damping(moments: Tensor, share: float, mean: Callable[[Tensor], Any], wrong: dict[str, Any]) -> Tensor:
    added = share * (wrong["of_all"](moments).mean() if "of_all" in wrong else mean(moments.diagonal()))
    if wrong.get("own"):
        return moments + share * torch.diag(moments.diagonal())
    return moments + added * (torch.ones_like(moments) if wrong.get("everywhere") else torch.eye(len(moments)))


def _who(told: str, place: int, width: int, block: int = 128) -> Tensor:
    """How often each column hears of the error of the one at PLACE."""
    end = (place // block + 1) * block
    heard = torch.ones(width, dtype=torch.float64)
    if told == "nobody":
        heard[:] = 0
    elif told == "next":
        heard[place + 2 :] = 0
    elif told == "block" or (told == "last of block" and place + 1 < end):
        heard[end:] = 0
    elif told == "beyond":
        heard[:end] = 0
    elif told == "turned inside":
        heard[:end] = -1
    elif told == "turned beyond":
        heard[end:] = -1
    elif told == "twice":
        heard[end:] = 2
    return heard


def _in_place(
    codes: Tensor, turns: list[int], kept: Grids, undone: str, bits: int, group: int | None,
    wrong: dict[str, Any],
) -> Quantized:  # fmt: skip
    places = {"yes": torch.tensor(turns).argsort(), "not": torch.arange(len(turns)), "again": torch.tensor(turns)}
    scales, minimums = (part.float() for part in (kept[::-1] if wrong.get("exchanged") else kept))
    told: Any = group or codes.shape[1] if wrong.get("width", True) else group
    return Quantized(scales, minimums, codes[:, places[undone]].to(torch.uint8), bits, told)
