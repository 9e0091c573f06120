"""A simulation runs the engine's own schedulers, and its figures are those that arithmetic gives."""

from __future__ import annotations

import math
import statistics
import time

import pytest
from acting_engine import request

from llmfromscratch import scheduler, simulation, steps
from llmfromscratch.simulation import CostModel, SimulatedCache, Workload, simulate


def continuous(cache):
    return scheduler.ContinuousScheduler(cache)


def static(cache):
    return scheduler.StaticScheduler(cache)


# ---- the clock and the records -----------------------------------------------------------------------------------


def test_one_request_takes_what_its_steps_cost():
    one = request(0, 10, max_tokens=4, arrival=3.0)
    run = simulate(continuous, [one], CostModel(fixed=1.0, per_token=0.5))
    assert [(record.start, record.end) for record in run.steps] == [(3.0, 9.0), (9.0, 10.5), (10.5, 12.0), (12.0, 13.5)]
    assert (one.queue_time, one.ttft, one.tpot) == (0.0, 6.0, 1.5)
    assert (run.seconds, run.tokens_per_second) == (10.5, 4 / 10.5)


def test_a_cost_per_context_counts_every_token_that_is_looked_back_at():
    one = request(0, 3, max_tokens=2)
    run = simulate(continuous, [one], CostModel(fixed=0.0, per_token=0.0, per_context=1.0))
    assert [record.end - record.start for record in run.steps] == [1 + 2 + 3, 4]


def test_padding_costs_what_other_tokens_cost():
    requests = [request(0, 10, max_tokens=1), request(1, 2, max_tokens=2)]
    run = simulate(static, requests, CostModel(fixed=0.0, per_token=1.0))
    assert [record.end - record.start for record in run.steps] == [20.0, 2.0]


def test_time_that_passes_with_nothing_to_do_is_not_simulated_step_by_step():
    requests = [request(0, 2, max_tokens=1, arrival=1.0), request(1, 2, max_tokens=1, arrival=1e6)]
    run = simulate(continuous, requests, CostModel(1.0, 0.0))
    assert [record.start for record in run.steps] == [1.0, 1e6]


def test_a_request_that_arrives_during_a_step_takes_part_in_the_next():
    requests = [request(0, 2, max_tokens=3), request(1, 2, max_tokens=1, arrival=1.5)]
    run = simulate(continuous, requests, CostModel(1.0, 0.0))
    assert [[work.request_id for work in record.work] for record in run.steps] == [[0], [0], [0, 1]]
    assert requests[1].queue_time == 0.5


def test_the_records_say_who_did_what_who_waited_who_gave_way_and_how_full_the_cache_was():
    requests = [request(0, 4, 6), request(1, 4, 6, arrival=0.5), request(2, 4, 1, arrival=0.6)]

    def two_at_a_time(cache):
        return scheduler.ContinuousScheduler(cache, max_requests=2, max_batch_tokens=3)

    run = simulate(two_at_a_time, requests, CostModel(1.0, 0.0), num_blocks=3, block_size=4)
    assert [record.work for record in run.steps[:4]] == [
        ((0, "prefill", 3, 0),),
        ((0, "prefill", 1, 0), (1, "prefill", 2, 0)),
        ((0, "decode", 1, 0), (1, "prefill", 2, 0)),
        ((0, "decode", 1, 0),),
    ]
    assert [record.waiting for record in run.steps[:4]] == [(), (2,), (2,), (2, 1)]
    assert [record.preempted for record in run.steps[:4]] == [(), (), (), (1,)]
    assert [(record.blocks_used, record.blocks_total) for record in run.steps[:4]] == [(1, 3), (2, 3), (3, 3), (2, 3)]


def test_a_row_that_has_ended_is_idle_in_the_records():
    requests = [request(0, 2, max_tokens=1), request(1, 3, max_tokens=2)]
    run = simulate(static, requests, CostModel(1.0, 0.0))
    assert [record.work for record in run.steps] == [
        ((0, "prefill", 2, 1), (1, "prefill", 3, 0)),
        ((0, "idle", 0, 1), (1, "decode", 1, 0)),
    ]


def test_a_cache_without_blocks_uses_none():
    assert steps.blocks_in_use(object()) == (0, 0)


def test_a_share_of_requests_had_their_first_token_in_time():
    requests = [request(number, 1, max_tokens=1) for number in range(10)]

    def one_by_one(cache):
        return scheduler.ContinuousScheduler(cache, max_requests=1)

    run = simulate(one_by_one, requests, CostModel(1.0, 0.0))
    assert [run.ttft(share) for share in (0.0, 0.1, 0.5, 0.95, 1.0)] == [1.0, 1.0, 5.0, 10.0, 10.0]
    assert math.isnan(simulation.Run([], []).ttft(0.5))
    assert simulation.Run([], []).tokens_per_second == 0.0


def test_the_cost_of_steps_is_found_again_from_their_records():
    cost = CostModel(fixed=0.25, per_token=0.125)
    run = simulate(static, Workload(count=20).requests(), cost)
    found = CostModel.fit(run.steps)
    assert (found.fixed, found.per_token) == (pytest.approx(0.25), pytest.approx(0.125))


