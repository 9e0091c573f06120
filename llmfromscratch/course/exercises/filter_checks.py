"""The checks of chapter 5's filters and penalties, against counting by hand, one candidate after the other."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.course import differences
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.exercises.drawing_checks import seeded
from llmfromscratch.course.exercises.sampler_runs import check_in_sampler

_Table = list[list[float]]
_FLOATS = (
    "numbers come back; asked for is True or False for each candidate: the caller sets those to 0 that do not stay"
)


def _ranked_case(rows: _Table, name: str, settings: list[Any], dtype: torch.dtype) -> Case:
    told = ", ".join(f"{setting:g}" for setting in settings)
    return Case(
        f"ranked {differences.shown(rows)}, {name} {told}", torch.tensor(rows), torch.tensor(settings, dtype=dtype)
    )


def _random_ranking(rows: int, candidates: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    logits = 2 * torch.randn(rows, candidates, generator=seeded(seed), dtype=torch.float64)
    return logits.softmax(-1).sort(dim=-1, descending=True).values.to(dtype)


def _of_table(got: Any, want: Any) -> str:
    if isinstance(got, Tensor) and got.dim() == 1:
        return (
            "one row comes back; asked for is one for each setting: make a column of them, which meets all the places"
        )
    return _FLOATS if isinstance(got, Tensor) and got.is_floating_point() and got.shape == want.shape else ""


# ---- 5.4 the top k -----------------------------------------------------------------------------------------------


def check_keep_top_k(keep_top_k: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Against lists of so many True and the rest False; then in the engine's sampler."""
    case = partial(_ranked_case, name="top_k", dtype=torch.int64)
    compare(
        keep_top_k,
        first_so_many,
        [
            case([[0.5, 0.3, 0.2]], settings=[1]),
            case([[0.5, 0.3, 0.2]], settings=[2]),
            case([[0.5, 0.3, 0.2]], settings=[3]),
            case([[0.5, 0.3, 0.2]], settings=[0]),
            case([[0.5, 0.3, 0.2]], settings=[5]),
            case([[0.25, 0.25, 0.25, 0.25]], settings=[2]),
            case([[0.75, 0.25, 0.0, 0.0]], settings=[3]),
            case([[0.6, 0.4], [0.7, 0.3]], settings=[2, 1]),
            case([[0.5, 0.3, 0.2], [0.6, 0.4, 0.0]], settings=[1, 2]),
            case([[0.5, 0.3, 0.2], [0.6, 0.4, 0.0], [0.4, 0.3, 0.3]], settings=[2, 0, 7]),
            Case("8 random rows of 12, k of 0 to 14", _random_ranking(8, 12, 1), torch.arange(0, 16, 2)),
        ],
        expected="bool [rows, candidates]: True for the first k candidates of each row, for all of them where k is 0",
        mistakes=combined(_by_k, _K_MISTAKES, at_once=2),
        diagnose=_of_table,
        explain=_of_k,
    )
    check_in_sampler("keep_top_k", keep_top_k)


def first_so_many(ranked: Tensor, top_k: Tensor) -> Tensor:
    """Rows of k times True and then False, of True alone for 0."""
    number = ranked.shape[-1]
    kept = [min(k, number) if k else number for k in top_k.tolist()]
    return torch.tensor([[True] * many + [False] * (number - many) for many in kept])


def _of_k(error: BaseException, case: Case) -> str:
    text = str(error)
    rare = isinstance(error, RuntimeError) and any(not 0 < k <= case.args[0].shape[-1] for k in case.args[1].tolist())
    if isinstance(error, IndexError) or rare or "out of range" in text or "out of bounds" in text:
        return "a place is asked for that the row does not have: k may be 0, or larger than the number of candidates"
    return ""


_BY_VALUE = "the probabilities are held against that of the k-th candidate, so equal ones stay or go together; the " \
    "places decide"  # fmt: skip
