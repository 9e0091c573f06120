"""The oracles of chapter 3's checks are right beyond the cases that learners see: they agree with the engine."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch import learner_engine
from llmfromscratch.course import differences
from llmfromscratch.course.exercises import (
    allocator_checks,
    cache_checks,
    cache_histories,
    paging_checks,
    paging_clinic,
)
from llmfromscratch.course.exercises.in_engine import in_engine

_KINDS = ["rewind", "fork", "release", "interrupted"]


@pytest.mark.parametrize("cache", ["ConcatKVCache", "StaticKVCache", "PagedKVCache"])
@pytest.mark.parametrize("seed", range(20, 26))
def test_the_dictionary_of_rows_says_what_every_cache_of_the_engine_says(cache, seed):
    history = cache_histories.random_history(seed, 40, 24, _KINDS)
    mine = cache_histories.played(cache, history, size=3)
    assert differences.find(mine, cache_histories.plainly(history), cache_histories.EXACT) is None


@pytest.mark.parametrize("seed", range(30, 36))
def test_a_shared_prefix_is_read_as_if_it_had_been_computed(seed):
    history = cache_histories.random_history(seed, 60, 24, [*_KINDS, "prompt", "prompt"])
    assert any(step[0] == "prompt" for step in history if isinstance(step, tuple))
    paged = cache_histories.played("PagedKVCache", history)
    assert differences.find(paged, cache_histories.plainly(history), cache_histories.EXACT) is None


def test_the_engine_has_its_own_function_back_after_a_check_of_another_and_after_an_error_in_it():
    engine = learner_engine.reference("kv_cache")
    own = engine.slots_of
    with pytest.raises(ZeroDivisionError), in_engine("kv_cache", "slots_of", lambda *given: 1 // 0):
        engine.slots_of([0], 0, 1, 4)
    assert engine.slots_of is own


@settings(deadline=None)
@given(st.integers(0, 9), st.integers(0, 5), st.integers(1, 6), st.booleans())
def test_the_rows_put_behind_rows_are_the_engines(start, more, new, stored):
    rows = torch.rand(start + more, 2, 3) if stored else None
    given_rows = (rows, start if stored else 0, torch.rand(new, 2, 3))
    engines = learner_engine.reference("kv_cache").append_rows(*given_rows)
    assert torch.equal(cache_checks._row_by_row(*given_rows), engines)


@settings(deadline=None)
@given(st.integers(0, 6), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3))
def test_the_numbers_written_one_by_one_are_the_engines(start, tokens, heads, head_dim):
    row, keys, values = torch.rand(2, heads, 12, head_dim), *torch.rand(2, tokens, heads, head_dim)
    mine, engines = row.clone(), row.clone()
    cache_checks._position_by_position(mine, start, keys, values)
    learner_engine.reference("kv_cache").write_positions(engines, start, keys, values)
    assert torch.equal(mine, engines) and not torch.equal(mine, row)


@settings(deadline=None)
@given(st.permutations(range(6)), st.integers(0, 9), st.integers(1, 9), st.integers(1, 5), st.integers(1, 3))
def test_the_places_in_blocks_are_the_engines(table, start, length, size, heads):
    engine = learner_engine.reference("kv_cache")
    length = min(length, 6 * size - start)
    if length < 1:
        return
    slots = engine.slots_of(table, start, length, size)
    stored = torch.rand(2, heads, 6, size, 2)
    mine = paging_checks._place_by_place(stored, torch.tensor(table), start + length, torch.empty(0))
    engines = engine.read_blocks(stored, torch.tensor(table), start + length, torch.empty_like(stored))
    assert all(map(torch.equal, mine, engines))
    assert torch.equal(stored.flatten(2, 3)[0, :, slots].transpose(0, 1), mine[0][start:])


@pytest.mark.parametrize("seed", range(40, 60))
def test_the_plain_blocks_are_handed_out_as_the_engine_hands_them_out(seed):
    steps = allocator_checks._random_steps(seed, 60)
    engines = allocator_checks._handed_out(learner_engine.reference("kv_cache").BlockAllocator, 4, steps)
    assert allocator_checks._handed_out(allocator_checks.PlainBlocks, 4, steps) == engines


@settings(deadline=None)  # the first call waits for the import
@given(st.lists(st.integers(0, 2**40), max_size=40), st.integers(1, 9), st.binary(max_size=40))
def test_the_chain_of_keys_is_the_engines(ids, block_size, parent):
    engines = learner_engine.reference("kv_cache").block_keys(ids, block_size, parent)
    assert allocator_checks._chained()(ids, block_size, parent) == engines


@pytest.mark.parametrize("history", paging_clinic._FORKS)
def test_the_mended_pages_of_the_bug_hunt_hold_what_was_appended(history):
    texts: dict[int, list[int]] = {}
    for step in history.split(", "):
        words = step.split()
        if words[0] == "fork":
            texts[int(words[2])] = list(texts[int(words[1])])
        else:
            request = int(words[0])
            mine = texts.setdefault(request, [])
            first = 1 + sum(token // 100 == request for token in mine)
            mine += [100 * request + n for n in range(first, first + int(words[1][1:]))]
    log = paging_clinic._written(paging_clinic._pages(), history)
    end = {request: [value for name, value in log.items() if name.endswith(f"text {request}")][-1] for request in texts}
    assert end == texts and log["the end: holders of each page are the tables that name it"]
