"""Who computes in the next step, and what becomes of the others."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from acting_engine import Engine, answer, layout, paged, request

from llmfromscratch import kv_cache, scheduler, simulation
from llmfromscratch.errors import OutOfMemory, RequestError

State = scheduler.State


def static(cache=None, **limits) -> Engine:
    return Engine(cache or paged(64), lambda cache: scheduler.StaticScheduler(cache, **limits))


def continuous(cache=None, **limits) -> Engine:
    return Engine(cache or paged(64), lambda cache: scheduler.ContinuousScheduler(cache, **limits))


def numbers(plan: list[scheduler.Work]) -> list[tuple[int, int, int, int]]:
    return [(work.request.request_id, work.start, work.tokens, work.padding) for work in plan]


def ids(requests) -> list[int]:
    return [one.request_id for one in requests]


# ---- a request and its clock -------------------------------------------------------------------------------------


def test_a_request_counts_the_seconds_it_waited_and_those_between_its_tokens():
    one = request(3, 5, arrival=10.0)
    one.begin(now=12.0)
    for token, now in ((7, 15.0), (8, 16.0), (9, 19.0)):
        one.record(token, now)
    assert (one.queue_time, one.ttft, one.tpot) == (2.0, 5.0, 2.0)
    assert (one.ids, one.length) == ([*one.prompt_token_ids, 7, 8, 9], 8)


def test_what_has_not_happened_has_no_time():
    one = request(3, 5, arrival=10.0)
    assert (one.queue_time, one.ttft, one.tpot) == (None, None, None)
    one.begin(now=10.0)
    one.record(7, 10.0)
    assert (one.queue_time, one.ttft, one.tpot) == (0.0, 0.0, None)  # one token has no time between


def test_a_request_that_begins_again_keeps_the_time_of_its_first_beginning_and_adds_up_its_hits():
    one = request(3, 5, arrival=1.0)
    one.begin(now=2.0, hits=4)
    one.begin(now=9.0, hits=8)
    assert (one.first_scheduled, one.prefix_hits) == (2.0, 12)


def test_a_request_goes_through_its_states_in_order():
    engine = continuous(max_batch_tokens=4)
    one = request(0, 6, max_tokens=2)
    seen = [one.state]
    engine.add(one)
    for _ in range(3):
        engine.step()
        seen.append(one.state)
    assert seen == [State.WAITING, State.PREFILLING, State.DECODING, State.FINISHED]
    assert (one.finish_reason, one.error, one.ended) == ("length", None, True)


def test_work_gives_a_token_only_where_it_reaches_the_end_of_the_text():
    one = request(0, 6)
    assert [scheduler.Work(one, start, 3).completes for start in (0, 3)] == [False, True]
    one.end("stop")
    assert not scheduler.Work(one, 3, 3).completes


# ---- static batching ---------------------------------------------------------------------------------------------


def test_a_static_batch_is_padded_to_its_longest_prompt_and_rows_that_have_ended_stay():
    engine = static()
    engine.add(request(0, 3, max_tokens=1), request(1, 5, max_tokens=3), request(2, 4, max_tokens=2))
    assert numbers(engine.step()) == [(0, 0, 3, 2), (1, 0, 5, 0), (2, 0, 4, 1)]
    assert numbers(engine.step()) == [(0, 3, 0, 1), (1, 5, 1, 0), (2, 4, 1, 0)]
    assert numbers(engine.step()) == [(0, 3, 0, 1), (1, 6, 1, 0), (2, 5, 0, 1)]
    planner = engine.scheduler
    assert (planner.useful_tokens, planner.padding_tokens, planner.idle_tokens) == (3 + 5 + 4 + 2 + 1, 3, 3)
    assert not engine.busy


@pytest.mark.parametrize("seed", range(5))
def test_the_waste_of_a_static_batch_is_what_arithmetic_says(seed):
    draw = random.Random(seed)
    lengths = [(draw.randint(1, 20), draw.randint(1, 20)) for _ in range(draw.randint(1, 6))]
    engine = static()
    engine.add(*(request(number, *each) for number, each in enumerate(lengths)))
    engine.run()
    longest, latest = max(prompt for prompt, _ in lengths), max(tokens for _, tokens in lengths)
    planner = engine.scheduler
    assert len(engine.history) == latest
    assert planner.useful_tokens == sum(prompt + tokens - 1 for prompt, tokens in lengths)
    assert planner.padding_tokens == sum(longest - prompt for prompt, _ in lengths)
    assert planner.idle_tokens == sum(latest - tokens for _, tokens in lengths)


def test_the_next_static_batch_begins_when_the_last_row_has_ended():
    engine = static(max_requests=2)
    requests = [request(0, 3, max_tokens=1), request(1, 3, max_tokens=4), request(2, 3, max_tokens=1)]
    engine.add(*requests)
    engine.run()
    assert [ids(work.request for work in plan) for plan in engine.history] == [[0, 1]] * 4 + [[2]]
    assert requests[2].queue_time == 4.0


@pytest.mark.parametrize("sharing", [True, False])
def test_a_static_batch_holds_memory_for_the_longest_answers_from_beginning_to_end(sharing):
    engine = static(paged(16, block_size=4, prefix_sharing=sharing))
    engine.add(request(0, 2, max_tokens=7), request(1, 10, max_tokens=6))
    held = []
    while engine.busy:
        engine.scheduler.schedule(engine.now)  # planned again in the step: that changes nothing
        held.append(engine.held_blocks())
        engine.step()
    assert held == [3 + 4] * 7  # 9 tokens, or 10 with the padding, and 16
    assert engine.held_blocks() == 0


def test_a_static_batch_takes_no_more_requests_than_memory_can_hold_to_the_end():
    engine = static(paged(8, block_size=4))
    engine.add(request(0, 4, max_tokens=8), request(1, 4, max_tokens=8), request(2, 4, max_tokens=8))
    engine.run()
    assert [ids(work.request for work in plan) for plan in engine.history] == [[0, 1]] * 8 + [[2]] * 8


def test_buckets_lower_the_padding():
    lengths = [30, 2, 31, 3, 29, 4, 32, 1]
    padding = {}
    for bucket in (False, True):
        engine = static(max_requests=4, bucket=bucket)
        engine.add(*(request(number, prompt, max_tokens=2) for number, prompt in enumerate(lengths)))
        engine.run()
        padding[bucket] = engine.scheduler.padding_tokens
    assert padding == {False: (32 - 30) + 30 + 1 + 29 + 3 + 28 + 0 + 31 - 4, True: 2 + 1 + 3 + 0 + 2 + 1 + 0 + 3}


def test_the_odd_one_out_is_served_although_others_more_alike_keep_coming():
    engine = static(max_requests=2, bucket=True)
    odd = request(1, 40, max_tokens=1)
    engine.add(request(0, 3, max_tokens=1), odd)
    for number in range(2, 60, 2):
        engine.add(request(number, 3, max_tokens=1), request(number + 1, 3, max_tokens=1))
        engine.step()
    assert odd.queue_time == 1.0  # the oldest of those whom the first batch has left


@pytest.mark.parametrize(
    "make_cache",
    [
        lambda: kv_cache.ConcatKVCache(1),
        lambda: kv_cache.NoKVCache(1),
        lambda: kv_cache.StaticKVCache(layout(), 2, 16),
        lambda: paged(7, block_size=4),
    ],
    ids=["concat", "none", "static", "paged"],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda cache: scheduler.StaticScheduler(cache, 3),
        lambda cache: scheduler.StaticScheduler(cache, 3, bucket=True),
        lambda cache: scheduler.ContinuousScheduler(cache, 3, 1000),
    ],
    ids=["static", "bucket", "continuous"],
)
def test_answers_do_not_depend_on_the_cache_or_the_scheduler(make_cache, make):
    engine = Engine(make_cache(), make)
    requests = [
        request(number, prompt, tokens) for number, (prompt, tokens) in enumerate([(3, 9), (7, 2), (8, 8), (1, 1)])
    ]
    engine.add(*requests)
    engine.run()
    assert [one.token_ids for one in requests] == [
        answer(one.prompt_token_ids, one.params.max_tokens) for one in requests
    ]


def test_a_request_that_is_aborted_keeps_its_row_of_a_static_batch_but_not_its_place_in_the_queue():
    engine = static(max_requests=2)
    rows, queued = [request(0, 3, max_tokens=3), request(1, 3, max_tokens=3)], request(2, 3)
    engine.add(*rows, queued)
    engine.step()
    engine.scheduler.abort(rows[0], "gone")
    engine.scheduler.abort(queued, "gone")
    assert numbers(engine.step()) == [(0, 3, 0, 1), (1, 3, 1, 0)]
    engine.run()
    assert (rows[0].finish_reason, rows[0].error, len(rows[0].token_ids)) == ("abort", "gone", 1)
    assert (queued.finish_reason, queued.token_ids) == ("abort", [])
    assert rows[1].token_ids == answer(rows[1].prompt_token_ids, 3)
    assert engine.held_blocks() == 0


def test_a_static_batch_of_which_all_rows_are_aborted_is_over():
    engine = static()
    rows = [request(0, 3), request(1, 3)]
    engine.add(*rows)
    engine.step()
    for one in rows:
        engine.scheduler.abort(one, "gone")
    assert not engine.busy
    assert engine.held_blocks() == 0


def test_static_batching_refuses_at_once_an_answer_that_could_not_be_held():
    engine = static(paged(2, block_size=4))
    with pytest.raises(OutOfMemory, match="a prompt of 8 tokens, at most 4 more.*room for 12 tokens.*cache holds 8"):
        engine.add(request(0, 8, max_tokens=4))
    engine.add(request(1, 4, max_tokens=4))
    engine.run()


# ---- continuous batching: places and the budget ------------------------------------------------------------------


def test_a_place_that_becomes_free_is_taken_in_the_next_step():
    engine = continuous(max_requests=2)
    engine.add(request(0, 3, max_tokens=1), request(1, 3, max_tokens=4), request(2, 3, max_tokens=2))
    engine.run()
    assert [ids(work.request for work in plan) for plan in engine.history] == [[0, 1], [1, 2], [1, 2], [1]]


def test_one_token_of_everyone_who_decodes_goes_first_and_a_long_prompt_gets_what_is_left():
    engine = continuous(max_batch_tokens=8)
    engine.add(request(0, 2, max_tokens=9), request(1, 2, max_tokens=9))
    engine.step()
    engine.add(request(2, 15, arrival=1.0))
    plans = [numbers(engine.step()) for _ in range(3)]
    assert plans == [
        [(0, 2, 1, 0), (1, 2, 1, 0), (2, 0, 6, 0)],
        [(0, 3, 1, 0), (1, 3, 1, 0), (2, 6, 6, 0)],
        [(0, 4, 1, 0), (1, 4, 1, 0), (2, 12, 3, 0)],
    ]


def test_decoding_goes_before_an_older_prompt_that_is_still_being_computed():
    engine = continuous(max_batch_tokens=4)
    long, short = request(0, 9), request(1, 2)
    engine.add(long)
    engine.step()
    engine.add(short)
    engine.step()
    engine.step()
    assert numbers(engine.step())[0][0] == 0
    assert [numbers(plan) for plan in engine.history[:3]] == [
        [(0, 0, 4, 0)],
        [(0, 4, 4, 0)],
        [(0, 8, 1, 0), (1, 0, 2, 0)],
    ]
    late = request(2, 9, arrival=-5.0)  # older than both
    engine.add(late)
    assert ids(work.request for work in engine.step()) == [0, 1, 2]
    assert ids(work.request for work in engine.step()) == [0, 1, 2]
    assert late.state is State.PREFILLING


def test_with_less_budget_than_requests_the_older_ones_go_on():
    engine = continuous(max_batch_tokens=2)
    engine.add(*(request(number, 1, max_tokens=3) for number in range(4)))
    engine.run()
    assert [ids(work.request for work in plan) for plan in engine.history] == [[0, 1]] * 3 + [[2, 3]] * 3


def test_nothing_to_do_is_an_empty_step():
    assert continuous().step() == []
    assert static().step() == []


# ---- preemption --------------------------------------------------------------------------------------------------


def crowded(*requests: scheduler.Request, blocks: int = 4, **limits) -> Engine:
    """All begin together in a cache of `blocks` blocks of 4 tokens, and outgrow it."""
    engine = continuous(paged(blocks, block_size=4, prefix_sharing=False), **limits)
    engine.add(*requests)
    return engine


def first_preempted(engine: Engine, requests) -> list[int]:
    while not any(one.preemptions for one in requests):
        engine.step()
    return ids(one for one in requests if one.preemptions)


def test_the_youngest_loses_its_memory_first():
    requests = [request(0, 4, 8, arrival=0.2), request(1, 4, 8, arrival=0.9), request(2, 4, 8, arrival=0.5)]
    assert first_preempted(crowded(*requests), requests) == [1]


def test_the_least_important_loses_its_memory_before_younger_ones():
    requests = [request(0, 4, 8, 0.2, priority=1), request(1, 4, 8, 0.5), request(2, 4, 8, 0.9, priority=1)]
    assert first_preempted(crowded(*requests), requests) == [1]


def test_of_those_who_came_together_the_last_loses_its_memory_first_and_keeps_its_place():
    requests = [request(number, 4, 8) for number in range(3)]
    engine = crowded(*requests, max_requests=3)
    assert first_preempted(engine, requests) == [2]
    later = request(3, 1, 1)  # of the same arrival, and it would fit at once
    engine.add(later)
    engine.run()
    assert [one.token_ids for one in requests] == [answer(one.prompt_token_ids, 8) for one in requests]
    assert later.last_token > requests[2].first_token
    started = [
        next(at for at, plan in enumerate(engine.history) if one in [work.request for work in plan]) for one in requests
    ]
    assert started == sorted(started)


def test_a_preempted_request_goes_before_those_who_came_after_it():
    first, second = request(0, 4, 12, arrival=0.0), request(1, 4, 9, arrival=1.0)
    engine = crowded(first, second)
    newcomers = [request(number, 4, 2, arrival=float(number)) for number in range(2, 6)]
    first_preempted(engine, [second])
    engine.add(*newcomers)
    resumed = None
    while engine.busy:
        plan = [work.request for work in engine.step()]
        if resumed is None and second in plan:
            resumed = len(engine.history)
        if resumed is None:
            assert not set(newcomers) & set(plan)
    assert second.token_ids == answer(second.prompt_token_ids, 9)


def test_the_one_that_needs_memory_gives_way_itself_if_it_is_the_last():
    # the older one has room to its block's end when the younger one needs a new block
    older, younger = request(0, 5, 4, arrival=0.0), request(1, 4, 4, arrival=1.0)
    engine = crowded(older, younger, blocks=3)
    engine.step()
    assert numbers(engine.step()) == [(0, 5, 1, 0)]
    assert (older.preemptions, younger.preemptions, younger.state) == (0, 1, State.PREEMPTED)
    engine.run()
    assert younger.token_ids == answer(younger.prompt_token_ids, 4)


def test_nobody_is_let_in_in_a_step_in_which_somebody_gave_way():
    requests = [request(0, 4, 8), request(1, 4, 8, arrival=1.0), request(2, 1, 1, arrival=2.0)]
    engine = crowded(*requests, blocks=3, max_requests=2)
    first_preempted(engine, requests)
    assert ids(work.request for work in engine.history[-1]) == [0]
    assert ids(engine.scheduler.waiting) == [2, 1]  # in the order of the queue from the next admission on


def test_a_preempted_request_takes_over_what_is_left_of_its_own_text():
    requests = [request(0, 4, 9), request(1, 3, 9, arrival=1.0)]
    engine = continuous(paged(4, block_size=4))
    engine.add(*requests)
    engine.run()
    assert requests[1].preemptions == 1
    assert requests[1].prefix_hits == 4  # one whole block: its prompt, and the first token of its answer
    assert requests[1].token_ids == answer(requests[1].prompt_token_ids, 9)


class Stubborn(simulation.SimulatedCache):
    """Refuses a request's first, second, ... reservation as told, whatever is free."""

    def __init__(self, refused: dict[int, set[int]]):
        super().__init__(64, 4)
        self.refused, self.asked = refused, dict.fromkeys(refused, 0)

    def reserve(self, request_id: int, tokens: int) -> None:
        if request_id in self.asked:
            self.asked[request_id] += 1
            if self.asked[request_id] in self.refused[request_id]:
                raise OutOfMemory("no")
        super().reserve(request_id, tokens)


