"""The check of chapter 7's factors for loud columns: every exponent is tried, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import Tolerance
from llmfromscratch.course.exercises.attention_checks import random_numbers
from llmfromscratch.course.exercises.called_pieces import pieces_at_fault
from llmfromscratch.course.exercises.matrix_checks import check_quantize
from llmfromscratch.course.failures import CheckFailed

Grids = tuple[Tensor, Tensor]


def inputs(tokens: int, width: int, seed: int, loud: float = 2.0, own: float = 0.5) -> Tensor:
    """Inputs whose columns are correlated, and some far louder than others: float32 [tokens, width].

    own: what each column has that the others do not.
    """
    mixing = random_numbers(width, width, seed=seed + 1) / width**0.5 + own * torch.eye(width)
    return random_numbers(tokens, width, seed=seed) @ mixing * (loud * random_numbers(width, seed=seed + 2)).exp()


def moments_of(x: Tensor) -> Tensor:
    """The sum of x xᵀ over the tokens, symmetric to the last digit."""
    return (x.double().T @ x.double()).float()


def grids(weight: Tensor, bits: int, group: int | None, symmetric: bool = False) -> Grids:
    """Scales and minimums of every group as they are stored, float64 [rows, groups]."""
    size, scales, minimums = group or weight.shape[1], [], []
    for part in weight.double().split(size, 1):
        lowest, highest = part.amin(1), part.amax(1)
        if symmetric:
            scales.append(part.abs().amax(1) / (2 ** (bits - 1) - 1))
            minimums.append(-scales[-1] * 2 ** (bits - 1))
        else:
            scales.append((highest - lowest) / (2**bits - 1))
            minimums.append(lowest)
    stored = [
        torch.stack(each, 1).to(torch.float16 if group else torch.float32).double() for each in (scales, minimums)
    ]
    return torch.where(stored[0] == 0, 1, stored[0]), stored[1]


def rounded(weight: Tensor, bits: int, group: int | None) -> Tensor:
    """The levels nearest to the numbers of a weight, float64."""
    size, width = group or weight.shape[1], weight.shape[1]
    scales, minimums = (part.repeat_interleave(size, 1)[:, :width] for part in grids(weight, bits, group))
    return minimums + scales * ((weight.double() - minimums) / scales).round().clamp(0, 2**bits - 1)


# ---- 7.8 AWQ's factors -------------------------------------------------------------------------------------------

FACTORS = Tolerance(relative=1e-4, absolute=1e-6)


def errors_of(
    weight: Tensor, moments: Tensor, bits: int, group: int | None, size: Tensor | None = None, steps: int = 20
) -> list[tuple[float, Tensor]]:
    """What each exponent costs, and its factors, in float64."""
    loud = moments.double().diagonal().sqrt().tolist() if size is None else size.double().tolist()
    weakest = min((number for number in loud if number > 0), default=1.0)
    loud = [number if number > 0 else weakest for number in loud]
    found = []
    for step in range(steps + 1):
        raised = [number ** (step / steps) for number in loud]
        factors = torch.tensor(raised, dtype=torch.float64) / (max(raised) * min(raised)) ** 0.5
        lost = weight.double() - rounded(weight.double() * factors, bits, group) / factors
        found.append((sum(float(row @ moments.double() @ row) for row in lost), factors))
    return found


def factor_by_factor(
    weight: Tensor, moments: Tensor, bits: int, group: int | None, size: Tensor | None = None, steps: int = 20
) -> Tensor:
    """The factors of the exponent that costs least, the first of equals."""
    found = errors_of(weight, moments, bits, group, size, steps)
    return min(found, key=lambda one: one[0])[1].float()


@cache
def factor_cases() -> tuple[Case, ...]:
    """What `awq_scale` is tried on. No second exponent costs nearly as little as the best one.

    Seeds are chosen so: rounding is full of jumps, and where two exponents cost the same, float32 would decide. Where
    all columns are alike, the factors are powers of 2, so that unnormalized ones cost the same to the last digit.
    """
    on_grid = torch.tensor([[0.0, 15.0, 4.0, 7.0], [15.0, 1.0, 0.0, 9.0]])
    loud = torch.diag(torch.tensor([1.0, 4.0, 100.0, 2500.0]))
    dead = moments_of(inputs(40, 6, seed=31) * torch.tensor([1.0, 0, 1, 1, 0, 1]))
    size = torch.tensor([8.0, 1.0, 0.0, 2.0, 0.5, 3.0])
    cases = [
        Case("a weight that lies on its grid: nothing is to be gained, bits 4, group None", on_grid, loud, 4, None),
        Case("a weight of zeros: all factors cost nothing, bits 4, group None", torch.zeros(2, 4), loud, 4, None),
        Case("a random weight [2, 4], moments of inputs that are all alike, bits 3, group None",
             random_numbers(2, 4, seed=1), 16 * torch.eye(4), 3, None, None, 2),
        _factors("a random weight [2, 4], moments [1, 4, 100, 2500] on the diagonal", 2, loud, 3, None, 4, seed=1),
        *(_factors(f"a random weight [{rows}, {width}]", rows, moments_of(inputs(60, width, seed=seed, loud=loudness)),
                   bits, group, steps, seed=seed)
          for rows, width, bits, group, steps, seed, loudness in _RANDOM),
        _factors("a random weight [4, 6], two columns without any input", 4, dead, 3, None, 5, seed=6),
        Case("a random weight [3, 6], no input at all, bits 4, group 3, 20 steps", random_numbers(3, 6, seed=8),
             torch.zeros(6, 6), 4, 3),
        Case("a random weight [4, 6], `size` [8, 1, 0, 2, 0.5, 3], bits 3, group None, 6 steps",
             random_numbers(4, 6, seed=2), moments_of(inputs(40, 6, seed=41)), 3, None, size, 6),
    ]  # fmt: skip
    return tuple(cases)


# rows, width, bits, group, steps, seed, how loud
_RANDOM: tuple[tuple[int, int, int, int | None, int, int, float], ...] = (
    (3, 3, 3, None, 4, 2, 1.0), (3, 3, 3, None, 4, 3, 1.0), (2, 8, 4, 4, 5, 20, 1.0), (2, 8, 4, 4, 5, 37, 1.0),
    (4, 10, 4, 4, 5, 17, 1.0), (4, 10, 4, 4, 5, 66, 1.0), (3, 16, 2, 8, 10, 42, 1.0), (4, 20, 3, 8, 8, 28, 1.0),
    (6, 12, 4, None, 20, 15, 1.5), (6, 12, 4, None, 20, 28, 1.5),
)  # fmt: skip


def _factors(text: str, rows: int, moments: Tensor, bits: int, group: int | None, steps: int, seed: int) -> Case:
    weight = random_numbers(rows, len(moments), seed=1000 + seed)
    return Case(f"{text}, bits {bits}, group {group}, {steps} steps", weight, moments, bits, group, None, steps)


def check_awq_scale(awq_scale: Callable[..., Tensor]) -> None:
    """Against every exponent in float64. Where it fails because of a piece that it calls, that piece is named."""
    try:
        compare(
            awq_scale,
            factor_by_factor,
            factor_cases(),
            expected="a factor for each column, size**α for the α that costs the output least, float32 [width], the "
            "largest and the smallest of them multiplying to 1",
            mistakes=combined(_scaling, _FACTOR_MISTAKES, at_once=2),
            diagnose=_of_factors,
            explain=_of_scaling,
            tolerance=FACTORS,
            what="the factors",
        )
    except CheckFailed as failure:
        named = _NOT_NORMAL if _right_but_for_a_factor(awq_scale) else failure.mistake
        failure.mistake = next(pieces_at_fault(awq_scale, {"quantize": _QUANTIZE}), named)
        raise


def _right_but_for_a_factor(awq_scale: Callable[..., Tensor]) -> bool:
    """Whether all results are right as soon as they are normalized."""

    def normalized(*arguments: Any) -> Tensor:
        factors = awq_scale(*arguments)
        return factors / (factors.max() * factors.min()).sqrt()

    try:
        compare(normalized, factor_by_factor, factor_cases(), expected="", tolerance=FACTORS)
    except Exception:  # noqa: BLE001 - the learner's code may fail in any way
        return False
    return True


_QUANTIZE = (check_quantize, 'check("7.3", quantize)')


def _of_scaling(error: BaseException, case: Case) -> str:
    if isinstance(error, ZeroDivisionError):
        return "α is step / steps, for the steps from 0 to `steps`"
    if isinstance(error, RuntimeError) and ("max()" in str(error) or "min()" in str(error)):
        return "no column has any input here; then all of them count alike"
    return ""


def _of_factors(got: Any, want: Any) -> str:
    if isinstance(got, float | int):
        return "the factors of the best exponent are asked for, not the exponent, and not its error"
    if not isinstance(got, Tensor):
        return ""
    if got.dim() == 2:
        return "a factor for each column is asked for, [width]; the weight itself is left as it is"
    if not bool(torch.isfinite(got).all()) or bool((got <= 0).any()):
        return _DEAD
    ratio = got.double() / want.double()
    if got.shape == want.shape and float(ratio.max() / ratio.min()) < 1.0001:
        return _NOT_NORMAL
    return ""


_NOT_NORMAL = (
    "right up to a factor that all columns share: it is the largest and the smallest that multiply to 1, so that the "
    "weight stays about as large as it was"
)
_DEAD = "a column without any input has the size 0, which makes factors 0, infinite or NaN: it counts as the weakest"
_KEPT = "the weight's factors are not taken back after rounding: it is compared, scaled, with the weight unscaled"
_FACTOR_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("α is 1 always; the best of all is meant", {"exponents": lambda steps: [1.0]}),
    ("α is 1/2 always; the best of all is meant", {"exponents": lambda steps: [0.5]}),
    ("α is 0 always, plain rounding; all others look worse where the factors are not taken back after rounding",
     {"exponents": lambda steps: [0.0]}),
    ("α = 0, plain rounding, is not tried: it may be the best", {"exponents": lambda steps: [s / steps for s in
                                                                                        range(1, steps + 1)]}),
    ("α = 1 is not tried", {"exponents": lambda steps: [s / steps for s in range(steps)]}),
    ("α is the step itself; it goes from 0 to 1, step / steps", {"exponents": lambda steps: [*range(steps + 1)]}),
    ("`steps` is not used: always 20", {"exponents": lambda steps: [s / 20 for s in range(21)]}),
    ("the worst exponent is taken", {"sign": -1.0}),
    ("of equal ones the last is taken; the smallest exponent is meant, which changes least", {"last": True}),
    (_KEPT, {"back": lambda numbers, factors: numbers}),
    ("after rounding the factors are multiplied in again; they are to be taken back",
     {"back": lambda numbers, factors: numbers * factors}),
    ("the weight is divided by the factors before rounding; loud columns would be made smaller",
     {"there": lambda weight, factors: weight / factors, "back": lambda numbers, factors: numbers * factors}),
    ("the error of the weights is what is made small; it is the output's, which the moments tell",
     {"error": lambda lost, moments: lost.square().sum()}),
    ("only the diagonal of the moments counts; columns that are loud together are not seen",
     {"error": lambda lost, moments: (lost.square() @ moments.diagonal()).sum()}),
    ("the largest error of a row decides; the sum of all is meant",
     {"error": lambda lost, moments: ((lost @ moments) * lost).sum(1).max()}),
    ("the size is the diagonal of the moments itself; its root is how large a column is",
     {"size": lambda weight, moments: moments.diagonal()}),
    ("the size is that of the weight's columns; it is that of their inputs",
     {"size": lambda weight, moments: weight.square().mean(0).sqrt()}),
    ("the size is that of the weight's columns; it is that of their inputs",
     {"size": lambda weight, moments: weight.abs().mean(0)}),
    ("the size is that of the weight's columns; it is that of their inputs",
     {"size": lambda weight, moments: weight.abs().amax(0)}),
    ("the size is the largest moment of a column with any other; it is the root of the one with itself",
     {"size": lambda weight, moments: moments.abs().amax(0)}),
    ("the size is the sum of a column's moments; it is the root of the one with itself",
     {"size": lambda weight, moments: moments.abs().sum(0)}),
    ("`size` is not used where it is given", {"given": False}),
    (_NOT_NORMAL, {"normal": lambda factors: factors}),
    (_NOT_NORMAL, {"normal": lambda factors: factors / factors.mean()}),
    (_NOT_NORMAL, {"normal": lambda factors: factors / factors.max()}),
    (_NOT_NORMAL, {"normal": lambda factors: factors / factors.min()}),
    (_NOT_NORMAL, {"normal": lambda factors: factors / (factors.max() * factors.min())}),
    (_NOT_NORMAL, {"normal": lambda factors: factors / factors.log().mean().exp()}),
    (_DEAD, {"weakest": lambda size: size}),
    *((_DEAD, {"weakest": lambda size, tiny=tiny: size.clamp(min=tiny)}) for tiny in
      (1e-12, 1e-10, 1e-9, 1e-8, 1e-6, 1e-5, 1e-4)),
    ("a column without any input counts as one of size 1; it counts as the weakest that has one",
     {"weakest": lambda size: torch.where(size > 0, size, 1)}),
    ("the factors are turned over: the weight's columns are multiplied by them", {"turned": True}),
    ("`group` is not handed on to quantize", {"of": lambda bits, group: (bits, None)}),
    ("4 bits are tried, whatever `bits` is", {"of": lambda bits, group: (4, group)}),
]  # fmt: skip


def _weakest(size: Tensor) -> Tensor:
    alive = size[size > 0]
    return torch.where(size > 0, size, alive.min() if len(alive) else 1)


def _evenly(steps: int) -> list[float]:
    return [step / steps for step in range(steps + 1)]


def _scaling(
    exponents: Callable[[int], Sequence[float]] = _evenly,
    sign: float = 1.0,
    there: Callable[[Tensor, Tensor], Tensor] = lambda weight, factors: weight * factors,
    back: Callable[[Tensor, Tensor], Tensor] = lambda numbers, factors: numbers / factors,
    error: Callable[[Tensor, Tensor], Tensor] = lambda lost, moments: ((lost @ moments) * lost).sum(),
    size: Callable[[Tensor, Tensor], Tensor] = lambda weight, moments: moments.diagonal().sqrt(),
    normal: Callable[[Tensor], Tensor] = lambda factors: factors / (factors.max() * factors.min()).sqrt(),
    weakest: Callable[[Tensor], Tensor] = _weakest,
    of: Callable[[int, int | None], tuple[int, int | None]] = lambda bits, group: (bits, group),
    **wrong: bool,
) -> Callable[..., Tensor]:
    """The search, with mistakes switched on."""

    def run(
        weight: Tensor, moments: Tensor, bits: int, group: int | None, given: Tensor | None = None, steps: int = 20
    ) -> Tensor:
        weight, moments = weight.double(), moments.double()
        use = given is not None and wrong.get("given", True)
        loud = weakest(given.double() if use and given is not None else size(weight, moments))
        best, least = torch.ones_like(loud), torch.inf
        for exponent in exponents(steps):
            factors = normal(loud**exponent)
            lost = weight - back(rounded(there(weight, factors), *of(bits, group)), factors)
            cost = sign * float(error(lost, moments))
            if cost < least or (wrong.get("last") and cost == least):
                best, least = factors, cost
        return (1 / best if wrong.get("turned") else best).float()

    return run
