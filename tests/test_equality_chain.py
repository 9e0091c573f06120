"""The engine's first law: greedy tokens are the same whichever way they are computed.

Here: no cache = concat cache = prefill in any chunks = alone or in any ragged batch. Later ways join the chain.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, all_logits, ours, random_ids, save_tiny, transformers_model

from llmfromscratch import LLM, SamplingParams, engine, kv_cache, model
from llmfromscratch.batch import Batch

# in float64, so that no near tie can decide
TINY = {
    shape: ours(transformers_model(shape, num_hidden_layers=2), torch.float64)
    for shape in ("llama, 9 heads on 3, tied, other rope base and epsilon", "qwen3, normalized heads")
}
PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24)
STEPS = 4


def without_cache(network: model.Model, prompt: list[int], steps: int) -> list[int]:
    """The plainest way: every token from the whole text before it, computed anew."""
    ids = list(prompt)
    for _ in range(steps):
        ids.append(int(all_logits(network, ids)[-1].argmax()))
    return ids[len(prompt) :]


def in_chunks(network: model.Model, prompt: list[int], steps: int, cuts: list[int]) -> list[int]:
    """Prefill cut at the given places, then one token at a time."""
    cache = kv_cache.ConcatKVCache(network.config.num_layers)
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(prompt)}), len(prompt)]
    for start, end in itertools.pairwise(edges):
        logits = network(Batch.of([(0, prompt[start:end], start)]), cache)
    tokens = [int(logits[0].argmax())]
    while len(tokens) < steps:
        logits = network(Batch.of([(0, tokens[-1:], cache.length(0))]), cache)
        tokens.append(int(logits[0].argmax()))
    return tokens


def in_ragged_batches(network: model.Model, prompts: list[list[int]], steps: int, late: list[int]) -> list[list[int]]:
    """All requests side by side; request i joins in round late[i], while others are already decoding."""
    cache = kv_cache.ConcatKVCache(network.config.num_layers)
    tokens: list[list[int]] = [[] for _ in prompts]
    for turn in range(max(late) + steps):
        active = [i for i in range(len(prompts)) if late[i] <= turn < late[i] + steps]
        parts = [(i, tokens[i][-1:] or prompts[i], cache.length(i)) for i in active]
        if parts:
            for i, row in zip(active, network(Batch.of(parts), cache), strict=True):
                tokens[i].append(int(row.argmax()))
    return tokens


def after_a_rewind(network: model.Model, prompt: list[int], steps: int, wrong: list[int]) -> list[int]:
    """Wrong tokens are computed first and taken back, as speculative decoding will do."""
    cache = kv_cache.ConcatKVCache(network.config.num_layers)
    logits = network(Batch.of([(0, prompt, 0)]), cache)
    tokens = [int(logits[0].argmax())]
    while len(tokens) < steps:
        network(Batch.of([(0, wrong, cache.length(0))]), cache)
        cache.rewind(0, len(wrong))
        logits = network(Batch.of([(0, tokens[-1:], cache.length(0))]), cache)
        tokens.append(int(logits[0].argmax()))
    return tokens


@pytest.mark.parametrize("shape", TINY)
@settings(deadline=None, max_examples=12)
@given(prompt=PROMPTS, cuts=st.lists(st.integers(1, 23), max_size=6))
def test_no_cache_and_any_chunks_of_prefill_say_the_same(shape, prompt, cuts):
    network = TINY[shape]
    expected = without_cache(network, prompt, STEPS)
    assert in_chunks(network, prompt, STEPS, []) == expected
    assert in_chunks(network, prompt, STEPS, cuts) == expected
    assert in_chunks(network, prompt, STEPS, list(range(24))) == expected  # one token at a time


@pytest.mark.parametrize("shape", TINY)
@settings(deadline=None, max_examples=12)
@given(requests=st.lists(st.tuples(PROMPTS, st.integers(0, 5)), min_size=1, max_size=4))
def test_alone_and_in_any_ragged_batch_say_the_same(shape, requests):
    network = TINY[shape]
    prompts, late = [prompt for prompt, _ in requests], [turn for _, turn in requests]
    expected = [in_chunks(network, prompt, STEPS, []) for prompt in prompts]
    assert in_ragged_batches(network, prompts, STEPS, late) == expected


@settings(deadline=None, max_examples=12)
@given(prompt=PROMPTS, wrong=PROMPTS)
def test_tokens_that_were_taken_back_leave_no_trace(prompt, wrong):
    network = TINY["qwen3, normalized heads"]
    assert after_a_rewind(network, prompt, STEPS, wrong[:5]) == in_chunks(network, prompt, STEPS, [])


@pytest.fixture(scope="module")
def tiny_llm(tmp_path_factory) -> LLM:
    return LLM(save_tiny(tmp_path_factory.mktemp("tiny")), dtype="float64", device="cpu")


@settings(deadline=None, max_examples=12)
@given(prompt=PROMPTS, chunk=st.integers(1, 24))
def test_the_engine_says_what_is_said_without_any_cache_in_any_chunks(tiny_llm, prompt, chunk):
    params = SamplingParams(max_tokens=STEPS, ignore_eos=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_PREFILL_CHUNK", chunk)
        answer = tiny_llm.generate(prompt, params)[0]
    assert answer.token_ids == without_cache(tiny_llm.model, prompt, STEPS)


def test_the_chain_would_notice_a_cache_that_forgets():
    network, prompt = TINY["qwen3, normalized heads"], random_ids(20)

    class Forgetful(kv_cache.ConcatKVCache):
        def read(self, layer, request_id):
            keys, values = super().read(layer, request_id)
            return torch.cat([torch.zeros_like(keys[:1]), keys[1:]]), values

    cache = Forgetful(network.config.num_layers)
    logits = network(Batch.of([(0, prompt, 0)], all_logits=True), cache)
    assert logits.argmax(-1).tolist() != all_logits(network, prompt).argmax(-1).tolist()


@pytest.mark.model
def test_the_real_model_says_the_same_whichever_way_it_is_computed(smollm2_fp32, monkeypatch):
    network, steps = smollm2_fp32.model, 24
    prompt = smollm2_fp32.chat_prompt([{"role": "user", "content": "Name three rivers of Europe."}])
    other = smollm2_fp32.tokenizer.encode("def fibonacci(n):\n")
    third = smollm2_fp32.tokenizer.encode("Once upon a time, in a village by the sea, there lived")
    expected = in_chunks(network, prompt, steps, [])
    # the text up to each token, computed anew in one pass: what no cache would say (24 passes would say it more slowly)
    anew = all_logits(network, [*prompt, *expected])[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert anew == expected
    assert in_ragged_batches(network, [other, prompt, third], steps, [0, 2, 3])[1] == expected
    monkeypatch.setattr(engine, "_PREFILL_CHUNK", 7)
    params = SamplingParams(max_tokens=steps, ignore_eos=True)
    assert smollm2_fp32.generate(prompt, params)[0].token_ids == expected


@pytest.mark.model
def test_the_real_model_without_any_cache_says_what_it_says_with_one(smollm2_fp32):
    prompt = smollm2_fp32.tokenizer.encode("The capital of Italy is")
    with_cache = smollm2_fp32.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids
    assert without_cache(smollm2_fp32.model, prompt, 8) == with_cache