def test_who_gives_way_in_a_step_has_no_part_in_it_and_its_share_of_the_budget_is_free_again():
    engine = continuous(Stubborn({0: {3}}), max_batch_tokens=5)
    long, short = request(0, 9, arrival=0.0), request(1, 1, arrival=1.0)
    engine.add(long)
    engine.step()  # 5 of 9; two reservations
    engine.scheduler.running.append(short)
    engine.cache.reserve(1, 2)
    engine.cache.advance(1, 1)
    short.begin(0.0)
    short.record(5, 0.0)  # it decodes, so its turn is before the older one's, who then finds no memory
    assert numbers(engine.step()) == [(0, 5, 4, 0)]
    assert (short.state, engine.scheduler.budget) == (State.PREEMPTED, 1)


# ---- memory that can never be enough -----------------------------------------------------------------------------


def test_a_prompt_that_can_never_fit_fails_at_once_with_both_numbers_and_the_others_go_on():
    engine = continuous(paged(2, block_size=4))
    other = request(1, 4, 3)
    engine.add(other)
    with pytest.raises(OutOfMemory, match="request 0 .*needs room for 9 tokens, and the whole cache holds 8"):
        engine.add(request(0, 9, 4))
    engine.run()
    assert other.token_ids == answer(other.prompt_token_ids, 3)


