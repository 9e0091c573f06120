"""The rotary frequencies are those of transformers, for every way of stretching them that we accept."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from llmfromscratch import model, rope
from llmfromscratch.config import ModelConfig, RopeScaling

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SETTINGS = {
    "default": {"rope_type": "default", "rope_theta": 100000.0},
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
    "llama3, as in Llama 3.1": {**LLAMA3, "rope_theta": 500000.0},
    "llama3, as in Llama 3.2": {**LLAMA3, "factor": 32.0, "rope_theta": 500000.0},
    "llama3, wide blend": {**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 40.0, "rope_theta": 10000.0},
    "yarn": {**YARN, "rope_theta": 10000.0},
    "yarn, long": {**YARN, "factor": 40.0, "original_max_position_embeddings": 4096, "rope_theta": 1000000.0},
    "yarn, factor 1": {**YARN, "factor": 1.0, "rope_theta": 10000.0},
    "yarn, other betas": {**YARN, "beta_fast": 24.0, "beta_slow": 2.5, "rope_theta": 10000.0},
    "yarn, ramp of no width": {
        **YARN,
        "original_max_position_embeddings": 64,
        "beta_fast": 11.0,
        "beta_slow": 11.0,
        "rope_theta": 10000.0,
    },
    "yarn, ramp that ends before it begins": {
        **YARN,
        "original_max_position_embeddings": 64,
        "beta_fast": 100.0,
        "beta_slow": 100.0,
        "rope_theta": 10000.0,
    },
    "yarn, bounds not rounded": {**YARN, "truncate": False, "rope_theta": 150000.0},
    "yarn, attention factor given": {**YARN, "attention_factor": 1.37, "rope_theta": 10000.0},
    "yarn, mscale": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8, "rope_theta": 10000.0},
    "yarn, mscale alone is not used": {**YARN, "mscale": 0.7, "rope_theta": 10000.0},
}


def llama_config(rope_parameters: dict, head_dim: int = 64) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=16384,
        rope_parameters=dict(rope_parameters),
        pad_token_id=None,
    )


@pytest.mark.parametrize("head_dim", [64, 10])
@pytest.mark.parametrize("setting", SETTINGS)
def test_frequencies_and_the_factor_on_cos_and_sin_are_those_of_transformers(setting, head_dim):
    reference_config = llama_config(SETTINGS[setting], head_dim)
    config = ModelConfig.from_hf(reference_config.to_dict())
    reference = LlamaRotaryEmbedding(reference_config)
    frequencies, scale = rope.inverse_frequencies(config)
    assert frequencies.dtype == torch.float32
    torch.testing.assert_close(frequencies, reference.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(reference.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("setting", SETTINGS)
def test_cosines_and_sines_are_those_of_transformers_up_to_the_end_of_the_context(setting):
    reference_config = llama_config(SETTINGS[setting])
    positions = torch.tensor([0, 1, 2, 63, 2047, 2048, 2049, 16383])
    cos, sin = model.RotaryEmbedding(ModelConfig.from_hf(reference_config.to_dict()))(positions)
    expected_cos, expected_sin = LlamaRotaryEmbedding(reference_config)(torch.zeros(1), positions[None])
    # our tables hold each angle once, transformers' hold it twice; an angle of 16383 is known to 1e-3 in float32
    torch.testing.assert_close(cos, expected_cos[0, :, :32], rtol=0, atol=2e-3)
    torch.testing.assert_close(sin, expected_sin[0, :, :32], rtol=0, atol=2e-3)
    torch.testing.assert_close(cos[:4], expected_cos[0, :4, :32], rtol=0, atol=1e-5)


def test_stored_factors_divide_the_frequencies_one_by_one():
    factors = (1.0, 2.0, 4.0, 8.0)
    config = small_config(RopeScaling("factors", 1.0, 2048, factors=factors))
    frequencies, scale = rope.inverse_frequencies(config)
    expected = [10000.0 ** (-2 * pair / 8) / factor for pair, factor in enumerate(factors)]
    assert frequencies.tolist() == pytest.approx(expected, rel=1e-6)
    assert scale == 1.0


def small_config(scaling: RopeScaling | None = None) -> ModelConfig:
    return ModelConfig("llama", 10, 16, 16, 1, 2, 2, 8, 65536, rope_theta=10000.0, rope_scaling=scaling)


# Field case 5: tables in half precision are off by 0.78 at position 2048.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_beyond_2048_keep_their_angles_in_a_model_cast_to_half_precision(dtype):
    network = model.Model(small_config()).to(dtype)
    positions = [2047, 2048, 2049, 4097, 32769]
    cos, sin = network.rotary(torch.tensor(positions))
    assert cos.dtype == sin.dtype == torch.float32
    for row, position in enumerate(positions):
        angles = [position * 10000.0 ** (-2 * pair / 8) for pair in range(4)]
        assert cos[row].tolist() == pytest.approx([math.cos(angle) for angle in angles], abs=2e-3)
        assert sin[row].tolist() == pytest.approx([math.sin(angle) for angle in angles], abs=2e-3)


def test_frequencies_are_computed_even_while_a_model_is_built_without_memory():
    with torch.device("meta"):
        network = model.Model(small_config())
    assert network.rotary.frequencies.device.type == "cpu"
    assert network.embed_tokens.weight.device.type == "meta"


def test_rotating_twice_by_a_position_equals_rotating_once_by_its_double():
    rotary = model.RotaryEmbedding(small_config())
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    once, double = rotary(torch.full((5,), 3)), rotary(torch.full((5,), 6))
    twice = model.rotate(model.rotate(x, *once), *once)
    torch.testing.assert_close(twice, model.rotate(x, *double), rtol=0, atol=1e-6)


def test_pair_i_is_dimension_i_and_its_partner_half_a_head_away():
    x = torch.zeros(1, 1, 8)
    x[0, 0, 1] = 1.0
    cos, sin = torch.tensor([[1.0, 0.6, 1.0, 1.0]]), torch.tensor([[0.0, 0.8, 0.0, 0.0]])
    turned = model.rotate(x, cos, sin)[0, 0]
    assert turned.tolist() == pytest.approx([0, 0.6, 0, 0, 0, 0.8, 0, 0])
