"""The equality chain across schedulers: a request says the same alone, in any batch, in any chunks, and preempted.

The oracle knows no scheduler, no cache and no batch: it computes every token from the whole text before it, and draws
from the request's own random stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, random_ids, said_without_an_engine, tiny_model

from llmfromscratch import SamplingParams, kv_cache, sampling, scheduler
from llmfromscratch.engine_core import EngineCore
from llmfromscratch.scheduler import Request, State

NETWORK = tiny_model(num_hidden_layers=2)  # in float64, so that no near tie can decide
CONFIG = NETWORK.config
LAYOUT = kv_cache.CacheLayout.of(CONFIG, torch.float64)
Asked = tuple[tuple[int, ...], SamplingParams]
_KNOWN: dict[Asked, list[int]] = {}


def alone(asked: Asked) -> list[int]:
    """What a request says, computed in the plainest way."""
    if asked not in _KNOWN:
        _KNOWN[asked] = said_without_an_engine(NETWORK, *asked)
    return _KNOWN[asked]


def serve(
    asked: Sequence[Asked],
    cache: kv_cache.KVCache,
    planner: scheduler.Scheduler,
    late: Sequence[int] = (),
    before_step: Callable[[int, list[Request]], None] = lambda step, requests: None,
) -> list[Request]:
    """Runs all requests to their end, request i arriving before step late[i], with an audit after each step."""
    core = EngineCore(NETWORK, cache, planner, sampling.Sampler(), CONFIG.eos_token_ids, CONFIG.context_length)
    requests = [Request(number, list(prompt), params) for number, (prompt, params) in enumerate(asked)]
    late = [*late, *[0] * (len(requests) - len(late))]
    step = 0
    while not all(request.ended for request in requests):
        for request, arrival in zip(requests, late, strict=True):
            if arrival == step:
                request.arrival = float(step)
                core.add(request)
        before_step(step, requests)
        core.step()
        audit(cache)
        step += 1
        assert step < 2000, "a request never ends"
    assert not core.has_work
    if isinstance(cache, kv_cache.PagedKVCache):
        assert cache.block_tables == {}
    return requests


def audit(cache: kv_cache.KVCache) -> None:
    if isinstance(cache, kv_cache.PagedKVCache):
        cache.audit()


def said(requests: Sequence[Request]) -> list[list[int]]:
    return [request.token_ids for request in requests]


def paged(num_blocks: int = 60, block_size: int = 4, prefix_sharing: bool = True) -> kv_cache.PagedKVCache:
    return kv_cache.PagedKVCache(LAYOUT, num_blocks, block_size, prefix_sharing)


CACHES: dict[str, Callable[[], kv_cache.KVCache]] = {
    "paged": paged,
    "paged, nothing shared": lambda: paged(prefix_sharing=False),
    "static": lambda: kv_cache.StaticKVCache(LAYOUT, 4, CONFIG.context_length),
    "concat": lambda: kv_cache.ConcatKVCache(CONFIG.num_layers),
}
PLANNERS: dict[str, Callable[[kv_cache.KVCache], scheduler.Scheduler]] = {
    "one at a time": lambda cache: scheduler.ContinuousScheduler(cache, max_requests=1),
    "static": lambda cache: scheduler.StaticScheduler(cache, max_requests=4),
    "static, in buckets": lambda cache: scheduler.StaticScheduler(cache, max_requests=2, bucket=True),
    "continuous": lambda cache: scheduler.ContinuousScheduler(cache, max_requests=4),
    "continuous, five tokens a step": lambda cache: scheduler.ContinuousScheduler(cache, 4, max_batch_tokens=5),
    "shortest first": lambda cache: scheduler.ContinuousScheduler(cache, 2, 16, scheduler.ShortestFirst()),
    "longest prefix first": lambda cache: scheduler.ContinuousScheduler(
        cache, 2, 16, scheduler.LongestPrefixMatch(cache)
    ),
}


FILTERED = [
    {"temperature": 1.4, "top_k": 7},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.1, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 1.0, "typical_p": 0.7},
]


@st.composite
def asked_for(draw) -> Asked:
    """A prompt from a small alphabet, so that some begin alike, and parameters: greedy, drawn, filtered, penalized."""
    prompt = draw(st.lists(st.integers(3, 5), min_size=1, max_size=20))
    warm = draw(st.sampled_from([{}, {}, {"temperature": 1.0}, {"temperature": 0.7}, *FILTERED]))
    params = SamplingParams(
        max_tokens=draw(st.integers(1, 9)),
        **warm,
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.3])),
        seed=draw(st.integers(0, 3)),
        ignore_eos=draw(st.booleans()),
        priority=draw(st.integers(-1, 1)),
    )
    return tuple(prompt), params


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("planner", PLANNERS)
@settings(deadline=None, max_examples=6)
@given(asked=st.lists(asked_for(), min_size=1, max_size=6), late=st.lists(st.integers(0, 8), max_size=6))
def test_every_scheduler_over_every_cache_says_what_is_said_alone(cache, planner, asked, late):
    memory = CACHES[cache]()
    requests = serve(asked, memory, PLANNERS[planner](memory), late[: len(asked)])
    assert said(requests) == [alone(one) for one in asked]
    assert {request.finish_reason for request in requests} <= {"stop", "length"}


@pytest.mark.parametrize("planner", ["static", "continuous"])
def test_without_a_cache_the_schedulers_say_the_same(planner):
    asked = [(tuple(random_ids(length, length)), SamplingParams(max_tokens=5)) for length in (3, 9, 1)]
    cache = kv_cache.NoKVCache(CONFIG.num_layers)
    assert said(serve(asked, cache, PLANNERS[planner](cache), [0, 0, 2])) == [alone(one) for one in asked]


@pytest.mark.parametrize("budget", range(1, 25))
def test_any_budget_of_tokens_says_the_same(budget):
    asked = [
        (tuple(random_ids(length, length)), SamplingParams(max_tokens=6, ignore_eos=True)) for length in (23, 7, 14)
    ]
    cache = paged()
    requests = serve(asked, cache, scheduler.ContinuousScheduler(cache, 4, budget), [0, 1, 2])
    assert said(requests) == [alone(one) for one in asked]


@settings(deadline=None, max_examples=40)
@given(
    asked=st.lists(asked_for(), min_size=2, max_size=6),
    late=st.lists(st.integers(0, 4), max_size=6),
    block_size=st.integers(1, 5),
    spare=st.integers(0, 6),
    budget=st.integers(1, 30),
    sharing=st.booleans(),
)
def test_a_cache_that_hardly_holds_one_preempts_and_says_the_same(asked, late, block_size, spare, budget, sharing):
    longest = max(len(prompt) + params.max_tokens for prompt, params in asked)
    cache = paged(-(-longest // block_size) + spare, block_size, sharing)
    requests = serve(asked, cache, scheduler.ContinuousScheduler(cache, 6, budget), late[: len(asked)])
    assert said(requests) == [alone(one) for one in asked]


def test_a_tiny_cache_does_preempt():
    asked = [(tuple(random_ids(9, seed)), SamplingParams(max_tokens=9, ignore_eos=True)) for seed in range(3)]
    cache = paged(num_blocks=7, block_size=4)
    requests = serve(asked, cache, scheduler.ContinuousScheduler(cache, 3))
    assert sum(request.preemptions for request in requests) > 0
    assert said(requests) == [alone(one) for one in asked]


# Two that share the beginning of their prompts, one drawn with penalties on what it has said, and one whose prompt
# takes several steps.
PENALIZED = {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.4, "frequency_penalty": 0.8}
SCENE = [
    ((5, 6, 7, 8, 9, 10), SamplingParams(max_tokens=6, ignore_eos=True)),
    ((5, 6, 7, 8, 9, 11, 12), SamplingParams(max_tokens=5, ignore_eos=True, seed=4, **PENALIZED)),
    (tuple(random_ids(17)), SamplingParams(max_tokens=4, ignore_eos=True)),
]


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("victim", range(len(SCENE)))
def test_a_preemption_at_any_step_changes_no_token(victim, block_size, sharing):
    preempted: dict[int, State] = {}
    for moment in itertools.count():
        reached = []
        cache = paged(80, block_size, sharing)
        planner = scheduler.ContinuousScheduler(cache, 3, max_batch_tokens=8)

        def preempt(step, requests, planner=planner, moment=moment, reached=reached):
            reached.append(step)
            if step == moment and requests[victim] in planner.running:
                preempted[moment] = requests[victim].state
                planner.preempt(requests[victim])

        requests = serve(SCENE, cache, planner, before_step=preempt)
        assert said(requests) == [alone(one) for one in SCENE]
        assert requests[victim].preemptions == (moment in preempted)
        if moment > max(reached):
            break
    assert len(preempted) >= len(alone(SCENE[victim])) - 1  # between any two tokens, at least
    assert State.DECODING in preempted.values()
    assert State.PREFILLING in preempted.values() or victim == 0


def test_preemptions_of_everyone_at_every_step_change_no_token():
    for number in range(20):
        cache = paged(80, 2)
        planner = scheduler.ContinuousScheduler(cache, 3, max_batch_tokens=20)
        dice = torch.Generator().manual_seed(number)

        def preempt(step, requests, planner=planner, dice=dice):
            for request in list(planner.running):
                if torch.rand((), generator=dice) < 0.4:
                    planner.preempt(request)

        assert said(serve(SCENE, cache, planner, before_step=preempt)) == [alone(one) for one in SCENE]


@pytest.mark.parametrize("seed", range(3))
def test_draws_do_not_depend_on_the_company_its_order_or_a_preemption(seed):
    mine = ((7, 8, 9), SamplingParams(max_tokens=9, temperature=1.5, seed=seed, ignore_eos=True))
    others = [((number,), SamplingParams(max_tokens=9, temperature=1.5, seed=9)) for number in range(3, 6)]
    for place in range(4):
        cache = paged(num_blocks=8, block_size=4)
        asked = [*others[:place], mine, *others[place:]]
        requests = serve(asked, cache, scheduler.ContinuousScheduler(cache, 4, max_batch_tokens=3), [0, 1, 0, 2])
        assert requests[place].token_ids == alone(mine)
    assert len({tuple(alone((mine[0], SamplingParams(**{**vars(mine[1]), "seed": s})))) for s in range(3)}) == 3


def test_the_chain_would_notice_a_token_lost_at_a_preemption():
    class Forgetful(scheduler.ContinuousScheduler):
        def preempt(self, request):
            super().preempt(request)
            if request.token_ids:
                request.token_ids.pop()
                request.token_ids.append(VOCAB - 1)

    asked = [(tuple(random_ids(9, seed)), SamplingParams(max_tokens=9, ignore_eos=True)) for seed in range(3)]
    cache = paged(num_blocks=7, block_size=4)
    requests = serve(asked, cache, Forgetful(cache, 3))
    assert said(requests) != [alone(one) for one in asked]


QUESTIONS = [
    "The capital of Italy is", "def fibonacci(n):\n", "Once upon a time, in a village by the sea, there lived",
    "1, 2, 3,", "Name three rivers of Europe.", "The capital of France is", "To be, or not to be,", "Water boils at",
]  # fmt: skip


MIXED = [
    {}, {"temperature": 0.8, "seed": 1}, {}, {"temperature": 1.0, "top_p": 0.9, "seed": 2},
    {"repetition_penalty": 1.2}, {"temperature": 0.7, "top_k": 40, "min_p": 0.05, "seed": 3}, {}, {},
]  # fmt: skip


@pytest.mark.model
def test_the_real_model_says_the_same_alone_together_and_preempted(smollm2_fp32):
    llm, usual = smollm2_fp32, smollm2_fp32.cache
    params = [SamplingParams(max_tokens=16, ignore_eos=True, **settings) for settings in MIXED]
    try:
        pairs = zip(QUESTIONS, params, strict=True)
        expected = [llm.generate(question, one)[0].token_ids for question, one in pairs]
        assert [answer.token_ids for answer in llm.generate(QUESTIONS, params)] == expected
        llm.use_scheduler("static", max_requests=3)
        assert [answer.token_ids for answer in llm.generate(QUESTIONS, params)] == expected
        llm.use_scheduler("continuous", max_batch_tokens=11)
        llm.cache = kv_cache.PagedKVCache(usual.layout, num_blocks=12, block_size=4)
        answers = llm.generate(QUESTIONS, params)
        assert [answer.token_ids for answer in answers] == expected
        assert llm.metrics.preemptions == sum(answer.metrics.preemptions for answer in answers) > 0
        llm.cache.audit()
    finally:
        llm.cache = usual
        llm.use_scheduler()