_ROWS_AND_COLUMNS = "is held against every row: number r belongs to row r, so make a column of them"
_K_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("a k of 0 keeps nothing; it means that nothing is cut", {"none": lambda number: 0}),
    ("a k of 0 keeps one candidate; it means that nothing is cut", {"none": lambda number: 1}),
    ("one candidate too many stays: the places begin at 0", {"limit": lambda k, number: k + 1}),
    ("one candidate too few stays: with k = 1 the first does", {"limit": lambda k, number: k - 1}),
    ("a k beyond the candidates keeps nothing; it keeps all of them",
     {"limit": lambda k, number: k if k <= number else 0}),
    ("the k of the first row is used for all; each row has its own", {"settings": lambda k: k[:1].expand(len(k))}),
    ("the largest k is used for all; each row has its own", {"settings": lambda k: k.amax().expand(len(k))}),
    (f"the list of k {_ROWS_AND_COLUMNS}", {"way": "across"}),
    (_BY_VALUE, {"way": "at least"}),
    (_BY_VALUE, {"way": "more"}),
    ("the last k stay; the row begins with the most probable", {"way": "last"}),
    ("True and False are exchanged: True means that a candidate stays", {"way": "inverted"}),
    ("candidates of probability 0 are cut as well; that is none of the business of top-k", {"way": "positive"}),
    ("candidates of probability 0 are cut as well; that is none of the business of top-k", {"way": "positive or 0"}),
    (_FLOATS, {"way": "cut"}),
]  # fmt: skip


def _by_k(
    limit: Callable[[int, int], int] = lambda k, number: k,
    none: Callable[[int], int] = lambda number: number,
    settings: Callable[[Tensor], Tensor] = lambda k: k,
    way: str = "first",
) -> Callable[[Tensor, Tensor], Tensor]:
    """Row by row, with mistakes switched on."""

    def run(ranked: Tensor, top_k: Tensor) -> Tensor:
        number = ranked.shape[-1]
        many = torch.tensor([limit(k, number) if k else none(number) for k in settings(top_k).tolist()])
        places = torch.arange(number).expand(ranked.shape)
        column = many.unsqueeze(-1)
        threshold = ranked.gather(-1, (column - 1).clamp(0, number - 1))
        return {
            "first": lambda: places < column,
            "across": lambda: places < many,
            "at least": lambda: (ranked >= threshold) & (column > 0),
            "more": lambda: (ranked > threshold) | (column >= number),
            "last": lambda: places >= number - column,
            "inverted": lambda: places >= column,
            "positive": lambda: (places < column) & (ranked > 0),
            "positive or 0": lambda: (places < column) & ((ranked > 0) | (top_k == 0).unsqueeze(-1)),
            "cut": lambda: ranked.masked_fill(places >= column, 0),
        }[way]()

    return run


# ---- 5.5 the top p -----------------------------------------------------------------------------------------------


def check_keep_top_p(keep_top_p: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Against exact sums, candidate by candidate; then in the engine's sampler."""
    compare(
        keep_top_p,
        until_reached,
        top_p_cases(),
        expected="bool [rows, candidates]: True while the candidates before this one have less than p together",
        mistakes=combined(_by_p, _P_MISTAKES, at_once=2),
        diagnose=_of_table,
    )
    check_in_sampler("keep_top_p", keep_top_p)


def top_p_cases() -> list[Case]:
    """What `keep_top_p` is tried on: sums that are exact, or none near its p."""
    case = partial(_ranked_case, name="top_p", dtype=torch.float32)
    return [
        case([[0.5, 0.25, 0.25]], settings=[0.6]),
        case([[0.5, 0.25, 0.25]], settings=[0.3]),
        case([[0.5, 0.25, 0.25]], settings=[0.5]),
        case([[0.5, 0.25, 0.25]], settings=[0.75]),
        case([[0.5, 0.25, 0.25]], settings=[1.0]),
        case([[0.9, 0.05, 0.05]], settings=[1e-6]),
        case([[0.4, 0.3, 0.2, 0.1]], settings=[0.6]),
        case([[0.5, 0.25, 0.25, 0.0]], settings=[0.9]),
        case([[0.5, 0.125, 0.125]], settings=[0.6]),
        case([[0.5, 0.5], [0.75, 0.25]], settings=[0.7, 0.7]),
        case([[0.5, 0.5], [0.75, 0.25]], settings=[0.9, 0.4]),
        case([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]], settings=[0.3, 0.9]),
        Case("6 random rows of 20", _random_ranking(6, 20, 2), torch.linspace(0.15, 0.95, 6)),
        Case("6 random rows of 20 in float64", _random_ranking(6, 20, 3, torch.float64),
             torch.linspace(0.95, 0.2, 6, dtype=torch.float64)),
    ]  # fmt: skip