def test_an_answer_that_outgrows_the_cache_ends_with_both_numbers_and_nobody_gave_way_to_it():
    engine = continuous(paged(2, block_size=4))
    large, small = request(0, 8, 4), request(1, 3, 3, arrival=1.0)  # field case: 8 + 4 tokens in two blocks of 4
    engine.add(large, small)
    engine.run()
    assert (large.state, large.finish_reason) == (State.ABORTED, "abort")
    assert large.token_ids == answer(large.prompt_token_ids, 1)  # its first token needed no room
    assert "a prompt of 8 tokens, at most 4 more) needs room for 9 tokens, and the whole cache holds 8" in large.error
    assert (small.token_ids, small.preemptions) == (answer(small.prompt_token_ids, 3), 0)


def test_an_answer_that_fits_to_the_last_slot_is_given_in_full():
    engine = continuous(paged(2, block_size=4))
    one = request(0, 5, 4)  # its last token is not stored
    engine.add(one)
    engine.run()
    assert one.token_ids == answer(one.prompt_token_ids, 4)


@pytest.mark.parametrize("make", [continuous, static])
def test_memory_that_others_hold_for_ever_fails_a_request_and_not_the_engine(make):
    cache = paged(4, block_size=4)
    cache.reserve(77, 8)  # none of the scheduler's
    engine = make(cache)
    large, larger, small = request(0, 9, 2), request(2, 10, 2, arrival=0.5), request(1, 3, 3, arrival=1.0)
    engine.add(large, larger, small)
    assert ids(work.request for work in engine.step()) == [1]
    assert (large.finish_reason, larger.finish_reason) == ("abort", "abort")
    # the numbers are those of the scheduler, or of the cache
    assert (
        "needs room for 9 tokens, and the cache has not so much free" in large.error or "2 of 4 are free" in large.error
    )
    engine.run()
    assert small.token_ids == answer(small.prompt_token_ids, 3)


