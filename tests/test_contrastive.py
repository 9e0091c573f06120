"""Contrastive search and contrastive decoding give what their papers' formulas give, computed slowly here."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import CACHES, all_logits, new_cache, random_ids, save_tiny, tiny_model

from llmfromscratch import LLM, RequestError, contrastive, kv_cache, layer_skipping
from llmfromscratch.batch import Batch
from llmfromscratch.contrastive import ContrastiveDecoding, ContrastiveSearch, contrastive_decoding, contrastive_search

BEGINNINGS = (
    "DeepMind Company is",
    "The history of the bicycle began when",
    "In a small village by the sea there lived",
    "My favourite thing about the summer is",
)


def last_states(network, ids):
    """(hidden states behind the last norm [tokens, hidden], logits [vocab] of the next token), without any cache."""
    found = []
    hook = network.norm.register_forward_hook(lambda _, inputs, output: found.append(output))
    logits = all_logits(network, ids)[-1]
    hook.remove()
    return found[0], logits


def slow_search(network, ids, top_k, alpha, tokens):
    """Su et al. 2022, equation 5, one candidate and one pair at a time."""
    text = list(ids)
    for _ in range(tokens):
        hidden, logits = last_states(network, text)
        probabilities = logits.softmax(-1)
        best, chosen = -math.inf, None
        for token in probabilities.sort(descending=True).indices[:top_k].tolist():
            own = last_states(network, [*text, token])[0][-1]
            penalty = max(
                float(own @ before / (own.square().sum().sqrt() * before.square().sum().sqrt())) for before in hidden
            )
            score = (1 - alpha) * float(probabilities[token]) - alpha * penalty
            if score > best:
                best, chosen = score, token
        text.append(chosen)
    return text[len(ids) :]


def slow_decoding(expert, amateur, ids, alpha, temperature, tokens):
    """Li et al. 2022, equations 2 and 3, token by token."""
    text = list(ids)
    for _ in range(tokens):
        wise = all_logits(expert, text)[-1].softmax(-1).tolist()
        simple = (all_logits(amateur, text)[-1] / temperature).softmax(-1).tolist()
        most = max(wise)
        scores = {
            token: math.log(p) - math.log(simple[token]) for token, p in enumerate(wise) if p and p >= alpha * most
        }
        text.append(max(scores, key=scores.get))
    return text[len(ids) :]


def run(search, tokens, cache=None):
    try:
        found = []
        for _ in range(tokens):
            found.append(search.step())
            if hasattr(cache, "audit"):
                cache.audit()
        return found
    finally:
        search.close()


@pytest.mark.parametrize("seed", range(12))
def test_contrastive_search_of_random_models_is_the_formula(seed):
    network, ids = tiny_model(seed % 4), random_ids(3 + seed % 6, seed)
    top_k, alpha = 1 + seed % 5, (0.0, 0.3, 0.6, 0.9, 1.0)[seed % 5]
    cache = new_cache("paged, blocks of 3", network)
    found = run(ContrastiveSearch(network, cache, ids, top_k, alpha), 10, cache)
    assert found == slow_search(network, ids, top_k, alpha, 10)
    assert not cache.block_tables


@pytest.mark.parametrize("seed", range(12))
def test_contrastive_decoding_of_random_models_is_the_formula(seed):
    expert, ids = tiny_model(seed % 4), random_ids(3 + seed % 6, seed)
    amateur = tiny_model(7) if seed % 2 else layer_skipping.skip_layers(expert, [0, 2])
    alpha, temperature = (0.1, 0.0, 0.5, 1.0)[seed % 4], (1.0, 0.5, 2.0)[seed % 3]
    cache = new_cache("paged, blocks of 3", expert)
    found = run(ContrastiveDecoding(expert, amateur, cache, ids, alpha, temperature), 10, cache)
    assert found == slow_decoding(expert, amateur, ids, alpha, temperature, 10)
    assert not cache.block_tables


def greedy(network, ids, tokens):
    text = list(ids)
    for _ in range(tokens):
        text.append(int(all_logits(network, text)[-1].argmax()))
    return text[len(ids) :]


def test_at_their_neutral_values_both_are_greedy_decoding():
    network, ids = tiny_model(2), random_ids(5, 2)
    expected = greedy(network, ids, 12)
    assert run(ContrastiveSearch(network, new_cache("concat", network), ids, 5, 0.0), 12) == expected
    assert run(ContrastiveSearch(network, new_cache("concat", network), ids, 1, 1.0), 12) == expected
    other = tiny_model(9)
    assert run(ContrastiveDecoding(network, other, new_cache("concat", network), ids, 1.0, 1.0), 12) == expected


@pytest.mark.parametrize("kind", CACHES)
def test_every_cache_gives_the_same_tokens(kind, monkeypatch):
    network, ids = tiny_model(1), random_ids(20, 1)
    amateur = layer_skipping.skip_layers(network, [0, 2])
    expected = slow_search(network, ids, 4, 0.6, 8), slow_decoding(network, amateur, ids, 0.1, 1.0, 8)
    monkeypatch.setattr("llmfromscratch.branches._CHUNK", 7)  # the prompt's hidden states come in several passes
    cache = new_cache(kind, network)
    for _ in range(2):  # the second time a cache that shares prefixes has some of it already
        assert run(ContrastiveSearch(network, cache, ids, 4, 0.6), 8) == expected[0]
        assert run(ContrastiveDecoding(network, amateur, cache, ids, 0.1, 1.0), 8) == expected[1]


def test_a_candidate_costs_one_token_and_the_chosen_one_is_not_computed_again(monkeypatch):
    network, ids, sizes = tiny_model(1), random_ids(20, 1), []
    search = ContrastiveSearch(network, new_cache("concat", network), ids, 4, 0.6)
    hook = network.embed_tokens.register_forward_hook(lambda _, inputs, output: sizes.append(len(inputs[0])))
    heads = []
    network.lm_head.register_forward_hook(lambda _, inputs, output: heads.append(len(output)))
    run(search, 5)
    hook.remove()
    assert sizes == [20, 4, 4, 4, 4, 4]
    assert heads == [1, 4, 4, 4, 4, 4]  # hidden states are wanted of the whole prompt, logits of its last token alone


@pytest.mark.parametrize("kind", ["search", "decoding"])
def test_whatever_is_interrupted_gives_everything_back(kind):
    network, ids = tiny_model(1), random_ids(20, 1)

    def begin(cache):
        if kind == "search":
            return ContrastiveSearch(network, cache, ids, 4, 0.6)
        return ContrastiveDecoding(network, contrastive.default_amateur(network), cache, ids, 0.1, 1.0)

    for fails_at in range(1, 13):
        cache, writes = new_cache("paged, blocks of 3", network), []
        write = cache.write

        def failing(layer, *rest, write=write, writes=writes, fails_at=fails_at):
            writes.append(layer)
            if len(writes) == fails_at:
                raise KeyboardInterrupt
            write(layer, *rest)

        cache.write = failing
        with pytest.raises(KeyboardInterrupt):
            run(begin(cache), 6)
        cache.audit()
        assert not cache.block_tables
        assert not network.lm_head._forward_pre_hooks


# ---- skipped layers ----------------------------------------------------------------------------------------------


def test_a_model_without_some_layers_is_the_model_whose_layers_add_nothing_there():
    network, ids = tiny_model(3), random_ids(9, 3)
    silent = tiny_model(3)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        silent.layers[1].get_submodule(name).weight.data.zero_()
    smaller = layer_skipping.skip_layers(network, [0, 2])
    assert torch.allclose(all_logits(smaller, ids), all_logits(silent, ids), rtol=1e-12, atol=1e-12)
    assert len(smaller.layers) == smaller.config.num_layers == 2


def test_the_copy_shares_every_weight_and_leaves_the_model_as_it_was():
    network, ids = tiny_model(3), random_ids(9, 3)
    before = all_logits(network, ids)
    smaller = layer_skipping.skip_layers(network, [1, 2])
    own = {weight.data_ptr() for weight in network.parameters()}
    assert {weight.data_ptr() for weight in smaller.parameters()} < own
    assert smaller.lm_head.weight is network.lm_head.weight
    assert torch.equal(all_logits(network, ids), before)
    assert [layer.self_attn.layer for layer in network.layers] == [0, 1, 2]
    assert torch.equal(all_logits(layer_skipping.skip_layers(network, [0, 1, 2]), ids), before)


@pytest.mark.parametrize("kept", [[], [0, 3], [-1, 0], [1, 0], [1, 1]])
def test_layers_that_cannot_be_kept_are_refused(kept):
    with pytest.raises(ValueError, match="the layers to keep are"):
        layer_skipping.skip_layers(tiny_model(3), kept)


def test_the_middle_is_left_out():
    assert layer_skipping.without_middle(10, 2) == [0, 1, 2, 3, 6, 7, 8, 9]
    assert layer_skipping.without_middle(3, 1) == [0, 2]
    assert layer_skipping.without_middle(4, 0) == [0, 1, 2, 3]


# ---- through an LLM ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(save_tiny(tmp_path_factory.mktemp("tiny")), dtype="float32", device="cpu", block_size=4)


def test_an_answer_has_text_tokens_and_a_true_reason(llm):
    prompt = llm.tokenizer.encode("hello")
    expected = slow_search(llm.model, prompt, 4, 0.6, 12)
    answer = contrastive_search(llm, "hello", max_tokens=12, ignore_eos=True)
    assert (answer.token_ids, answer.finish_reason) == (expected, "length")
    assert answer.text == llm.tokenizer.decode(expected) and answer.metrics.tokens == 12
    end = expected[5]
    stopped = contrastive_search(llm, prompt, max_tokens=12, ignore_eos=True, stop_token_ids=[end])
    assert stopped.token_ids == expected[: expected.index(end) + 1] and stopped.finish_reason == "stop"
    expected = slow_decoding(llm.model, layer_skipping.skip_layers(llm.model, [0, 2]), prompt, 0.1, 1.0, 12)
    answer = contrastive_decoding(llm, "hello", max_tokens=12, ignore_eos=True)
    assert (answer.token_ids, answer.finish_reason) == (expected, "length")
    llm.cache.audit()


def test_the_model_s_own_end_ends_an_answer_and_the_context_is_never_overrun(llm):
    prompt = random_ids(llm.config.context_length - 4)
    for answer in (contrastive_search(llm, prompt), contrastive_decoding(llm, prompt)):
        assert len(answer.token_ids) == 4 or answer.token_ids[-1] in llm.config.eos_token_ids
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] in llm.config.eos_token_ids else "length")


OTHER_CACHES = [{"kv_cache": "none"}, {"kv_cache": "concat"}, {"kv_cache": "static"}, {"window": 64}]


@pytest.mark.parametrize("settings", OTHER_CACHES, ids=str)
def test_llms_with_other_caches_answer_alike(settings, llm, tmp_path):
    other = LLM(save_tiny(tmp_path), dtype="float32", device="cpu", **settings)
    for method in (contrastive_search, contrastive_decoding):
        expected = method(llm, "hello there", max_tokens=6, ignore_eos=True)
        assert method(other, "hello there", max_tokens=6, ignore_eos=True) == expected


def test_a_search_waits_for_memory_that_others_hold_and_says_so_when_there_is_never_enough(tmp_path):
    folder = save_tiny(tmp_path)
    cache_bytes = kv_bytes(folder, blocks=5)
    tight = LLM(folder, dtype="float32", device="cpu", block_size=4, kv_cache_memory=cache_bytes)
    long = contrastive_search(tight, random_ids(40), max_tokens=2)
    assert long.finish_reason == "abort" and "blocks" in long.error
    stream = tight.stream(random_ids(8), tight_params(8))
    next(stream)
    answer = contrastive_search(tight, random_ids(6), top_k=3, max_tokens=3, ignore_eos=True)
    assert len(answer.token_ids) == 3 and answer.finish_reason == "length"
    assert len(list(stream)) == 7
    tight.cache.audit()
    assert not tight.cache.block_tables


def kv_bytes(folder, blocks):
    config = LLM(folder, dtype="float32", device="cpu", kv_cache="none").config
    return blocks * 4 * kv_cache.bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, 4)


def tight_params(tokens):
    from llmfromscratch import SamplingParams

    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def test_logits_that_are_not_finite_end_the_answer_with_a_reason(tmp_path):
    broken = LLM(save_tiny(tmp_path), dtype="float32", device="cpu")
    broken.model.norm.weight.data[0] = math.nan
    for method in (contrastive_search, contrastive_decoding):
        answer = method(broken, "hello")
        assert answer.finish_reason == "abort" and "NaN" in answer.error
    broken.cache.audit()
    assert not broken.cache.block_tables


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (contrastive_search, {"alpha": -0.1}, "alpha is -0.1"),
        (contrastive_search, {"alpha": math.nan}, "alpha is nan"),
        (contrastive_search, {"top_k": 0}, "top_k is 0"),
        (contrastive_search, {"top_k": 10**6}, "top_k is 1000000"),
        (contrastive_search, {"max_tokens": 0}, "max_tokens is 0"),
        (contrastive_decoding, {"alpha": 1.5}, "alpha is 1.5"),
        (contrastive_decoding, {"amateur_temperature": 0.0}, "amateur_temperature is 0.0"),
        (contrastive_decoding, {"amateur": tiny_model(0)}, "vocabulary of 97, the model one of 259"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(llm, method, changes, message):
    with pytest.raises(RequestError, match=message):
        method(llm, "hello", **changes)


def test_hidden_states_are_what_the_head_reads_for_every_token():
    network, ids = tiny_model(2), random_ids(7, 2)
    states, cache = contrastive.WithHiddenStates(network), new_cache("concat", network)
    logits = states(Batch.of([(0, ids[:4], 0)]), cache)
    states(Batch.of([(0, ids[4:], 4)], logits_at=[None]), cache)
    expected, _ = last_states(network, ids)
    assert torch.allclose(states.take(), torch.nn.functional.normalize(expected, dim=-1))
    assert torch.allclose(logits[0], all_logits(network, ids)[3])


# ---- the real model ----------------------------------------------------------------------------------------------


@pytest.mark.model
def test_the_real_model_searches_and_decodes_by_the_formulas(smollm2_fp32):
    llm = smollm2_fp32
    amateur = contrastive.default_amateur(llm.model)
    assert amateur.config.num_layers == 24
    for prompt in BEGINNINGS[:2]:
        ids = llm.tokenizer.encode(prompt)
        found = contrastive_search(llm, prompt, max_tokens=12, ignore_eos=True).token_ids
        assert found == slow_search(llm.model, ids, 4, 0.6, 12)
        found = contrastive_decoding(llm, prompt, max_tokens=12, ignore_eos=True).token_ids
        assert found == slow_decoding(llm.model, amateur, ids, 0.1, 1.0, 12)
    llm.cache.audit()


def distinct(ids, n):
    """The share of different runs of n tokens among all of them: 1 where nothing repeats."""
    runs = [tuple(ids[place : place + n]) for place in range(len(ids) - n + 1)]
    return len(set(runs)) / len(runs)


@pytest.mark.model
def test_contrastive_search_repeats_less_than_greedy_decoding_on_the_real_model(smollm2_fp32):
    from llmfromscratch import SamplingParams

    tokens, texts = 48, BEGINNINGS[1:3]
    plain = smollm2_fp32.generate(list(texts), SamplingParams(max_tokens=tokens, ignore_eos=True))
    varied = [contrastive_search(smollm2_fp32, text, max_tokens=tokens, ignore_eos=True) for text in texts]
    for n in (2, 3, 4):
        before, after = (sum(distinct(one.token_ids, n) for one in found) / len(found) for found in (plain, varied))
        assert after > before + 0.1, f"distinct {n}-grams: greedy {before:.3f}, contrastive search {after:.3f}"
