"""The checks of chapter 5's draws and of its temperature, against exact sums, a race and one division at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.course import differences
from llmfromscratch.course.calling import result_of
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.differences import Tolerance
from llmfromscratch.course.exercises.sampler_runs import check_in_sampler

_PAIR = "max along a dimension gives values and indices: take amax or argmax"
_NEARLY_ONE = 1 - 2.0**-53  # the largest float64 below 1


def seeded(seed: int) -> torch.Generator:
    """A generator of one's own."""
    return torch.Generator().manual_seed(seed)


def by_chance(function: Callable[..., Any], case: Case) -> Callable[[Any, Any], str]:
    """For `diagnose`: tells a function that draws numbers of its own from one that uses those it is given."""

    def diagnose(got: Any, want: Any) -> str:
        if isinstance(got, int | float) or (isinstance(got, Tensor) and got.shape != want.shape):
            return _of_shape(got, want)
        if "return_types" in str(type(got)):
            return _PAIR
        first, second = (result_of(function, case) for _ in range(2))
        if differences.find(first, second, Tolerance()) is None:
            return ""
        return "two calls with the same numbers give two results: use `uniforms`, and no random numbers of your own"

    return diagnose


def _of_shape(got: Any, want: Tensor) -> str:
    if isinstance(got, Tensor) and list(got.shape) == [*want.shape, 1]:
        return "a column comes back; squeeze(-1) makes one number for each row of it"
    if isinstance(got, Tensor) and got.dim() == 1:
        return f"{len(got)} numbers come back for {len(want)} row{'s' * (len(want) > 1)}; every row draws one"
    return "" if isinstance(got, Tensor) and got.dim() else "a single number comes back; asked for is one for each row"


# ---- 5.1 a draw --------------------------------------------------------------------------------------------------


def _draw_case(probabilities: list[list[float]], uniforms: list[float], dtype: torch.dtype = torch.float32) -> Case:
    numbers = ", ".join("the largest number below 1" if number == _NEARLY_ONE else f"{number:g}" for number in uniforms)
    return Case(
        f"probabilities {differences.shown(probabilities)}, uniforms {numbers}",
        torch.tensor(probabilities, dtype=dtype),
        torch.tensor(uniforms, dtype=torch.float64),
    )


def draw_cases() -> list[Case]:
    """What `draw` is tried on: numbers on a border only where all sums are exact."""
    sparse = torch.rand(6, 9, generator=seeded(1)) * (torch.rand(6, 9, generator=seeded(2)) > 0.4)
    wide = torch.rand(40, 12, generator=seeded(3), dtype=torch.float64)
    wide[:, 9:] = 0
    long = torch.cat([torch.ones(1), torch.full((4096,), 2.0**-26)]).expand(3, -1).clone()
    return [
        _draw_case([[0.25, 0.75]], [0.125]),
        _draw_case([[0.25, 0.75]], [0.5]),
        _draw_case([[0.25, 0.75]], [0.25]),
        _draw_case([[0.0, 1.0]], [0.0]),
        _draw_case([[0.25, 0.0, 0.75]], [0.25]),
        _draw_case([[0.5, 0.5, 0.0]], [_NEARLY_ONE]),
        _draw_case([[1.0, 2.0, 1.0]], [0.5]),
        _draw_case([[0.125, 0.125]], [0.75]),
        _draw_case([[0.5, 0.5], [0.5, 0.5]], [0.9, 0.1]),
        _draw_case([[1.0, 1.0], [1.0, 3.0]], [0.4, 0.4]),
        _draw_case([[0.2, 0.0, 0.5, 0.3]] * 4, [0.1, 0.3, 0.6, 0.8]),
        Case("6 random rows of 9, some 0", sparse, torch.rand(6, generator=seeded(4), dtype=torch.float64)),
        Case("40 random rows of 12 in float64, the last 3 columns 0", wide, _numbers(40, seed=5)),
        Case("40 random rows of 12 in float64, the last 3 columns 0, each uniform the largest number below 1", wide,
             torch.full((40,), _NEARLY_ONE, dtype=torch.float64)),
        Case("3 rows of a 1 and 4096 times 2**-26, float32", long,
             _middles(98, 1801, 3007)),
    ]  # fmt: skip


def _middles(*columns: int) -> Tensor:
    """The numbers that fall into the middle of these columns of the row of a 1 and 4096 times 2**-26."""
    return torch.tensor([(1 + (column - 0.5) * 2.0**-26) / (1 + 2.0**-14) for column in columns], dtype=torch.float64)


