"""The config of every dialect: what transformers reads, we read; what is damaged or unsupported is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llmfromscratch.config import ModelConfig, RopeScaling
from llmfromscratch.errors import CheckpointError

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
HF = {
    **SIZES,
    "model_type": "llama",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": 16,
    "pad_token_id": None,
}
GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "llama.embedding_length": 96,
    "llama.feed_forward_length": 256,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 4096,
    "llama.rope.freq_base": 50000.0,
    "llama.rope.dimension_count": 16,
    "llama.vocab_size": 1000,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
META = {
    "dim": 96,
    "n_layers": 3,
    "n_heads": 6,
    "n_kv_heads": 2,
    "vocab_size": 1000,
    "multiple_of": 256,
    "norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_seq_len": 4096,
}


@pytest.mark.parametrize(
    ("cls", "biases"),
    [
        (LlamaConfig, (False, False, False, False)),
        (MistralConfig, (False, False, False, False)),
        (Qwen2Config, (True, False, False, False)),
        (Qwen3Config, (False, False, False, True)),
    ],
)
def test_a_config_of_every_family_reads_as_transformers_reads_it(cls, biases):
    theirs = cls(**SIZES, max_position_embeddings=2048, bos_token_id=1, eos_token_id=[2, 3])
    ours = ModelConfig.from_hf(json.loads(theirs.to_json_string()))
    expected_heads = getattr(theirs, "head_dim", None) or 96 // 6
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size) == (1000, 96, 256)
    assert (ours.num_layers, ours.num_heads, ours.num_kv_heads, ours.head_dim) == (3, 6, 2, expected_heads)
    assert (ours.context_length, ours.rms_norm_eps, ours.rope_theta) == (2048, theirs.rms_norm_eps, 10000.0)
    assert (ours.attention_bias, ours.output_bias, ours.mlp_bias, ours.qk_norm) == biases
    assert (ours.bos_token_id, ours.eos_token_ids, ours.rope_scaling) == (1, (2, 3), None)
    assert ours.model_type == theirs.model_type


def test_absent_fields_have_the_defaults_of_transformers():
    for cls, kind in (
        (LlamaConfig, "llama"),
        (Qwen2Config, "qwen2"),
        (Qwen3Config, "qwen3"),
        (MistralConfig, "mistral"),
    ):
        theirs = cls()
        ours = ModelConfig.from_hf({**SIZES, "model_type": kind})
        window = getattr(theirs, "sliding_window", None) or math.inf
        assert ours.context_length == min(theirs.max_position_embeddings, window)
        assert ours.rms_norm_eps == theirs.rms_norm_eps
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ModelConfig.from_hf({**SIZES, "model_type": "qwen3"}).head_dim == Qwen3Config().head_dim


def test_the_three_dialects_of_one_model_give_one_config():
    hf, gguf = ModelConfig.from_hf(HF), ModelConfig.from_gguf(GGUF)
    meta = ModelConfig.from_meta(META)
    assert hf == gguf
    assert meta == dataclasses.replace(hf, bos_token_id=None, eos_token_ids=())


@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_rope_scaling_reads_alike_in_the_old_and_the_new_form(name):
    scaling = {name: "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 1024
    old = ModelConfig.from_hf({**HF, "rope_scaling": scaling})
    new = ModelConfig.from_hf({**HF, "rope_theta": None, "rope_parameters": {**scaling, "rope_theta": 50000.0}})
    assert old == new
    assert old.rope_scaling == RopeScaling("llama3", 8.0, 1024, low_freq_factor=1.0, high_freq_factor=4.0)
    assert old.rope_theta == 50000.0


def test_linear_and_yarn_scaling_are_read_with_the_defaults_of_transformers():
    linear = ModelConfig.from_hf({**HF, "rope_scaling": {"type": "linear", "factor": 2}}).rope_scaling
    assert linear is not None and (linear.kind, linear.factor) == ("linear", 2.0)
    yarn = ModelConfig.from_hf({**HF, "rope_scaling": {"type": "yarn", "factor": 4.0}}).rope_scaling
    assert yarn == RopeScaling("yarn", 4.0, 4096, beta_fast=32.0, beta_slow=1.0, attention_factor=None, truncate=True)
    full = {
        "rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024, "beta_fast": 16, "beta_slow": 2,
        "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False, "attention_factor": 1.5,
    }  # fmt: skip
    assert ModelConfig.from_hf({**HF, "rope_parameters": full}).rope_scaling == RopeScaling(
        "yarn", 4.0, 1024, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5, mscale=1.0, mscale_all_dim=0.5,
        truncate=False,
    )  # fmt: skip


def test_original_context_beside_the_rope_parameters_goes_before_the_one_inside():
    rope = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
    config = ModelConfig.from_hf({**HF, "original_max_position_embeddings": 1024, "rope_scaling": rope})
    theirs = LlamaConfig(**{**HF, "original_max_position_embeddings": 1024, "rope_scaling": dict(rope)})
    ROPE_INIT_FUNCTIONS["yarn"](theirs)  # settles the parameters before it computes with them
    assert config.rope_scaling is not None
    assert config.rope_scaling.original_context == theirs.rope_parameters["original_max_position_embeddings"] == 1024


def test_a_sliding_window_ends_the_context_where_full_attention_stops_being_exact():
    mistral = {**HF, "model_type": "mistral"}
    assert ModelConfig.from_hf({**mistral, "sliding_window": 512}).context_length == 512
    assert ModelConfig.from_hf({**mistral, "sliding_window": None}).context_length == 4096
    qwen = {**HF, "model_type": "qwen2", "sliding_window": 512, "max_window_layers": 1}
    assert ModelConfig.from_hf({**qwen, "use_sliding_window": True}).context_length == 512
    assert ModelConfig.from_hf({**qwen, "use_sliding_window": True, "max_window_layers": 3}).context_length == 4096
    assert ModelConfig.from_hf({**qwen, "use_sliding_window": False}).context_length == 4096


def test_llama_biases_cover_the_output_projection_and_qwen2_ones_do_not():
    llama = ModelConfig.from_hf({**HF, "attention_bias": True, "mlp_bias": True})
    assert (llama.attention_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    qwen = ModelConfig.from_hf({**HF, "model_type": "qwen2"})
    assert (qwen.attention_bias, qwen.output_bias, qwen.mlp_bias) == (True, False, False)


def test_gguf_keys_of_other_architectures_and_optional_ones_are_read():
    qwen = {key.replace("llama.", "qwen3."): value for key, value in GGUF.items()}
    qwen |= {"general.architecture": "qwen3", "qwen3.attention.key_length": 32, "qwen3.rope.dimension_count": 32}
    del qwen["qwen3.vocab_size"]
    config = ModelConfig.from_gguf({**qwen, "tokenizer.ggml.tokens": ["x"] * 77, "tokenizer.ggml.eot_token_id": 5})
    assert (config.model_type, config.head_dim, config.vocab_size, config.qk_norm) == ("qwen3", 32, 77, True)
    assert config.eos_token_ids == (2, 5)
    per_layer = ModelConfig.from_gguf({**GGUF, "llama.attention.head_count_kv": np.array([2, 2, 2], dtype=np.int32)})
    assert per_layer.num_kv_heads == 2


def test_gguf_rope_scaling_is_read_and_yarn_keeps_its_extra_factor():
    scaled = {**GGUF, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert ModelConfig.from_gguf(scaled).rope_scaling == RopeScaling("linear", 4.0, 4096)
    assert ModelConfig.from_gguf({**GGUF, "llama.rope.scale_linear": 4.0}).rope_scaling == RopeScaling(
        "linear", 4.0, 4096
    )
    yarn = scaled | {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 1024}
    assert ModelConfig.from_gguf(yarn).rope_scaling == RopeScaling("yarn", 4.0, 1024)
    extra = ModelConfig.from_gguf({**yarn, "llama.rope.scaling.attn_factor": 2.0}).rope_scaling
    assert extra is not None and extra.attention_factor == pytest.approx(2.0 * (0.1 * math.log(4.0) + 1.0))


@pytest.mark.parametrize(
    ("params", "width"),
    [
        ({"dim": 4096, "n_heads": 32, "multiple_of": 256}, 11008),  # Llama 2 7B
        ({"dim": 8192, "n_heads": 64, "multiple_of": 4096, "ffn_dim_multiplier": 1.3}, 28672),  # Llama 2 70B
        ({"dim": 4096, "n_heads": 32, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}, 14336),  # Llama 3 8B
        ({"dim": 2048, "n_heads": 32, "multiple_of": 256, "ffn_dim_multiplier": 1.5}, 8192),  # Llama 3.2 1B
        ({"dim": 4096, "n_heads": 32, "hidden_dim": 14336, "head_dim": 128}, 14336),  # Mistral 7B
    ],
)
def test_meta_widths_are_those_of_the_published_models(params, width):
    config = ModelConfig.from_meta({"n_layers": 2, "vocab_size": -1, **params}, vocab_size=32000)
    assert (config.intermediate_size, config.vocab_size) == (width, 32000)


def test_use_scaled_rope_stands_for_the_constants_of_llama_3_1():
    config = ModelConfig.from_meta({**META, "use_scaled_rope": True})
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, ["model_type", "gpt2", "llama"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_type", "dynamic"]),
        ({"rope_scaling": {"type": "longrope"}}, ["longrope"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters"]),
        ({"layer_types": ["linear_attention"]}, ["layer_types", "linear_attention"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "1,024"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"num_hidden_layers": 3.0}, ["num_hidden_layers", "3.0"]),
        ({"num_hidden_layers": None}, ["num_hidden_layers", "missing"]),
        ({"hidden_size": -96}, ["hidden_size", "-96"]),
        ({"num_attention_heads": 5, "head_dim": None}, ["96", "5 heads"]),
        ({"num_key_value_heads": 4}, ["num_heads is 6", "num_kv_heads = 4"]),
        ({"head_dim": 15}, ["head_dim is 15", "even"]),
        ({"rms_norm_eps": math.nan}, ["rms_norm_eps", "nan"]),
        ({"rope_theta": math.inf}, ["rope_theta", "inf"]),
        ({"rope_theta": 1.0}, ["rope_theta", "1"]),
        ({"rope_theta": 10**400}, ["rope_theta"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "yes"]),
        ({"eos_token_id": [2, "x"]}, ["eos_token_id", "'x'"]),
        ({"eos_token_id": 1000}, ["eos_token_ids", "1000"]),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, ["factor", "0.5"]),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}}, ["4.0"]),
    ],
)
def test_what_is_wrong_or_unsupported_is_refused_with_field_value_and_file(change, words):
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_hf({**HF, **change}, "some/config.json")
    assert caught.value.file == "some/config.json"
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"general.architecture": "mamba"}, "mamba"),
        ({"general.architecture": np.array([1, 2])}, "general.architecture"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.rope.dimension_count": 8, "llama.attention.key_length": 16}, "dimension_count"),
        ({"llama.attention.value_length": 8}, "value_length"),
        ({"llama.attention.head_count_kv": np.array([2, 1, 2])}, "head_count_kv"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
    ],
)
def test_gguf_metadata_that_cannot_be_computed_is_refused_by_name(change, word):
    with pytest.raises(CheckpointError, match=word):
        ModelConfig.from_gguf({**GGUF, **change})


def test_a_config_built_by_hand_is_checked_too():
    good = ModelConfig.from_hf(HF)
    with pytest.raises(CheckpointError, match="num_layers"):
        dataclasses.replace(good, num_layers=0)
    with pytest.raises(CheckpointError, match="3 rope factors"):
        dataclasses.replace(good, rope_scaling=RopeScaling("factors", 1.0, 4096, factors=(1.0, 1.0, 1.0)))


ROPE_KEYS = [
    "type", "rope_type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
    "mscale", "attention_factor", "mscale_all_dim", "truncate", "original_max_position_embeddings", "x",
]  # fmt: skip
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["default", "linear", "llama3", "yarn", "silu", "llama", "sliding_attention", 10**400, -(10**400)]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(ROPE_KEYS),
            inner,
            max_size=5,
        )
    ),
    max_leaves=6,
)
HF_EXTRA = [
    "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types", "quantization_config",
]  # fmt: skip
GGUF_EXTRA = ["llama.expert_count", "llama.attention.key_length", "llama.attention.value_length",
              "llama.attention.sliding_window", "llama.rope.scale_linear", "llama.rope.scaling.type",
              "llama.rope.scaling.factor", "llama.rope.scaling.yarn_beta_fast", "tokenizer.ggml.tokens",
              "tokenizer.ggml.eot_token_id", "llama.rope.scaling.attn_factor"]  # fmt: skip
META_EXTRA = ["ffn_dim_multiplier", "use_scaled_rope", "hidden_dim", "head_dim", "moe", "sliding_window"]


def _reads_or_refuses(read, source):
    try:
        config = read(source)
    except CheckpointError:
        return
    assert all(
        type(getattr(config, name)) is int for name in ("vocab_size", "num_layers", "head_dim", "context_length")
    )
    assert math.isfinite(config.rms_norm_eps) and math.isfinite(config.rope_theta)
    assert config.num_heads % config.num_kv_heads == 0


@settings(deadline=None)
@given(
    st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
    st.dictionaries(st.sampled_from([*HF, *HF_EXTRA]), JSON, max_size=4),
)
def test_any_json_in_any_field_gives_a_config_or_a_checkpoint_error(kind, changes):
    _reads_or_refuses(ModelConfig.from_hf, {**HF, "model_type": kind, **changes})


ARRAYS = st.lists(st.integers(-3, 300), max_size=3).map(lambda values: np.array(values, dtype=np.int32))


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*GGUF, *GGUF_EXTRA]), JSON | ARRAYS | st.floats(width=32).map(np.float32), max_size=4
    )
)
def test_any_metadata_of_a_gguf_gives_a_config_or_a_checkpoint_error(changes):
    _reads_or_refuses(ModelConfig.from_gguf, {**GGUF, **changes})


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*META, *META_EXTRA]), JSON, max_size=4), st.none() | st.integers(-1, 2**30))
def test_any_params_of_meta_give_a_config_or_a_checkpoint_error(changes, vocab_size):
    _reads_or_refuses(lambda source: ModelConfig.from_meta(source, vocab_size=vocab_size), {**META, **changes})


@settings(deadline=None)
@given(JSON)
def test_a_config_that_is_no_object_is_refused(value):
    if not isinstance(value, dict):
        with pytest.raises(CheckpointError, match="object of named fields"):
            ModelConfig.from_hf(value)
