"""Drafts change the speed and never the answer: verified, taken back, bounded, and harmless whatever a drafter does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, new_cache, random_ids, said_without_an_engine, tiny_model

from llmfromscratch import SamplingParams, drafters, kv_cache, sampling, scheduler, sparse_cache
from llmfromscratch.drafters import Draft
from llmfromscratch.engine_core import EngineCore
from llmfromscratch.scheduler import Request, State
from llmfromscratch.speculation import Pace, Speculation

NETWORK = tiny_model()  # in float64, so that no near tie can decide
CONFIG = NETWORK.config
Asked = tuple[tuple[int, ...], SamplingParams]
_KNOWN: dict[str, list[int]] = {}


def alone(asked: Asked) -> list[int]:
    """What a request says, each token computed from the whole text before it, without engine, cache or drafts."""
    key = repr(asked)  # parameters with a bias have no hash
    if key not in _KNOWN:
        _KNOWN[key] = said_without_an_engine(NETWORK, *asked)
    return _KNOWN[key]


class Guesses:
    """Drafts what will be said, with a mistake at every place that `wrong` (of the place in the answer) names."""

    def __init__(self, wrong: Callable[[int], bool] = lambda place: False, tokens: int = 8):
        self.wrong, self.tokens = wrong, tokens
        self.asked: list[tuple[int, int]] = []
        self.forgotten: list[int] = []

    def propose(self, requests, counts):
        self.asked += [(request.request_id, count) for request, count in zip(requests, counts, strict=True)]
        return [Draft(self._draft(request, count)) for request, count in zip(requests, counts, strict=True)]

    def _draft(self, request, count):
        done = len(request.token_ids)
        right = alone((tuple(request.prompt_token_ids), request.params))[done : done + count]
        return [(token + self.wrong(done + at)) % VOCAB for at, token in enumerate(right)]

    def forget(self, request_id):
        self.forgotten.append(request_id)


class Proposes:
    """Drafts what a function of the request says."""

    def __init__(self, draft: Callable[[Request], Draft]):
        self.draft, self.asked = draft, []

    def propose(self, requests, counts):
        self.asked += [request.request_id for request in requests]
        return [self.draft(request) for request in requests]

    def forget(self, request_id):
        pass


def skipping(**settings) -> drafters.LayerSkip:
    drafter = drafters.LayerSkip(1, cost=0.0, **settings)
    drafter.attach(type("Llm", (), {"model": NETWORK, "config": CONFIG, "tokenizer": None}))
    return drafter


def new_core(drafter, cache=None, planner=None, sampler=None, network=NETWORK, max_rows=64, **settings) -> EngineCore:
    cache = new_cache("paged, blocks of 3", NETWORK, 600) if cache is None else cache
    planner = (planner or scheduler.ContinuousScheduler)(cache)
    guessing = Speculation(drafter, CONFIG.vocab_size, max_rows, row_cost=0.0)
    sampler = sampler or sampling.Sampler()
    return EngineCore(
        network, cache, planner, sampler, CONFIG.eos_token_ids, CONFIG.context_length, speculation=guessing, **settings
    )


def run(core: EngineCore, asked: Sequence[Asked | Request], late: Sequence[int] = ()) -> list[Request]:
    """Runs all to their end, an audit after each step: the cache adds up, and holds what was said and nothing else."""
    requests = [
        one if isinstance(one, Request) else Request(number, list(one[0]), one[1]) for number, one in enumerate(asked)
    ]
    late = [*late, *[0] * (len(requests) - len(late))]
    step = 0
    while not all(request.ended for request in requests):
        for request, arrival in zip(requests, late, strict=True):
            if arrival == step:
                request.arrival = float(step)
                core.add(request)
        core.step()
        audit(core)
        step += 1
        assert step < 1000, "a request never ends"
    return requests


def audit(core: EngineCore) -> None:
    if isinstance(core.cache, kv_cache.PagedKVCache):
        core.cache.audit()
    for request in core.scheduler.running:
        if request.state is State.DECODING and not isinstance(core.cache, kv_cache.NoKVCache):
            assert core.cache.length(request.request_id) == request.length - 1
    for held in core._in_flight.values():  # what the sampler would hold against a later token
        assert getattr(held.row, "token_ids", held.request.token_ids) == held.request.token_ids


def said(requests: Sequence[Request]) -> list[list[int]]:
    return [request.token_ids for request in requests]


def asks(*lengths: int, **params) -> list[Asked]:
    params = {"max_tokens": 12, "ignore_eos": True} | params
    return [(tuple(random_ids(length, length)), SamplingParams(**params)) for length in lengths]


# ---- the answer stays the same -------------------------------------------------------------------------------------

DRAFTERS = {
    "all right": Guesses,
    "all wrong": lambda: Guesses(lambda place: True),
    "every third wrong": lambda: Guesses(lambda place: place % 3 == 2),
    "lookup": lambda: drafters.Lookup(2),
}
CACHES = {
    "paged": lambda: new_cache("paged, blocks of 3", NETWORK, 600),
    "paged, nothing shared": lambda: new_cache("paged, blocks of 8", NETWORK, 600, prefix_sharing=False),
    "static": lambda: new_cache("static", NETWORK, CONFIG.context_length),
    "concat": lambda: new_cache("concat", NETWORK),
    "none": lambda: new_cache("none", NETWORK),
}
PLANNERS = {
    "one at a time": lambda cache: scheduler.ContinuousScheduler(cache, max_requests=1),
    "static": lambda cache: scheduler.StaticScheduler(cache, max_requests=4),
    "continuous": lambda cache: scheduler.ContinuousScheduler(cache, max_requests=4),
    "continuous, nine tokens a step": lambda cache: scheduler.ContinuousScheduler(cache, 4, max_batch_tokens=9),
}


@st.composite
def asked_for(draw) -> Asked:
    """A prompt from a small alphabet, so that some begin alike and lookup finds something; greedy or drawn."""
    prompt = draw(st.lists(st.integers(3, 5), min_size=1, max_size=20))
    warm = draw(st.sampled_from([{}, {}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9}]))
    seed, most = draw(st.integers(0, 3)), draw(st.integers(1, 14))
    penalty, ignore = draw(st.sampled_from([1.0, 1.0, 1.0, 1.3])), draw(st.booleans())
    return tuple(prompt), SamplingParams(
        max_tokens=most, seed=seed, repetition_penalty=penalty, ignore_eos=ignore, logit_bias={7: 1.0}, **warm
    )


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("cache", CACHES)
@settings(deadline=None, max_examples=6)
@given(
    asked=st.lists(asked_for(), min_size=1, max_size=6),
    late=st.lists(st.integers(0, 6), max_size=6),
    drafter=st.sampled_from(sorted(DRAFTERS)),
)
def test_greedy_and_drawn_tokens_are_those_without_drafts_in_any_batch(planner, cache, asked, late, drafter):
    if cache == "none":
        planner = "continuous"  # what is not kept cannot be computed in chunks
    core = new_core(DRAFTERS[drafter](), CACHES[cache](), PLANNERS[planner])
    assert said(run(core, asked, late[: len(asked)])) == [alone(one) for one in asked]


@settings(deadline=None, max_examples=10)
@given(asked=st.lists(asked_for(), min_size=2, max_size=5), drafter=st.sampled_from(sorted(DRAFTERS)))
def test_preempted_requests_say_the_same_with_drafts(asked, drafter):
    # room for hardly more than one request
    core = new_core(DRAFTERS[drafter](), new_cache("paged, blocks of 3", NETWORK, 36))
    assert said(run(core, asked)) == [alone(one) for one in asked]


def test_preemptions_happen_in_such_a_cache_and_drafts_cause_none():
    counts = []
    for drafter in (None, Guesses(), Guesses(lambda place: True)):
        core = new_core(drafter, new_cache("paged, blocks of 3", NETWORK, 36), max_rows=64)
        requests = run(core, asks(9, 10, 11))
        assert said(requests) == [alone(one) for one in asks(9, 10, 11)]
        counts.append(sum(request.preemptions for request in requests))
    assert counts[0] > 0
    assert max(counts[1:]) <= counts[0]


@pytest.mark.parametrize("kind", ["greedy", "drawn"])
def test_the_same_model_without_a_layer_drafts_and_greedy_answers_stay(kind):
    warm = {} if kind == "greedy" else {"temperature": 1.0, "seed": 3}
    asked = asks(5, 9, 2, max_tokens=20, **warm)
    core = new_core(skipping())
    requests = run(core, asked)
    assert core.metrics.drafted > core.metrics.accepted > 0
    if kind == "greedy":
        assert said(requests) == [alone(one) for one in asked]
    else:  # the same seeds give the same draws
        assert said(requests) == said(run(new_core(skipping()), asked))


@pytest.mark.parametrize("window", [4, 9])
def test_a_window_that_forgets_sees_the_same_with_drafts(window):
    def answers(drafter):
        return said(run(new_core(drafter, sparse_cache.SlidingWindow(CONFIG.num_layers, window, sinks=2)), asks(5, 20)))

    plain = answers(None)
    assert answers(drafters.Lookup(1)) == plain
    wrong = Proposes(lambda request: Draft([3, 4, 5][: request.params.max_tokens - len(request.token_ids) - 1]))
    assert answers(wrong) == plain and wrong.asked


def test_what_heavy_hitters_keep_depends_on_the_cuts_so_there_are_no_drafts():
    drafter = Guesses()
    run(new_core(drafter, sparse_cache.HeavyHitters(CONFIG.num_layers, 8, 4)), asks(5))
    assert drafter.asked == []


# ---- a step with drafts --------------------------------------------------------------------------------------------


def spied(batches: list) -> Callable:
    def network(batch, cache):
        batches.append(batch)
        return NETWORK(batch, cache)

    return network


def test_right_drafts_are_verified_in_one_pass_that_gives_one_token_more():
    batches: list = []
    (request,) = run(new_core(Guesses(tokens=4), network=spied(batches)), asks(5, max_tokens=11))
    # the prompt, then the newest token with 4 drafts twice; a draft for the last token would be one too many
    assert [len(batch.token_ids) for batch in batches] == [5, 5, 5]
    assert [batch.logit_rows.tolist() for batch in batches] == [[4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert (len(request.token_ids), request.drafted, request.accepted) == (11, 8, 8)


def test_the_first_wrong_draft_ends_what_stands_and_all_behind_it_is_taken_back():
    verdicts: list = []
    core = new_core(Guesses(lambda place: place == 3, tokens=4))
    core.speculation.on_verdict = verdicts.append
    (request,) = run(core, asks(5, max_tokens=9))
    answer = alone(asks(5, max_tokens=9)[0])
    first = verdicts[0]
    assert first.drafts == (answer[1], answer[2], (answer[3] + 1) % VOCAB, answer[4])
    assert first.tokens == tuple(answer[1:4])
    assert request.token_ids == answer
    assert (core.metrics.drafted, core.metrics.accepted) == (request.drafted, request.accepted)
    assert core.metrics.tokens == 9


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("most", [1, 2, 3, 4, 9])
def test_no_answer_is_longer_than_it_may_be_and_no_draft_goes_beyond(most, right):
    for length in (5, 90):  # the context holds 96
        batches: list = []
        drafter = Guesses() if right else Proposes(lambda request: Draft([8] * 20))
        core = new_core(drafter, network=spied(batches))
        (request,) = run(core, asks(length, max_tokens=most))
        said = min(most, 96 - length)
        assert len(request.token_ids) == core.metrics.tokens == said
        # what the last token of all would follow from is fed, and nothing behind it
        assert max(int(batch.positions.max()) for batch in batches) == length + said - 2


def test_an_end_token_among_right_drafts_ends_the_answer_there():
    answer = alone(asks(5, max_tokens=12)[0])
    place = next(place for place in range(3, 12) if answer[place] not in answer[:place])
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(answer[place],))

    class Further(Guesses):
        def _draft(self, request, count):
            return answer[len(request.token_ids) : len(request.token_ids) + count]

    for planner in ("continuous", "static"):
        core = new_core(Further(), planner=PLANNERS[planner])
        (request,) = run(core, [(tuple(random_ids(5, 5)), params)])
        assert (request.token_ids, request.finish_reason) == (answer[: place + 1], "stop")
        assert core.metrics.tokens == place + 1
        assert core.cache.block_tables == {}


def test_what_stops_a_text_is_told_of_no_token_behind_the_stop():
    asked = asks(5)
    request, seen = Request(0, list(asked[0][0]), asked[0][1]), []

    def stops(token):
        seen.append(token)
        return len(seen) == 4

    request.stops = stops
    run(new_core(Guesses()), [request])
    assert (request.token_ids, request.finish_reason) == (alone(asked[0])[:4], "stop")
    assert seen == request.token_ids


def test_rows_of_a_step_are_bounded_and_shared_out():
    for rows, tokens, most in ((8, 512, 8), (64, 10, 10)):
        batches: list = []
        drafter = Guesses(tokens=20)
        planner = lambda cache, tokens=tokens: scheduler.ContinuousScheduler(cache, 4, tokens)  # noqa: E731
        run(new_core(drafter, planner=planner, network=spied(batches), max_rows=rows), asks(2, 3, max_tokens=20))
        assert max(len(batch.token_ids) for batch in batches[2:]) == most
        assert {count for _, count in drafter.asked} <= set(range(1, most - 1))


def test_many_requests_in_a_step_go_without_drafts():
    drafter = Guesses()
    run(new_core(drafter, max_rows=8), asks(*range(3, 12), max_tokens=5))
    assert drafter.asked == []


@pytest.mark.parametrize("asked", [{"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"logprobs": 1}])
def test_what_looks_at_the_tokens_in_between_has_no_drafts(asked):
    drafter = Guesses()
    run(new_core(drafter), [*asks(5, **asked), *asks(6)])
    assert {number for number, _ in drafter.asked} == {1}


def test_a_constrained_request_has_no_drafts():
    class Sevens:
        def allowed(self):
            return torch.arange(VOCAB) == 7

        def advance(self, token_id):
            pass

    drafter = Guesses()
    request = Request(0, [3, 4], SamplingParams(max_tokens=4), constraint=Sevens())
    assert said(run(new_core(drafter), [request])) == [[7] * 4]
    assert drafter.asked == []


def test_a_sampler_of_another_kind_is_asked_one_token_after_the_other():
    class Own(sampling.Sampler):
        pass

    drafter = Guesses()
    asked = asks(5)
    assert said(run(new_core(drafter, sampler=Own()), asked)) == [alone(asked[0])]
    assert drafter.asked == []


def test_memory_that_is_lacking_costs_the_drafts_and_nothing_else():
    # a prompt of 6, and 12 tokens of which the last is never stored: 17 of the 18 that 6 blocks hold
    core = new_core(Guesses(lambda place: True), new_cache("paged, blocks of 3", NETWORK, 18))
    (request,) = run(core, asks(6))
    assert (request.token_ids, request.preemptions) == (alone(asks(6)[0]), 0)


def test_ended_requests_are_forgotten():
    drafter = Guesses()
    core = new_core(drafter)
    run(core, asks(3, 4, 5))
    assert sorted(drafter.forgotten) == [0, 1, 2]
    assert core.speculation._paces == {}


# ---- drafters that do what they like -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "draft",
    [
        lambda request: Draft([]),
        lambda request: Draft([VOCAB]),
        lambda request: Draft([-1]),
        lambda request: Draft([5, 6], torch.ones(1, VOCAB)),
        lambda request: Draft([5] * 500),
        lambda request: 1 / 0,
        lambda request: None,
    ],
)
def test_a_drafter_at_fault_costs_nobody_the_answer(draft):
    drafter, asked = Proposes(draft), asks(5, 7)
    assert said(run(new_core(drafter), asked)) == [alone(one) for one in asked]
    assert drafter.asked


def test_a_drafter_that_is_not_written_yet_says_so():
    def unwritten(request):
        raise NotImplementedError("exercise 6.7")

    core = new_core(Proposes(unwritten))
    with pytest.raises(NotImplementedError, match=r"6\.7"):
        run(core, asks(5))
    assert not core.has_work


def test_bad_logits_behind_a_wrong_draft_are_not_the_requests_fault():
    def network(batch, cache):
        logits = NETWORK(batch, cache)
        rows = batch.token_ids[batch.logit_rows] == 0  # the rows behind the token 0, which nobody but the drafter says
        return logits.masked_fill(rows.unsqueeze(-1), torch.nan)

    asked = asks(5, 8)
    assert all(0 not in alone(one) for one in asked)
    drafter = Proposes(lambda request: Draft([0]))
    assert said(run(new_core(drafter, network=network), asked)) == [alone(one) for one in asked]
    assert drafter.asked


@pytest.mark.parametrize("planner", ["continuous", "static"])
def test_a_pass_with_drafts_that_fails_ends_its_requests_and_leaves_nothing(planner):
    def network(batch, cache):
        if len(batch.token_ids) > 12:
            raise ArithmeticError("too long")
        return NETWORK(batch, cache)

    core = new_core(Guesses(), network=network, planner=PLANNERS[planner])
    requests = run(core, asks(2, 3, 4))
    assert {request.finish_reason for request in requests} == {"abort"}
    assert "ArithmeticError: too long" in requests[0].error
    assert core.cache.block_tables == {} and not core.has_work


def test_a_drafter_sees_what_the_head_read_for_each_newest_token():
    class Watches(Guesses):
        wants_hidden = True
        seen: list

        def observe(self, request_ids, hidden):
            self.seen += zip(request_ids, hidden, strict=True)

    drafter = Watches(lambda place: place % 4 == 3)
    drafter.seen = []
    asked = asks(5, 9)
    requests = run(new_core(drafter), asked)
    told = {number: [] for number in (0, 1)}
    for number, hidden in drafter.seen:
        told[number].append(NETWORK.lm_head(hidden.clone()).argmax())
    for request in requests:  # each names the token that it gave
        assert request.token_ids[0] == told[request.request_id][0]
        assert request.token_ids[-1] == told[request.request_id][-1]
        assert len(told[request.request_id]) == len(request.token_ids) - request.accepted
    assert not NETWORK.lm_head._forward_pre_hooks


# ---- how many drafts -----------------------------------------------------------------------------------------------


def test_right_drafts_are_soon_followed_by_many():
    pace, counts = Pace(), []
    for _ in range(6):
        counts.append(pace.count(8, 0.2))
        pace.learn(counts[-1], counts[-1])
    assert counts == sorted(counts) and counts[0] in (1, 2) and counts[-1] == 8


def test_wrong_drafts_are_given_up_but_for_a_try_now_and_then():
    pace, counts = Pace(), []
    for _ in range(300):
        counts.append(pace.count(8, 0.2))
        if counts[-1]:
            pace.learn(counts[-1], 0)
    assert sum(counts[:20]) < 10
    late = counts[100:]
    assert set(late) == {0, 1} and 5 <= sum(late) <= 7  # one in 33
    pace.rest = 0
    for _ in range(4):
        count = pace.count(8, 0.2)
        pace.learn(count, count)
    assert pace.count(8, 0.2) > 2


def test_what_costs_as_much_as_the_model_is_not_drafted():
    pace = Pace(stood=9.0, fell=1.0)
    assert pace.count(4, 0.2) >= 3
    assert [pace.count(4, 1.1) for _ in range(3)] == [1, 0, 1]  # tries


def test_no_room_for_drafts_means_none():
    assert [Pace().count(0, 0.1) for _ in range(3)] == [0, 0, 0]