def test_when_the_last_who_runs_cannot_go_on_those_who_gave_way_to_it_begin_in_the_same_step():
    engine = continuous(Stubborn({0: {3, 4, 5}}))
    older, younger = request(0, 4, 12), request(1, 3, 4, arrival=1.0)
    engine.add(older, younger)
    engine.step()
    assert numbers(engine.step()) == [(1, 0, 4, 0)]  # its prompt again, and its first token
    assert (older.finish_reason, younger.preemptions) == ("abort", 1)
    assert older.error.startswith("request 0 needs room for 5 tokens, and the cache has not so much free")
    engine.run()
    assert younger.token_ids == answer(younger.prompt_token_ids, 4)


def test_a_large_request_at_the_head_of_the_queue_is_not_overtaken_for_ever():
    engine = continuous(paged(4, block_size=4), max_requests=4)
    large = request(1, 15, 1, arrival=1.0)
    engine.add(request(0, 3, 6), large)
    for number in range(2, 60):
        engine.add(request(number, 3, 2, arrival=float(number)))
        engine.step()
    assert large.queue_time == 5.0  # as soon as the first has its 6 tokens


def test_an_admission_that_fails_leaves_everything_as_it_was():
    engine = continuous(paged(4, block_size=4))
    prompt = list(range(9))
    first, second = request(0, prompt, 3), request(1, [*prompt[:8], 50, 51], 1, arrival=1.0)
    engine.add(first)
    engine.step()
    engine.cache.reserve(77, 4)  # the last block: two of the three that the second needs are there, and shared
    engine.add(second)
    engine.step()
    assert set(engine.cache.block_tables) == {0, 77}
    assert engine.cache.allocator.ref_counts == [1, 1, 1, 1]
    assert (second.state, second.prefix_hits, second.first_scheduled) == (State.WAITING, 0, None)
    assert engine.scheduler.waiting == [second]


