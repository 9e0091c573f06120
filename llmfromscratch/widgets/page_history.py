"""Pages over time: what an allocator, or a whole paged cache under a model, hands out as requests come and go.

After every event a `Snapshot` is taken and checked: `problems` says what does not add up, by the blocks it shows in.
An event is a tuple:

    ("arrive", "A", 20)    request A comes with 20 tokens; ("arrive", "D", 24, "A", 16): the first 16 are those of A
    ("steps", 3)           three decode steps: each running request writes one token in each
    ("fork", "B", "A")     B goes on from A's tokens
    ("leave", "A")         A is done
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from llmfromscratch.widgets.token_reading import counted, in_words

Event = tuple[Any, ...]
MOST_BLOCKS = 96  # a cell each; more would be too small to read


@dataclass(frozen=True)
class Snapshot:
    """The pages after an event. tables: request -> its blocks in order; lengths: request -> tokens written.

    ref_counts: one for each block; free: in the order in which they will be handed out; kept: blocks nobody holds whose
    content may still serve, the oldest first. problems: sentences; wrong: the blocks that they speak of.
    """

    happened: str
    tables: Mapping[str, tuple[int, ...]]
    lengths: Mapping[str, int]
    ref_counts: tuple[int, ...]
    free: tuple[int, ...]
    kept: tuple[int, ...]
    problems: tuple[str, ...] = ()
    wrong: frozenset[int] = frozenset()

    def holders(self) -> dict[int, list[tuple[str, int]]]:
        """For each block in a table: the requests, each with the block's place in its table."""
        found: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for request, table in self.tables.items():
            for place, block in enumerate(table):
                found[block].append((request, place))
        return dict(found)

    def filled(self, block_size: int) -> dict[int, int]:
        """For each block in a table the slots that hold a token."""
        return {
            block: max(min(block_size, max(0, self.lengths[request] - place * block_size)) for request, place in those)
            for block, those in self.holders().items()
        }


@dataclass(frozen=True)
class PageHistory:
    """All snapshots of a run. block_size: tokens a block; max_length: what a static row would reserve for a request."""

    snapshots: tuple[Snapshot, ...]
    num_blocks: int
    block_size: int
    max_length: int

    @property
    def requests(self) -> list[str]:
        """Every request that ever ran, in the order of arrival."""
        return list(dict.fromkeys(request for shot in self.snapshots for request in shot.tables))


class Pages(Protocol):
    """What runs the events: a driver around an allocator or around a cache. Each method says what happened."""

    @property
    def allocator(self) -> Any:
        """With `free`, `ref_counts` and `kept` of `kv_cache.BlockAllocator`."""
        ...

    @property
    def tables(self) -> Mapping[str, Sequence[int]]:
        """Request -> blocks."""
        ...

    @property
    def tokens(self) -> Mapping[str, Sequence[Hashable]]:
        """Request -> the tokens it has written, in order."""
        ...

    def arrive(self, request: str, count: int, like: str = "", same: int = 0) -> str:
        """Takes a request in."""
        ...

    def step(self) -> str:
        """One decode step of all that run."""
        ...

    def fork(self, request: str, of: str) -> str:
        """Lets a request go on from another's tokens."""
        ...

    def leave(self, request: str) -> str:
        """Ends a request and gives its blocks back."""
        ...


def run(make: Callable[[], Pages], events: Sequence[Event], frame: PageHistory) -> PageHistory:
    """The history of the events, with the sizes of `frame`. What raises ends it, and its last snapshot says so."""
    shots: list[Snapshot] = []
    empty = Snapshot("nothing runs", {}, {}, (), (), ())
    doing = "making the cache"
    try:
        pages = make()
        shots.append(_snapshot("nothing runs yet: all blocks are free", pages, frame))
        for event in _one_by_one(events):
            doing = " ".join(map(str, event[:2]))
            shots.append(_snapshot(_apply(pages, event), pages, frame))
    except Exception as error:  # noqa: BLE001 - a learner's code may raise anything: the last picture says what it did
        last = shots[-1] if shots else empty
        said = f"The run ends here, at “{doing}”: {_function(error)} {in_words(error)}."
        shots.append(replace(last, happened=f"“{doing}” fails", problems=(said, *last.problems)))
    return PageHistory(tuple(shots), frame.num_blocks, frame.block_size, frame.max_length)


