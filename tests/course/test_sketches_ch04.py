"""Chapter 4's sketches: the counts against a rectangle that is drawn, buckets against their promises, and the loop."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch import scheduler
from llmfromscratch.course.sketches import ch04

sys.path.insert(0, str(Path(__file__).parents[1]))
import acting_engine

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=9)


@given(LENGTHS)
def test_what_a_batch_wastes_is_the_empty_part_of_the_rectangle(requests):
    prompts, answers = (list(side) for side in zip(*requests, strict=True))
    width, steps = max(prompts), max(answers) - 1
    drawn = ["#" * p + "." * (width - p) + "#" * (a - 1) + "." * (steps - a + 1) for p, a in requests]
    needed, computed = ch04.static_waste(prompts, answers)
    assert (needed, computed) == (sum(row.count("#") for row in drawn), sum(map(len, drawn)))


def test_the_worked_example_of_the_rectangle():
    assert ch04.static_waste([2, 4], [3, 1]) == (8, 12)


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(1, 8))
def test_buckets_hold_every_place_once_in_the_order_of_length(lengths, size):
    groups = ch04.buckets(lengths, size)
    places = [place for group in groups for place in group]
    assert sorted(places) == list(range(len(lengths)))
    assert [(lengths[place], place) for place in places] == sorted((n, place) for place, n in enumerate(lengths))
    assert all(len(group) == size for group in groups[:-1]) and all(groups)


def test_the_worked_example_of_the_buckets():
    assert ch04.buckets([9, 2, 8, 3, 7], 2) == [[1, 3], [4, 2], [0]]


def network(batch, cache):
    """Writes the batch and reads each text back; the next token is the acting engine's."""
    rows = batch.token_ids.double()[:, None, None]
    cache.write(0, rows, -rows, batch)
    texts = {span.request_id: cache.read(0, span.request_id)[0][:, 0, 0].long().tolist() for span in batch.spans}
    return torch.eye(7)[[acting_engine.next_token(texts[span.request_id]) for span in batch.spans]]


@pytest.mark.parametrize("make", ["static", "bucket", "continuous", "chunks", "tiny"])
def test_the_loop_answers_everybody_as_if_alone(make):
    cache = acting_engine.paged(8 if make == "tiny" else 64)
    planner = {
        "static": lambda: scheduler.StaticScheduler(cache, 3),
        "bucket": lambda: scheduler.StaticScheduler(cache, 3, bucket=True),
        "continuous": lambda: scheduler.ContinuousScheduler(cache, 4, 64),
        "chunks": lambda: scheduler.ContinuousScheduler(cache, 4, 3),
        "tiny": lambda: scheduler.ContinuousScheduler(cache, 4, 8),
    }[make]()
    requests = [acting_engine.request(n, 3 + 5 * n % 9, 2 + 4 * n % 7) for n in range(8)]
    steps = ch04.serve(network, cache, planner, requests)
    for request in requests:
        assert request.token_ids == acting_engine.answer(request.prompt_token_ids, request.params.max_tokens)
        assert request.finish_reason == "length"
    assert steps == max(request.last_token for request in requests)
    cache.audit()


def test_the_end_token_is_recorded_and_wins_over_the_limit():
    cache = acting_engine.paged(64)
    want = acting_engine.answer(acting_engine.request(1, 5).prompt_token_ids, 6)
    for limit in (6, want.index(want[2]) + 1):
        request = acting_engine.request(1, 5, limit)
        ch04.serve(network, cache, scheduler.ContinuousScheduler(cache), [request], end_tokens={want[2]})
        assert request.token_ids == want[: want.index(want[2]) + 1]
        assert request.finish_reason == "stop"


@settings(max_examples=20, deadline=None)
@given(LENGTHS, st.integers(1, 4))
def test_the_counts_of_the_static_scheduler_are_those_of_the_rectangles(requests, places):
    cache = acting_engine.paged(400)
    batches = scheduler.StaticScheduler(cache, places)
    ch04.serve(network, cache, batches, [acting_engine.request(n, *pair) for n, pair in enumerate(requests)])
    groups = [requests[first : first + places] for first in range(0, len(requests), places)]
    counts = [ch04.static_waste(*(list(side) for side in zip(*group, strict=True))) for group in groups]
    assert batches.useful_tokens == sum(needed for needed, _ in counts)
    wasted = batches.padding_tokens + batches.idle_tokens
    assert wasted + batches.useful_tokens == sum(computed for _, computed in counts)
