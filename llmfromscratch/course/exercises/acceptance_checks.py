"""The checks of what becomes of drafts: accepted greedily, accepted by the rejection rule, and how many that makes.

The rejection rule is held against plain numbers first, and then against what it promises: over all drafts and all
uniforms, texts come with exactly the probabilities of the model.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import learner_engine
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare
from llmfromscratch.course.failures import CheckFailed

# ---- 6.8 greedily ------------------------------------------------------------------------------------------------


def check_accept_greedy(accept_greedy: Callable[..., list[int]]) -> None:
    """Against decoding one token after the other, with the best tokens as the model."""
    compare(
        accept_greedy,
        one_at_a_time,
        [
            Case(f"drafts {drafts}, best {best}", drafts, best)
            for drafts, best in (
                ([4, 9], [4, 9, 3]),
                ([4], [4, 7]),
                ([4], [5, 7]),
                ([], [6]),
                ([4, 9, 3], [4, 8, 3, 6]),
                ([4, 9, 3], [5, 9, 3, 6]),
                ([4, 9, 3], [4, 9, 2, 6]),
                ([4, 9, 3, 1], [9, 3, 1, 7, 5]),
                ([4, 4, 4, 4], [4, 4, 5, 4, 6]),
                ([0, 0], [0, 0, 0]),
                ([2, 0, 7], [2, 0, 0, 7]),
                (list(range(20)), [*range(13), 0, *range(14, 21)]),
                (list(range(20)), list(range(21))),
            )
        ],
        expected="the drafts up to the first that differs from the best at its place, then the best at that place",
        mistakes=combined(_accepted, _GREEDY, at_once=2),
        explain=_of_best,
    )


def one_at_a_time(drafts: Sequence[int], best: Sequence[int]) -> list[int]:
    """The model says its tokens, as long as what it has said is what was drafted."""
    said: list[int] = []
    while len(said) <= len(drafts) and said == list(drafts[: len(said)]):
        said.append(best[len(said)])
    return said


def _of_best(error: BaseException, case: Case) -> str:
    if isinstance(error, IndexError):
        return "a place is asked for that is not there: there are as many drafts as places before the last of `best`"
    if isinstance(error, ValueError) and "zip()" in str(error):
        return "there is one best token more than there are drafts"
    return ""


_GREEDY: list[tuple[str, dict[str, Any]]] = [
    ("the token of the model's own is missing: every pass gives one more than the drafts that stand",
     {"more": lambda drafts, best, right: []}),
    ("where all drafts stand, the one token more is missing: best has a place for it",
     {"more": lambda drafts, best, right: [best[right]] if right < len(drafts) else []}),
    ("where a draft is wrong, the model's own token in its place is missing",
     {"more": lambda drafts, best, right: [best[right]] if right == len(drafts) else []}),
    ("it stops one draft too early", {"many": lambda drafts, best, right: max(right - 1, 0)}),
    ("the first wrong draft stands still", {"many": lambda drafts, best, right: min(right + 1, len(drafts))}),
    ("drafts that fit again behind a wrong one are accepted; behind a wrong token nothing counts", {"again": True}),
    ("the token after a wrong draft is taken from the end of best, which answers to the wrong draft; its own "
     "place counts",
     {"more": lambda drafts, best, right: [best[-1]]}),
    ("the token after a wrong draft is taken one place too late: that one answers to the wrong draft",
     {"more": lambda drafts, best, right: [best[min(right + 1, len(drafts))]]}),
    ("the token more is taken one place too early", {"more": lambda drafts, best, right: [best[max(right - 1, 0)]]}),
    ("the token more is the wrong draft itself; the model's own comes in its place",
     {"more": lambda drafts, best, right: [drafts[right] if right < len(drafts) else best[right]]}),
    ("everything that the model says behind the wrong draft comes as well; that answers to a text with the wrong draft "
     "in it", {"more": lambda drafts, best, right: list(best[right:])}),
    ("all drafts are accepted, right or wrong", {"many": lambda drafts, best, right: len(drafts),
                                                 "more": lambda drafts, best, right: [best[-1]]}),
    ("drafts that differ are left out, and those behind them stay: it ends at the first that differs",
     {"filter": True}),
    ("drafts are held against the place after theirs: best[i] is what the model says behind i drafts, and draft "
     "i comes "
     "behind i drafts", {"shift": 1}),
    ("with one wrong draft all of them are rejected; those before it stand",
     {"many": lambda drafts, best, right: right if right == len(drafts) else 0,
      "more": lambda drafts, best, right: [best[right if right == len(drafts) else 0]]}),
    ("their number comes back; asked for are the tokens", {"gives": len}),
    ("a tuple comes back; asked for is a list", {"gives": tuple}),
    ("a tensor comes back; asked for is a list", {"gives": torch.tensor}),
]  # fmt: skip


def _accepted(
    many: Callable[[list[int], list[int], int], int] = lambda drafts, best, right: right,
    more: Callable[[list[int], list[int], int], list[int]] = lambda drafts, best, right: [best[right]],
    again: bool = False,
    filter: bool = False,
    shift: int = 0,
    gives: Callable[[list[int]], Any] = lambda tokens: tokens,
) -> Callable[..., Any]:
    """Counts the right drafts, with mistakes switched on."""

    def run(drafts: list[int], best: list[int]) -> Any:
        fits = [draft == one for draft, one in zip(drafts, best[shift:], strict=False)]
        right = fits.index(False) if False in fits else len(fits)
        stand = [draft for draft, fit in zip(drafts, fits, strict=False) if fit] if again or filter else None
        if filter and stand is not None:
            return gives([*stand, best[len(stand)]])
        return gives([*(drafts[: many(drafts, best, right)] if stand is None else stand), *more(drafts, best, right)])

    return run


# ---- 6.9 by the rejection rule -----------------------------------------------------------------------------------

_EXPECTED = "the drafts that stand, then one token that was drawn, by the rule and with the uniforms of the docstring"


def check_accept_drafts(accept_drafts: Callable[..., list[int]]) -> None:
    """Against plain numbers, then against what the rule promises, summed up over everything that may happen."""
    compare(
        accept_drafts,
        by_the_rule,
        rejection_cases(),
        expected=_EXPECTED,
        mistakes=combined(_ruled, _RULE, at_once=2),
        diagnose=_of_tokens,
        explain=_of_rule,
    )
    _check_promise(accept_drafts, one_draft())
    _check_promise(accept_drafts, two_drafts())


def rejection_cases() -> list[Case]:
    """Eighths, in which nothing is rounded, then random distributions."""
    quarter, half, left = [0.25, 0.25, 0.25, 0.25], [0.5, 0.25, 0.125, 0.125], [0.125, 0.25, 0.375, 0.25]
    certain, later = [0.0, 1.0, 0.0, 0.0], [0.0, 0.125, 0.125, 0.75]
    listed: list[tuple[list[int], list[list[float]], list[list[float]], list[float]]] = [
        ([0], [half], [left, later], [0.2, 0.3]),
        ([0], [half], [left, later], [0.2, 0.05]),
        ([0], [half], [left, later], [0.9, 0.3]),
        ([0], [half], [left, later], [0.9, 0.8]),
        ([0], [half], [left, later], [0.3, 0.9]),
        ([0], [half], [left, later], [0.25, 0.5]),
        ([2], [half], [left, later], [0.99, 0.1]),
        ([1], [half], [left, later], [0.999, 0.6]),
        ([1], [certain], [left, later], [0.2, 0.4]),
        ([1], [certain], [left, later], [0.3, 0.4]),
        ([1], [certain], [left, later], [0.3, 0.1]),
        ([1], [certain], [[0.5, 0.0, 0.5, 0.0], later], [0.0, 0.7]),
        ([], [], [left], [0.4]),
        ([], [], [left], [0.9]),
        ([0, 2], [half, quarter], [left, later, half], [0.2, 0.3, 0.6]),
        ([0, 2], [half, quarter], [left, later, half], [0.2, 0.6, 0.6]),
        ([0, 2], [half, quarter], [left, later, half], [0.3, 0.1, 0.6]),
        ([0, 2], [half, quarter], [left, later, half], [0.3, 0.1, 0.9]),
        ([2, 3, 0], [half, quarter, half], [left, later, quarter, left], [0.7, 0.9, 0.45, 0.35]),
        ([2, 3, 0], [half, quarter, half], [left, later, quarter, left], [0.7, 0.9, 0.55, 0.1]),
        ([0], [half], [left, later], [0.9, 2 / 3 - 1e-10]),
        ([], [], [left], [0.375 - 1e-10]),
    ]
    cases = [
        Case(
            f"drafts {drafts}, drafted {drafted}, wanted {wanted}, uniforms {[float(f'{u:.12g}') for u in uniforms]}",
            drafts,
            torch.tensor(drafted, dtype=torch.float64).reshape(len(drafts), 4),
            torch.tensor(wanted, dtype=torch.float64),
            uniforms,
        )
        for drafts, drafted, wanted, uniforms in listed
    ]
    return [*cases, *_random_cases()]


def _random_cases() -> list[Case]:
    cases = []
    for seed in range(24):
        generator = torch.Generator().manual_seed(70 + seed)
        count, vocab = seed % 5, (3, 7, 30)[seed % 3]
        logits = torch.randn(2 * count + 1, vocab, generator=generator, dtype=torch.float64)
        drafted, wanted = logits[:count].softmax(-1), (logits[count:] * 1.5).softmax(-1)
        drafts = torch.multinomial(drafted, 1, generator=generator).flatten().tolist() if count else []
        uniforms = torch.rand(count + 1, generator=generator, dtype=torch.float64).tolist()
        cases.append(Case(f"{count} random drafts of {vocab} tokens", drafts, drafted, wanted, uniforms))
    return cases


def by_the_rule(drafts: Sequence[int], drafted: Tensor, wanted: Tensor, uniforms: Sequence[float]) -> list[int]:
    """In exact fractions, one draft after the other, one column after the other."""
    kept: list[int] = []
    for place, draft in enumerate(drafts):
        have, want = _exact(drafted[place]), _exact(wanted[place])
        if Fraction(uniforms[place]) * have[draft] >= want[draft]:
            return [*kept, _first_beyond([max(w - h, Fraction(0)) for w, h in zip(want, have, strict=True)], uniforms)]
        kept.append(draft)
    return [*kept, _first_beyond(_exact(wanted[len(kept)]), uniforms)]


def _exact(row: Tensor) -> list[Fraction]:
    return [Fraction(value) for value in row.tolist()]


def _first_beyond(weights: list[Fraction], uniforms: Sequence[float]) -> int:
    target = Fraction(uniforms[-1]) * sum(weights)
    return next(column for column, sum_ in enumerate(itertools.accumulate(weights)) if sum_ > target)


def _of_tokens(got: Any, want: list[int]) -> str:
    if isinstance(got, list) and any(not isinstance(token, int) for token in got):
        return "the ids are still tensors; int(...) and .tolist() give plain numbers"
    return ""


def _of_rule(error: BaseException, case: Case) -> str:
    if isinstance(error, IndexError) and not isinstance(error, KeyError):
        return "a place is asked for that is not there: `drafted` has a row for each draft, `wanted` one more"
    if isinstance(error, RuntimeError) and "boolean value of Tensor" in str(error).replace("Boolean", "boolean"):
        return "a whole row is compared; the draft's own probability is a single number of it"
    return ""


_TURNED = "the draft's two probabilities are exchanged: it stands the surer, the more the model wants it"
_RULE: list[tuple[str, dict[str, Any]]] = [
    (_TURNED, {"stands": lambda u, have, want: u * want < have}),
    ("at equality the draft stands; it should not, or a draft that the model gives 0 stands at a uniform of 0",
     {"stands": lambda u, have, want: u * have <= want}),
    ("stand and fall are exchanged", {"stands": lambda u, have, want: u * have >= want}),
    ("the draft's own probability is forgotten: what was drafted often has to be rejected more often",
     {"stands": lambda u, have, want: u < want}),
    ("the uniform is held against the drafted probability; it is the ratio that counts",
     {"stands": lambda u, have, want: u < have}),
    ("a draft stands only where the model wants it at least as much as it was drafted; below that it stands now and "
     "then, by its uniform", {"stands": lambda u, have, want: want >= have}),
    ("a draft falls with the probability with which it should stand",
     {"stands": lambda u, have, want: (1 - u) * have < want}),
    ("every draft stands", {"stands": lambda u, have, want: True}),
    ("no draft stands", {"stands": lambda u, have, want: False}),
    ("in the place of a rejected draft the model's own distribution is drawn from; what the draft offered already has "
     "to be taken off it", {"left": lambda have, want, draft: want}),
    ("in the place of a rejected draft the drafts' own distribution is drawn from",
     {"left": lambda have, want, draft: have}),
    ("negative differences are left in: where more was drafted than wanted, nothing is left",
     {"left": lambda have, want, draft: want - have}),
    ("negative differences count as positive ones: where more was drafted than wanted, nothing is left",
     {"left": lambda have, want, draft: (want - have).abs()}),
    ("the differences are the wrong way round: what is wanted beyond what was drafted is left",
     {"left": lambda have, want, draft: (have - want).clamp(min=0)}),
    ("only the rejected token is taken off what is wanted; the other tokens were offered by the draft too",
     {"left": lambda have, want, draft: want.index_fill(0, torch.tensor([draft]), 0)}),
    ("the differences go through a softmax; draw scales its row by itself",
     {"left": lambda have, want, draft: (want - have).clamp(min=0).softmax(-1)}),
    ("in the place of a rejected draft the most wanted token is taken; it has to be drawn",
     {"chosen": lambda row, number: row.argmax(-1)}),
    ("the most probable token is taken; tokens have to be drawn", {"pick": lambda row, number: row.argmax(-1)}),
    ("the draw uses the uniform that has rejected the draft, which is always a large one; the last is for drawing",
     {"number": lambda uniforms, place: uniforms[place]}),
    ("the draw uses the uniform after the rejected draft's; the last one is for drawing, wherever the rejection was",
     {"number": lambda uniforms, place: uniforms[min(place + 1, len(uniforms) - 1)]}),
    ("the draw uses the first uniform; the last one is for drawing", {"number": lambda uniforms, place: uniforms[0]}),
    ("the last uniform is rounded to float32 on the way: torch.tensor makes float32 unless told",
     {"number": lambda uniforms, place: float(torch.tensor(uniforms[-1]))}),
    ("the draw uses numbers of its own; the last uniform is for drawing", {"number": None}),
    ("where all drafts stand, the one token more is missing", {"more": None}),
    ("the one token more is drawn from the first row of `wanted`; the last is the model's behind all drafts",
     {"more": lambda wanted: wanted[0]}),
    ("the one token more is drawn from the row before the last; the last is the model's behind all drafts",
     {"more": lambda wanted: wanted[max(len(wanted) - 2, 0)]}),
    ("in the place of a rejected draft nothing comes", {"instead": False}),
    ("the rejected draft stays, and the drawn token comes behind it", {"stays": True}),
    ("drafts behind a rejected one are looked at too; they were guessed for another text", {"goes_on": True}),
    ("the row after the rejected draft's is drawn from", {"row": lambda place: place + 1}),
    ("a rejected draft is replaced by what the first row left over; each place has rows of its own",
     {"row": lambda place: 0}),
    ("one uniform is used for all drafts; each has its own", {"own": lambda uniforms, place: uniforms[0]}),
    ("a draft is held against the uniform of the next place", {"own": lambda uniforms, place: uniforms[place + 1]}),
    ("the drafts are held against the last uniform; each has its own", {"own": lambda uniforms, place: uniforms[-1]}),
    ("the ids are still tensors; int(...) and .tolist() give plain numbers", {"plain": False}),
    ("a tuple comes back; asked for is a list", {"gives": tuple}),
    ("a tensor comes back; asked for is a list", {"gives": torch.tensor}),
    ("only the drawn token comes back; the drafts that stand come before it", {"gives": lambda tokens: tokens[-1:]}),
]  # fmt: skip


def _ruled(
    stands: Callable[[float, float, float], bool] = lambda u, have, want: u * have < want,
    left: Callable[[Tensor, Tensor, int], Tensor] = lambda have, want, draft: (want - have).clamp(min=0),
    number: Callable[[Sequence[float], int], float] | None = lambda uniforms, place: uniforms[-1],
    more: Callable[[Tensor], Tensor] | None = lambda wanted: wanted[-1],
    row: Callable[[int], int] = lambda place: place,
    **wrong: Any,
) -> Callable[..., Any]:
    """The rule, with mistakes switched on."""
    own = wrong.get("own", lambda uniforms, place: uniforms[place])
    pick = wrong.get("pick", lambda row, number: learner_engine.reference("sampling").draw(row, number))
    gives = wrong.get("gives", lambda tokens: tokens)

    def drawn(weights: Tensor, uniforms: Sequence[float], place: int, way: Callable[..., Tensor] = pick) -> Any:
        chosen = number(uniforms, place) if number else float(torch.rand(()))
        token = way(weights.unsqueeze(0), torch.tensor([chosen], dtype=torch.float64))
        return int(token) if wrong.get("plain", True) else token[0]

    def run(drafts: Sequence[int], drafted: Tensor, wanted: Tensor, uniforms: Sequence[float]) -> Any:
        tokens: list[Any] = []
        for place, draft in enumerate(drafts):
            if stands(own(uniforms, place), float(drafted[place, draft]), float(wanted[place, draft])):
                tokens.append(draft)
                continue
            at = row(place)
            tokens += [draft] if wrong.get("stays") else []
            if wrong.get("instead", True):
                have = drafted[min(at, len(drafts) - 1)]
                tokens.append(drawn(left(have, wanted[at], draft), uniforms, place, wrong.get("chosen", pick)))
            if not wrong.get("goes_on"):
                return gives(tokens)
        return gives([*tokens, drawn(more(wanted), uniforms, len(drafts))] if more else tokens)

    return run


# ---- what the rule promises --------------------------------------------------------------------------------------

Text = tuple[int, ...]
Language = dict[Text, list[float]]  # a beginning -> the probabilities of what comes next


class Guesser:
    """A model and a drafter, each a table. cells: into how many a uniform's range is cut, one number for each uniform.

    All borders that matter lie between cells, so that one number of each stands for the whole of it.
    """

    def __init__(self, drafted: Language, wanted: Language, cells: Sequence[int]):
        self.drafted, self.wanted, self.cells = drafted, wanted, cells
        self.count = len(cells) - 1

    def happenings(self) -> Iterator[tuple[float, tuple[list[int], Tensor, Tensor, list[float]]]]:
        """Everything that may happen: how probable it is, and what accept_drafts is given then."""
        vocab = len(self.wanted[()])
        grid = list(itertools.product(*([(cell + 0.5) / cells for cell in range(cells)] for cells in self.cells)))
        for drafts in itertools.product(range(vocab), repeat=self.count):
            before = [drafts[:place] for place in range(self.count + 1)]
            chance = math.prod(self.drafted[text][draft] for text, draft in zip(before, drafts, strict=False))
            drafted = torch.tensor([self.drafted[text] for text in before[:-1]], dtype=torch.float64)
            wanted = torch.tensor([self.wanted[text] for text in before], dtype=torch.float64)
            for uniforms in grid if chance else ():
                yield chance / len(grid), (list(drafts), drafted, wanted, list(uniforms))

    def spoken(self) -> dict[Text, float]:
        """Each text of count + 1 tokens, and its probability where the model draws every token itself."""
        return dict(self._continued((), 1.0))

    def _continued(self, text: Text, chance: float) -> Iterator[tuple[Text, float]]:
        if len(text) > self.count:
            yield text, chance
            return
        for token, probability in enumerate(self.wanted[text]):
            yield from self._continued((*text, token), chance * probability)

    def guessed(self, accept_drafts: Callable[..., list[int]]) -> dict[Text, float]:
        """The same with drafts that are accepted so; what a pass leaves open, the model draws."""
        found = dict.fromkeys(self.spoken(), 0.0)
        for chance, given in self.happenings():
            for text, share in self._continued(tuple(accept_drafts(*given)), chance):
                found[text] = found.get(text, 0.0) + share
        return found


_MODEL = [0.125, 0.25, 0.375, 0.25]
_DRAFTER = [0.5, 0.25, 0.125, 0.125]


def one_draft() -> Guesser:
    """Ratios of a quarter and more, and thirds of what is left over: 24 cells hold all borders."""
    after: Language = {(token,): [0.25, 0.25, 0.25, 0.25] for token in range(4)}
    return Guesser({(): _DRAFTER}, {(): _MODEL, **after}, (8, 24))


def two_drafts() -> Guesser:
    """Three tokens, and distributions that depend on the token before."""
    first = [0.25, 0.5, 0.25]
    second: Language = {(0,): [0.375, 0.125, 0.5], (1,): [0.25, 0.25, 0.5], (2,): [0.125, 0.125, 0.75]}
    third: Language = {(a, b): [0.5, 0.25, 0.25] if a < b else [0.0, 0.5, 0.5] for a in range(3) for b in range(3)}
    guesses: Language = {(0,): [0.25, 0.5, 0.25], (1,): [0.5, 0.25, 0.25], (2,): [0.25, 0.25, 0.5]}
    return Guesser({(): [0.5, 0.25, 0.25], **guesses}, {(): first, **second, **third}, (4, 4, 24))


def _check_promise(accept_drafts: Callable[..., list[int]], guesser: Guesser) -> None:
    found, promised = guesser.guessed(accept_drafts), guesser.spoken()
    wrong = [text for text in found if abs(found[text] - promised.get(text, 0.0)) > 1e-9]
    if wrong:
        text = wrong[0]
        raise CheckFailed(
            "texts with the probabilities of the model, summed up over all drafts and all uniforms",
            case=f"drafts of a pass: {guesser.count}, vocabulary: {len(guesser.wanted[()])}; the text {list(text)} "
            f"comes with probability {found[text]:.4f}, and the model says it with {promised.get(text, 0.0):.4f}",
        )


# ---- 6.10 how many that makes ------------------------------------------------------------------------------------


def check_expected_tokens(expected_tokens: Callable[[float, int], float]) -> None:
    """Against adding up every way that a pass can end."""
    compare(
        _as_float(expected_tokens),
        every_end,
        [
            Case(f"acceptance {acceptance}, {drafts} draft{'s' * (drafts != 1)}", acceptance, drafts)
            for acceptance, drafts in (
                (0.5, 1), (0.5, 2), (0.25, 3), (0.5, 0), (0.0, 4), (1.0, 1), (1.0, 5), (0.75, 4), (0.8, 8), (0.99, 30),
                (0.9999999, 6), (1e-9, 3),
            )
        ],
        expected="the tokens of a pass on average, as a float",
        mistakes=[(sentence, _as_float(wrong)) for sentence, wrong in _AVERAGES],
        explain=_of_average,
    )  # fmt: skip


def _as_float(function: Callable[..., Any]) -> Callable[..., Any]:
    """With whole numbers taken for floats, as Python does."""

    @functools.wraps(function)
    def run(acceptance: float, drafts: int) -> Any:
        found = function(acceptance, drafts)
        return float(found) if type(found) is int else found

    return run


def every_end(acceptance: float, drafts: int) -> float:
    """A pass ends at the first draft that falls, or behind the last: each end with its probability, in fractions."""
    one = Fraction(acceptance)
    ends = [(one**stand * (1 - one), stand + 1) for stand in range(drafts)]
    return float(sum((chance * tokens for chance, tokens in ends), one**drafts * (drafts + 1)))


def _of_average(error: BaseException, case: Case) -> str:
    if isinstance(error, ZeroDivisionError):
        return "with an acceptance of 1 the closed form divides 0 by 0; the sum itself has no such hole"
    return ""


_AVERAGES: list[tuple[str, Callable[[float, int], Any]]] = [
    ("the last term is missing: with k drafts there are k + 1 terms, the last for the token behind all of them",
     lambda a, k: float(sum(a**place for place in range(k)))),
    ("the first term is missing: one token comes of every pass, whatever becomes of the drafts",
     lambda a, k: float(sum(a**place for place in range(1, k + 1)))),
    ("the token that comes of every pass is missing, and drafts are counted as if each stood for itself",
     lambda a, k: a * k),
    ("drafts are counted as if each stood for itself; behind one that falls none counts", lambda a, k: 1 + a * k),
    ("drafts are counted as if each stood for itself; behind one that falls none counts", lambda a, k: a * (k + 1)),
    ("only the case in which all drafts stand is counted", lambda a, k: 1 + a**k),
    ("only the case in which all drafts stand is counted", lambda a, k: 1 + k * a**k),
    ("only the case in which all drafts stand is counted", lambda a, k: (k + 1) * a**k),
    ("one term too many", lambda a, k: float(sum(a**place for place in range(k + 2)))),
    ("the sum goes on for ever: with few drafts it ends at acceptance**drafts",
     lambda a, k: 1 / (1 - a) if a < 1 else 0.0),
    ("the sign of the exponent, or acceptance and rejection, are exchanged",
     lambda a, k: float(sum((1 - a) ** place for place in range(k + 1)))),
    ("acceptance and number of drafts are exchanged: it is the acceptance that is raised to a power",
     lambda a, k: float(sum(place**a for place in range(k + 1)))),
    ("the number of drafts that stand most probably is no average", lambda a, k: 1.0 + round(a * k)),
    ("the drafts that fall are counted", lambda a, k: k + 1 - float(sum(a**place for place in range(k + 1)))),
    ("the terms are multiplied; they are added", lambda a, k: math.prod(a**place for place in range(k + 1))),
]  # fmt: skip