# ---- who goes first ----------------------------------------------------------------------------------------------


def order_of(policy, *requests: scheduler.Request) -> list[int]:
    engine = continuous(max_requests=1, policy=policy)
    engine.add(*requests)
    engine.run()
    return ids(sorted(requests, key=lambda one: one.first_scheduled))


def test_priorities_are_served_in_order_and_within_one_the_first_who_came():
    requests = [
        request(number, 2, 1, arrival=float(number), priority=p) for number, p in enumerate([0, 2, -1, 1, 2, 0])
    ]
    assert order_of(scheduler.FirstComeFirstServed(ageing=1e6), *requests) == [1, 4, 3, 0, 5, 2]


def test_without_ageing_only_the_time_of_arrival_counts():
    requests = [request(number, 2, 1, arrival=-float(number), priority=number % 2) for number in range(4)]
    assert order_of(scheduler.FirstComeFirstServed(ageing=0.0), *requests) == [3, 2, 1, 0]


@pytest.mark.parametrize(("ageing", "served_at"), [(5.0, 5.0), (20.0, 20.0), (1e6, None)])
def test_a_request_of_low_priority_ages_under_a_steady_stream_of_important_ones(ageing, served_at):
    engine = continuous(max_requests=1, policy=scheduler.FirstComeFirstServed(ageing))
    low = request(0, 2, 1, arrival=0.0)
    engine.add(low)
    for number in range(1, 60):  # one a second, and one a second is all that can be served
        engine.add(request(number, 2, 1, arrival=engine.now, priority=1))
        engine.step()
    assert low.first_scheduled == served_at


