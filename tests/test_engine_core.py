"""The engine's step: everything that goes wrong in one stays where it went wrong, and nothing is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from tiny_models import VOCAB, all_logits, random_ids, tiny_model

from llmfromscratch import SamplingParams, kv_cache, sampling, scheduler
from llmfromscratch.engine_core import EngineCore
from llmfromscratch.errors import OutOfMemory
from llmfromscratch.scheduler import Request
from llmfromscratch.steps import StepRecord, WorkRecord

NETWORK = tiny_model(num_hidden_layers=2)
CONFIG = NETWORK.config
LAYOUT = kv_cache.CacheLayout.of(CONFIG, torch.float64)
FIVE = SamplingParams(max_tokens=5, ignore_eos=True)


class Broken:
    """The model, with a fault in chosen calls: fault(call, logits, batch) raises, or gives other logits."""

    def __init__(self, fault: Callable):
        self.fault, self.calls = fault, 0
        self.batches = []

    def __call__(self, batch, cache):
        self.calls += 1
        self.batches.append(batch)
        logits = NETWORK(batch, cache)
        changed = self.fault(self.calls, logits, batch)
        return logits if changed is None else changed


def new_core(network=NETWORK, num_blocks=60, planner="continuous", sampler=None, **settings) -> EngineCore:
    cache = kv_cache.PagedKVCache(LAYOUT, num_blocks, block_size=4)
    plan = {
        "continuous": lambda: scheduler.ContinuousScheduler(cache, 8, 64),
        "static": lambda: scheduler.StaticScheduler(cache, 8),
    }[planner]() if isinstance(planner, str) else planner(cache)  # fmt: skip
    return EngineCore(network, cache, plan, sampler or sampling.Sampler(), CONFIG.eos_token_ids, 96, **settings)


def asked(*lengths: int, params: SamplingParams = FIVE) -> list[Request]:
    return [Request(number, random_ids(length, number), params) for number, length in enumerate(lengths)]


def run(core: EngineCore, requests: list[Request]) -> list[Request]:
    for request in requests:
        core.add(request)
    for _ in range(500):
        if not core.has_work:
            break
        core.step()
        core.cache.audit()
    clean(core)
    assert all(request.ended for request in requests)
    return requests


def clean(core: EngineCore) -> None:
    core.cache.audit()
    assert not core.has_work
    assert core.cache.block_tables == {}
    assert (core.scheduler.running, core.scheduler.waiting) == ([], [])


def greedy(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(all_logits(NETWORK, ids)[-1].argmax()))
    return ids[len(prompt) :]


def expected(requests: list[Request]) -> list[list[int]]:
    return [greedy(request.prompt_token_ids, request.params.max_tokens) for request in requests]


def said(requests: list[Request]) -> list[list[int]]:
    return [request.token_ids for request in requests]


# ---- the step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", ["continuous", "static"])
def test_requests_side_by_side_get_the_models_greedy_tokens(planner):
    requests = run(new_core(planner=planner), asked(3, 11, 1, 8))
    assert said(requests) == expected(requests)
    assert [request.finish_reason for request in requests] == ["length"] * 4


def test_a_step_is_one_forward_pass_over_all_and_asks_only_for_the_logits_that_are_needed():
    network = Broken(lambda *_: None)
    core = new_core(network, planner=lambda cache: scheduler.ContinuousScheduler(cache, 4, 8))
    for request in asked(3, 12, params=SamplingParams(max_tokens=3, ignore_eos=True)):
        core.add(request)
    while core.has_work:
        core.step()
    spans = [[(span.request_id, span.start, span.length) for span in batch.spans] for batch in network.batches]
    assert spans == [[(0, 0, 3), (1, 0, 5)], [(0, 3, 1), (1, 5, 7)], [(0, 4, 1), (1, 12, 1)], [(1, 13, 1)]]
    assert [batch.logit_rows.tolist() for batch in network.batches] == [[2], [0, 7], [0, 1], [0]]


def test_a_step_of_prompt_chunks_alone_needs_no_logits():
    network = Broken(lambda *_: None)
    core = new_core(network, planner=lambda cache: scheduler.ContinuousScheduler(cache, 4, 4))
    requests = asked(10)
    core.add(requests[0])
    assert core.step() == []
    assert network.batches[0].logit_rows.tolist() == []
    while core.has_work:
        core.step()
    assert said(requests) == expected(requests)


def test_padding_is_computed_and_leaves_no_trace():
    network = Broken(lambda *_: None)
    core = new_core(network, planner="static")
    requests = asked(3, 9, params=SamplingParams(max_tokens=2, ignore_eos=True))
    requests[0].params = FIVE
    run(core, requests)
    assert [len(batch.token_ids) for batch in network.batches] == [2 * 9, 2, 2, 2, 2]  # the ended row computes on
    assert [len(batch.logit_rows) for batch in network.batches] == [2, 2, 1, 1, 1]
    assert said(requests) == expected(requests)
    assert (core.scheduler.padding_tokens, core.scheduler.idle_tokens) == (6, 3)


def test_a_step_returns_who_got_a_token_or_ended():
    core = new_core(planner=lambda cache: scheduler.ContinuousScheduler(cache, 4, 8))
    requests = asked(3, 12, params=SamplingParams(max_tokens=2, ignore_eos=True))
    for request in requests:
        core.add(request)
    steps = []
    while core.has_work:
        steps.append([request.request_id for request in core.step()])
    assert steps == [[0], [0, 1], [1]]
    assert core.step() == []


def test_end_tokens_stop_length_counts_and_the_end_token_wins():
    class Says:
        def start(self, params, prompt_token_ids, constraint=None):
            return params.seed

        def sample(self, logits, rows):
            return rows

    end = CONFIG.eos_token_ids[1]
    requests = [
        Request(0, [7], SamplingParams(max_tokens=4, seed=end)),
        Request(1, [7], SamplingParams(max_tokens=1, seed=end)),
        Request(2, [7], SamplingParams(max_tokens=4, seed=end, ignore_eos=True)),
        Request(3, [7], SamplingParams(max_tokens=4, seed=9, stop_token_ids=(9,))),
        Request(4, [7], SamplingParams(max_tokens=1, seed=9)),
    ]
    run(new_core(sampler=Says()), requests)
    assert [(request.finish_reason, len(request.token_ids)) for request in requests] == [
        ("stop", 1), ("stop", 1), ("length", 4), ("stop", 1), ("length", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("planner", ["continuous", "static"])
def test_an_answer_ends_where_the_context_is_full(planner):
    core = new_core(planner=planner, num_blocks=24)  # 96 tokens: less than prompt and max_tokens together
    requests = run(core, [Request(0, random_ids(93), SamplingParams(max_tokens=50, ignore_eos=True))])
    assert (len(requests[0].token_ids), requests[0].finish_reason) == (3, "length")
    assert said(requests) == [greedy(requests[0].prompt_token_ids, 3)]


def test_a_prompt_as_long_as_the_context_ends_at_once_and_says_so():
    core = new_core()
    request = Request(0, random_ids(96), FIVE)
    core.add(request)
    assert (request.finish_reason, request.token_ids) == ("abort", [])
    assert "the prompt has 96 tokens; the context holds 96" in request.error
    clean(core)


def test_the_number_of_a_request_in_flight_is_refused():
    core = new_core()
    core.add(Request(3, [5], FIVE))
    with pytest.raises(ValueError, match="request 3 is in flight already"):
        core.add(Request(3, [6], FIVE))
    while core.has_work:
        core.step()
    run(core, [Request(3, [6], FIVE)])


# ---- memory ------------------------------------------------------------------------------------------------------


# Field case 13: two blocks of 4, a prompt of 8, 4 new tokens.
@pytest.mark.parametrize("planner", ["continuous", "static"])
def test_a_request_that_can_never_fit_ends_with_the_numbers_and_the_others_go_on(planner):
    core = new_core(num_blocks=2, planner=planner)
    requests = asked(3, 8, 30, 2, params=SamplingParams(max_tokens=4, ignore_eos=True))
    run(core, requests)
    assert [request.finish_reason for request in requests] == ["length", "abort", "abort", "length"]
    # computed as far as it goes, where memory is not taken for the whole answer at once
    assert len(requests[1].token_ids) == (1 if planner == "continuous" else 0)
    for request, size in ((requests[1], "8 tokens"), (requests[2], "30 tokens")):
        assert size in request.error
        assert "the whole cache holds 8" in request.error
        assert "kv_cache_memory" in request.error
    assert requests[0].token_ids == expected(requests)[0]
    assert requests[3].token_ids == expected(requests)[3]


# ---- faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", ["continuous", "static"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_logits_end_one_request_and_keep_what_it_said(planner, value):
    def fault(call, logits, batch):
        if call == 3:
            logits = logits.clone()
            logits[1, 17] = value
            return logits
        return None

    requests = run(new_core(Broken(fault), planner=planner), asked(4, 9, 2))
    assert [request.finish_reason for request in requests] == ["length", "abort", "length"]
    assert "NaN or infinite" in requests[1].error
    wanted = expected(requests)
    assert requests[1].token_ids == wanted[1][:2]
    assert said(requests)[::2] == wanted[::2]


@pytest.mark.parametrize("planner", ["continuous", "static"])
@pytest.mark.parametrize("broken_call", [1, 2, 4])
def test_a_step_that_fails_ends_its_own_requests_by_name_and_the_engine_goes_on(planner, broken_call, caplog):
    def fault(call, logits, batch):
        if call == broken_call:
            raise ValueError("a weight fell off")

    core = new_core(Broken(fault), planner=planner)
    first = run(core, asked(4, 9))
    for request in first:
        assert request.finish_reason == "abort"
        assert "the model failed in a step of this request: ValueError: a weight fell off" in request.error
        assert request.token_ids == greedy(request.prompt_token_ids, broken_call - 1)
    assert "a weight fell off" in caplog.text  # with the place in the code, for whoever has written it
    second = run(core, [Request(7, random_ids(5), FIVE)])
    assert said(second) == expected(second)


def test_those_who_had_no_part_in_a_failing_step_go_on():
    def fault(call, logits, batch):
        if 1 in [span.request_id for span in batch.spans]:
            raise RuntimeError("out of memory somewhere")

    core = new_core(Broken(fault), planner=lambda cache: scheduler.ContinuousScheduler(cache, 1))
    requests = run(core, asked(4, 9, 3))
    assert [request.finish_reason for request in requests] == ["length", "abort", "length"]
    assert said(requests)[::2] == expected(requests)[::2]


def test_a_sampler_that_fails_ends_one_request():
    class Failing(sampling.Sampler):
        def sample(self, logits, rows):
            if any(row.params.seed == 13 for row in rows):
                raise ZeroDivisionError("no luck")
            return super().sample(logits, rows)

    requests = asked(4, 9, 2)
    requests[1].params = SamplingParams(max_tokens=5, seed=13)
    run(new_core(sampler=Failing()), requests)
    assert [request.finish_reason for request in requests] == ["length", "abort", "length"]
    assert requests[1].error == "the sampler failed: ZeroDivisionError: no luck"
    assert said(requests)[::2] == expected(requests)[::2]


WARM = SamplingParams(max_tokens=5, temperature=1.3, seed=4, frequency_penalty=0.5, logprobs=1, ignore_eos=True)


class Fickle:
    """A constraint that allows everything and fails from the n-th call of one of its methods on."""

    def __init__(self, method: str, at: int):
        self.method, self.left = method, at

    def tick(self, method: str) -> None:
        self.left -= method == self.method
        if self.left <= 0:
            raise ZeroDivisionError("no luck")

    def allowed(self):
        self.tick("allowed")
        return torch.ones(VOCAB, dtype=torch.bool)

    def advance(self, token_id):
        self.tick("advance")


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("method", ["allowed", "advance"])
@pytest.mark.parametrize("at", [1, 3])
def test_a_constraint_that_fails_ends_its_request_and_costs_the_others_no_random_number(place, method, at, caplog):
    wanted = run(new_core(), asked(4, 9, 2, params=WARM))
    requests = asked(4, 9, 2, params=WARM)
    requests[place].constraint = Fickle(method, at)
    run(new_core(), requests)
    assert [request.finish_reason for request in requests].count("abort") == 1
    assert requests[place].error == "the sampler failed: ZeroDivisionError: no luck"
    assert requests[place].token_ids == wanted[place].token_ids[: at - 1 + (method == "advance")]
    for request, other in zip(requests, wanted, strict=True):
        assert request is requests[place] or request.token_ids == other.token_ids
        assert [entry.token_id for entry in request.logprobs] == request.token_ids


def test_a_step_is_one_call_of_the_sampler_with_the_rows_that_it_began():
    calls = []

    class Watched(sampling.Sampler):
        def start(self, params, prompt_token_ids, constraint=None):
            row = super().start(params, prompt_token_ids, constraint)
            calls.append(("start", row))
            return row

        def sample(self, logits, rows):
            assert (logits.dtype, logits.shape) == (torch.float32, (len(rows), VOCAB))
            calls.append(("sample", list(rows)))
            return super().sample(logits, rows)

    requests = run(new_core(sampler=Watched()), asked(3, 11, 1))
    rows = [row for kind, row in calls if kind == "start"]
    assert [row.prompt_token_ids for row in rows] == [request.prompt_token_ids for request in requests]
    assert calls[3:] == [("sample", rows)] * 5
    assert [row.token_ids for row in rows] == said(requests) == expected(requests)


def test_a_row_without_finite_logits_is_not_shown_to_the_sampler():
    def fault(call, logits, batch):
        logits = logits.clone()
        logits[1, 17] = float("nan")
        return logits if call == 2 else None

    seen = []

    class Watched(sampling.Sampler):
        def sample(self, logits, rows):
            seen.append([len(row.prompt_token_ids) for row in rows])
            return super().sample(logits, rows)

    requests = run(new_core(Broken(fault), sampler=Watched()), asked(4, 9, 2))
    assert seen == [[4, 9, 2], *[[4, 2]] * 4]
    assert said(requests)[::2] == expected(requests)[::2]


def test_a_sampler_that_cannot_begin_a_request_ends_that_one(caplog):
    class Choosy(sampling.Sampler):
        def start(self, params, prompt_token_ids, constraint=None):
            if len(prompt_token_ids) == 9:
                raise ValueError("nine is too many")
            return super().start(params, prompt_token_ids, constraint)

    requests = run(new_core(sampler=Choosy()), asked(4, 9, 2))
    assert [request.finish_reason for request in requests] == ["length", "abort", "length"]
    assert requests[1].error == "the sampler failed: ValueError: nine is too many"
    assert said(requests)[::2] == expected(requests)[::2]


def test_a_sampler_that_gives_too_few_tokens_is_found_out(caplog):
    class Lazy(sampling.Sampler):
        def sample(self, logits, rows):
            return super().sample(logits, rows)[:1]

    requests = run(new_core(sampler=Lazy()), asked(4))
    assert said(requests) == expected(requests)

    class Mute(sampling.Sampler):
        def sample(self, logits, rows):
            return []

    requests = run(new_core(sampler=Mute()), asked(4, 9))
    assert [request.finish_reason for request in requests] == ["abort", "abort"]
    assert all("the sampler failed" in request.error for request in requests)


class Interrupting(sampling.Sampler):
    """A sampler and a model in one that raises at the n-th call of either."""

    def __init__(self, at: int, error: BaseException):
        self.left, self.error = at, error

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error

    def sample(self, logits, rows):
        self.tick()
        tokens = super().sample(logits, rows)
        self.tick()
        return tokens

    def model(self, batch, cache):
        self.tick()
        logits = NETWORK(batch, cache)
        self.tick()
        return logits


@pytest.mark.parametrize("planner", ["continuous", "static"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), NotImplementedError("not yet written")])
def test_an_interruption_at_any_call_propagates_and_leaves_a_clean_engine(planner, error):
    calls, ended = 0, False
    while not ended:
        calls += 1
        both = Interrupting(calls, error)
        core = new_core(both.model, planner=planner, sampler=both)
        requests = asked(3, 9, 5, params=SamplingParams(max_tokens=3, ignore_eos=True))
        try:
            run(core, requests)
            ended = True
        except type(error):
            clean(core)
            for request in requests:
                assert request.finish_reason in ("abort", "length")
                assert request.finish_reason == "length" or type(error).__name__ in request.error
            both.left = 0
            again = run(core, [Request(9, random_ids(5), FIVE)])
            assert said(again) == expected(again)
    assert calls == 3 * 4 + 1  # before and after either, in each of three steps


class TickingCache(kv_cache.PagedKVCache):
    """A cache that is interrupted after its n-th call."""

    left, counts_releases = 0, True

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def match_prefix(self, request_id, token_ids):
        matched = super().match_prefix(request_id, token_ids)
        self.tick()
        return matched

    def reserve(self, request_id, tokens):
        super().reserve(request_id, tokens)
        self.tick()

    def write(self, layer, keys, values, batch):
        super().write(layer, keys, values, batch)
        self.tick()

    def rewind(self, request_id, tokens):
        super().rewind(request_id, tokens)
        self.tick()

    def release(self, request_id):
        super().release(request_id)
        if self.counts_releases:
            self.tick()


@pytest.mark.parametrize("planner", ["continuous", "static"])
def test_an_interruption_while_memory_is_taken_or_given_back_leaves_none_taken(planner):
    cache = TickingCache(LAYOUT, num_blocks=5, block_size=4)
    cache.counts_releases = planner == "continuous"  # static batching gives a whole batch back at once
    make = {"continuous": scheduler.ContinuousScheduler, "static": scheduler.StaticScheduler}[planner]
    core = EngineCore(NETWORK, cache, make(cache), sampling.Sampler(), (), 96)
    params, calls, interrupted = SamplingParams(max_tokens=4), 0, True
    while interrupted:
        calls, interrupted = calls + 1, False
        cache.left = calls
        requests = [Request(3 * calls + number, [7] * length, params) for number, length in enumerate((5, 5, 7))]
        try:
            for request in requests:
                core.add(request)
            while core.has_work:
                core.step()
        except KeyboardInterrupt:
            interrupted = True
        cache.left = 0
        for request in requests:
            core.abort(request, "given up by who asked for it")
        clean(core)
    assert said(requests) == [greedy(request.prompt_token_ids, 4) for request in requests]
    assert calls > 25


class Bare:
    """A scheduler with one fault. The rest is the continuous one."""

    def __init__(self, cache, **methods):
        self.inner = scheduler.ContinuousScheduler(cache)
        self.methods = methods

    def __getattr__(self, name):
        return self.methods.get(name) or getattr(self.inner, name)


def test_a_scheduler_that_fails_is_not_hidden_and_ends_everything():
    def broken(now):
        raise KeyError("lost")

    core = new_core(planner=lambda cache: Bare(cache, schedule=broken))
    requests = asked(3, 4)
    for request in requests:
        core.add(request)
    with pytest.raises(KeyError, match="lost"):
        core.step()
    assert [request.finish_reason for request in requests] == ["abort"] * 2
    assert "KeyError" in requests[0].error
    clean(core)


def test_a_scheduler_that_plans_nothing_is_found_out_instead_of_waited_for():
    core = new_core(planner=lambda cache: Bare(cache, schedule=lambda now: []))
    core.add(asked(3)[0])
    with pytest.raises(RuntimeError, match="plans nothing, and 1 requests are in flight"):
        core.step()
    clean(core)


def test_a_scheduler_that_does_not_end_what_has_finished_is_found_out():
    core = new_core(planner=lambda cache: Bare(cache, finish=lambda request, reason: None))
    request = asked(3, params=SamplingParams(max_tokens=1))[0]
    core.add(request)
    with pytest.raises(RuntimeError, match="finish left request 0 decoding"):
        core.step()
    assert request.finish_reason == "abort"
    clean(core)


def test_a_request_ends_even_if_the_scheduler_cannot_abort_it():
    def broken(request, error):
        raise LookupError("where is it?")

    core = new_core(planner=lambda cache: Bare(cache, abort=broken))
    request = asked(3)[0]
    core.add(request)
    with pytest.raises(LookupError):
        core.abort(request, "enough")
    assert (request.finish_reason, request.error) == ("abort", "enough")
    assert core.step() == []


# ---- aborting ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", ["continuous", "static"])
@pytest.mark.parametrize("moment", range(7))
def test_an_abort_at_any_moment_ends_that_request_alone(planner, moment):
    core = new_core(planner=planner)
    requests = asked(4, 9, 2)
    for request in requests:
        core.add(request)
    for _ in range(moment):
        core.step()
    core.abort(requests[1], "its reader left")
    core.cache.audit()
    if planner == "continuous":
        assert 1 not in core.cache.block_tables
    while core.has_work:
        core.step()
        core.cache.audit()
    clean(core)
    if moment < 5:
        assert (requests[1].finish_reason, requests[1].error) == ("abort", "its reader left")
    else:  # it had ended before
        assert (requests[1].finish_reason, requests[1].error) == ("length", None)
    assert requests[1].token_ids == expected(requests)[1][:moment]
    assert said(requests)[::2] == expected(requests)[::2]


def test_adding_and_aborting_in_the_middle_of_a_step_wait_for_its_end():
    late = Request(9, random_ids(6), FIVE)

    def meddle(call, logits, batch):
        if call == 2:  # as a garbage collector may do, in the thread that steps
            core.abort(requests[0], "dropped")
            core.add(late)
            assert not requests[0].ended
            assert 0 in core.cache.block_tables

    core = new_core(Broken(meddle))
    requests = asked(4, 9)
    for request in requests:
        core.add(request)
    core.step()
    core.step()
    assert (requests[0].finish_reason, len(requests[0].token_ids)) == ("abort", 2)
    assert 0 not in core.cache.block_tables
    while core.has_work:
        core.step()
    assert said([requests[1], late]) == expected([requests[1], late])
    clean(core)


def test_several_threads_may_step_one_engine():
    core = new_core(num_blocks=12)
    requests = [Request(number, random_ids(3 + number, number), FIVE) for number in range(12)]

    def serve(mine: list[Request]) -> None:
        for request in mine:
            core.add(request)
        while not all(request.ended for request in mine):
            core.step()

    threads = [threading.Thread(target=serve, args=(requests[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert said(requests) == expected(requests)
    clean(core)


# ---- what is told about a step -----------------------------------------------------------------------------------


def test_each_step_is_recorded():
    records: list[StepRecord] = []
    ticks = iter(range(1000))
    core = new_core(
        planner=lambda cache: scheduler.ContinuousScheduler(cache, 2, 8),
        clock=lambda: float(next(ticks)),
        on_step=records.append,
    )
    for request in asked(3, 12, 2, params=SamplingParams(max_tokens=2, ignore_eos=True)):
        core.add(request)
    while core.has_work:
        core.step()
    assert [record.work for record in records] == [
        (WorkRecord(0, "prefill", 3, 0), WorkRecord(1, "prefill", 5, 0)),
        (WorkRecord(0, "decode", 1, 0), WorkRecord(1, "prefill", 7, 0)),
        (WorkRecord(1, "decode", 1, 0), WorkRecord(2, "prefill", 2, 0)),
        (WorkRecord(2, "decode", 1, 0),),
    ]
    assert [record.waiting for record in records] == [(2,), (2,), (), ()]
    assert [(record.start, record.end) for record in records] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert {record.blocks_total for record in records} == {60}
    assert records[0].blocks_used == 1 + 3  # 3 tokens, and all 12 of the prompt that has begun
    assert all(0 < record.scheduling_seconds < 1 for record in records)


def test_idle_rows_and_preemptions_are_recorded():
    records: list[StepRecord] = []
    core = new_core(planner="static", on_step=records.append)
    requests = asked(3, 4)
    requests[0].params = SamplingParams(max_tokens=1)
    run(core, requests)
    assert records[0].work[0] == WorkRecord(0, "prefill", 3, 1)
    assert records[1].work[0] == WorkRecord(0, "idle", 0, 1)
    records.clear()
    core = new_core(num_blocks=5, on_step=records.append)
    requests = run(core, asked(7, 7, 1))
    assert sum(len(record.preempted) for record in records) == sum(request.preemptions for request in requests) > 0
    assert core.metrics.preemptions == sum(request.preemptions for request in requests)


def test_the_engines_figures_add_up():
    core = new_core(num_blocks=20)
    requests = [Request(number, [7] * 9, FIVE) for number in range(3)]
    for request in requests:
        core.add(request)
    assert (core.metrics.waiting, core.metrics.running, core.metrics.blocks_used) == (3, 0, 0)
    core.step()
    assert (core.metrics.waiting, core.metrics.running, core.metrics.blocks_used) == (0, 3, 9)
    core.abort(requests[0], "enough")
    while core.has_work:
        core.step()
    run(core, [Request(5, [7] * 9, FIVE), Request(6, [8] * 2, FIVE)])
    figures = core.metrics
    assert (figures.running, figures.waiting, figures.blocks_used, figures.blocks_total) == (0, 0, 0, 20)
    assert (figures.finished, figures.aborted, figures.tokens) == (4, 1, 1 + 4 * 5)
    assert figures.prefix_hits == 8  # the fourth finds both full blocks of its prompt
    assert (figures.steps, figures.useful_rows) == (10, 1 + 4 * 5)
    assert figures.batch_occupancy == pytest.approx(2.1)
    assert figures.tokens_per_second == pytest.approx(21 / figures.busy_seconds)


def test_out_of_memory_of_a_scheduler_of_ones_own_reaches_the_request():
    def refuse(request):
        raise OutOfMemory("no more than three, please")

    core = new_core(planner=lambda cache: Bare(cache, add=refuse))
    request = Request(0, [VOCAB - 1], FIVE)
    core.add(request)
    assert (request.finish_reason, request.error) == ("abort", "no more than three, please")
    assert core.metrics.aborted == 1
