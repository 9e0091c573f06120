"""The page grid: its numbers against counts made here, and allocators that are wrong are seen to be."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import pytest
from matplotlib.colors import to_hex

from llmfromscratch import kv_cache
from llmfromscratch.widgets.page_grid import describe_page_grid, draw_page_grid, page_grid, waste
from llmfromscratch.widgets.page_history import PageHistory, Snapshot
from llmfromscratch.widgets.page_runs import STORY, record_allocations, record_pages
from llmfromscratch.widgets.style import ALARM
from tests.tiny_models import random_ids, tiny_model

pytestmark = pytest.mark.filterwarnings("error")
BLOCK = 8


@pytest.fixture(scope="module")
def history():
    return record_allocations()


@pytest.fixture(scope="module")
def network():
    return tiny_model(max_position_embeddings=128)


def last_text(history):
    return describe_page_grid(history, len(history.snapshots) - 1)


def framed(figure):
    return [patch for patch in figure.axes[0].patches if to_hex(patch.get_edgecolor()) == ALARM.lower()]


def words(figure):
    return [text.get_text() for text in figure.axes[0].texts]


class TwiceOut(kv_cache.BlockAllocator):
    """Leaves block 4 in the free list when it is handed out for the first time."""

    times = 0

    def allocate(self):
        block = super().allocate()
        self.times += block == 4
        if block == 4 and self.times == 1:
            self.free.appendleft(block)
        return block


class Leaking(kv_cache.BlockAllocator):
    """Counts down and gives nothing back."""

    def release(self, block, keep=False):
        self.ref_counts[block] -= 1


class Uncounted(kv_cache.BlockAllocator):
    """Shares without counting."""

    def share(self, block):
        self.kept.pop(block, None)


class GivesAway(kv_cache.BlockAllocator):
    """Frees a block that others still hold."""

    def release(self, block, keep=False):
        self.ref_counts[block] = 0
        self.free.append(block)


class NotWritten(kv_cache.BlockAllocator):
    def allocate(self):
        raise NotImplementedError


class Nonsense(kv_cache.BlockAllocator):
    def allocate(self):
        return 99


class WritesInPlace(kv_cache.PagedKVCache):
    """A fork's shared block is written without a copy."""

    def _make_writable(self, table, index):
        pass