def until_reached(ranked: Tensor, top_p: Tensor) -> Tensor:
    """Takes one candidate after the other until p is reached; what is left over goes."""
    table = []
    for row, p in zip(ranked.tolist(), top_p.tolist(), strict=True):
        together, kept = Fraction(0), []
        for probability in row:
            kept.append(together < Fraction(p))
            together += Fraction(probability)
        table.append(kept)
    return torch.tensor(table)


def _before(ranked: Tensor) -> Tensor:
    return torch.nn.functional.pad(ranked.cumsum(-1), (1, -1))


_CROSSING = "the candidate that crosses p is dropped: its own probability is counted in; what stands before it decides"
_REACHED = "a candidate stays though those before it have reached p: together they must have less"
_P_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    (_CROSSING, {"before": lambda ranked: ranked.cumsum(-1)}),
    (_CROSSING, {"before": lambda ranked: ranked.cumsum(-1), "stays": torch.le}),
    (f"{_CROSSING}. That the first stays whatever its probability does not mend it",
     {"before": lambda ranked: ranked.cumsum(-1), "first": True}),
    (f"{_CROSSING}. That the first stays whatever its probability does not mend it",
     {"before": lambda ranked: ranked.cumsum(-1), "stays": torch.le, "first": True}),
    ("[0] is the whole first row, which now stays whatever it holds; the first candidate of every row is [:, 0]",
     {"first": "row"}),
    (_REACHED, {"stays": torch.le}),
    ("one candidate too many stays: the one that crosses p is the last",
     {"before": lambda ranked: torch.nn.functional.pad(ranked.cumsum(-1), (2, -2))}),
    ("roll brings the sum of the whole row to the first place; before the first candidate there is nothing, 0",
     {"before": lambda ranked: ranked.cumsum(-1).roll(1, -1)}),
    ("roll along the whole tensor brings the sum of one row to the first place of the next; there it is 0",
     {"before": lambda ranked: ranked.cumsum(-1).roll(1)}),
    ("a row is scaled to a sum of 1; the candidates may be a part of the vocabulary, and p is a share of the whole",
     {"before": lambda ranked: _before(ranked / ranked.sum(-1, keepdim=True))}),
    ("the p of the first row is used for all; each row has its own",
     {"settings": lambda p: p[:1].unsqueeze(-1)}),
    (f"the list of p {_ROWS_AND_COLUMNS}", {"settings": lambda p: p}),
    ("the sums run down the columns; they run along each row",
     {"before": lambda ranked: torch.nn.functional.pad(ranked.cumsum(0), (0, 0, 1, -1))}),
    ("the sums run down the columns; they run along each row", {"before": lambda ranked: ranked.cumsum(0)}),
    ("True and False are exchanged: True means that a candidate stays", {"stays": torch.ge}),
    ("True and False are exchanged: True means that a candidate stays", {"stays": torch.gt}),
    ("the sums begin at the end of the row, with the least probable",
     {"before": lambda ranked: _before(ranked.flip(-1)).flip(-1)}),
    ("the sums begin at the end of the row, with the least probable",
     {"before": lambda ranked: ranked.flip(-1).cumsum(-1).flip(-1)}),
    ("1 - p is kept in place of p", {"settings": lambda p: 1 - p.unsqueeze(-1)}),
    ("each probability by itself is held against p; those before a candidate count together",
     {"before": lambda ranked: ranked, "stays": torch.ge}),
    ("each probability by itself is held against p; those before a candidate count together",
     {"before": lambda ranked: ranked}),
    ("each probability is held against p times the first: that is min-p",
     {"before": lambda ranked: ranked / ranked[:, :1], "stays": torch.ge}),
    ("a softmax of the probabilities is summed; they are probabilities already",
     {"before": lambda ranked: _before(ranked.softmax(-1))}),
    (_FLOATS, {"cut": True}),
]  # fmt: skip


