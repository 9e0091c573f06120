"""Chapter 4's last bug hunts, around places and budget: a broken piece, the symptom it causes, and its check each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from llmfromscratch.course.calling import Case
from llmfromscratch.course.comparing import compare
from llmfromscratch.course.differences import NamedParts

# ---- 4.c ---------------------------------------------------------------------------------------------------------

PLACES_STORY = """
"In the morning eight requests run at once. At noon it is three, and the queue is long. After a restart all is well. No
request is lost, and every answer is right." Below: how many run at once, hour by hour.
"""


class Places:
    """The places of an engine: so many requests run at once, the others wait in the order of their arrival."""

    def __init__(self, places: int):
        self.free = places
        self.waiting: list[tuple[str, int]] = []
        self.left: dict[str, int] = {}  # who runs, and how many tokens are still to come

    def add(self, name: str, max_tokens: int) -> None:
        """A request that gets at most so many tokens, at least 1."""
        self.waiting.append((name, max_tokens))

    def step(self, end_tokens_of: Collection[str] = ()) -> list[str]:
        """Each that runs gets a token; returns who is finished: by its last token, or because it got the end token."""
        while self.waiting and self.free > 0:
            name, tokens = self.waiting.pop(0)
            self.left[name] = tokens
            self.free -= 1
        for name in self.left:
            self.left[name] -= 1
        finished = [name for name, left in self.left.items() if left == 0 or name in end_tokens_of]
        self.free += sum(self.left[name] == 0 for name in finished)
        for name in finished:
            del self.left[name]
        return finished


# (places, (name, most tokens) of each, who gets the end token in which step)
_SHIFTS: tuple[tuple[int, tuple[tuple[str, int], ...], dict[int, tuple[str, ...]]], ...] = (
    (1, (("A", 1), ("B", 1)), {}),
    (1, (("A", 3), ("B", 2)), {}),
    (1, (("A", 3), ("B", 1)), {1: ("A",)}),
    (1, (("A", 2), ("B", 3)), {2: ("A",)}),
    (2, (("A", 5), ("B", 5), ("C", 1), ("D", 1)), {1: ("A", "B")}),
    (2, (("A", 2), ("B", 2), ("C", 3), ("D", 3), ("E", 1)), {2: ("A",), 3: ("D",)}),
    (
        3,
        tuple((letter, 2 + n % 5) for n, letter in enumerate("ABCDEFGHIJ")),
        {2: ("A", "C"), 4: ("B",), 5: ("F",), 6: ("G", "H")},
    ),
)


def show_places() -> None:
    """How many run at once while one answer in ten ends before its limit."""
    places = Places(8)
    for hour in range(5):
        for number in range(60):
            places.add(f"{hour}-{number}", 4)
        running = 0
        for _ in range(24):
            ends = [name for name in places.left if name.endswith("7")]
            places.step(ends)
            running = max(running, len(places.left))
        print(f"hour {hour + 1}: at most {running} of 8 places in use, {len(places.waiting)} wait")


def check_places(mended: Callable[..., Any]) -> None:
    """Step by step, who runs and who is finished."""
    compare(
        partial(_shift, mended),
        _by_list,
        [
            Case(
                f"{places} place{'s' * (places > 1)}; "
                + ", ".join(f"{name} of {tokens}" for name, tokens in requests)
                + "".join(f"; end token of {' and '.join(names)} in step {step}" for step, names in ends.items()),
                places, requests, ends,
            )
            for places, requests, ends in _SHIFTS
        ],
        expected="a place for the next one in the step after a request has finished, whatever it finished by",
        mistakes=[
            ("who finishes by its end token does not give its place back", partial(_shift, Places)),
            ("a place comes back twice for a request whose end token is its last token: more run than there are places",
             _counted(lambda left, ends, finished: sum((left[n] == 0) + (n in ends) for n in finished))),
            ("only one place comes back where several finish in the same step",
             _counted(lambda left, ends, finished: min(1, len(finished)))),
            ("no place comes back at all", _counted(lambda left, ends, finished: 0)),
            ("only those with their end token give their place back",
             _counted(lambda left, ends, finished: sum(n in ends for n in finished))),
            ("a place comes back for everybody who runs, finished or not",
             _counted(lambda left, ends, finished: len(left))),
            ("as many places come back as there are end tokens: who has all its tokens gives its place back too",
             _counted(lambda left, ends, finished: len(ends))),
            ("a place comes back twice for a request whose end token is its last token: more run than there are places",
             _counted(lambda left, ends, finished: sum(left[n] == 0 for n in finished) + len(ends))),
            ("the condition is turned round: who has all its tokens does not give its place back now",
             _counted(lambda left, ends, finished: sum(left[n] != 0 for n in finished))),
            ("the places are not looked at any more: more run than there are", _counted(None, blind=True)),
            ("the end token is not heeded: a request goes on until it has all its tokens", _counted(None, deaf=True)),
            ("the request keeps running after its end token, and finishes a second time", _counted(None, stays=True)),
        ],
    )  # fmt: skip


def _shift(
    places_class: Callable[..., Any], places: int, requests: Sequence[tuple[str, int]], ends: dict[int, tuple[str, ...]]
) -> NamedParts:
    """Everybody is there at the beginning; 14 steps."""
    engine, log = places_class(places), NamedParts()
    for name, tokens in requests:
        engine.add(name, tokens)
    for step in range(1, 15):
        waited = [name for name, _ in engine.waiting]
        finished = engine.step(ends.get(step, ()))
        log[f"step {step}: begun"] = [name for name in waited if name not in [one for one, _ in engine.waiting]]
        log[f"step {step}: finished"] = sorted(finished) if isinstance(finished, list) else finished
    return log


def _by_list(places: int, requests: Sequence[tuple[str, int]], ends: dict[int, tuple[str, ...]]) -> NamedParts:
    """A list of those who run, at most as long as there are places."""
    queue, running, log = list(requests), list[tuple[str, int]](), NamedParts()
    for step in range(1, 15):
        begun = queue[: places - len(running)]
        queue = queue[len(begun) :]
        running = [(name, tokens - 1) for name, tokens in [*running, *begun]]
        finished = [name for name, tokens in running if tokens == 0 or name in ends.get(step, ())]
        running = [pair for pair in running if pair[0] not in finished]
        log[f"step {step}: begun"] = [name for name, _ in begun]
        log[f"step {step}: finished"] = sorted(finished)
    return log


def _counted(back: Callable[..., int] | None, **wrong: bool) -> Callable[..., NamedParts]:
    """Places of which `back` come back."""

    class Counted(Places):
        def step(self, end_tokens_of: Collection[str] = ()) -> list[str]:
            while self.waiting and (self.free > 0 or wrong.get("blind")):
                name, tokens = self.waiting.pop(0)
                self.left[name] = tokens
                self.free -= 1
            self.left = {name: tokens - 1 for name, tokens in self.left.items()}
            ends = () if wrong.get("deaf") else end_tokens_of
            finished = [name for name, tokens in self.left.items() if tokens == 0 or name in ends]
            gone = [name for name in finished if self.left[name] == 0] if wrong.get("stays") else finished
            self.free += len(gone) if back is None else back(self.left, ends, finished)
            self.left = {name: tokens for name, tokens in self.left.items() if name not in gone}
            return finished

    return partial(_shift, Counted)


# ---- 4.d ---------------------------------------------------------------------------------------------------------

STUTTER_STORY = """
"All goes smoothly until somebody sends a long document. Then everybody's text stands still for a second or two. And we
do have a budget: 8 tokens a step!" Below: how long each step takes while a prompt of 500 tokens comes in.
"""


def plan_step(decoding: Sequence[str], prompts: Sequence[tuple[str, int]], budget: int) -> dict[str, int]:
    """How many tokens of each request the next step computes, `budget` in all.

    decoding: who has its prompt behind it, one token each. prompts: (request, tokens of its prompt still to compute),
    in order. Those who decode come first, there are never more of them than the budget allows; what is left of the
    budget goes to the prompts. Who gets nothing in this step does not appear.
    """
    plan = dict.fromkeys(decoding, 1)
    left = budget - len(plan)
    for name, tokens in prompts:
        if left <= 0:
            break
        plan[name] = tokens
        left -= tokens
    return plan


def show_stutter() -> None:
    """What steps cost, at 30 ms and 2 ms a token."""
    for planner, label in ((plan_step, "this code"), (_dealt, "within the budget")):
        left, gaps = 500, []
        for _ in range(80):
            plan = planner(["A", "B", "C"], [("document", left)] if left else [], 8)
            left -= plan.get("document", 0)
            gaps.append(0.03 + 0.002 * sum(plan.values()))
        print(f"{label}: the longest time between two tokens of A, B and C: {max(gaps):.2f} s")


def _dealt(decoding: Sequence[str], prompts: Sequence[tuple[str, int]], budget: int) -> dict[str, int]:
    """Token by token, from the front of the line."""
    line = [*decoding, *(name for name, tokens in prompts for _ in range(tokens))]
    dealt = line[:budget]
    return {name: dealt.count(name) for name in dict.fromkeys(dealt)}


def check_plan_step(mended: Callable[..., dict[str, int]]) -> None:
    """Against dealing the budget out token by token."""
    prompts: tuple[tuple[list[str], list[tuple[str, int]], int], ...] = (
        ([], [("P", 3)], 8),
        (["A"], [], 8),
        ([], [("P", 9)], 8),
        (["A", "B"], [("P", 9)], 8),
        (["A"], [("P", 3), ("Q", 2)], 8),
        (["A"], [("P", 3), ("Q", 9)], 8),
        (["A"], [("P", 9), ("Q", 2)], 8),
        (["A", "B"], [("P", 4)], 2),
        ([], [("P", 4), ("Q", 4), ("R", 1)], 8),
        (["A"], [("P", 1), ("Q", 1), ("R", 500)], 64),
    )
    compare(
        mended,
        _dealt,
        [Case(f"decoding {decoding}, prompts {waiting}, budget {budget}", decoding, waiting, budget)
         for decoding, waiting, budget in prompts],
        expected="one token of each that decodes, then chunks of the prompts, no more than the budget in all",
        mistakes=[
            ("the budget is looked at before a prompt is planned, and then the whole prompt is: plan the part that "
             "fits", plan_step),
            ("a prompt that does not fit is skipped for those behind it: a long one would wait for ever, since it "
             "never becomes smaller", _chunked(lambda tokens, left, budget: tokens if tokens <= left else 0)),
            ("a prompt that does not fit ends the step: a prompt larger than the budget would never begin",
             _chunked(lambda tokens, left, budget: tokens if tokens <= left else 0, stops=True)),
            ("each prompt gets as much as the budget has in all; what others have taken is gone",
             _chunked(lambda tokens, left, budget: min(tokens, budget))),
            ("the budget is not lowered from one prompt to the next",
             _chunked(lambda tokens, left, budget: min(tokens, left), spends=False)),
            ("each prompt gets an equal share of the budget; the first in order gets as much of it as it needs",
             _chunked(lambda tokens, left, budget: tokens, shares=min)),
            ("each prompt gets an equal share of the budget; the first in order gets as much of it as it needs",
             _chunked(lambda tokens, left, budget: tokens, shares=lambda tokens, share: min(tokens, max(1, share)))),
            ("only one token of a prompt is computed in a step: the budget would allow more",
             _chunked(lambda tokens, left, budget: min(tokens, left, 1))),
            ("only the first prompt gets something, although some of the budget is left",
             _chunked(lambda tokens, left, budget: min(tokens, left), first=True)),
            ("those who decode are not counted in the budget",
             _chunked(lambda tokens, left, budget: min(tokens, left), free=True)),
            ("the prompts come first, so those who decode may get nothing",
             lambda decoding, waiting, budget: _prompts_first(decoding, waiting, budget)),
            ("who gets 0 tokens appears in the plan",
             _chunked(lambda tokens, left, budget: max(0, min(tokens, left)), zeros=True)),
        ],
        what="the plan",
    )  # fmt: skip


def _chunked(
    chunk: Callable[[int, int, int], int],
    spends: bool = True,
    shares: Callable[[int, int], int] | None = None,
    **wrong: bool,
) -> Callable[..., dict[str, int]]:
    """Plans with `chunk(tokens of the prompt, what is left, the whole budget)`."""

    def run(decoding: Sequence[str], prompts: Sequence[tuple[str, int]], budget: int) -> dict[str, int]:
        plan = dict.fromkeys(decoding, 1)
        left = budget - (0 if wrong.get("free") else len(plan))
        share = left // max(1, len(prompts))
        for name, tokens in prompts[:1] if wrong.get("first") else prompts:
            if left <= 0 and not wrong.get("zeros"):
                break
            new = shares(tokens, share) if shares else chunk(tokens, left, budget)
            if new or wrong.get("zeros"):
                plan[name] = new
            elif wrong.get("stops"):
                break
            left -= new if spends else 0
        return plan

    return run


def _prompts_first(decoding: Sequence[str], prompts: Sequence[tuple[str, int]], budget: int) -> dict[str, int]:
    line = [*(name for name, tokens in prompts for _ in range(tokens)), *decoding][:budget]
    return {name: line.count(name) for name in dict.fromkeys(line)}
