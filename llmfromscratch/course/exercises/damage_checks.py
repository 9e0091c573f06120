"""The checks of chapter 7's damage, in Python's own numbers: what distributions lose, and what
bits are worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from llmfromscratch.course import differences
from llmfromscratch.course.combining import combined
from llmfromscratch.course.comparing import Case, compare, expect_raises
from llmfromscratch.course.differences import Tolerance
from llmfromscratch.course.exercises.attention_checks import random_numbers
from llmfromscratch.course.failures import CheckFailed

# ---- 7.7 divergence ----------------------------------------------------------------------------------------------

NATS = Tolerance(relative=3e-4, absolute=1e-5)


def token_by_token(logits: Tensor, other: Tensor) -> Tensor:
    """KL(p || q) of each token, each a sum over the vocabulary in Python's own numbers."""
    found = []
    for ours, theirs in zip(logits.double().tolist(), other.double().tolist(), strict=True):
        ours, theirs = _log_probabilities(ours), _log_probabilities(theirs)
        found.append(math.fsum(math.exp(p) * (p - q) for p, q in zip(ours, theirs, strict=True)))
    return torch.tensor(found, dtype=torch.float32)


def _log_probabilities(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    total = top + math.log(math.fsum(math.exp(logit - top) for logit in logits))
    return [logit - total for logit in logits]


def _logits_case(text: str, logits: Any, other: Any) -> Case:
    logits, other = (part if isinstance(part, Tensor) else torch.tensor(part) for part in (logits, other))
    return Case(text or f"logits {differences.shown(logits)}, other {differences.shown(other)}", logits, other)


def divergence_cases() -> list[Case]:
    """What `divergence` is tried on: far from each other, far from 0, equal up to a constant, in half precision."""
    near = 3 * random_numbers(4, 30, seed=5)
    return [
        _logits_case("", [[0.0, 0.0]], [[0.0, math.log(3.0)]]),
        _logits_case("", [[1.0, 3.0]], [[2.0, 2.0]]),
        _logits_case("", [[1.0, 2.0, 4.0], [0.0, 0.0, 1.0]], [[3.0, 2.0, 1.0], [0.0, 2.0, 1.0]]),
        _logits_case("", [[0.0, -200.0]], [[0.0, 0.0]]),
        _logits_case("", [[0.0, 0.0]], [[0.0, -200.0]]),
        _logits_case("", [[100.0, 99.0]], [[-100.0, -98.0]]),
        *(
            _logits_case(f"random logits [{tokens}, {vocab}]", 2 * random_numbers(tokens, vocab, seed=vocab),
                         2 * random_numbers(tokens, vocab, seed=vocab + 1))
            for tokens, vocab in ((3, 3), (2, 7), (5, 40), (1, 400))
        ),
        _logits_case("random logits [4, 30], and the same moved by 2", near, near + 2),
        _logits_case("random logits [4, 30], and others nearby", near, near + 0.2 * random_numbers(4, 30, seed=6)),
        _logits_case("random logits [3, 50] in bfloat16", 4 * random_numbers(3, 50, seed=7).bfloat16(),
                     4 * random_numbers(3, 50, seed=8).bfloat16()),
        _logits_case("random logits [3, 50] in float16", 4 * random_numbers(3, 50, seed=9).half(),
                     4 * random_numbers(3, 50, seed=10).half()),
        _logits_case("random logits [2, 20] in float64", random_numbers(2, 20, seed=11).double(),
                     random_numbers(2, 20, seed=12).double()),
    ]  # fmt: skip


def check_divergence(divergence: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Against one token after the other."""
    compare(
        divergence,
        token_by_token,
        divergence_cases(),
        expected="for each token the sum over the vocabulary of p * (log p - log q), in nats, float32 [tokens]",
        mistakes=combined(_diverging, _DIVERGENCE_MISTAKES, at_once=2),
        diagnose=_of_tokens,
        tolerance=NATS,
        what="the divergence",
    )


def _of_tokens(got: Any, want: Any) -> str:
    if not isinstance(got, Tensor):
        return ""
    if got.shape != want.shape:
        return f"one number for each token, {list(want.shape)} here: the sum goes over the vocabulary, dim=-1"
    return _OF_ZERO if not bool(torch.isfinite(got).all()) else ""


_OF_ZERO = "a probability has become 0, and its logarithm is infinite: log_softmax gives logarithms without the detour"
_SMOOTHED = "something small is added before the logarithm: what lies below it is lost; log_softmax needs no such help"
_IN_HALF = "the arithmetic is in the logits' own half precision; make them float32 first"
_DIVERGENCE_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("p and q are exchanged: this is KL(q || p); the first model's tokens are the ones that count", {"turned": True}),
    ("the differences are weighted with q; the first model says how often a token comes", {"weights": "theirs"}),
    ("the sign is turned: log p - log q, not log q - log p", {"difference": lambda ours, theirs: theirs - ours}),
    ("this is in bits; nats come of the natural logarithm", {"unit": math.log(2)}),
    ("this is a logarithm of base 10; nats come of the natural one", {"unit": math.log(10)}),
    ("one mean of all tokens; each token has its own number", {"gather": lambda each: each.sum(-1).mean()}),
    ("one sum of all tokens; each token has its own number", {"gather": lambda each: each.sum()}),
    ("one mean of everything; each token has its own number", {"gather": lambda each: each.mean()}),
    ("the mean over the vocabulary; a divergence is a sum", {"gather": lambda each: each.mean(-1)}),
    ("the sum goes over the tokens; it goes over the vocabulary, dim=-1", {"gather": lambda each: each.sum(0)}),
    ("the largest term counts alone; a divergence is a sum", {"gather": lambda each: each.amax(-1)}),
    ("softmax goes over the tokens; it goes over the vocabulary, dim=-1", {"dim": 0}),
    (_OF_ZERO, {"added": 0.0}),
    *((_SMOOTHED, {"added": tiny}) for tiny in (1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5)),
    ("this is the cross-entropy: what p alone would have cost, log p, is not taken off",
     {"difference": lambda ours, theirs: -theirs}),
    ("q does not come in: this is p's own entropy", {"difference": lambda ours, theirs: -ours}),
    ("q does not come in: this is p's own entropy with its sign turned", {"difference": lambda ours, theirs: ours}),
    ("the differences are of probabilities; they are of their logarithms",
     {"difference": lambda ours, theirs: ours.exp() - theirs.exp()}),
    ("every difference counts as positive; those below 0 are part of the sum",
     {"difference": lambda ours, theirs: (ours - theirs).abs()}),
    ("the differences are squared", {"difference": lambda ours, theirs: (ours - theirs).square()}),
    ("the terms are not weighted: each counts as often as p says", {"weights": "none"}),
    ("the terms are weighted with log p; p itself is its exponential", {"weights": "logarithms"}),
    ("the terms are weighted with the logits; p is their softmax", {"weights": "logits"}),
    ("the mean of both directions; only KL(p || q) is meant", {"weights": "difference"}),
    ("logits are taken for logarithms of probabilities: they need log_softmax", {"dim": None}),
    (_IN_HALF, {"wide": "never"}),
    (_IN_HALF, {"wide": "late"}),
]  # fmt: skip


def _diverging(
    turned: bool = False,
    weights: str = "ours",
    difference: Callable[[Tensor, Tensor], Tensor] = lambda ours, theirs: ours - theirs,
    unit: float = 1.0,
    gather: Callable[[Tensor], Tensor] = lambda each: each.sum(-1),
    dim: int | None = -1,
    added: float | None = None,
    wide: str = "first",
) -> Callable[..., Tensor]:
    """The divergence, with mistakes switched on."""

    def run(logits: Tensor, other: Tensor) -> Tensor:
        first, second = (other, logits) if turned else (logits, other)
        if wide == "first":
            first, second = first.float(), second.float()
        p, q = (part.softmax(-1 if dim is None else dim) for part in (first, second))
        if dim is None:
            ours, theirs = first, second
        elif added is None:
            ours, theirs = first.log_softmax(dim), second.log_softmax(dim)
            p, q = ours.exp(), theirs.exp()
        else:
            ours, theirs = (p + added).log(), (q + added).log()
        weight = {"ours": p, "theirs": q, "none": torch.ones_like(p), "logarithms": ours, "logits": first,
                  "difference": (p - q) / 2}[weights]  # fmt: skip
        found = gather(weight * difference(ours, theirs)) / unit
        return found.float() if wide == "late" else found

    return run


# ---- 7.11 bits for a budget --------------------------------------------------------------------------------------

Damage = Sequence[dict[int, float]]


def step_by_step(damage: Damage, sizes: Sequence[int], budget: float) -> list[int]:
    """The rule as it stands, in fractions: of the steps that fit and win, the one that wins most for a bit."""
    bits = [min(part) for part in damage]
    while True:
        left = Fraction(budget) - sum(size * number for size, number in zip(sizes, bits, strict=True))
        best: tuple[Fraction, int, int] | None = None
        for part, options in enumerate(damage):
            for option in sorted(options):
                price = sizes[part] * (option - bits[part])
                won = Fraction(options[bits[part]]) - Fraction(options[option])
                if price > 0 and price <= left and won > 0 and (best is None or won / price > best[0]):
                    best = (won / price, part, option)
        if best is None:
            return bits
        bits[best[1]] = best[2]


def _budget_case(damage: Damage, sizes: Sequence[int], budget: float, text: str = "") -> Case:
    told = text or f"damage {list(damage)}, sizes {list(sizes)}"
    return Case(f"{told}, budget {budget:g}", list(damage), list(sizes), budget)


def random_parts(count: int, seed: int, bits: Sequence[int] = (3, 4, 8)) -> tuple[Damage, list[int]]:
    """Parts that mind in different ways, and their sizes."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(count, 3, generator=generator).tolist()
    damage = [{number: round(10 * a * (0.2 + 0.6 * b) ** number, 6) for number in bits} for a, b, _ in numbers]
    return damage, [4 + int(30 * c) for _, _, c in numbers]


def budget_cases() -> list[Case]:
    """What `choose_bits` is tried on. Rates differ clearly, or are equal to the last digit, and then the first wins."""
    minds = [{4: 0.1, 8: 0.01}, {4: 0.02, 8: 0.01}]
    twins = [{4: 0.5, 8: 0.25}, {4: 0.5, 8: 0.25}, {4: 0.5, 8: 0.25}]
    leap = [{3: 1.0, 4: 0.95, 8: 0.0}, {3: 0.5, 4: 0.42, 8: 0.4}]
    cases = [
        _budget_case([{4: 0.3, 8: 0.1}], [1], 8),
        _budget_case([{4: 0.3, 8: 0.1}], [1], 7),
        _budget_case(minds, [1, 1], 12),
        _budget_case(minds[::-1], [1, 1], 12),
        _budget_case(minds, [1, 1], 8),
        _budget_case(minds, [1, 1], 16),
        _budget_case(minds, [10, 1], 52),
        _budget_case([{4: 0.1, 8: 0.01}, {4: 0.08, 8: 0.01}], [10, 1], 84),
        _budget_case([{2: 1.0, 3: 0.6, 4: 0.3}], [2], 4),
        _budget_case([{4: 0.5, 8: 0.1}, {4: 0.08, 8: 0.01}], [10, 1], 50),
        _budget_case([{8: 0.01, 4: 0.1}, {8: 0.01, 4: 0.02}], [2, 2], 24),
        _budget_case([{4: 0.1, 8: 0.15}, {4: 0.02, 8: 0.01}], [1, 1], 16),
        _budget_case(twins, [1, 1, 1], 16),
        _budget_case([{3: 0.9, 4: 0.4, 8: 0.1}, {3: 0.3, 4: 0.2, 8: 0.15}], [2, 2], 20),
        _budget_case([{3: 0.9, 4: 0.4, 8: 0.1}, {3: 0.3, 4: 0.2, 8: 0.15}], [2, 2], 24),
        _budget_case(leap, [1, 1], 11),
        _budget_case([{2: 1.0, 3: 0.1}, {4: 0.7, 6: 0.1}, {8: 0.1}], [3, 2, 5], 58),
    ]
    for count, seed, average in ((3, 1, 4.5), (5, 2, 3.5), (8, 3, 5.0), (12, 4, 4.25), (30, 5, 4.5), (30, 6, 6.5)):
        damage, sizes = random_parts(count, seed)
        cases.append(_budget_case(damage, sizes, average * sum(sizes), "" if count < 4 else f"{count} random parts"))
    return cases


def check_choose_bits(choose_bits: Callable[..., list[int]]) -> None:
    """Against the rule in fractions; then budgets that are too small."""
    compare(
        choose_bits,
        step_by_step,
        budget_cases(),
        expected="the bits of each part: from the fewest, always the step that wins most damage for a bit of all that "
        "still fit, until none does",
        mistakes=combined(_choosing, _BUDGET_MISTAKES, at_once=2),
        diagnose=_of_budget,
        explain=_of_steps,
        what="the bits",
    )
    for damage, sizes, budget in (([{4: 0.3, 8: 0.1}], [1], 3.0), ([{4: 0.1}, {3: 0.2, 8: 0.1}], [2, 5], 22.5),
                                  ([{4: 0.3, 8: 0.1}], [1], 0.0)):  # fmt: skip
        try:
            expect_raises(lambda: choose_bits(damage, sizes, budget), ValueError,  # noqa: B023
                          case=f"damage {damage}, sizes {sizes}, budget {budget:g}")  # fmt: skip
        except CheckFailed as failure:
            failure.mistake = "where not even the fewest bits fit, no choice is right: a ValueError says so"
            raise


def _of_steps(error: BaseException, case: Case) -> str:
    if isinstance(error, ValueError) and "empty" in str(error):
        return "there comes a point at which no step fits, or none wins anything: then the choice is made"
    if isinstance(error, ValueError):
        damage, sizes, budget = case.args
        if sum(size * min(part) for part, size in zip(damage, sizes, strict=True)) == budget:
            return "the fewest bits fit here: a budget that they just reach is enough"
        return (
            "the fewest bits fit here: each part begins at its own fewest, min(part), which need not be its first key "
            "or that of other parts; beginning at the most leaves nothing of the budget"
        )
    if isinstance(error, KeyError):
        return "damage has an entry for some numbers of bits only, and parts may differ in them: go through its keys"
    return ""


def _of_budget(got: Any, want: Any) -> str:
    if isinstance(got, list) and len(got) != len(want):
        return "a number of bits for each part, in their order"
    return ""


_BY_DAMAGE = "the step that wins most is taken, whatever it costs; what counts is what it wins for a bit"
_UNSEEN = "the budget is not looked at, or it is not bits that are counted: a part takes size * bits of it"
_DOWN = "it begins with the most bits and goes down; it begins with the fewest and goes up, to the step that wins most"
_BUDGET_MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("the sizes do not count in what a bit wins: a step of a large part costs more bits",
     {"rate": lambda won, size, more: won / more}),
    (_BY_DAMAGE, {"rate": lambda won, size, more: won}),
    ("the step that wins most for a weight is taken; it may be of several bits a weight: for a bit is meant",
     {"rate": lambda won, size, more: won / size}),
    ("the cheapest step is taken, whatever it wins", {"rate": lambda won, size, more: -size * more}),
    ("the step that wins least for a bit is taken", {"rate": lambda won, size, more: -won / (size * more)}),
    ("the rate is turned round: bits for what is won", {"rate": lambda won, size, more: size * more / won}),
    ("what is won is multiplied by the bits; for a bit is a division",
     {"rate": lambda won, size, more: won * size * more}),
    (_UNSEEN, {"room": lambda budget, sizes: float("inf")}),
    ("the budget is bits in all; here it is taken for the bits of a weight, on average: what is spent is "
     "compared with it as it is, without the sum of the sizes", {"room": lambda budget, sizes: budget * sum(sizes)}),
    ("the budget is bits in all; the sizes are not counted in what is spent", {"price": lambda size, bits: bits}),
    ("the budget is bits; weights are counted: a step costs size * (bits more)", {"price": lambda size, bits: size}),
    ("the budget is bits; bytes are counted", {"price": lambda size, bits: size * bits / 8}),
    ("what the fewest bits take belongs to what is spent; here only the steps are counted", {"begun": False}),
    ("the budget may be used up to its last bit; a step that just fits is not taken", {"just": False}),
    ("one step too many: whether it fits has to be known before it is taken", {"late": True}),
    ("after the first step nothing more is done; steps are taken as long as one fits", {"many": "one"}),
    ("each part is raised once at most; it may be raised again", {"many": "one each"}),
    ("it ends when the best step does not fit; another may", {"stuck": True}),
    ("only the next number of bits is tried; a step may go past it", {"reach": "next"}),
    ("a part goes to its most bits at once; what lies between may be worth more for a bit", {"reach": "last"}),
    ("of equal steps the last is taken; the first is meant", {"last": True}),
    ("a step that makes it worse is taken: more bits need not win, as damage is measured", {"worse": True}),
    ("it begins with the most bits: then nothing is left of the budget, or it is overdrawn", {"start": max}),
    ("a part begins with the first of its keys; its fewest bits are min(part)",
     {"start": lambda part: next(iter(part))}),
    ("a part begins with the bits that cost most damage; it begins with the fewest, min(part)",
     {"start": lambda part: max(part, key=lambda bits: part[bits])}),
    *((_DOWN, {"down": price}) for price in
      (lambda size, less: size * less, lambda size, less: less, lambda size, less: 1)),
    ("the part that is damaged most goes first; what counts is what a step wins for a bit",
     {"looks_at": lambda part, now, then: part[now]}),
    ("the step that leaves least damage goes first; what counts is what it wins for a bit",
     {"looks_at": lambda part, now, then: -part[then]}),
    ("part after part gets what fits; the best step of all parts is meant", {"in_turn": True}),
    ("a step costs the bits that are added; all its bits are counted again", {"whole": True}),
    ("a step costs the bits that are added; all its bits are counted again", {"again": True}),
    ("a step costs the bits that are added; all its bits are counted again",
     {"whole": True, "rate_of": lambda now, then: then}),
    ("what a step costs is not added to what is spent", {"free": True}),
]  # fmt: skip


def _choosing(
    rate: Callable[[float, int, int], float] = lambda won, size, more: won / (size * more),
    room: Callable[[float, Sequence[int]], float] = lambda budget, sizes: budget,
    price: Callable[[int, int], float] = lambda size, bits: size * bits,
    start: Callable[[dict[int, float]], int] = min,
    many: str = "all",
    reach: str = "any",
    just: bool = True,
    begun: bool = True,
    rate_of: Callable[[int, int], int] = lambda now, then: then - now,
    **wrong: Any,
) -> Callable[..., list[int]]:
    """The choice, with mistakes switched on."""

    def run(damage: Damage, sizes: Sequence[int], budget: float) -> list[int]:
        if "down" in wrong:
            return _going_down(damage, sizes, budget, wrong["down"])
        bits, raised = [start(part) for part in damage], set[int]()
        spent = sum(price(size, number) for size, number in zip(sizes, bits, strict=True)) if begun else 0
        while not (many == "one" and raised):
            steps, limit = [], room(budget, sizes)
            for part, option in _steps(damage, bits, reach):
                won, more = damage[part][bits[part]] - damage[part][option], option - bits[part]
                cost = price(sizes[part], option if wrong.get("whole") else more)
                fits = spent + cost <= limit if just else spent + cost < limit
                fits = spent <= limit if wrong.get("late") else fits
                if (won > 0 or wrong.get("worse")) and not (many == "one each" and part in raised):
                    place = part if wrong.get("last") else -part
                    order = -part if wrong.get("in_turn") else 0
                    worth = rate(won, sizes[part], rate_of(bits[part], option)) if won else 0.0
                    worth = wrong["looks_at"](damage[part], bits[part], option) if "looks_at" in wrong else worth
                    steps.append((order, worth, place, fits, part, option, cost))
            steps = steps if wrong.get("stuck") else [step for step in steps if step[3]]
            if not steps or not max(steps)[3]:
                break
            *_, part, option, cost = max(steps)
            cost = price(sizes[part], option) if wrong.get("again") else cost
            bits[part], spent = option, spent if wrong.get("free") else spent + cost
            raised.add(part)
        return bits

    return run


def _going_down(damage: Damage, sizes: Sequence[int], budget: float, price: Callable[[int, int], int]) -> list[int]:
    """From the most bits down, by what costs least damage for a bit, until the budget holds it."""
    bits = [max(part) for part in damage]
    while sum(size * number for size, number in zip(sizes, bits, strict=True)) > budget:
        steps = [
            ((options[option] - options[bits[part]]) / price(sizes[part], bits[part] - option), part, -option)
            for part, options in enumerate(damage)
            for option in options
            if option < bits[part]
        ]
        _, part, option = min(steps)
        bits[part] = -option
    return bits


def _steps(damage: Damage, bits: Sequence[int], reach: str) -> Iterator[tuple[int, int]]:
    """The steps that go up: (part, bits)."""
    for part, options in enumerate(damage):
        above = sorted(option for option in options if option > bits[part])
        above = above[:1] if reach == "next" else above[-1:] if reach == "last" else above
        yield from ((part, option) for option in above)