def _by_p(
    before: Callable[[Tensor], Tensor] = _before,
    stays: Callable[[Tensor, Tensor], Tensor] = torch.lt,
    settings: Callable[[Tensor], Tensor] = lambda p: p.unsqueeze(-1),
    first: bool | str = False,
    cut: bool = False,
) -> Callable[[Tensor, Tensor], Tensor]:
    """The sums held against p, with mistakes switched on."""

    def run(ranked: Tensor, top_p: Tensor) -> Tensor:
        kept = stays(before(ranked), settings(top_p))
        if first:  # the first candidate of every row, or the first row
            firsts = torch.arange(len(ranked)).unsqueeze(-1) if first == "row" else torch.arange(ranked.shape[-1])
            kept = kept | (firsts == 0)
        return ranked.masked_fill(~kept, 0) if cut else kept

    return run


# ---- 5.6 penalties -----------------------------------------------------------------------------------------------

_NOTHING: dict[str, Any] = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}


def _penalty_case(rows: list[tuple[_Table, dict[str, float]]]) -> Case:
    """rows: for each the columns, (logit, seen, count), and the strengths that are not neutral."""
    logits, seen, counts = ([[column[part] for column in columns] for columns, _ in rows] for part in range(3))
    settings = [{**_NOTHING, **strengths} for _, strengths in rows]
    strengths = {name: [one[name] for one in settings] for name in _NOTHING}
    table = [[bool(one) for one in row] for row in seen]
    told = [f"logits {differences.shown(logits)}, seen {table}, counts {counts}"]
    told += [f"{name} {differences.shown(one)}" for name, one in strengths.items() if set(one) != {_NOTHING[name]}]
    return Case(
        ", ".join(told),
        torch.tensor(logits, dtype=torch.float32),
        torch.tensor(seen).bool(),
        torch.tensor(counts, dtype=torch.int64),
        *(torch.tensor(one) for one in strengths.values()),
    )


def _random_penalties() -> Case:
    counts = torch.randint(-3, 4, (6, 15), generator=seeded(4)).clamp(min=0)
    seen = (counts > 0) | (torch.rand(6, 15, generator=seeded(5)) > 0.6)
    logits = 3 * torch.randn(6, 15, generator=seeded(6))
    strengths = torch.rand(3, 6, generator=seeded(7))
    return Case("6 random rows of 15, strengths of their own", logits, seen, counts, 1 + strengths[0], *strengths[1:])