def test_every_snapshot_accounts_for_every_block(history):
    assert len(history.snapshots) == 1 + sum(event[1] if event[0] == "steps" else 1 for event in STORY)
    for shot in history.snapshots:
        assert shot.problems == ()
        held = {block for table in shot.tables.values() for block in table}
        assert sorted([*held, *shot.free, *shot.kept]) == list(range(32))
        assert Counter(block for table in shot.tables.values() for block in table) == Counter(
            {block: count for block, count in enumerate(shot.ref_counts) if count}
        )
        for request, table in shot.tables.items():
            assert len(table) == -(-shot.lengths[request] // BLOCK)


def test_the_story_shows_sharing_kept_blocks_hits_and_evictions(history):
    shots = history.snapshots
    assert any(len(those) > 1 for shot in shots for those in shot.holders().values())
    assert any(shot.kept for shot in shots)
    assert any("24 of them still here" in shot.happened for shot in shots)
    evicted = [
        set(before.kept) & {block for table in after.tables.values() for block in table}
        for before, after in pairwise(shots)
        if "still here" not in after.happened
    ]
    assert any(evicted)


def test_a_real_run_has_the_blocks_that_the_story_has(network, history):
    real = record_pages(network)
    assert [shot.lengths for shot in real.snapshots] == [shot.lengths for shot in history.snapshots]
    assert [len(shot.free) for shot in real.snapshots] == [len(shot.free) for shot in history.snapshots]
    assert all(shot.problems == () for shot in real.snapshots)
    assert real.requests == list("ABCDEFG")


def test_prompts_of_a_real_run_are_used_and_what_they_share_is_found(network):
    ids = random_ids(30)
    events = [("arrive", "A", 1), ("arrive", "B", 1), ("leave", "A"), ("arrive", "C", 1)]
    real = record_pages(network, {"A": ids, "B": ids[:20] + [1, 2], "C": ids[:10]}, events)
    assert [shot.happened for shot in real.snapshots][1:] == [
        "A arrives with 30 tokens", "B arrives with 22 tokens, 16 of them still here",
        "A leaves and gives its blocks back", "C arrives with 10 tokens, 8 of them still here",
    ]  # fmt: skip
    assert real.snapshots[2].tables["B"][:2] == real.snapshots[2].tables["A"][:2]


def test_the_text_says_tables_lists_and_waste():
    events = [("arrive", "A", 13), ("arrive", "B", 17), ("fork", "C", "A"), ("steps", 1), ("leave", "B")]
    history = record_allocations(events=events, num_blocks=12)
    assert describe_page_grid(history, 4).splitlines() == [
        "After event 4 of 5: a decode step: A, B, C, one token each",
        "A: 14 tokens in blocks 0, 5",
        "B: 18 tokens in blocks 2, 3, 4",
        "C: 14 tokens in blocks 0, 1",
        "Shared blocks: 0 (A and C)",
        "Free, next first: 6, 7, 8, 9, 10, 11; kept, oldest first: none",
        # A and C: 8 together and 6 each; B: 18: 38 of 6 blocks
        "Pages: 10 of 48 allocated slots unused: 21 % waste",
        "Static rows of 128: 338 of 384 slots would be unused: 88 % waste",
        "Every block is accounted for.",
    ]
    assert describe_page_grid(history, 4, "B").splitlines()[1:3] == [
        "B: 18 tokens in blocks 2, 3, 4", "Shared blocks: 0 (A and C)",
    ]  # fmt: skip
    assert "B does not run now" in describe_page_grid(history, 5, "B")
    assert "Free, next first: 4, 6, 7, 8, 9, 10, 11; kept, oldest first: 3, 2" in describe_page_grid(history, 5)


def test_the_waste_is_what_a_count_over_slots_gives(history):
    for shot in history.snapshots:
        slots = {
            (table[place // BLOCK], place % BLOCK)
            for request, table in shot.tables.items()
            for place in range(shot.lengths[request])
        }
        blocks = {block for table in shot.tables.values() for block in table}
        now = waste(history, shot)
        assert (now.used, now.allocated) == (len(slots), BLOCK * len(blocks))
        assert (now.tokens, now.static) == (sum(shot.lengths.values()), 128 * len(shot.tables))


def test_every_control_changes_the_picture(history):
    view = page_grid(history)
    pictures = [view.set(step=step).png() for step in range(0, len(history.snapshots), 3)]
    view.set(step=10)
    pictures += [view.set(follow=name).png() for name in "ABCD"]
    assert len(set(pictures)) == len(pictures)
    with pytest.raises(ValueError, match="step cannot be 30"):
        view.set(step=30)


def test_that_the_followed_request_does_not_run_is_said_in_the_picture_too(history):
    idle = next(step for step, shot in enumerate(history.snapshots) if "A" not in shot.tables)
    assert "A does not run now" in " ".join(words(draw_page_grid(history, idle, follow="A")))
    assert "does not run" not in " ".join(words(draw_page_grid(history, idle)))


def test_cells_say_whose_they_are_and_how_far_they_are_filled():
    history = record_allocations(events=[("arrive", "A", 13), ("fork", "B", "A")], num_blocks=6)
    figure = draw_page_grid(history, 2)
    assert [word for word in words(figure) if re.fullmatch("[AB][01]", word)] == ["A0", "B0", "A1", "B1"]
    widths = [patch.get_width() for patch in figure.axes[0].patches if to_hex(patch.get_facecolor()) == "#56b4e9"]
    full = 5.6 / 8 - 0.06
    assert widths[:2] == pytest.approx([full, full * 5 / 8])


def test_a_block_handed_out_twice_is_framed_and_named():
    history = record_allocations(TwiceOut, num_blocks=16, events=[("arrive", "A", 34), ("arrive", "B", 10)])
    assert "Block 4 is claimed by A and by B, whose texts differ there" in last_text(history)
    assert history.snapshots[-1].wrong >= {4}
    figure = draw_page_grid(history, 2)
    assert len(framed(figure)) == 3  # the cell, and block 4 in two tables
    assert "!" in words(figure)
    assert not framed(draw_page_grid(record_allocations(), 2))


@pytest.mark.parametrize(
    ("allocator", "said"),
    [
        (TwiceOut, "Block 4 stands twice in the table of B."),
        (Leaking, "Blocks 2, 3, 4, 5, 6, 16 are lost: in no table, not free and not kept."),
        (Uncounted, "Reference counts do not add up: block 0 is in 2 tables, its count is 1"),
        (GivesAway, "in a table and in the free list: to be handed out a second time."),
        (NotWritten, "The run ends here, at “arrive A”: allocate is not yet written."),
        (Nonsense, "allocate() returned 99; a block from 0 to 31 was expected."),
        (lambda n, f: None, "raised AttributeError: 'NoneType' object has no attribute 'ref_counts'."),
    ],
)
def test_what_is_wrong_with_an_allocator_is_said(allocator, said):
    history = record_allocations(allocator)
    assert any(said in problem for shot in history.snapshots for problem in shot.problems)
    first = next(number for number, shot in enumerate(history.snapshots) if shot.problems)
    assert "Every block is accounted for" not in describe_page_grid(history, first)
    assert page_grid(history, first).png() != page_grid(record_allocations(), first).png()


def test_a_run_that_ended_before_the_asked_event_is_shown_at_its_end():
    history = record_allocations(NotWritten)
    assert page_grid(history, step=14).text() == page_grid(history).text()
    assert "allocate is not yet written" in page_grid(history, step=14).text()


def test_a_broken_allocator_under_a_real_cache_shows(network):
    history = record_pages(network, allocator_class=Uncounted)
    problems = [problem for shot in history.snapshots for problem in shot.problems]
    assert any("Reference counts do not add up" in problem for problem in problems)
    history = record_pages(network, allocator_class=NotWritten)
    assert "The run ends here, at “arrive A”: allocate is not yet written." in last_text(history)


def test_a_shared_block_written_in_place_is_named(network):
    history = record_pages(network, cache_class=WritesInPlace)
    fork = next(number for number, shot in enumerate(history.snapshots) if "forks" in shot.happened)
    assert history.snapshots[fork].problems == ()
    assert history.snapshots[fork + 1].problems[0] == (
        "Block 1 is claimed by A and by C, whose texts differ there: each writes over the other's keys and values."
    )


@pytest.mark.parametrize("source", ["allocator", "model"])
def test_a_request_without_room_is_turned_away_and_one_that_cannot_go_on_leaves(source, network):
    events = [("arrive", "A", 24), ("arrive", "B", 30), ("arrive", "C", 8), ("steps", 1), ("leave", "A")]
    sizes = {"events": events, "num_blocks": 4, "block_size": BLOCK}
    history = record_allocations(**sizes) if source == "allocator" else record_pages(network, **sizes)
    happened = [shot.happened for shot in history.snapshots]
    assert happened[2].startswith("B is turned away: ")
    assert list(history.snapshots[3].tables) == ["A", "C"]
    assert happened[4] == "a decode step: C, one token each; out of memory: A cannot go on and gives its blocks back"
    assert happened[5] == "leave A: A does not run, so nothing happens"
    assert all(shot.problems == () for shot in history.snapshots)


def test_many_requests_and_long_tables_fit_the_picture():
    events = [("arrive", f"r{number}", 60) for number in range(11)]
    history = record_allocations(events=events, num_blocks=96)
    figure = draw_page_grid(history, 11)
    assert "and 3 more" in words(figure)
    assert {"12", "95"} <= set(words(figure))
    long = record_allocations(events=[("arrive", "A", 300)], num_blocks=40)
    assert "+29" in words(draw_page_grid(long, 1))


def test_a_history_of_nothing_but_a_failure_is_drawn():
    history = PageHistory((Snapshot("making the cache fails", {}, {}, (), (), (), ("It is so.",)),), 8, 8, 64)
    assert page_grid(history).text().endswith("It is so.")
    assert page_grid(history).png()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"events": [("come", "A", 3)]}, "is no event; the first word is one of arrive, steps, fork, leave"),
        ({"events": [("arrive", "A")]}, r"\('arrive', 'A'\) is no event"),
        ({"num_blocks": 97}, "num_blocks is 97; the grid shows from 1 to 96 blocks"),
    ],
)
def test_events_that_cannot_be_meant_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        record_allocations(**changes)


@pytest.mark.model
def test_a_run_on_the_real_model_shares_the_prompts_beginning(smollm2_fp32):
    history = record_pages(smollm2_fp32)
    assert all(shot.problems == () for shot in history.snapshots)
    hits = [
        re.search(r"E arrives with \d+ tokens, (\d+) of them still here", shot.happened) for shot in history.snapshots
    ]
    assert [int(hit[1]) for hit in hits if hit] == [24]
