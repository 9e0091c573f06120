"""The transformer gives transformers' numbers, whatever its shape and however the tokens are cut into batches."""

from __future__ import annotations

import pytest
import torch
from tiny_models import SHAPES, VOCAB, all_logits, ours, random_ids, tiny_model, transformers_model
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from llmfromscratch import kv_cache, model
from llmfromscratch.batch import Batch

ROPES = {
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 10000.0},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers_for_every_shape_of_model(shape):
    reference = transformers_model(shape)
    ids = random_ids(40)
    assert_same_logits(reference, ids)


@pytest.mark.parametrize("setting", ROPES)
def test_logits_are_those_of_transformers_with_stretched_rotary_frequencies(setting):
    reference = transformers_model("llama, 3 heads on 1", rope_parameters=ROPES[setting])
    assert_same_logits(reference, random_ids(90))


def assert_same_logits(reference, ids: list[int]) -> None:
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    logits = all_logits(ours(reference), ids)
    assert logits.shape == (len(ids), VOCAB)
    scale = expected.abs().max().item()
    assert scale > 1, "logits this small would prove nothing"
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_norm_equals_that_of_transformers_bit_for_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(50, 36, generator=generator) * torch.logspace(-3, 3, 50)[:, None]).to(dtype)
    reference, own = LlamaRMSNorm(36, eps=1e-5).to(dtype), model.RMSNorm(36, eps=1e-5).to(dtype)
    weight = torch.randn(36, generator=generator).to(dtype)
    with torch.inference_mode():
        reference.weight.copy_(weight)
        own.weight.copy_(weight)
        assert torch.equal(own(x), reference(x))
    assert own(x).dtype == dtype


def test_the_norm_has_its_epsilon_inside_the_root():
    own = model.RMSNorm(2, eps=3.0).double()
    x = torch.tensor([1.0, 1.0], dtype=torch.float64)  # mean square 1, so 1 / sqrt(1 + 3)
    assert own(x).tolist() == pytest.approx([0.5, 0.5], rel=1e-6)


# Field case 10: chunks against a filled cache are masked from the wrong corner elsewhere.
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 20])
def test_prefill_in_chunks_gives_the_logits_of_one_prefill(chunk):
    network, ids = tiny_model(), random_ids(20)
    cache = kv_cache.ConcatKVCache(network.config.num_layers)
    pieces = [
        network(Batch.of([(0, ids[start : start + chunk], start)], all_logits=True), cache)
        for start in range(0, len(ids), chunk)
    ]
    torch.testing.assert_close(torch.cat(pieces), all_logits(network, ids), rtol=0, atol=1e-9)


def test_a_later_token_changes_no_earlier_logits():
    network, ids = tiny_model(), random_ids(12)
    changed = [*ids[:-1], (ids[-1] + 1) % VOCAB]
    before, after = all_logits(network, ids), all_logits(network, changed)
    torch.testing.assert_close(after[:-1], before[:-1], rtol=0, atol=1e-12)
    assert (after[-1] - before[-1]).abs().max() > 1e-3


def test_requests_of_a_ragged_batch_get_the_logits_they_get_alone():
    network = tiny_model()
    prompts = {4: random_ids(9, seed=1), 7: random_ids(1, seed=2), 5: random_ids(6, seed=3)}
    alone = {request: all_logits(network, ids) for request, ids in prompts.items()}
    cache = kv_cache.ConcatKVCache(network.config.num_layers)
    network(Batch.of([(4, prompts[4][:8], 0)]), cache)
    # one decode step, a whole prompt of one token, and the first chunk of a longer one, side by side
    mixed = network(Batch.of([(4, prompts[4][8:], 8), (7, prompts[7], 0), (5, prompts[5][:4], 0)]), cache)
    expected = torch.stack([alone[4][8], alone[7][0], alone[5][3]])
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-9)


def test_a_neighbour_in_the_batch_changes_nothing_even_if_its_numbers_are_nan():
    network, ids = tiny_model(), random_ids(5)
    with torch.no_grad():
        network.embed_tokens.weight[VOCAB - 1] = float("nan")
    clean = [token for token in ids if token != VOCAB - 1]
    network.lm_head.weight = torch.nn.Parameter(network.lm_head.weight.nan_to_num())
    logits = network(Batch.of([(0, clean, 0), (1, [VOCAB - 1], 0)]), kv_cache.ConcatKVCache(3))
    assert logits[0].isfinite().all()
    assert logits[1].isnan().all()


def test_the_parameters_carry_the_canonical_names():
    config = tiny_model().config
    expected = {"embed_tokens.weight", "norm.weight", "lm_head.weight"}
    for layer in range(config.num_layers):
        inside = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        inside += [f"self_attn.{letter}_proj" for letter in "qkvo"]
        expected |= {f"layers.{layer}.{name}.weight" for name in inside}
    assert set(model.Model(config).state_dict()) == expected


@pytest.mark.model
def test_the_real_models_logits_are_those_of_transformers(transformers_smollm2, smollm2_fp32):
    ids = smollm2_fp32.tokenizer.encode(LONG_TEXT)[:200]
    assert len(ids) == 200
    with torch.inference_mode():
        expected = transformers_smollm2(torch.tensor([ids])).logits[0]
    difference = (all_logits(smollm2_fp32.model, ids) - expected).abs().max().item()
    assert difference < 1e-3
    assert difference < 1e-4 * expected.abs().max().item()


@pytest.mark.model
def test_the_real_model_finds_ordinary_english_likely(smollm2_fp32):
    ids = smollm2_fp32.tokenizer.encode(LONG_TEXT)
    log_probabilities = all_logits(smollm2_fp32.model, ids).log_softmax(-1)
    surprise = -log_probabilities[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean().item()
    # without un-permuted q and k rows the perplexity of such texts is eight times as high, and still looks like English
    assert 5 < torch.tensor(surprise).exp().item() < 40


LONG_TEXT = """The lighthouse stood at the end of a narrow spit of land, and for most of the year nobody went there but
the keeper and the birds. Every evening he climbed the two hundred steps, cleaned the great lens with a soft cloth,
and lit the lamp. From the gallery he could see the fishing boats come home in a line, their lanterns small and yellow
against the dark water. He knew each of them by the sound of its engine. On some nights the fog was so thick that the
beam seemed to end a few yards from the glass, and then he rang the bell, once every minute, until the morning. The
work was simple, but it could not be left undone for a single night, and he was proud of that. When people in the
village asked him whether he was lonely, he used to say that a light is a kind of conversation: you speak into the
night, you cannot hear the answer, and in the morning the boats are all there. In his last winter a young woman came
from the city to learn the trade. She asked questions about everything, and he found, to his surprise, that he had an
answer to most of them.
"""