def check_apply_penalties(apply_penalties: Callable[..., Tensor]) -> None:
    """Against one token after the other, in Python's numbers; then in the engine's sampler."""
    prompt, twice, unseen = [2.0, 1, 0], [2.0, 1, 2], [2.0, 0, 0]
    mixed = [[2.0, 1, 1], [-2.0, 1, 3], [1.0, 0, 0], [-1.0, 0, 0], [0.5, 1, 0]]
    compare(
        apply_penalties,
        token_by_token,
        [
            _penalty_case([([prompt], {"repetition": 2.0})]),
            _penalty_case([([[-2.0, 1, 0]], {"repetition": 2.0})]),
            _penalty_case([([unseen, prompt], {"repetition": 2.0})]),
            _penalty_case([([twice], {"repetition": 2.0})]),
            _penalty_case([([[2.0, 1, 1]], {"presence": 0.5})]),
            _penalty_case([([twice], {"presence": 0.5})]),
            _penalty_case([([prompt, unseen, twice], {"presence": 0.5})]),
            _penalty_case([([twice], {"frequency": 0.5})]),
            _penalty_case([([prompt, unseen, [2.0, 1, 1]], {"frequency": 0.5})]),
            _penalty_case([([[2.0, 1, 1]], {"repetition": 2.0, "presence": 0.5})]),
            _penalty_case([([[0.25, 1, 3]], {"repetition": 2.0, "frequency": 0.5})]),
            _penalty_case([([[-torch.inf, 0, 0], [-torch.inf, 1, 1], [1.0, 0, 0]],
                            {"repetition": 2.0, "presence": 0.5, "frequency": 0.5})]),
            _penalty_case([(mixed, {"repetition": 1.5, "presence": 0.5, "frequency": 0.25})]),
            _penalty_case([(mixed[:2], {"repetition": 1.5}), (mixed[:2], {"presence": 1.0, "frequency": 0.25})]),
            _penalty_case([(mixed, {"repetition": 0.5, "presence": -0.5}), (mixed, {}), (mixed, {"frequency": -1.0})]),
            _random_penalties(),
        ],
        expected="float32 [rows, vocab]: what was seen less likely by `repetition`, whatever its sign; then what the "
        "answer holds less by `presence` once, and by `frequency` for each time",
        mistakes=combined(_penalized, _PENALTY_MISTAKES, at_once=2),
    )  # fmt: skip
    check_in_sampler("apply_penalties", apply_penalties)