def test_the_shortest_goes_first_until_a_long_one_has_waited_as_long_as_it_is():
    policy = scheduler.ShortestFirst(seconds_per_token=0.5)
    together = [request(0, 20, 1), request(1, 5, 9), request(2, 5, 8)]
    assert order_of(policy, *together) == [2, 1, 0]
    engine = continuous(max_requests=1, policy=policy)
    long = request(0, 20, 1)
    engine.add(long)
    for number in range(1, 60):
        engine.add(request(number, 2, 1, arrival=engine.now))
        engine.step()
    assert long.first_scheduled == 9.0  # 21 tokens set it back by 10.5 seconds, those of the others by 1.5


def test_priority_counts_under_every_policy():
    for policy in (scheduler.ShortestFirst(), scheduler.LongestPrefixMatch(paged(2))):
        assert order_of(policy, request(0, 4, 2), request(1, 4, 2, priority=1)) == [1, 0]


def test_what_the_cache_holds_goes_first_but_not_for_ever():
    cache = paged(64)
    policy = scheduler.LongestPrefixMatch(cache, seconds_per_token=0.5)
    shared = list(range(9))
    engine = continuous(cache, max_requests=1, policy=policy)
    engine.add(request(0, shared, 1))
    engine.run()
    stranger, friend = request(1, 9, 1, arrival=1.0), request(2, [*shared, 60], 1, arrival=2.0)
    engine.add(stranger, friend)
    queries = cache.prefix_query_tokens
    engine.step()
    assert (friend.first_scheduled, stranger.first_scheduled) == (1.0, None)
    assert (friend.prefix_hits, cache.prefix_query_tokens - queries) == (8, 10)  # looking is not asking
    for number in range(3, 40):
        engine.add(request(number, [*shared, number], 1, arrival=engine.now))
        engine.step()
    assert stranger.first_scheduled == 5.0  # 8 tokens found are worth 4 seconds


