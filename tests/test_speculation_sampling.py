"""Drawn answers with drafts that were drawn themselves: other tokens than without, and the same distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model

from llmfromscratch import SamplingParams, drafters, kv_cache, sampling, scheduler
from llmfromscratch.batch import Batch
from llmfromscratch.drafters import Draft
from llmfromscratch.engine_core import EngineCore
from llmfromscratch.scheduler import Request
from llmfromscratch.speculation import Speculation

VOCAB, ANSWERS = 11, 2000
NETWORK = tiny_model(vocab_size=VOCAB, eos_token_id=2, bos_token_id=1)
PROMPT = [3, 7, 4]
PARAMS = {
    "plain": {"temperature": 3.0},
    "filtered": {"temperature": 5.0, "top_k": 8, "min_p": 0.02, "logit_bias": {2: -5.0}},
}


@pytest.fixture(autouse=True)
def room_for_all(monkeypatch):
    """The smaller model's cache holds as many requests as run at once."""
    monkeypatch.setattr(drafters, "_CONTEXTS", 40)


def distributions(texts: Sequence[Sequence[int]], params: SamplingParams) -> torch.Tensor:
    """What the next token of each text is to be drawn from: float64 [texts, VOCAB]."""
    cache = kv_cache.ConcatKVCache(NETWORK.config.num_layers)
    logits = NETWORK(Batch.of([(number, text, 0) for number, text in enumerate(texts)]), cache)
    row = sampling.Sampler().start(params, PROMPT)
    return sampling.distribution(logits.float(), [row] * len(texts))


def expected(params: SamplingParams) -> list[torch.Tensor]:
    """The exact shares of the answer's first three tokens, each by itself, by following every way there."""
    ways, shares = [[]], torch.ones(1, dtype=torch.float64)
    found = []
    for _ in range(3):
        joint = shares.unsqueeze(-1) * distributions([PROMPT + way for way in ways], params)
        found.append(joint.sum(dim=0))
        ways = [[*way, token] for way in ways for token in range(VOCAB)]
        shares = joint.flatten()
    return found


def answers(drafter, params: SamplingParams, count: int = ANSWERS) -> list[Request]:
    cache = kv_cache.PagedKVCache(kv_cache.CacheLayout.of(NETWORK.config, torch.float64), 800, 4)
    core = EngineCore(
        NETWORK,
        cache,
        scheduler.ContinuousScheduler(cache, max_requests=200, max_batch_tokens=2000),
        sampling.Sampler(),
        [],
        NETWORK.config.context_length,
        speculation=Speculation(drafter, VOCAB, max_rows=4000, row_cost=0.0),
    )
    requests = [Request(number, PROMPT, replace(params, seed=number)) for number in range(count)]
    for request in requests:
        core.add(request)
    while core.has_work:
        core.step()
    assert all(len(request.token_ids) == params.max_tokens for request in requests)
    assert core.metrics.drafted > count / 3
    return requests


def assert_drawn_from(shares: torch.Tensor, tokens: Sequence[int]) -> None:
    """Pearson's chi-square at 1 in a million, by Wilson and Hilferty's approximation of its quantile."""
    counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB).double()
    means = shares * len(tokens)
    assert counts[means == 0].sum() == 0, "a cut token was drawn"
    large = means > 5
    rest = torch.stack([counts[~large].sum(), means[~large].sum()])  # rare ones together
    pairs = [*zip(counts[large], means[large], strict=True), *([tuple(rest)] if rest[1] > 5 else [])]
    statistic, freedom = sum(float((count - mean) ** 2 / mean) for count, mean in pairs), len(pairs) - 1
    assert freedom >= 3
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + 4.753 * math.sqrt(spread)) ** 3


def skipping() -> drafters.LayerSkip:
    drafter = drafters.LayerSkip(1, cost=0.0)
    drafter.attach(type("Llm", (), {"model": NETWORK, "config": NETWORK.config, "tokenizer": None}))
    return drafter


class Uniform:
    """Draws its drafts from all tokens alike, by a stream of its own."""

    def __init__(self):
        self.stream = sampling.random_stream(11)

    def propose(self, requests, counts):
        return [self._draft(count) for count in counts]

    def _draft(self, count):
        drawn = torch.randint(VOCAB, (count,), generator=self.stream).tolist()
        return Draft(drawn, torch.full((count, VOCAB), 1 / VOCAB, dtype=torch.float64))

    def forget(self, request_id):
        pass


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("drafter", [skipping, Uniform])
def test_drawn_drafts_leave_the_distribution_of_every_token_as_it_was(drafter, kind):
    params = SamplingParams(max_tokens=3, ignore_eos=True, **PARAMS[kind])
    requests = answers(drafter(), params)
    for place, shares in enumerate(expected(params)):
        assert_drawn_from(shares, [request.token_ids[place] for request in requests])


def test_the_test_would_notice_drafts_that_are_simply_believed():
    params = SamplingParams(max_tokens=3, ignore_eos=True, **PARAMS["plain"])
    believed = torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64)
    drawn = torch.multinomial(believed, ANSWERS, replacement=True, generator=torch.Generator().manual_seed(0))
    with pytest.raises(AssertionError):
        assert_drawn_from(expected(params)[1], drawn.tolist())


def test_the_same_seeds_give_the_same_answers():
    params = SamplingParams(max_tokens=6, ignore_eos=True, **PARAMS["plain"])
    first, second = ([request.token_ids for request in answers(skipping(), params, 40)] for _ in range(2))
    assert first == second
