"""The engine's first law: greedy tokens are the same whichever way they are computed.

Here: no cache = concat = static = paged (any block size, blocks in any order) = prefill in any chunks = prefix hit =
rewound = forked = alone or in any ragged batch = plain, fused or compiled layers = any attention. Later ways join.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CACHES, VOCAB, all_logits, new_cache, ours, random_ids, save_tiny, transformers_model

from llmfromscratch import LLM, SamplingParams, attention_backends, fused_layers, kv_cache, model
from llmfromscratch.batch import Batch

# in float64, so that no near tie can decide
TINY = {
    shape: ours(transformers_model(shape, num_hidden_layers=2), torch.float64)
    for shape in (
        "llama, 3 heads on 1",
        "llama, 9 heads on 3, tied, other rope base and epsilon",
        "llama, wide heads, every bias",
        "qwen3, normalized heads",
    )
}
PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)
STEPS = 4
PAGED = [kind for kind in CACHES if kind.startswith("paged")]
Said = tuple[list[int], torch.Tensor]  # tokens, and the logits [steps, vocab] that each was taken from


def anew(network: model.Model, prompt: list[int], steps: int = STEPS) -> Said:
    """The plainest way: every token from the whole text before it, each in an empty cache."""
    ids, logits = list(prompt), []
    for _ in range(steps):
        logits.append(all_logits(network, ids)[-1])
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :], torch.stack(logits)


def feed(network: model.Model, cache: kv_cache.KVCache, text: list[int], request: int = 0) -> torch.Tensor:
    """Computes what the cache does not hold of a text; logits [vocab] after its last token."""
    done = cache.length(request)
    logits = network(Batch.of([(request, text[done:], done)]), cache)[0]
    audit(cache)
    return logits


def greedy(
    network: model.Model,
    cache: kv_cache.KVCache,
    prompt: list[int],
    steps: int = STEPS,
    cuts: Sequence[int] = (),
    request: int = 0,
) -> Said:
    """As the engine does: what is shared is taken over, the rest is prefilled in chunks that end at the cuts."""
    cache.match_prefix(request, prompt)
    edges = [] if isinstance(cache, kv_cache.NoKVCache) else sorted(set(cuts))
    for edge in edges:
        if cache.length(request) < edge < len(prompt):
            feed(network, cache, prompt[:edge], request)
    text, logits = list(prompt), []
    for _ in range(steps):
        logits.append(feed(network, cache, text, request))
        text.append(int(logits[-1].argmax()))
    return text[len(prompt) :], torch.stack(logits)


def audit(cache: kv_cache.KVCache) -> None:
    if isinstance(cache, kv_cache.PagedKVCache):
        cache.audit()


def same(said: Said, expected: Said) -> None:
    assert said[0] == expected[0]
    torch.testing.assert_close(said[1], expected[1], rtol=0, atol=1e-9)


# ---- alone -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CACHES)
@settings(deadline=None, max_examples=8)
@given(shape=st.sampled_from(sorted(TINY)), prompt=PROMPTS, cuts=st.lists(st.integers(1, 39), max_size=6))
def test_every_cache_in_any_chunks_says_what_is_said_without(kind, shape, prompt, cuts):
    network = TINY[shape]
    same(greedy(network, new_cache(kind, network), prompt, cuts=cuts), anew(network, prompt))


# Field case 10.
@pytest.mark.parametrize("kind", [kind for kind in CACHES if kind != "none"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_prefill_in_chunks_of_one_size_says_the_same(kind, chunk):
    network, prompt = TINY["llama, 9 heads on 3, tied, other rope base and epsilon"], random_ids(64)
    said = greedy(network, new_cache(kind, network), prompt, cuts=range(chunk, 64, chunk))
    same(said, anew(network, prompt))


@pytest.mark.parametrize("kind", CACHES)
@settings(deadline=None, max_examples=6)
@given(prompt=PROMPTS, wrong=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5))
def test_tokens_that_were_taken_back_leave_no_trace(kind, prompt, wrong):
    # wrong tokens are computed first and taken back, as speculative decoding will do
    network = TINY["qwen3, normalized heads"]
    cache = new_cache(kind, network)
    text, logits = list(prompt), []
    for _ in range(STEPS):
        feed(network, cache, [*text[: cache.length(0)], *wrong])
        cache.rewind(0, len(wrong))
        audit(cache)
        logits.append(feed(network, cache, text))
        text.append(int(logits[-1].argmax()))
    same((text[len(prompt) :], torch.stack(logits)), anew(network, prompt))


@pytest.mark.parametrize("kind", CACHES)
@settings(deadline=None, max_examples=6)
@given(prompt=PROMPTS, back=st.integers(0, 39))
def test_a_text_that_was_rewound_and_fed_again_says_the_same(kind, prompt, back):
    network = TINY["qwen3, normalized heads"]
    cache = new_cache(kind, network)
    expected = anew(network, prompt)
    same(greedy(network, cache, prompt), expected)
    cache.rewind(0, min(cache.length(0), back + STEPS))
    audit(cache)
    text, logits = list(prompt), []
    for _ in range(STEPS):
        if cache.length(0) >= len(text):
            cache.rewind(0, cache.length(0) - len(text) + 1)
        logits.append(feed(network, cache, text))
        text.append(int(logits[-1].argmax()))
    same((text[len(prompt) :], torch.stack(logits)), expected)


@pytest.mark.parametrize("kind", CACHES)
@settings(deadline=None, max_examples=6)
@given(prompt=PROMPTS, other=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), later=st.booleans())
def test_forks_say_the_same_as_two_requests_and_do_not_disturb_each_other(kind, prompt, other, later):
    network = TINY["qwen3, normalized heads"]
    cache = new_cache(kind, network)
    feed(network, cache, prompt)
    cache.fork(0, 1)
    audit(cache)
    turns = [(0, [*prompt, *other]), (1, [*prompt, *reversed(other)])]
    for request, text in reversed(turns) if later else turns:
        same(greedy_from(network, cache, text, request), anew(network, text))
    cache.release(0)
    audit(cache)
    said = anew(network, turns[1][1])[0]
    continued = [*turns[1][1], *said]
    same(greedy_from(network, cache, continued, 1), anew(network, continued))


def greedy_from(network: model.Model, cache: kv_cache.KVCache, text: list[int], request: int) -> Said:
    """Greedy steps for a request that is under way."""
    start, text, logits = len(text), list(text), []
    for _ in range(STEPS):
        logits.append(feed(network, cache, text, request))
        text.append(int(logits[-1].argmax()))
    return text[start:], torch.stack(logits)


# ---- shared prefixes ---------------------------------------------------------------------------------------------


# Field case 11: A, A, B, B elsewhere. A prompt of exactly n full blocks is where the last token must not be shared.
@pytest.mark.parametrize("kind", PAGED)
@pytest.mark.parametrize("released", [True, False])
@pytest.mark.parametrize("length", [1, 2, 3, 8, 9, 16, 31, 32, 33, 48, 64])
def test_the_same_prompt_four_times_gets_the_same_answer_four_times(kind, released, length):
    network, prompt = TINY["llama, 3 heads on 1"], random_ids(length)
    cache, expected = new_cache(kind, network), anew(network, prompt)
    for request in range(4):
        same(greedy(network, cache, prompt, request=request), expected)
        if released:
            cache.release(request)
            audit(cache)
    shared = (length - 1) // cache.block_size * cache.block_size
    assert cache.prefix_hit_tokens == 3 * shared


@pytest.mark.parametrize("kind", PAGED)
@settings(deadline=None, max_examples=8)
@given(prefix=PROMPTS, tails=st.lists(PROMPTS, min_size=2, max_size=4), cuts=st.lists(st.integers(1, 60), max_size=3))
def test_prompts_that_begin_alike_say_what_they_say_alone(kind, prefix, tails, cuts):
    network = TINY["llama, 9 heads on 3, tied, other rope base and epsilon"]
    cache = new_cache(kind, network)
    for request, tail in enumerate(tails):
        prompt = prefix + tail
        same(greedy(network, cache, prompt, cuts=cuts, request=request), anew(network, prompt))
        if request % 2:
            cache.release(request)
            audit(cache)


@pytest.mark.parametrize("kind", PAGED)
@settings(deadline=None, max_examples=6)
@given(numbers=st.lists(st.integers(0, 5), min_size=6, max_size=12))
def test_a_cache_so_small_that_it_forgets_all_the_time_says_the_same(kind, numbers):
    # two texts of 44 tokens fit, the third evicts; prompts come back when they are still there, in part, or not at all
    network = TINY["llama, 3 heads on 1"]
    prompts = [random_ids(24, seed=number % 2) + random_ids(16, seed=number) for number in range(6)]
    cache = new_cache(kind, network, tokens=128)
    for request, number in enumerate(numbers):
        same(greedy(network, cache, prompts[number], request=request), anew(network, prompts[number]))
        cache.release(request - 1)
        audit(cache)


@pytest.mark.parametrize("kind", PAGED)
def test_a_rewound_prompt_is_not_shared_under_what_was_taken_back(kind):
    # a block is full, known, cut, and filled with other tokens: whoever asks for the first text must not get these
    network = TINY["llama, 3 heads on 1"]
    cache, first = new_cache(kind, network), random_ids(33)
    second = first[:30] + random_ids(20, seed=1)
    same(greedy(network, cache, first), anew(network, first))
    cache.rewind(0, cache.length(0) - 30)
    feed(network, cache, second)
    for request, prompt in enumerate((first + [7], second + [7], first + [8]), start=1):
        same(greedy(network, cache, prompt, request=request), anew(network, prompt))


# ---- side by side ------------------------------------------------------------------------------------------------


def side_by_side(
    network: model.Model, cache: kv_cache.KVCache, prompts: list[list[int]], steps: int, late: list[int]
) -> list[Said]:
    """All requests in one ragged batch; request i joins in round late[i], while others are already decoding."""
    texts, logits = [list(prompt) for prompt in prompts], [[] for _ in prompts]
    for turn in range(max(late) + steps):
        for i in range(len(prompts)):
            if turn == late[i]:
                cache.match_prefix(i, prompts[i])
            if turn == late[i] + steps:
                cache.release(i)
        active = [i for i in range(len(prompts)) if late[i] <= turn < late[i] + steps]
        parts = [(i, texts[i][cache.length(i) :], cache.length(i)) for i in active]
        if parts:
            for i, row in zip(active, network(Batch.of(parts), cache), strict=True):
                logits[i].append(row)
                texts[i].append(int(row.argmax()))
        audit(cache)
    return [(text[len(prompt) :], torch.stack(rows)) for text, prompt, rows in zip(texts, prompts, logits, strict=True)]


@pytest.mark.parametrize("kind", CACHES)
@settings(deadline=None, max_examples=8)
@given(
    shape=st.sampled_from(sorted(TINY)),
    prefix=st.lists(st.integers(0, VOCAB - 1), max_size=20),
    requests=st.lists(st.tuples(PROMPTS, st.integers(0, 5)), min_size=1, max_size=4),
)
def test_alone_and_in_any_ragged_batch_say_the_same(kind, shape, prefix, requests):
    network = TINY[shape]
    prompts, late = [prefix + prompt for prompt, _ in requests], [turn for _, turn in requests]
    for said, prompt in zip(
        side_by_side(network, new_cache(kind, network), prompts, STEPS, late), prompts, strict=True
    ):
        same(said, anew(network, prompt))


# ---- in the engine -----------------------------------------------------------------------------------------------

ENGINES = {
    "none": {"kv_cache": "none"},
    "concat": {"kv_cache": "concat"},
    "static": {"kv_cache": "static"},
    "paged": {},
    "paged, blocks of 3": {"block_size": 3},
    "paged, nothing shared": {"prefix_sharing": False},
    "a window longer than any text": {"window": 96},
}


@pytest.fixture(scope="module")
def tiny_llms(tmp_path_factory) -> dict[str, LLM]:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"))
    return {name: LLM(folder, dtype="float64", device="cpu", **settings) for name, settings in ENGINES.items()}


@pytest.mark.parametrize("name", ENGINES)
@settings(deadline=None, max_examples=8)
@given(prompt=PROMPTS, chunk=st.integers(1, 24))
def test_the_engine_says_what_is_said_without_any_cache_in_any_chunks(tiny_llms, name, prompt, chunk):
    llm, params = tiny_llms[name], SamplingParams(max_tokens=STEPS, ignore_eos=True)
    llm.use_scheduler(max_batch_tokens=chunk)
    answers = llm.generate([prompt, prompt], params)
    assert [answer.token_ids for answer in answers] == [anew(llm.model, prompt)[0]] * 2


def test_the_chain_would_notice_a_cache_that_forgets():
    network, prompt = TINY["qwen3, normalized heads"], random_ids(20)

    class Forgetful(kv_cache.ConcatKVCache):
        def read(self, layer, request_id):
            keys, values = super().read(layer, request_id)
            return torch.cat([torch.zeros_like(keys[:1]), keys[1:]]), values

    with pytest.raises(AssertionError):
        same(greedy(network, Forgetful(network.config.num_layers), prompt), anew(network, prompt))


# ---- layers and attention ----------------------------------------------------------------------------------------

ATTENTION = ("plain", "compiled", "tiled", "sdpa")


@pytest.mark.parametrize("layers", ["plain", "fused", "compiled"])
@pytest.mark.parametrize("shape", sorted(TINY))
def test_every_kind_of_layers_says_the_same_with_every_attention_over_every_cache(shape, layers):
    # in float32, where all of them compute; steps, chunks, and chunks of few rows
    network = ours(transformers_model(shape, num_hidden_layers=2))
    fused_layers.use(layers, network)
    for seed, cuts in ((3, ()), (4, (5, 20, 23))):
        prompt = random_ids(26, seed)
        expected = anew(TINY[shape], prompt)
        top = expected[1].topk(2).values
        assert (top[:, 0] - top[:, 1]).min() > 2e-3, "a near tie would tell nothing; choose another seed"
        for attention in ("auto", *ATTENTION):
            attention_backends.use(attention, network.layers)
            for kind in ("concat", "static", "paged, blocks of 8", "paged, scattered"):
                said = greedy(network, new_cache(kind, network), prompt, cuts=cuts)
                assert said[0] == expected[0], (attention, kind)
                torch.testing.assert_close(said[1].double(), expected[1], rtol=0, atol=1e-3)


# ---- the real model ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.model
def test_the_real_model_says_the_same_whichever_way_it_is_computed(smollm2_fp32):
    network, steps = smollm2_fp32.model, 24
    prompt = smollm2_fp32.chat_prompt([{"role": "user", "content": "Name three rivers of Europe."}])
    other = smollm2_fp32.tokenizer.encode("def fibonacci(n):\n")
    third = smollm2_fp32.tokenizer.encode("Once upon a time, in a village by the sea, there lived")
    expected = greedy(network, kv_cache.ConcatKVCache(network.config.num_layers), prompt, steps)[0]
    # the text up to each token, computed anew in one pass: what no cache would say (24 passes would say it more slowly)
    again = all_logits(network, [*prompt, *expected])[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert again == expected
    for kind in ("static", "paged, blocks of 8", "paged, blocks of 16", "paged, blocks of 32", "paged, scattered"):
        cache = new_cache(kind, network, tokens=400)
        assert greedy(network, cache, prompt, steps)[0] == expected, kind
        if kind.startswith("paged"):
            assert greedy(network, cache, prompt, steps, request=1)[0] == expected, f"{kind}, prefix hit"
            assert cache.prefix_hit_tokens >= len(prompt) - cache.block_size
    for chunk in (1, 3, 7):
        cache = new_cache("paged, blocks of 16", network, tokens=400)
        assert greedy(network, cache, prompt, steps, range(chunk, len(prompt), chunk))[0] == expected, chunk
    for kind in ("concat", "static", "paged, blocks of 16"):
        cache = new_cache(kind, network, tokens=400)
        together = side_by_side(network, cache, [other, prompt, third], steps, [0, 2, 3])
        assert together[1][0] == expected, kind
    try:
        for kind in ATTENTION:
            attention_backends.use(kind, network.layers)
            cache = new_cache("paged, blocks of 16", network, tokens=400)
            assert greedy(network, cache, prompt, 6)[0] == expected[:6], kind
    finally:
        attention_backends.use("auto", network.layers)
    assert smollm2_fp32.generate(prompt, SamplingParams(max_tokens=steps, ignore_eos=True))[0].token_ids == expected


@pytest.mark.model
def test_the_real_model_without_any_cache_says_what_it_says_with_one(smollm2_fp32):
    prompt = smollm2_fp32.tokenizer.encode("The capital of Italy is")
    with_cache = smollm2_fp32.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids
    without = kv_cache.NoKVCache(smollm2_fp32.config.num_layers)
    assert greedy(smollm2_fp32.model, without, prompt, 8)[0] == with_cache


def test_every_pair_of_ways_is_joined_by_the_chain():
    """The plain way is computed without this package's caches' help only as far as this: concat, from empty."""
    network, prompt = TINY["llama, 3 heads on 1"], random_ids(12)
    reference = transformers_model("llama, 3 heads on 1", num_hidden_layers=2).double()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, -1]
    said = [greedy(network, new_cache(kind, network), prompt)[1][0] for kind in CACHES]
    for left, right in itertools.pairwise([expected, *said]):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-4)
