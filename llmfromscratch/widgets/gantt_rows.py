"""What each request of a run did at what time, and what it ought not to have done: the facts that `gantt` draws."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmfromscratch.steps import StepRecord, WorkRecord
from llmfromscratch.widgets.serving_run import ServingRun, in_time, numbers

WAITING, PREEMPTED = "waiting", "preempted"  # they hold nothing
PREFILL, DECODE, NOTHING, HELD = "prefill", "decode", "computed for nothing", "place held, no tokens"
PHASES = {"prefill": PREFILL, "decode": DECODE, "idle": NOTHING}


@dataclass
class Piece:
    """One stretch of time, in seconds from the start of the run, and what the request did in it."""

    start: float
    end: float
    what: str


@dataclass(frozen=True)
class Row:
    """One request. end: seconds from the start of the run, None if it never ends. wrong: when it did what is wrong."""

    request: Any
    arrival: float
    end: float | None
    pieces: list[Piece]
    wrong: list[float] = field(default_factory=list)

    @property
    def number(self) -> int:
        """The request's number."""
        return self.request.request_id


@dataclass(frozen=True)
class Chart:
    """A run as rows in the order of `run.requests`. notes: who was aborted, and what was computed for nothing.

    problems: what is wrong, as sentences."""

    run: ServingRun
    rows: list[Row]
    notes: list[str]
    problems: list[str]


class _Seen:
    """What the steps say about each request, by number; places in the sequence of steps."""

    def __init__(self, steps: Sequence[StepRecord]):
        self.events: dict[int, list[tuple[int, WorkRecord | None]]] = defaultdict(list)  # None: preempted
        self.last_waiting: dict[int, int] = {}
        self.both: dict[int, int] = {}  # in the queue and at work in one step: the first such step
        self.twice: dict[int, int] = {}  # twice in one step
        waiting: frozenset[int] = frozenset()
        before: Any = None
        for place, record in enumerate(steps):
            if record.waiting is not before:  # as a rule one tuple serves many steps
                before, waiting = record.waiting, frozenset(record.waiting)
            for number in record.preempted:
                self.events[number].append((place, None))
            at_work: set[int] = set()
            for work in record.work:
                self.events[work.request_id].append((place, work))
                if work.request_id in at_work:
                    self.twice.setdefault(work.request_id, place)
                if work.request_id in waiting:
                    self.both.setdefault(work.request_id, place)
                at_work.add(work.request_id)
        for place, record in enumerate(steps):
            if place + 1 == len(steps) or steps[place + 1].waiting is not record.waiting:
                self.last_waiting.update(dict.fromkeys(record.waiting, place))


def read_chart(run: ServingRun) -> Chart:
    """The rows of a run, from its records alone but for arrival and end, which the requests know."""
    seen = _Seen(run.steps)
    rows = [_row(request, run, seen) for request in run.requests]
    problems = [*_strangers(rows, seen), *_unfinished(rows, run, seen)]
    for find in (_waiting_at_work, _twice_in_a_step, _out_of_life, _queued_after_the_end, _too_little):
        problems += _said(find, rows, run, seen)
    return Chart(run, rows, [*_idle_notes(rows), *_aborted_notes(rows)], problems)


def _row(request: Any, run: ServingRun, seen: _Seen) -> Row:
    events, origin, steps = seen.events.get(request.request_id, []), run.start, run.steps
    arrival = request.arrival - origin
    pieces: list[Piece] = []
    now, state, before = arrival, WAITING, -1
    for place, work in events:
        start, end = steps[place].start - origin, steps[place].end - origin
        if state == HELD and place - before == 1 and start - now <= steps[before].end - steps[before].start:
            pieces[-1].end = max(start, pieces[-1].end)  # the engine's own time between two steps
        else:
            _append(pieces, now, start, state)
        now = max(now, start)
        if work is None:
            state = PREEMPTED
            continue
        for piece in _work_pieces(work, start, end):
            _append(pieces, piece.start, piece.end, piece.what)
        now, state, before = end, HELD, place
    end_of_life = _end(request, run, seen)
    if end_of_life is None:
        _append(pieces, now, run.end - origin, state)
    elif state != HELD:
        _append(pieces, now, end_of_life, state)
    return Row(request, arrival, end_of_life, pieces)


def _work_pieces(work: WorkRecord, start: float, end: float) -> Iterator[Piece]:
    """The step as one piece, or two where a part of its tokens is padding."""
    width = work.tokens + work.padding
    useful = start + (end - start) * (work.tokens / width if width and work.phase != "idle" else 1)
    yield Piece(start, useful, PHASES.get(work.phase, DECODE))
    yield Piece(useful, end, NOTHING)


def _append(pieces: list[Piece], start: float, end: float, what: str) -> None:
    if end <= start:
        return
    if what != PREFILL and pieces and pieces[-1].what == what and start <= pieces[-1].end + 1e-9:
        pieces[-1].end = end
    else:
        pieces.append(Piece(start, end, what))


def _end(request: Any, run: ServingRun, seen: _Seen) -> float | None:
    if not request.ended:
        return None
    if request.finish_reason != "abort" and request.last_token is not None:
        return request.last_token - run.start
    places = [place for place, work in seen.events.get(request.request_id, []) if work is None or work.phase != "idle"]
    places += [seen.last_waiting[request.request_id]] if request.request_id in seen.last_waiting else []
    return max([run.steps[place].end for place in places], default=request.arrival) - run.start


# ---- what is wrong -----------------------------------------------------------------------------------------------

