"""Chapter 4's first bug hunts, around the queue: a broken piece, the symptom it causes, and its check each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llmfromscratch.course.calling import Case
from llmfromscratch.course.comparing import compare
from llmfromscratch.course.differences import NamedParts
from llmfromscratch.course.exercises.serving_stage import counted
from llmfromscratch.course.failures import CheckFailed

# ---- 4.a ---------------------------------------------------------------------------------------------------------

BORDER_STORY = """
"One answer in a few hundred is another one than alone. It happens only under load, and only to requests that had to
give way. Most of those are right, too." Below, requests with answers of different lengths give way and begin again.
"""


class PagedText:
    """A request's text, prompt and answer so far, and the numbers of the blocks that it holds.

    A token is appended when it is known, and gets its place in a block (`grow`) in the step that computes it.
    """

    def __init__(self, prompt: Sequence[int], block_size: int):
        self.text, self.block_size = list(prompt), block_size
        self.blocks: list[int] = []

    def append(self, token: int) -> None:
        """The newest token of the answer."""
        self.text.append(token)

    def grow(self, free: list[int]) -> bool:
        """Takes blocks from the end of `free` until the whole text has a place; False where there are too few."""
        while len(self.blocks) * self.block_size < len(self.text):
            if not free:
                return False
            self.blocks.append(free.pop())
        return True

    def preempt(self, free: list[int]) -> None:
        """Gives all blocks back. The text stays, to be computed again from its first token on."""
        size = self.block_size
        stretches = [self.text[number * size : (number + 1) * size] for number in range(len(self.blocks))]
        self.text = [token for stretch in stretches for token in stretch]
        free.extend(self.blocks)
        self.blocks = []


def show_border() -> None:
    """What is left of texts that give way at different lengths."""
    for tokens in range(2, 8):
        want = list(range(10, 14 + tokens))
        got = _given_way(PagedText, 4, 4, tokens, 9)["the text afterwards"]
        lost = f"{len(want) - len(got)} token lost" if got != want else "all there"
        print(f"a prompt of 4, then {tokens} tokens, blocks of 4: {len(want)} before, {len(got)} after: {lost}")


def _given_way(text_class: Callable[..., Any], size: int, prompt: int, tokens: int, num_blocks: int) -> NamedParts:
    """A request that grows with every token but the newest, gives way, and begins again."""
    free = list(range(num_blocks))
    text = text_class(list(range(10, 10 + prompt)), size)
    for number in range(tokens):
        text.grow(free)
        text.append(10 + prompt + number)
    text.preempt(free)
    parts = NamedParts({"the text afterwards": list(text.text), "free blocks afterwards": sorted(free)})
    parts["blocks held afterwards"] = list(text.blocks)
    parts["there is room to begin again"] = text.grow(free)
    parts["blocks held when it begins again"] = len(text.blocks)
    return parts


def check_paged_text(mended: Callable[..., Any]) -> None:
    """Texts of many lengths: what was there before is there afterwards."""
    histories = ((4, 4, 1, 9), (4, 4, 2, 9), (4, 3, 1, 9), (4, 3, 2, 9), (4, 5, 0, 9), (4, 6, 7, 9), (2, 3, 6, 9),
                 (1, 2, 3, 9), (4, 9, 3, 2), (3, 1, 12, 9))  # fmt: skip
    compare(
        partial(_given_way, mended),
        _as_before,
        [
            Case(f"{history[3]} blocks of {history[0]}, a prompt of {history[1]}, then {counted(history[2])}", *history)
            for history in histories
        ],
        expected="the whole text, and all blocks back in `free`",
        mistakes=[
            ("the newest token has no place in a block yet, where the text has just filled its blocks: what is cut "
             "along the blocks ends before it", partial(_given_way, PagedText)),
            ("the newest token is lost every time, not only at the border of a block",
             _forgetting(lambda t, b: t[:-1])),
            ("the answer is lost: what was said so far belongs to the text", _forgetting(lambda t, b: t, prompt=True)),
            ("the newest token is there twice", _forgetting(lambda t, b: [*t, *t[-1:]])),
            ("one token behind the blocks is kept; a prompt that has no blocks yet has more",
             _forgetting(lambda t, b: t[: b + 1])),
            ("a whole block is kept behind the blocks; a long prompt that has none yet has more",
             _forgetting(lambda t, b, size=4: t[: b + size])),
            ("the text is cut where it fills no block: the rest of it is lost",
             _forgetting(lambda t, b, size=0: t[: len(t) // size * size] if size else t, whole=True)),
            ("the newest token gets a block before all are given back: where none is free it is lost all the same, and "
             "who gives way does so because none is free",
             _forgetting(lambda t, b: t, keeps="grows")),
            ("nothing is given back: the text is whole, and the blocks are still held",
             _forgetting(lambda t, b: t, keeps="all")),
            ("the blocks are not given back", _forgetting(lambda t, b: t, keeps="free")),
            ("the blocks are in `free`, and the request still names them: two will use them",
             _forgetting(lambda t, b: t, keeps="blocks")),
        ],
    )  # fmt: skip


def _as_before(size: int, prompt: int, tokens: int, num_blocks: int) -> NamedParts:
    needed = -(-(prompt + tokens) // size)
    return NamedParts(
        {
            "the text afterwards": [10 + number for number in range(prompt + tokens)],
            "free blocks afterwards": list(range(num_blocks)),
            "blocks held afterwards": [],
            "there is room to begin again": needed <= num_blocks,
            "blocks held when it begins again": min(needed, num_blocks),
        }
    )


def _forgetting(rest: Callable[..., list[int]], **wrong: Any) -> Callable[..., NamedParts]:
    """A text of which `rest(text, places in its blocks)` is left."""

    class Forgetting(PagedText):
        def preempt(self, free: list[int]) -> None:
            places = len(self.blocks) * self.block_size
            if wrong.get("keeps") == "all":
                return
            if wrong.get("keeps") == "grows":
                self.grow(free)
                super().preempt(free)
                return
            if wrong.get("whole"):
                self.text = rest(self.text, places, self.block_size)
            elif wrong.get("prompt"):
                self.text = self.text[: self.first]
            else:
                self.text = rest(self.text, places)
            free.extend(self.blocks if wrong.get("keeps") != "free" else [])
            self.blocks = [] if wrong.get("keeps") != "blocks" else self.blocks

        def __init__(self, prompt: Sequence[int], block_size: int):
            super().__init__(prompt, block_size)
            self.first = len(prompt)

    return partial(_given_way, Forgetting)


# ---- 4.b ---------------------------------------------------------------------------------------------------------

STARVING_STORY = """
"The nightly report has been waiting since Monday. Its priority is 0, that of people who type is 1, and somebody types
all the time. But the code does look at how long a request has waited!" Below, every second somebody types, and one
request is served.
"""


@dataclass(frozen=True)
class Waiting:
    """One who waits. priority: 0, or 1 for who is more important. arrival: seconds."""

    name: str
    priority: int
    arrival: float


def next_in_line(waiting: Sequence[Any], now: float, patience: float) -> Any:
    """Whom to serve next. Each of `waiting` has a priority (0 or 1) and an arrival in seconds; in order of arrival.

    The more important go first, and of equally important ones the oldest. But nobody may be passed over by one that
    came `patience` seconds after it, or later still.

    Example: with a patience of 10 s, A (priority 0) came at 0 s and B (priority 1) at 1 s. At 20 s, too, B is served:
    it came 1 s later, not 10. Had B come at 10 s, A would be served.
    """
    return max(waiting, key=lambda one: (one.priority, now - one.arrival))


def _stream(seconds: int, every: float = 1.0) -> list[Waiting]:
    typing = [Waiting(f"person {number}", 1, number * every) for number in range(round(seconds / every))]
    return sorted([Waiting("report", 0, 2.5), *typing], key=lambda one: one.arrival)


def _history(
    choose: Callable[..., Any], arrivals: Sequence[Waiting], patience: float
) -> list[tuple[float, Waiting, list[Waiting]]]:
    """(time, who is served, who could have been) second by second, until nobody comes any more."""
    queue, coming, found = list[Waiting](), list(arrivals), []
    for now in range(int(arrivals[-1].arrival) + 1):
        while coming and coming[0].arrival <= now:
            queue.append(coming.pop(0))
        if queue:
            chosen = choose(list(queue), float(now), patience)
            if chosen not in queue:
                raise CheckFailed("one of those who wait", case=f"at {now} s {chosen!r} was chosen")
            found.append((float(now), chosen, list(queue)))
            queue.remove(chosen)
    return found


def show_starving() -> None:
    """Who is served in the first seconds, and when the report is."""
    history = _history(next_in_line, _stream(600), 10.0)
    print("served first:", ", ".join(chosen.name for _, chosen, _ in history[:6]), "...")
    when = [now for now, chosen, _ in history if chosen.name == "report"]
    print(
        f"the report came at 2.5 s; after {len(history)} s it was served: {'at ' + str(when[0]) if when else 'never'}"
    )


_ARRIVALS = (
    ("two of the same importance", (Waiting("A", 0, 0.0), Waiting("B", 0, 0.5), Waiting("C", 0, 3.0))),
    ("an important one comes a little later", (Waiting("A", 0, 0.2), Waiting("B", 1, 0.8), Waiting("C", 0, 4.0))),
    ("three important ones at once", (Waiting("A", 0, 0.1), Waiting("B", 1, 0.2), Waiting("C", 1, 0.3),
                                      Waiting("D", 1, 0.4), Waiting("E", 0, 6.0))),
    ("the report in a stream of people", tuple(_stream(60))),
    ("several reports in a stream of people", tuple(sorted(
        [Waiting(f"report {number}", 0, 1.5 + 7 * number) for number in range(5)] + _stream(90),
        key=lambda one: one.arrival))),
)  # fmt: skip
# (who waits, now, patience)
_MOMENTS = (
    ((Waiting("A", 0, 0.0), Waiting("B", 0, 1.0)), 5.0, 10.0),
    ((Waiting("A", 0, 0.0), Waiting("B", 1, 1.0)), 5.0, 10.0),
    ((Waiting("A", 0, 0.0), Waiting("B", 1, 1.0)), 20.0, 10.0),
    ((Waiting("A", 0, 0.0), Waiting("B", 1, 7.5)), 9.0, 8.0),
    ((Waiting("A", 0, 0.0), Waiting("B", 1, 30.0)), 31.0, 8.0),
    ((Waiting("A", 0, 0.0), Waiting("B", 1, 8.0)), 8.0, 8.0),
    ((Waiting("A", 0, 0.0), Waiting("B", 1, 8.0)), 24.0, 8.0),
    ((Waiting("A", 0, 0.0), Waiting("B", 1, 3.0), Waiting("C", 1, 8.0), Waiting("D", 0, 9.0)), 30.0, 8.0),
    ((Waiting("A", 1, 0.0), Waiting("B", 0, 0.5), Waiting("C", 1, 20.0)), 40.0, 8.0),
)


def check_next_in_line(mended: Callable[..., Any]) -> None:
    """At single moments, then second by second: the rules leave one choice, and the broken one is named."""
    for waiting, now, patience in _MOMENTS:
        chosen = mended(list(waiting), now, patience)
        if chosen not in waiting:
            raise CheckFailed("one of those who wait", case=f"{_told(waiting)}: {chosen!r} was chosen")
        _refuse(chosen, waiting, now, patience)
    for patience in (10.0, 4.0):
        for text, arrivals in _ARRIVALS:
            for now, chosen, queue in _history(mended, arrivals, patience):
                _refuse(chosen, queue, now, patience, f"{text}, ")


def _refuse(chosen: Waiting, queue: Sequence[Waiting], now: float, patience: float, text: str = "") -> None:
    if mistake := _injustice(chosen, queue, patience):
        raise CheckFailed(
            "the most important first, and nobody passed over by one that came `patience` seconds later",
            case=f"{text}patience {patience:g} s: at {now:g} s {chosen.name} is served; waiting are {_told(queue)}",
            mistake=mistake,
        )


def _told(queue: Sequence[Waiting]) -> str:
    return ", ".join(f"{one.name} (priority {one.priority}, from {one.arrival:g} s)" for one in queue[:5])


def _injustice(chosen: Waiting, queue: Sequence[Waiting], patience: float) -> str:
    """Which rule the choice breaks, in words; "" for the only one that breaks none."""
    passed = [chosen.arrival - one.arrival for one in queue if one.arrival + patience <= chosen.arrival]
    if passed == [patience]:
        return "who came exactly `patience` seconds later may not go first either"
    if passed:
        return (
            "somebody who came `patience` seconds later, or more, still goes first: waiting has to count against "
            "priority, not among equals alone"
        )
    if any(one.priority == chosen.priority and one.arrival < chosen.arrival for one in queue):
        return "of equally important ones the oldest has to go first"
    important = [one for one in queue if one.priority > chosen.priority and one.arrival < chosen.arrival + patience]
    if important:
        return (
            f"priority is not heeded: {important[0].name} did not come `patience` seconds after {chosen.name}, so the "
            "important one goes first, however long both have waited since"
        )
    return ""