def token_by_token(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """The penalties as their definitions say them, for one token at a time."""
    table = logits.double().clone()
    for row in range(len(logits)):
        for token in range(logits.shape[1]):
            value = float(logits[row, token])
            if seen[row, token]:
                value = value / float(repetition[row]) if value > 0 else value * float(repetition[row])
            for times in range(int(counts[row, token])):
                value -= float(frequency[row]) + (float(presence[row]) if times == 0 else 0)
            table[row, token] = value
    return table.float()


_REWARDS = "a negative logit is divided, which makes it more likely: it is multiplied"
_UNSEEN_NAN = "a product with `seen` makes NaN of -inf (-inf x 0): choose with torch.where"
_THREE = (
    "what was not seen is {} as well: one torch.where tells two kinds apart, and there are three kinds: seen and above "
    "0, seen and not, not seen"
)
_BLIND = "`{}` plays no part"
_PENALTY_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    (_REWARDS, {"repel": lambda x, f, seen, counts: x / f}),
    ("a positive logit is multiplied, which makes it more likely: it is divided",
     {"repel": lambda x, f, seen, counts: x * f}),
    ("it is the wrong way round: positive logits are divided, negative ones multiplied",
     {"repel": lambda x, f, seen, counts: torch.where(x > 0, x * f, x / f)}),
    ("the penalty acts once for each time that the token stands there; repetition acts once",
     {"repel": lambda x, f, seen, counts: _repelled(x, f ** counts.clamp(min=1))}),
    ("the penalty acts once for each time that the token stands there; repetition acts once",
     {"repel": lambda x, f, seen, counts: _repelled(x, f**counts)}),
    ("`repetition` is taken off the logit; it is a factor", {"repel": lambda x, f, seen, counts: x - f}),
    ("negative logits are left as they are; they are multiplied",
     {"repel": lambda x, f, seen, counts: torch.where(x > 0, x / f, x)}),
    ("`repetition` is applied to all tokens; those that were not seen are left alone",
     {"chosen": lambda seen, counts: torch.ones_like(seen)}),
    ("`repetition` is applied to what was not seen", {"chosen": lambda seen, counts: ~seen}),
    ("`repetition` looks at the answer alone; what stands in the prompt counts as well: `seen`",
     {"chosen": lambda seen, counts: counts > 0}),
    (_THREE.format("multiplied"), {"repel": lambda x, f, seen, counts: torch.where(seen & (x > 0), x / f, x * f),
                                   "chosen": lambda seen, counts: torch.ones_like(seen)}),
    (_THREE.format("divided"), {"repel": lambda x, f, seen, counts: torch.where(seen & (x < 0), x * f, x / f),
                                "chosen": lambda seen, counts: torch.ones_like(seen)}),
    (_THREE.format("divided"), {"repel": lambda x, f, seen, counts: torch.where(seen & (x <= 0), x * f, x / f),
                                "chosen": lambda seen, counts: torch.ones_like(seen)}),
    (_UNSEEN_NAN, {"select": lambda seen, new, old: new * seen + old * ~seen}),
    ("presence counts the prompt as well; it looks at the answer alone: `counts`",
     {"present": lambda seen, counts: seen}),
    ("presence is taken off for each time; once is enough", {"present": lambda seen, counts: counts}),
    ("presence is taken off all tokens; only what the answer holds loses it",
     {"present": lambda seen, counts: torch.ones_like(seen)}),
    ("presence is taken off what stands in the answer more than once; once is enough",
     {"present": lambda seen, counts: counts > 1}),
    ("frequency is taken off once; it is taken off for each time", {"times": lambda seen, counts: counts > 0}),
    ("frequency counts the prompt as well; it looks at the answer alone: `counts`",
     {"times": lambda seen, counts: seen}),
    ("frequency counts the prompt as well; it looks at the answer alone: `counts`",
     {"times": lambda seen, counts: counts + (seen & (counts == 0)).long()}),
    ("frequency is a share of the answer's tokens here; it is taken off for each time",
     {"times": lambda seen, counts: counts / counts.sum(-1, keepdim=True).clamp(min=1)}),
    ("presence and frequency are exchanged", {"strengths": lambda r, p, f: (r, f, p)}),
    ("presence and frequency are added; they are taken off", {"strengths": lambda r, p, f: (r, -p, -f)}),
    ("presence is added; it is taken off", {"strengths": lambda r, p, f: (r, -p, f)}),
    ("frequency is added; it is taken off", {"strengths": lambda r, p, f: (r, p, -f)}),
    (_BLIND.format("presence"), {"strengths": lambda r, p, f: (r, 0 * p, f)}),
    (_BLIND.format("frequency"), {"strengths": lambda r, p, f: (r, p, 0 * f)}),
    (_BLIND.format("repetition"), {"strengths": lambda r, p, f: (r / r, p, f)}),
    ("the strengths of the first row are used for all; each row has its own",
     {"strengths": lambda r, p, f: (r[:1], p[:1], f[:1])}),
    ("the strengths meet all rows: number r belongs to row r, so make a column of them",
     {"strengths": lambda r, p, f: (r.T, p.T, f.T)}),
    ("presence and frequency come first, and repetition scales what they leave; repetition comes first",
     {"late": True}),
]  # fmt: skip


def _repelled(x: Tensor, factor: Tensor) -> Tensor:
    return torch.where(x > 0, x / factor, x * factor)


def _penalized(
    repel: Callable[..., Tensor] = lambda x, f, seen, counts: _repelled(x, f),
    chosen: Callable[[Tensor, Tensor], Tensor] = lambda seen, counts: seen,
    select: Callable[..., Tensor] = torch.where,
    present: Callable[[Tensor, Tensor], Tensor] = lambda seen, counts: counts > 0,
    times: Callable[[Tensor, Tensor], Tensor] = lambda seen, counts: counts,
    strengths: Callable[..., tuple[Tensor, Tensor, Tensor]] = lambda r, p, f: (r, p, f),
    late: bool = False,
) -> Callable[..., Tensor]:
    """The three steps, with mistakes switched on; strengths come as columns."""

    def run(logits: Tensor, seen: Tensor, counts: Tensor, *given: Tensor) -> Tensor:
        repetition, presence, frequency = strengths(*(one.unsqueeze(-1) for one in given))
        taken = presence * present(seen, counts) + frequency * times(seen, counts)
        first = logits - taken if late else logits
        repelled = select(chosen(seen, counts), repel(first, repetition, seen, counts), first)
        return repelled if late else repelled - taken

    return run
