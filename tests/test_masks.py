"""The mask language: every word against loops over positions, joined in any way; masked models against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CACHES, all_logits, new_cache, ours, random_ids, save_tiny, transformers_model

from llmfromscratch import (
    LLM,
    SamplingParams,
    attention_backends,
    compiled_layers,
    fused_layers,
    kv_cache,
    masks,
    sparse_cache,
)
from llmfromscratch.batch import Batch
from llmfromscratch.errors import RequestError

CPU = torch.device("cpu")
TOKENS = 23


def seen(mask: masks.Mask, tokens: int = TOKENS) -> list[list[bool]]:
    return masks.table(mask, 0, tokens, CPU).tolist()


def by_hand(rule) -> list[list[bool]]:
    return [[key <= query and rule(query, key) for key in range(TOKENS)] for query in range(TOKENS)]


words = st.one_of(
    st.builds(masks.sliding, st.integers(1, 9)),
    st.builds(masks.dilated, st.integers(1, 4), st.integers(1, 5)),
    st.builds(masks.global_tokens, st.integers(1, 5)),
    st.builds(masks.blocks, st.integers(1, 6), st.integers(0, 2)),
    st.builds(masks.random_blocks, st.integers(1, 5), st.integers(1, 3), st.integers(0, 10**9)),
)


def joined(inner):
    return st.one_of(st.builds(lambda a, b: a | b, inner, inner), st.builds(lambda a, b: a & b, inner, inner))


expressions = st.recursive(words, joined, max_leaves=5)

# ---- the words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 7, 100])
def test_a_sliding_window_sees_the_newest_tokens_and_counts_its_own(window):
    assert seen(masks.sliding(window)) == by_hand(lambda query, key: key in range(query - window + 1, query + 1))


@pytest.mark.parametrize(("stride", "window"), [(1, 3), (2, 3), (3, 1), (5, 2)])
def test_a_dilated_window_sees_as_many_tokens_a_stride_apart(stride, window):
    wanted = by_hand(lambda query, key: key in [query - stride * back for back in range(window)])
    assert seen(masks.dilated(stride, window)) == wanted
    assert max(map(sum, wanted)) <= window


def test_global_tokens_are_the_first_ones_for_everyone():
    assert seen(masks.global_tokens(3)) == by_hand(lambda query, key: key in (0, 1, 2))


@pytest.mark.parametrize(("size", "before"), [(1, 0), (4, 0), (4, 1), (5, 2)])
def test_blocks_see_their_own_and_so_many_before(size, before):
    of = [position // size for position in range(TOKENS)]
    assert seen(masks.blocks(size, before)) == by_hand(lambda query, key: of[query] - before <= of[key])


def test_random_blocks_are_whole_blocks_drawn_anew_for_each_block_of_queries():
    table = torch.tensor(seen(masks.random_blocks(4, 2, seed=5), 400))
    drawn = []
    for block in range(100):
        rows = table[4 * block : 4 * block + 4]
        ones = {int(key) // 4 for key in rows[-1].nonzero()}
        assert 1 <= len(ones) <= 2 and max(ones) <= block
        for place, row in enumerate(rows.tolist()):
            assert row == [key // 4 in ones and key <= 4 * block + place for key in range(400)]
        drawn.append(ones)
    # no place is preferred: far and near blocks are drawn alike
    places = [one / (block + 1) for block, ones in enumerate(drawn) if block > 20 for one in ones]
    assert 0.35 < np.mean(places) < 0.6 and len({int(10 * place) for place in places}) == 10
    assert seen(masks.random_blocks(4, 2, seed=5)) == seen(masks.random_blocks(4, 2, seed=5))
    assert seen(masks.random_blocks(4, 2, seed=5), 400) != seen(masks.random_blocks(4, 2, seed=6), 400)


# ---- joined ------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(left=expressions, right=expressions)
def test_either_sees_what_one_of_them_sees_and_both_what_both_see(left, right):
    one, other = np.array(seen(left)), np.array(seen(right))
    assert (np.array(seen(left | right)) == (one | other)).all()
    assert (np.array(seen(left & right)) == (one & other)).all()


@settings(deadline=None)
@given(mask=expressions)
def test_what_is_printed_makes_the_same_mask_again(mask):
    again = eval(repr(mask), vars(masks))
    assert again == mask and hash(again) == hash(mask) and repr(again) == repr(mask)


def test_an_expression_reads_as_it_was_written():
    mask = (masks.sliding(256) | masks.global_tokens(4)) & masks.blocks(64, 1) & masks.dilated(2, 8)
    assert repr(mask) == "(sliding(256) | global_tokens(4)) & blocks(64, 1) & dilated(2, 8)"
    assert repr(masks.sliding(2) & masks.blocks(3) | masks.random_blocks(4, 1, 7)) == (
        "sliding(2) & blocks(3) | random_blocks(4, 1, 7)"
    )


@settings(deadline=None)
@given(mask=expressions, start=st.integers(0, TOKENS - 1), new=st.integers(1, TOKENS))
def test_a_chunk_sees_what_its_rows_see_in_the_whole_text_and_never_ahead(mask, start, new):
    whole = torch.tensor(seen(mask))
    assert not whole.triu(1).any()
    end = min(start + new, TOKENS)
    assert torch.equal(masks.table(mask, start, end - start, CPU), whole[start:end, :end])
    assert masks.seen_from(mask, start).tolist() == whole[start].nonzero().flatten().tolist()
    assert bool(mask.visible(start, start)) == bool(whole[start, start])


@settings(deadline=None)
@given(mask=expressions)
def test_a_mask_that_is_taken_lets_every_token_see_itself(mask):
    try:
        masks.check(mask)
    except RequestError:
        assert "global_tokens" in repr(mask) or "random_blocks" in repr(mask)
    else:
        assert np.diag(np.array(seen(mask))).all()


# ---- refused -----------------------------------------------------------------------------------------------------


def test_numbers_that_cannot_be_meant_are_refused_by_name():
    for make, sentence in (
        (lambda: masks.sliding(0), "sliding: window is 0; it must be a whole number of at least 1"),
        (lambda: masks.dilated(True, 2), "dilated: stride is True"),
        (lambda: masks.dilated(2, 1.5), "dilated: window is 1.5"),
        (lambda: masks.global_tokens(-1), "global_tokens: count is -1"),
        (lambda: masks.blocks(4, -1), "blocks: before is -1; it must be a whole number of at least 0"),
        (lambda: masks.random_blocks(4, 0), "random_blocks: count is 0"),
    ):
        with pytest.raises(RequestError, match=sentence):
            make()
    with pytest.raises(TypeError):
        masks.sliding(3) | 5


def test_what_is_no_mask_or_leaves_a_token_with_nothing_is_refused():
    with pytest.raises(RequestError, match="mask is 256; expected one made of masks.sliding"):
        LLM("nowhere", mask=256)
    for mask in (masks.global_tokens(4), masks.random_blocks(8, 2), masks.sliding(4) & masks.global_tokens(1)):
        with pytest.raises(RequestError, match=r"may leave a token without anything .* \| masks.sliding\(1\)"):
            LLM("nowhere", mask=mask)
    masks.check(masks.global_tokens(4) | masks.sliding(1))


def test_a_cache_that_forgets_takes_no_mask_when_the_engine_is_made_nor_later(tmp_path):
    folder = save_tiny(tmp_path)
    with pytest.raises(RequestError, match=r"mask=sliding\(4\) cannot be kept over a SlidingWindow \(window=...\)"):
        LLM(folder, dtype="float32", device="cpu", window=8, mask=masks.sliding(4))
    llm = LLM(folder, dtype="float32", device="cpu", mask=masks.sliding(4))
    before = llm.cache
    with pytest.raises(RequestError, match="cannot be kept over a SlidingWindow"):
        llm.cache = sparse_cache.SlidingWindow(llm.config.num_layers, 8)
    assert llm.cache is before


# ---- models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["auto", "plain", "compiled", "tiled", "sdpa"])
@pytest.mark.parametrize("window", [1, 3, 8, 200])
def test_a_sliding_window_is_transformers_sliding_window(window, kind):
    oracle = transformers_model("mistral, narrow heads", sliding_window=window, attn_implementation="eager")
    ids = random_ids(30, seed=1)
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    network = ours(oracle)
    attention_backends.use(kind, network.layers, masks.sliding(window))
    cache = kv_cache.PagedKVCache(kv_cache.CacheLayout.of(network.config), 40, 3)
    found = [network(Batch.of([(0, ids[:11], 0)], all_logits=True), cache)]
    found += [network(Batch.of([(0, ids[11:20], 11)], all_logits=True), cache)]
    found += [network(Batch.of([(0, [token], 20 + i)]), cache) for i, token in enumerate(ids[20:])]
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4)


MASK = masks.sliding(4) | masks.global_tokens(2) | masks.random_blocks(3, 1)


def anew(network, prompt: list[int], steps: int) -> list[int]:
    ids = list(prompt)
    for _ in range(steps):
        ids.append(int(all_logits(network, ids)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("attention", ["auto", "plain", "tiled", "sdpa"])
@pytest.mark.parametrize("cache", ["paged", "static", "concat", "none"])
def test_a_masked_engine_says_the_same_in_any_chunks_cache_and_company(tiny_folder, attention, cache):
    settings = {"attention": attention, "kv_cache": cache, "max_batch_tokens": 7}
    llm = LLM(tiny_folder, dtype="float64", device="cpu", mask=MASK, **settings)
    prefix = random_ids(18, seed=2)
    prompts = [prefix + random_ids(5, seed=3), random_ids(9, seed=4), prefix + random_ids(7, seed=5)]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    said = [out.token_ids for out in llm.generate(prompts, params)]
    attention_backends.use("plain", llm.model.layers, MASK)
    assert said == [anew(llm.model, prompt, 6) for prompt in prompts]
    attention_backends.use("plain", llm.model.layers)
    assert said != [anew(llm.model, prompt, 6) for prompt in prompts]


@pytest.mark.parametrize("kind", [kind for kind in CACHES if kind != "none"])
def test_compiled_decode_steps_keep_to_the_mask_in_every_cache(kind):
    network = ours(transformers_model("llama, 9 heads on 3, tied, other rope base and epsilon"), torch.float32)
    ids = random_ids(40, seed=6)
    attention_backends.use("plain", network.layers, MASK)
    expected = all_logits(network, ids)
    attention_backends.use("auto", network.layers, MASK)
    cache = new_cache(kind, network, tokens=64)
    found = [network(Batch.of([(0, ids[:9], 0)], all_logits=True), cache)]
    found += [network(Batch.of([(0, [token], 9 + i)]), cache) for i, token in enumerate(ids[9:])]
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("layers", ["fused", "compiled"])
@pytest.mark.parametrize("cache", ["static", "paged, blocks of 3"])
def test_fused_and_compiled_layers_keep_to_the_mask_in_steps_drafts_and_prompts(layers, cache):
    network = ours(transformers_model("llama, 9 heads on 3, tied, other rope base and epsilon"), torch.float32)
    ids, other = random_ids(41, seed=6), random_ids(12, seed=8)
    attention_backends.use("plain", network.layers, MASK)
    expected, beside = all_logits(network, ids), all_logits(network, other)
    fused_layers.use(layers, network)
    attention_backends.use("auto", network.layers, MASK)
    store, found, start = new_cache(cache, network, tokens=64), [], 0
    network(Batch.of([(1, other[:11], 0)]), store)
    for new in (12, 1, 1, 5, 1, 3, 1):  # a prompt, steps, and drafts that are verified
        found.append(network(Batch.of([(0, ids[start : start + new], start)], all_logits=True), store))
        start += new
    both = network(Batch.of([(0, ids[start : start + 4], start), (1, other[11:], 11)], all_logits=True), store)
    torch.testing.assert_close(torch.cat([*found, both[:4]]), expected[: start + 4], rtol=0, atol=2e-4)
    torch.testing.assert_close(both[4:], beside[11:], rtol=0, atol=2e-4)
    assert (expected - all_logits_without_mask(network, ids)).abs().max() > 0.1


def all_logits_without_mask(network, ids):
    attention_backends.use("plain", network.layers)
    return all_logits(network, ids)


def test_scoring_a_text_keeps_to_the_mask(tiny_folder):
    llm = LLM(tiny_folder, dtype="float64", device="cpu", mask=MASK)
    ids = random_ids(25, seed=7)
    found = [one.raw for one in llm.logprobs(ids)[1:]]
    attention_backends.use("plain", llm.model.layers, MASK)
    rows = all_logits(llm.model, ids).log_softmax(-1)
    expected = [float(rows[place, token]) for place, token in enumerate(ids[1:])]
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.model
def test_the_real_model_keeps_to_the_mask_in_compiled_layers(smollm2_gguf, smollm2_fp32, monkeypatch):
    """In float32, by the layers and the attention that the engine chooses itself, against the whole text at once."""
    mask = masks.sliding(12) | masks.global_tokens(1)
    llm = LLM(smollm2_gguf, dtype="float32", device="cpu", mask=mask)
    prompt = llm.tokenizer.encode("The river ran past the mill, and the miller counted his sacks: one, two, three,")
    calls = []
    own = compiled_layers.forward
    monkeypatch.setattr(compiled_layers, "forward", lambda *parts: calls.append(1) or own(*parts))
    said = llm.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
    assert len(calls) == 11 * llm.config.num_layers
    layers = smollm2_fp32.model.layers
    try:
        attention_backends.use("plain", layers, mask)
        assert best(smollm2_fp32.model, prompt, said) == said
        attention_backends.use("plain", layers)
        assert best(smollm2_fp32.model, prompt, said) != said
    finally:
        attention_backends.use("auto", layers)


def best(network, prompt, said) -> list[int]:
    """The most probable token behind the prompt and behind each token of the answer but the last, in one pass."""
    return all_logits(network, [*prompt, *said])[len(prompt) - 1 : -1].argmax(-1).tolist()