_Find = Callable[[Row, ServingRun, _Seen], "tuple[float, str] | None"]


def _said(find: _Find, rows: Sequence[Row], run: ServingRun, seen: _Seen) -> Iterator[str]:
    """One sentence for one kind of problem, the first request's own; the times go into the rows."""
    said = ""
    found = []
    for row in rows:
        if problem := find(row, run, seen):
            row.wrong.append(problem[0])
            said = said or problem[1]
            found.append(row.number)
    if found:
        yield said + (f" So it is with {numbers(found[1:])}." if found[1:] else "")


def _strangers(rows: Sequence[Row], seen: _Seen) -> Iterator[str]:
    strangers = sorted(seen.events.keys() - {row.number for row in rows})
    if strangers:
        yield f"The steps name {numbers(strangers)}, not among the requests of this run: not drawn."


def _unfinished(rows: Sequence[Row], run: ServingRun, seen: _Seen) -> Iterator[str]:
    """Who has not ended by the last step: one sentence for each way to stand there."""
    said: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.end is None:
            row.wrong.append(run.end - run.start)
            said[_stands(row, run, seen)].append(row)
    for where, left in said.items():
        row = left[0]
        tokens = f"{len(row.request.token_ids)} of {row.request.params.max_tokens} tokens"
        others = f" So it is with {numbers(other.number for other in left[1:])}." if left[1:] else ""
        yield f"Request {row.number} never ends: {tokens}, {where}.{others}"


def _stands(row: Row, run: ServingRun, seen: _Seen) -> str:
    """Where a request that has not ended is in the last step."""
    last = len(run.steps) - 1
    work = [place for place, work in seen.events.get(row.number, []) if work is not None]
    if work and work[-1] == last:
        return "at work in the last step"
    computed = f"last computed at {in_time(run.steps[work[-1]].end - run.start)}" if work else "never computed"
    if last < 0 or row.number in run.steps[last].waiting:
        return f"{computed}, still in the queue"
    return f"{computed}, and not in the queue"


def _waiting_at_work(row: Row, run: ServingRun, seen: _Seen) -> tuple[float, str] | None:
    if row.number not in seen.both:
        return None
    when = run.steps[seen.both[row.number]].start - run.start
    return when, f"Request {row.number} computes while it waits in the queue, first at {in_time(when)}."


def _twice_in_a_step(row: Row, run: ServingRun, seen: _Seen) -> tuple[float, str] | None:
    if row.number not in seen.twice:
        return None
    when = run.steps[seen.twice[row.number]].start - run.start
    return when, f"Request {row.number} is twice in one step, first at {in_time(when)}."


def _out_of_life(row: Row, run: ServingRun, seen: _Seen) -> tuple[float, str] | None:
    """Work before the arrival, or with tokens after the end. Padding of a row that has ended is waste, not wrong."""
    for place, work in seen.events.get(row.number, []):
        record = run.steps[place]
        start = record.start - run.start
        if start < row.arrival - 1e-9:
            return (
                start,
                f"Request {row.number} is in a step at {in_time(start)}, and arrives at {in_time(row.arrival)}.",
            )
        if work is not None and work.tokens and row.end is not None and start >= row.end:
            late = f"has {work.tokens} more to compute at {in_time(start)}"
            return start, f"Request {row.number} has ended at {in_time(row.end)}, keeps its place and {late}."
    return None


def _queued_after_the_end(row: Row, run: ServingRun, seen: _Seen) -> tuple[float, str] | None:
    last = seen.last_waiting.get(row.number)
    if last is None or row.end is None or run.steps[last].start - run.start < row.end:
        return None
    when = run.steps[last].start - run.start
    return when, f"Request {row.number} has ended at {in_time(row.end)}, and is in the queue at {in_time(when)}."


def _too_little(row: Row, run: ServingRun, seen: _Seen) -> tuple[float, str] | None:
    """Since it was begun last, all of its text but the last token must have been computed or found in the cache."""
    if row.end is None or row.request.finish_reason == "abort" or row.request.prefix_hits:
        return None
    computed = 0
    for _, work in seen.events.get(row.number, []):
        computed = 0 if work is None else computed + work.tokens * (work.phase != "idle")
    needed = row.request.length - 1
    if computed >= needed:
        return None
    again = " since it was preempted" if row.request.preemptions else ""
    tokens = f"{computed} token{'s' * (computed != 1)}"
    return row.end, f"Request {row.number} has computed {tokens}{again}, and its text needs {needed}."


def _idle_notes(rows: Sequence[Row]) -> list[str]:
    """Who keeps a place and computes for nothing after the end."""
    after: dict[int, float] = {}
    for row in rows:
        if row.end is not None:
            held = sum(p.end - max(p.start, row.end) for p in row.pieces if p.what == NOTHING and p.end > row.end)
            after |= {row.number: held} if held > 1e-9 else {}
    if not after:
        return []
    longest = max(after, key=after.__getitem__)
    worst = f"request {longest} for {in_time(after[longest])}" if len(after) == 1 else ""
    worst = worst or f"{numbers(after)}; request {longest} longest, for {in_time(after[longest])}"
    return [f"A place is held after the end by {worst}."]


def _aborted_notes(rows: Sequence[Row]) -> list[str]:
    aborted = [row for row in rows if row.request.finish_reason == "abort"]
    if not aborted:
        return []
    return [f"Aborted: {numbers(row.number for row in aborted)}. The first: {aborted[0].request.error}"]