def _numbers(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=seeded(seed), dtype=torch.float64)


def check_draw(draw: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Against running sums of fractions, which no rounding touches; then in the engine's sampler."""
    compare(
        draw,
        exact_draw,
        draw_cases(),
        expected="int64 [rows]: in each row the first column at which the running sum exceeds uniform x sum",
        mistakes=combined(_drawn, _DRAW_MISTAKES, at_once=2),
        diagnose=by_chance(draw, Case("", torch.ones(50, 90), _numbers(50, seed=6))),
        explain=_of_draw,
    )
    check_in_sampler("draw", draw)


def exact_draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The columns by exact sums."""
    drawn = []
    for row, number in zip(probabilities.tolist(), uniforms.tolist(), strict=True):
        sums = list(accumulate(map(Fraction, row)))
        target = Fraction(number) * sums[-1]
        drawn.append(next(column for column, total in enumerate(sums) if total > target))
    return torch.tensor(drawn)


def _of_draw(error: BaseException, case: Case) -> str:
    text = str(error)
    if "first N-1 dimensions" in text or "boundaries tensor" in text:
        return "searchsorted looks for rows of numbers in rows of sums: make a column [rows, 1] of the numbers"
    if isinstance(error, IndexError) or "out of bounds" in text or "out of range" in text:
        return "an index lies behind the last column: rounding can leave the running sum below its target"
    return ""


_UNSCALED = "the numbers are held against the running sum as it is; a row need not add up to 1, its sum counts as 1"
_BEYOND = (
    "rounding leaves the running sum below a number just under 1, and the result is not the last column that has any "
    "probability; that one is meant"
)
_IN_FLOAT32 = "the sums are kept in float32, where small probabilities behind large ones are lost: make them float64"
_DRAW_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("the number at the border belongs to the next column: the sum must exceed it, not only reach it",
     {"exceeds": False}),
    *((_UNSCALED, {"scale": "none", **end})
      for end in ({}, {"end": "none"}, {"end": "clamp"}, {"end": "zero"}, {"end": "drop"})),
    ("all rows are scaled by one sum; each has its own", {"scale": "all"}),
    ("all rows are scaled by the sum of the first; each has its own", {"scale": "first"}),
    ("the first number is used for all rows; each row has its own", {"numbers": lambda u: u[:1].expand(len(u))}),
    ("row r meets all the numbers: number r belongs to row r, so make a column of them", {"across": "count"}),
    ("row r meets all the numbers: number r belongs to row r, so make a column of them", {"across": "argmax"}),
    *((_BEYOND, {"way": "divide", "end": end}) for end in ("none", "clamp", "zero", "drop")),
    *((_IN_FLOAT32, {"way": way, **end})
      for way in ("float32", "rounded", "in turn", "divide in float32") for end in ({}, {"end": "none"})),
    ("the most probable column is taken, whatever the number", {"way": "argmax"}),
    ("the columns are put in order of probability first: the line has them in their own order", {"way": "places"}),
    ("the columns are put in order of probability first: the line has them in their own order", {"way": "ranked"}),
    ("a softmax of the probabilities is drawn from; they are probabilities already",
     {"weights": lambda p: p.softmax(-1)}),
    ("the sums run down the columns; they run along each row", {"way": "down"}),
    ("the sums run down the columns; they run along each row", {"way": "down", "end": "none"}),
    ("the column after the right one", {"shift": 1}),
    ("the column before the right one", {"shift": -1}),
    ("the line is read from its far end: the first column begins at 0", {"numbers": lambda u: 1 - u}),
    ("this is the probability of what was drawn; asked for is its column", {"gives": "probability"}),
]  # fmt: skip


def _drawn(
    exceeds: bool = True,
    scale: str = "row",
    end: str = "last",
    way: str = "float64",
    numbers: Callable[[Tensor], Tensor] = lambda u: u,
    weights: Callable[[Tensor], Tensor] = lambda p: p,
    **wrong: Any,
) -> Callable[[Tensor, Tensor], Tensor]:
    """A draw with mistakes switched on."""

    def run(probabilities: Tensor, uniforms: Tensor) -> Tensor:
        p = weights(probabilities)
        if way == "argmax":
            return p.argmax(-1)
        order = p.argsort(dim=-1, descending=True, stable=True) if way in ("ranked", "places") else None
        sums = _sums(p if order is None else p.gather(-1, order), way)
        scales: dict[str, Any] = {"row": sums[:, -1:], "none": 1, "all": sums[:, -1].sum(), "first": sums[0, -1]}
        if wrong.get("across"):
            over = sums > numbers(uniforms).to(sums) * scales[scale]
            return (~over).sum(-1) if wrong["across"] == "count" else over.int().argmax(-1)
        targets = numbers(uniforms).to(sums).unsqueeze(-1) * (1 if way.startswith("divide") else scales[scale])
        drawn = torch.searchsorted(sums.contiguous(), targets.contiguous(), right=exceeds).squeeze(-1)
        columns = p.shape[-1]
        last = columns - 1 - (p > 0).int().flip(-1).argmax(-1)
        ends = {"last": torch.minimum(drawn, last), "none": drawn, "clamp": drawn.clamp(max=columns - 1)}
        if end == "drop":
            return drawn[drawn < columns]
        drawn = ends[end] if end in ends else torch.where(drawn == columns, 0, drawn)
        drawn = drawn + wrong.get("shift", 0)
        if order is not None and way == "ranked":
            drawn = order.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)
        return p.gather(-1, drawn.unsqueeze(-1)).squeeze(-1) if wrong.get("gives") else drawn

    return run


def _sums(p: Tensor, way: str) -> Tensor:
    """The running sums of each row, kept in one way or another."""
    if way == "divide":
        return (p.double() / p.double().sum(-1, keepdim=True)).cumsum(-1)
    if way == "divide in float32":
        return (p / p.sum(-1, keepdim=True)).double().cumsum(-1)
    if way == "in turn":  # torch's own cumsum keeps more digits than its results have
        return torch.from_numpy(p.numpy().cumsum(-1)).double()
    if way in ("float32", "rounded"):
        return p.cumsum(-1) if way == "float32" else p.cumsum(-1).double()
    return p.double().cumsum(0 if way == "down" else -1)


# ---- 5.2 a draw without a sum ------------------------------------------------------------------------------------


def check_gumbel_draw(gumbel_draw: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Against a race: each token rings after -log(u) / e**logit, and the first to ring is drawn."""
    compare(
        gumbel_draw,
        first_to_ring,
        gumbel_cases(),
        expected="int64 [rows]: in each row the place where logit - log(-log(uniform)) is largest",
        mistakes=combined(_gumbel, _GUMBEL_MISTAKES, at_once=2),
        diagnose=by_chance(gumbel_draw, Case("", torch.zeros(50, 90), _numbers(50, 90, seed=13))),
        explain=_of_pair,
    )


def gumbel_cases() -> list[Case]:
    """What `gumbel_draw` is tried on; in each row the largest sum leads clearly."""
    never = -torch.inf
    return [
        _gumbel_case([[0.0, 0.0]], [[0.9, 0.2]]),
        _gumbel_case([[0.0, 0.0]], [[0.2, 0.9]]),
        _gumbel_case([[1.0, 0.0]], [[0.3, 0.5]]),
        _gumbel_case([[4.0, 0.0, 2.0]], [[0.2, 0.6, 0.5]]),
        _gumbel_case([[-3.0, -4.0]], [[0.1, 0.9]]),
        _gumbel_case([[never, 3.0]], [[0.9, 0.1]]),
        _gumbel_case([[0.0, 20.0]], [[0.5, 0.0]]),
        _gumbel_case([[never, 3.0]], [[0.5, 0.0]]),
        _gumbel_case([[0.0, never]], [[0.5, _NEARLY_ONE]], torch.float64),
        _gumbel_case([[30.0, 0.0]], [[0.5, _NEARLY_ONE]], torch.float64),
        _gumbel_case([[0.0, 4.7]], [[0.5, 0.0]]),
        Case("logits [[0, -20], [0, -20]], uniforms in float64: 0.5 and 1 - 2**-24, 0.5 and 1 - 2**-26",
             torch.tensor([[0.0, -20.0]]).expand(2, -1).clone(),
             torch.tensor([[0.5, 1 - 2.0**-24], [0.5, 1 - 2.0**-26]], dtype=torch.float64)),
        _gumbel_case([[0.0, 0.0], [0.0, 0.0]], [[0.9, 0.2], [0.3, 0.8]]),
        Case("8 random rows of 6", 2 * torch.randn(8, 6, generator=seeded(7)), _numbers(8, 6, seed=8).float()),
        Case("30 random rows of 20, uniforms in float64", 3 * torch.randn(30, 20, generator=seeded(9)),
             _numbers(30, 20, seed=10)),
        Case("logits of some hundreds, in float64", 300 + torch.randn(9, 7, generator=seeded(11)).double(),
             _numbers(9, 7, seed=12)),
    ]  # fmt: skip


def _gumbel_case(logits: list[list[float]], uniforms: list[list[float]], dtype: torch.dtype = torch.float32) -> Case:
    numbers = differences.shown(uniforms)
    if any(_NEARLY_ONE in row for row in uniforms):
        numbers = f"0.5 and the largest {dtype} below 1".replace("torch.", "")
    told = f"logits {differences.shown(logits)}, uniforms {numbers}"
    return Case(told, torch.tensor(logits), torch.tensor(uniforms, dtype=dtype))


def first_to_ring(logits: Tensor, uniforms: Tensor) -> Tensor:
    """The race, in Python's numbers; a clock that never rings rings last."""
    smallest = torch.finfo(uniforms.dtype).tiny
    drawn = []
    for row, numbers in zip(logits.tolist(), uniforms.tolist(), strict=True):
        top = max(row)
        rings = [
            math.inf if logit == -math.inf else -math.log(max(number, smallest)) * math.exp(top - logit)
            for logit, number in zip(row, numbers, strict=True)
        ]
        drawn.append(rings.index(min(rings)))
    return torch.tensor(drawn)


_ONE_LOGARITHM = "one logarithm is there; there are two, one of the other's negative"
_LIFTED = (
    "adding a small number lifts the largest uniforms to 1 or above, where one of the logarithms breaks: use a floor "
    "instead (clamp), which raises only what is below it"
)
_ADDED = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12, 2.0**-52, 2.0**-23)
_GUMBEL_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    *((_ONE_LOGARITHM, {"noise": noise}) for noise in (
        lambda u: -u.log(), lambda u: u.log(), lambda u: -_above_0(u).log(), lambda u: _above_0(u).log())),
    ("the uniforms are added as they are; what is added is -log(-log(u))", {"noise": lambda u: u}),
    ("a sign is wrong: log(-log(u)) is subtracted from the logit", {"noise": lambda u: (-_above_0(u).log()).log()}),
    ("the logarithm of a uniform is negative, and its own logarithm NaN: a minus goes between the two",
     {"noise": lambda u: -_above_0(u).log().log()}),
    ("a uniform of 0 has no finite logarithm: it counts as the smallest positive number of its dtype",
     {"noise": lambda u: -(-u.log()).log()}),
    ("uniforms in float64 are brought to float32, where the largest of them become 1: log(1) is 0, and log(0) infinite",
     {"noise": lambda u: -(-_above_0(u.float()).log()).log()}),
    *(("a uniform of 0 counts as far more than the smallest positive number of its dtype: let torch.finfo(dtype).tiny "
       "be the floor (clamp), and add nothing", {"noise": raised}) for raised in (lambda u: _noise(u + 1e-20), *(
           lambda u, least=least: _noise(u.clamp(min=least)) for least in (1e-20, 1e-12, 1e-9, 1e-6, 1e-4)))),
    *((_LIFTED, {"noise": lambda u, small=small: -(-(u + small).log()).log()}) for small in _ADDED),
    *((_LIFTED, {"noise": lambda u, small=small: -(-(u + small).log() + small).log()}) for small in _ADDED),
    *(("a uniform of 0 has no finite logarithm: it counts as the smallest positive number of its dtype. A small number "
       "that is added to the logarithm does not mend it", {"noise": lambda u, small=small: -(-u.log() + small).log()})
      for small in (*_ADDED, 1e-20)),
    *(("a small number is added to -log(u), which for uniforms just under 1 is smaller still, so that they count too "
       "little: add nothing there", {"noise": lambda u, small=small: -(-_above_0(u).log() + small).log()})
      for small in _ADDED),
    ("the softmax of the logits is taken first; the numbers are added to the logits themselves",
     {"base": lambda logits: logits.softmax(-1)}),
    ("e**logit is taken first; the numbers are added to the logits themselves", {"base": torch.exp}),
    ("the logits play no part: every token is as probable as any other", {"base": lambda logits: 0 * logits.exp()}),
    ("the numbers play no part, or a row adds the same one to all its logits: the most probable is always drawn",
     {"noise": lambda u: 0 * u}),
    ("all rows use the first row's numbers; each has its own", {"noise": lambda u: _noise(u[:1]).expand(u.shape)}),
    ("the logits are multiplied by the numbers; the numbers are added", {"join": torch.mul}),
    ("the logits are divided by the numbers; the numbers are added", {"join": torch.div}),
    ("the logits are divided by -log(u); -log(-log(u)) is added to them",
     {"join": torch.div, "noise": lambda u: -u.log()}),
    ("the logits are divided by -log(u); -log(-log(u)) is added to them",
     {"join": torch.div, "noise": lambda u: -_above_0(u).log()}),
    ("the smallest is taken; asked for is where the largest is", {"pick": lambda x: x.argmin(-1)}),
    ("the largest of each column is taken; each row draws one", {"pick": lambda x: x.argmax(0)}),
    ("one token for all rows is drawn; each row draws its own", {"pick": torch.argmax}),
    ("these are the largest values; asked for is where they are", {"pick": lambda x: x.amax(-1)}),
]  # fmt: skip