def _apply(pages: Pages, event: Event) -> str:
    kind, *rest = event
    needed = {"fork": rest[1:], "leave": rest}.get(kind, [])
    if any(request not in pages.tables for request in needed):  # it was turned away, or had to leave
        return f"{kind} {rest[0]}: {needed[0]} does not run, so nothing happens"
    if kind == "arrive":
        return pages.arrive(*rest)
    if kind == "fork":
        return pages.fork(*rest)
    return pages.leave(*rest) if kind == "leave" else pages.step()


def _one_by_one(events: Sequence[Event]) -> list[Event]:
    return [one for event in events for one in ([("step",)] * event[1] if event[0] == "steps" else [event])]


def check_events(events: Sequence[Event], num_blocks: int) -> None:
    """Raises ValueError for events that cannot be meant."""
    if not 1 <= num_blocks <= MOST_BLOCKS:
        raise ValueError(f"num_blocks is {num_blocks}; the grid shows from 1 to {MOST_BLOCKS} blocks.")
    sizes = {"arrive": (3, 5), "steps": (2,), "fork": (3,), "leave": (2,)}
    for event in events:
        if not event or len(event) not in sizes.get(event[0], ()):
            raise ValueError(f"{event!r} is no event; the first word is one of {', '.join(sizes)}, as in the module.")


def _snapshot(happened: str, pages: Pages, frame: PageHistory) -> Snapshot:
    allocator = pages.allocator
    shot = Snapshot(
        happened,
        {request: tuple(table) for request, table in pages.tables.items()},
        {request: len(pages.tokens[request]) for request in pages.tables},
        tuple(allocator.ref_counts), tuple(allocator.free), tuple(allocator.kept),
    )  # fmt: skip
    said = [*_clashes(shot, pages, frame.block_size), *_miscounted(shot, frame.num_blocks)]
    wrong = frozenset(block for _, blocks in said for block in blocks)
    return replace(shot, problems=tuple(what for what, _ in said), wrong=wrong)


def _clashes(shot: Snapshot, pages: Pages, block_size: int) -> list[tuple[str, list[int]]]:
    """Blocks in two tables whose texts differ where the block lies: one writes over the other."""
    said: list[tuple[str, list[int]]] = []
    for block, those in shot.holders().items():
        (first, at), *others = those
        for other, place in others:
            ends = [min(shot.lengths[request], (at + 1) * block_size) for request in (first, other)]
            same = place == at and pages.tokens[first][: min(ends)] == pages.tokens[other][: min(ends)]
            what = ""
            if first == other:
                what = f"Block {block} stands twice in the table of {first}."
            elif not same:
                what = (
                    f"Block {block} is claimed by {first} and by {other}, whose texts differ there: each writes over "
                    "the other's keys and values."
                )
            elif ends[0] != ends[1]:
                what = f"Block {block} is shared by {first} and {other}, and one of them has written into it."
            if what and (what, [block]) not in said:
                said.append((what, [block]))
    return said


def _miscounted(shot: Snapshot, num_blocks: int) -> list[tuple[str, list[int]]]:
    """What does not add up between the tables, the reference counts, the free list and the kept blocks."""
    holders, idle = shot.holders(), [*shot.free, *shot.kept]
    said = []
    handed = sorted(block for block in holders if block in idle)
    if handed:
        where = "free list" if handed[0] in shot.free else "kept blocks"
        said.append((f"{_blocks(handed)} in a table and in the {where}: to be handed out a second time.", handed))
    twice = sorted({block for block in idle if idle.count(block) > 1})
    if twice:
        said.append((f"{_blocks(twice)} twice in the free list: to be handed out twice.", twice))
    lost = [block for block in range(num_blocks) if block not in holders and block not in idle]
    if lost:
        said.append((f"{_blocks(lost)} lost: in no table, not free and not kept.", lost))
    if len(shot.ref_counts) == num_blocks:
        off = [block for block in range(num_blocks) if shot.ref_counts[block] != len(holders.get(block, []))]
        if off:
            held = len(holders.get(off[0], []))
            count = f"block {off[0]} is in {counted(held, 'table')}, its count is {shot.ref_counts[off[0]]}"
            more = f" ({counted(len(off) - 1, 'more block')} like this)" if len(off) > 1 else ""
            said.append((f"Reference counts do not add up: {count}{more}.", off))
    return said


def _blocks(blocks: Sequence[int]) -> str:
    listed = ", ".join(map(str, blocks[:6])) + (", …" if len(blocks) > 6 else "")
    return f"Block {listed} is" if len(blocks) == 1 else f"Blocks {listed} are"


def _function(error: Exception) -> str:
    """The function that raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "it" if trace is None else trace.tb_frame.f_code.co_name