def test_the_policy_decides_who_begins_and_not_who_gives_way():
    old, young = request(0, 4, 9, arrival=0.0), request(1, 4, 3, arrival=1.0)
    engine = crowded(old, young, blocks=3, policy=scheduler.ShortestFirst(seconds_per_token=100.0))
    engine.step()
    assert ids(engine.scheduler.running) == [1, 0]
    assert first_preempted(engine, [old, young]) == [1]


# ---- ends, and mistakes of the caller ----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(8))
def test_a_request_can_be_aborted_at_any_moment(steps):
    engine = continuous(paged(4, block_size=4, prefix_sharing=False), max_batch_tokens=6)
    requests = [request(0, 4, 6, arrival=0.0), request(1, 7, 3, arrival=1.0), request(2, 3, 2, arrival=2.0)]
    engine.add(*requests)
    for _ in range(steps):
        engine.step()
    was, tokens = requests[1].state, list(requests[1].token_ids)
    engine.scheduler.abort(requests[1], "gone")
    engine.cache.audit()
    assert set(engine.cache.block_tables) == set(ids(engine.scheduler.running))
    engine.run()
    assert engine.held_blocks() == 0
    if was is not State.FINISHED:
        assert (requests[1].state, requests[1].error, requests[1].token_ids) == (State.ABORTED, "gone", tokens)
    for one in (requests[0], requests[2]):
        assert one.token_ids == answer(one.prompt_token_ids, one.params.max_tokens)


def test_the_moments_of_the_test_above_are_all_there_are():
    seen = set()
    engine = continuous(paged(4, block_size=4, prefix_sharing=False), max_batch_tokens=6)
    requests = [request(0, 4, 6, arrival=0.0), request(1, 7, 3, arrival=1.0), request(2, 3, 2, arrival=2.0)]
    engine.add(*requests)
    for _ in range(8):
        seen.add(requests[1].state)
        engine.step()
    assert seen == set(State) - {State.FINISHED, State.ABORTED}


@pytest.mark.parametrize("make", [continuous, static])
def test_what_has_ended_stays_as_it_is(make):
    engine = make()
    one = request(0, 2, 1)
    engine.add(one)
    engine.run()
    engine.scheduler.abort(one, "too late")
    engine.scheduler.finish(one, "stop")
    assert (one.state, one.finish_reason, one.error) == (State.FINISHED, "length", None)


@pytest.mark.parametrize("make", [continuous, static])
def test_a_number_that_is_in_use_is_refused_and_can_be_used_again_later(make):
    engine = make(max_requests=1)
    engine.add(request(0, 2, 2), request(1, 2, 2))
    engine.step()
    for number in (0, 1):
        with pytest.raises(ValueError, match=f"request {number} is waiting, or another one of that number"):
            engine.add(request(number, 2))
    engine.run()
    again = request(0, 2, 2)
    engine.add(again)
    engine.run()
    assert again.token_ids == answer(again.prompt_token_ids, 2)
    with pytest.raises(ValueError, match="request 0 is finished"):
        engine.add(again)


def test_aborting_a_stranger_takes_nothing_from_its_namesake():
    engine = continuous()
    one = request(0, 5, 3)
    engine.add(one)
    engine.step()
    held = engine.held_blocks()
    engine.scheduler.abort(request(0, 5), "never added")
    assert engine.held_blocks() == held == 2
    engine.run()
    assert one.token_ids == answer(one.prompt_token_ids, 3)


def test_limits_under_which_nothing_could_run_are_refused():
    for limits in ({"max_requests": 0}, {"max_batch_tokens": 0}, {"max_requests": -1}):
        with pytest.raises(RequestError, match="at least 1"):
            continuous(**limits)
    with pytest.raises(RequestError, match="max_requests=0"):
        static(max_requests=0)


def test_every_policy_has_a_finite_worth_of_a_priority():
    for policy in (scheduler.FirstComeFirstServed, scheduler.ShortestFirst, scheduler.LongestPrefixMatch):
        ageing = next(field for field in dataclasses.fields(policy) if field.name == "ageing")
        assert math.isfinite(ageing.default)
        assert ageing.default > 0