def _above_0(uniforms: Tensor) -> Tensor:
    return uniforms.clamp(min=torch.finfo(uniforms.dtype).tiny)


def _noise(uniforms: Tensor) -> Tensor:
    return -(-_above_0(uniforms).log()).log()


def _gumbel(
    noise: Callable[[Tensor], Tensor] = _noise,
    base: Callable[[Tensor], Tensor] = lambda logits: logits,
    join: Callable[[Tensor, Tensor], Tensor] = torch.add,
    pick: Callable[[Tensor], Tensor] = lambda x: x.argmax(-1),
) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, uniforms: pick(join(base(logits), noise(uniforms)))


def _of_pair(error: BaseException, case: Case) -> str:
    return _PAIR if "return_types" in str(error) else ""  # the name of what torch's max gives


# ---- 5.3 the temperature -----------------------------------------------------------------------------------------

_NORMAL = torch.finfo(torch.float32)


def check_apply_temperature(apply_temperature: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Against one division after the other; then in the engine's sampler."""
    compare(
        apply_temperature,
        one_by_one,
        [
            _hot([[3.0, 1.0]], [1.0]),
            _hot([[3.0, 1.0]], [0.5]),
            _hot([[1.0, 3.0, 0.0]], [2.0]),
            _hot([[-5.0, -7.0]], [0.5]),
            _hot([[3.0, 1.0], [2.0, 6.0]], [0.5, 2.0]),
            _hot([[3.0, 1.0, -torch.inf], [2.0, 6.0, 0.0]], [4.0, 0.25]),
            _hot([[1.0, 1.5]], [1e-10]),
            _hot([[7.0, 1.0, 7.0]], [1e-38]),
            _hot([[7.0, 1.0, 7.0]], [1e-300], torch.float64),
            _hot([[1.0, 2.0, -torch.inf], [1.0, 2.0, 0.0]], [1e300, 1.0], torch.float64),
            Case("5 random rows of 8, temperatures in float64", 4 * torch.randn(5, 8, generator=seeded(14)),
                 _numbers(5, seed=15) + 0.2),
        ],
        expected="float32 [rows, vocab]: (logit - the largest of its row) / the temperature of its row",
        mistakes=combined(_heated, _HEAT_MISTAKES, at_once=2),
        explain=_of_pair,
    )  # fmt: skip
    check_in_sampler("apply_temperature", apply_temperature)


def _hot(logits: list[list[float]], temperatures: list[float], dtype: torch.dtype = torch.float32) -> Case:
    told = ", ".join(f"{temperature:g}" for temperature in temperatures)
    kind = " in float64" if dtype == torch.float64 else ""
    told = f"logits {differences.shown(logits)}, temperature{'s' * (len(temperatures) > 1)} {told}{kind}"
    return Case(told, torch.tensor(logits), torch.tensor(temperatures, dtype=dtype))


def one_by_one(logits: Tensor, temperatures: Tensor) -> Tensor:
    """In Python's numbers, which are float64; what float32 cannot hold becomes infinite there."""
    rows = []
    for row, temperature in zip(logits.tolist(), temperatures.tolist(), strict=True):
        divisor, top = min(max(temperature, _NORMAL.tiny), _NORMAL.max), max(row)
        rows.append([(logit - top) / divisor for logit in row])
    return torch.tensor(rows, dtype=torch.float64).float()


_AFTER = "the largest is taken off after the division, which a tiny temperature makes infinite: take it off first"
_ROUGHLY: list[tuple[str, dict[str, Any]]] = [
    ("the largest logit of the row is not taken off first; the result is at most 0", {"top": lambda x: 0}),
    ("the logits are multiplied by the temperature; they are divided by it", {"apply": torch.mul}),
    ("the temperature of the first row is used for all; each row has its own", {"rows": lambda t: t[:1]}),
    ("row r meets all the temperatures: temperature r belongs to row r, so make a column of them",
     {"column": lambda t: t}),
    ("the largest of the whole tensor is taken off; each row has its own", {"top": torch.max}),
    ("the largest of each column is taken off; each row has its own", {"top": lambda x: x.amax(0, keepdim=True)}),
    ("the smallest is taken off; it is the largest that makes a result of at most 0",
     {"top": lambda x: x.amin(-1, keepdim=True)}),
    ("the mean is taken off; the largest should be", {"top": lambda x: x.mean(-1, keepdim=True)}),
    ("this is the softmax; asked for are the logits that go into it", {"after": lambda x: x.softmax(-1)}),
    ("this is the logarithm of the softmax; asked for are the logits that go into it",
     {"after": lambda x: x.log_softmax(-1)}),
    ("without keepdim=True amax and max lose the last dimension, and a row's largest meets a column",
     {"top": lambda x: x.amax(-1)}),
    ("the square of the temperature divides", {"rows": torch.square}),
    ("the root of the temperature divides", {"rows": torch.sqrt}),
    (_AFTER, {"late": "divided"}),
    ("the undivided largest is taken off after the division: take it off first", {"late": "undivided"}),
]  # fmt: skip
_UNCLAMPED: dict[str, Any] = {"clamped": lambda t: t}
_HEAT_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    # who makes one of these has rarely clamped the temperatures, or brought them to float32
    *((sentence, {**settings, **more})
      for more in ({}, _UNCLAMPED, {**_UNCLAMPED, "cast": False}) for sentence, settings in _ROUGHLY),
    *((f"temperatures below {least:g} count as {least:g}; float32 holds far smaller ones, and they differ", {
        "clamped": lambda t, least=least, most=most: t.clamp(least, most)})
      for most in (_NORMAL.max, None) for least in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9)),
    *((f"{least:g} is added to the temperatures, and small ones are lost in it: clamp them", {
        "clamped": lambda t, least=least, most=most: (t + least).clamp(max=most)})
      for most in (_NORMAL.max, torch.inf) for least in (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9)),
    ("a temperature below what float32 holds becomes 0 there, and 0 / 0 is NaN: clamp it to the smallest normal number",
     {"clamped": lambda t: t.clamp(max=_NORMAL.max)}),
    ("a temperature above what float32 holds becomes infinite there, and -inf / inf is NaN: clamp it to the largest",
     {"clamped": lambda t: t.clamp(min=_NORMAL.tiny)}),
    ("temperatures outside of float32 become 0 or infinite there: clamp them to its smallest and largest normal number",
     _UNCLAMPED),
    *(("the result has the dtype of the temperatures; it should be that of the logits", {**more, "cast": False})
      for more in ({}, _UNCLAMPED)),
]  # fmt: skip


def _heated(
    top: Callable[[Tensor], Any] = lambda x: x.amax(-1, keepdim=True),
    apply: Callable[[Tensor, Tensor], Tensor] = torch.div,
    rows: Callable[[Tensor], Tensor] = lambda t: t,
    column: Callable[[Tensor], Tensor] = lambda t: t.unsqueeze(-1),
    clamped: Callable[[Tensor], Tensor] = lambda t: t.clamp(_NORMAL.tiny, _NORMAL.max),
    after: Callable[[Tensor], Tensor] = lambda x: x,
    late: str = "",
    cast: bool = True,
) -> Callable[[Tensor, Tensor], Tensor]:
    def run(logits: Tensor, temperatures: Tensor) -> Tensor:
        divisors = column(rows(clamped(temperatures)))
        divisors = divisors.to(logits) if cast else divisors
        if late:
            divided = apply(logits, divisors)
            return after(divided - top(divided if late == "divided" else logits))
        return after(apply(logits - top(logits), divisors))

    return run