# ---- workloads ---------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    def run(seed: int):
        load = Workload(count=60, seed=seed, priorities=(0, 0, 2))
        done = simulate(continuous, load.requests(), num_blocks=120)
        return done.steps, [(one.prompt_token_ids, one.params, one.arrival, one.last_token) for one in done.requests]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_arrivals_are_a_poisson_process_of_the_rate_that_was_asked_for():
    arrivals = [one.arrival for one in Workload(count=4000, rate=5.0, prompt_tokens=(1, 1)).requests()]
    gaps = [after - before for before, after in zip([0.0, *arrivals], arrivals, strict=False)]
    # exponential gaps: mean and deviation are both 1 / rate; 4000 of them stray by 1.6 %, so 8 % is five deviations
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.08)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.12)
    assert sum(gap > 0.2 for gap in gaps) / 4000 == pytest.approx(1 / math.e, abs=0.04)


def test_lengths_reach_both_bounds_and_each_doubling_is_equally_likely():
    load = Workload(count=4000, prompt_tokens=(16, 511), output_tokens=(1, 3), priorities=(0, 1), vocab_size=5)
    requests = load.requests()
    prompts = [len(one.prompt_token_ids) for one in requests]
    assert (min(prompts), max(prompts)) == (16, 511)
    for low in (16, 32, 64, 128, 256):
        assert sum(low <= prompt < 2 * low for prompt in prompts) / 4000 == pytest.approx(1 / 5, abs=0.035)
    assert {one.params.max_tokens for one in requests} == {1, 2, 3}
    assert {one.params.priority for one in requests} == {0, 1}
    assert {token for one in requests for token in one.prompt_token_ids} == set(range(5))
    assert all(one.params.ignore_eos for one in requests)


# ---- whole runs --------------------------------------------------------------------------------------------------


def test_a_thousand_requests_are_simulated_in_about_a_second():
    requests = Workload(count=1000, rate=2.0).requests()
    began = time.process_time()
    run = simulate(continuous, requests)
    assert time.process_time() - began < 6  # about one on an idle machine
    assert [one.finish_reason for one in run.requests] == ["length"] * 1000
    assert [len(one.token_ids) for one in run.requests] == [one.params.max_tokens for one in run.requests]


def test_continuous_batching_has_more_throughput_and_shorter_waits_than_static_batching():
    load = Workload(count=150, rate=2.0)
    runs = {make: simulate(make, load.requests()) for make in (static, continuous)}
    assert runs[continuous].tokens_per_second > 1.7 * runs[static].tokens_per_second
    assert runs[continuous].ttft(0.95) < runs[static].ttft(0.95)


def test_shortest_first_lowers_the_mean_wait():
    load = Workload(count=300, rate=8.0)

    def shortest(cache):
        return scheduler.ContinuousScheduler(cache, policy=scheduler.ShortestFirst(seconds_per_token=1.0))

    waits = [
        statistics.mean(one.ttft for one in simulate(make, load.requests()).requests) for make in (continuous, shortest)
    ]
    assert waits[1] < 0.8 * waits[0]


def test_a_smaller_budget_shortens_the_longest_pause_between_tokens():
    load = Workload(count=100, rate=4.0)

    def longest_step(budget: int) -> float:
        run = simulate(lambda cache: scheduler.ContinuousScheduler(cache, 32, budget), load.requests())
        return max(record.end - record.start for record in run.steps)

    cost = CostModel()
    assert longest_step(64) <= cost.fixed + 64 * cost.per_token + 1e-9
    assert longest_step(512) > 3 * longest_step(64)


def test_a_request_that_can_never_fit_fails_and_the_others_are_served():
    requests = [request(0, 40, 4), request(1, 4, 4)]
    run = simulate(continuous, requests, num_blocks=2, block_size=16)
    assert (requests[0].finish_reason, requests[1].finish_reason) == ("abort", "length")
    assert "40 tokens, and the whole cache holds 32" in requests[0].error
    assert len(run.steps) == 4


def test_an_answer_that_outgrows_the_cache_ends_a_run_that_has_nothing_else_to_do():
    one = request(0, 30, 10)
    run = simulate(continuous, [one], num_blocks=2, block_size=16)
    assert (one.finish_reason, len(one.token_ids), len(run.steps)) == ("abort", 3, 3)


# ---- schedulers that do not do their duty ------------------------------------------------------------------------


class Idle(scheduler.ContinuousScheduler):
    def schedule(self, now):
        return []


class Forgetful(scheduler.ContinuousScheduler):
    def finish(self, request, reason):
        """Lets it run on."""


def test_a_scheduler_that_plans_nothing_is_stopped():
    with pytest.raises(RuntimeError, match="plans nothing, and 1 requests wait, 0 run"):
        simulate(Idle, [request(0, 3)])


def test_a_scheduler_that_never_ends_is_stopped():
    with pytest.raises(RuntimeError, match="after 50 steps 1 have not ended"):
        simulate(Forgetful, [request(0, 3)], max_steps=50)


def test_a_scheduler_that_takes_no_memory_is_found_out(monkeypatch):
    monkeypatch.setattr(scheduler, "make_room", lambda planner, request, tokens: True)
    with pytest.raises(ValueError, match="request 0 computes its token 17, and has reserved room for 16"):
        simulate(scheduler.ContinuousScheduler, [request(0, 16)])


def test_the_audit_of_a_simulated_cache_finds_a_block_with_two_owners():
    cache = SimulatedCache(4, 4)
    cache.reserve(0, 6)
    cache.audit()
    cache.block_tables[1] = cache.block_tables[0][:1]
    with pytest.raises(RuntimeError, match="is not all blocks"):
        cache.audit()
