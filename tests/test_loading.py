"""The parts of loading, each against a closed form or another package; reports, sizes and devices."""

from __future__ import annotations

import dataclasses
import json
import math

import gguf
import numpy as np
import pytest
import torch
from checkpoint_writers import FAMILIES, TYPES, assert_same, expected_tensors, random_model, write_hf

from llmfromscratch import devices, loading
from llmfromscratch.config import ModelConfig
from llmfromscratch.errors import CheckpointError, OutOfMemory, RequestError


def test_a_q4_1_block_worked_by_hand():
    block = torch.zeros(1, 20, dtype=torch.uint8)
    block[0, :4] = torch.tensor([0.5, -1.0], dtype=torch.float16).view(torch.uint8)
    block[0, 4], block[0, 19] = 0x3A, 0xF0
    numbers = loading.dequantize_q4_1(block)
    assert (numbers.dtype, tuple(numbers.shape)) == (torch.float32, (1, 32))
    assert (numbers[0, 0], numbers[0, 16], numbers[0, 15], numbers[0, 31], numbers[0, 1]) == (4.0, 0.5, -1.0, 6.5, -1.0)


def test_random_q4_1_blocks_equal_the_gguf_package_even_from_an_odd_offset():
    numbers = np.random.default_rng(1).normal(size=(50, 64)).astype(np.float32)
    packed = gguf.quants.quantize(numbers, TYPES.Q4_1)
    expected = gguf.quants.dequantize(packed, TYPES.Q4_1).reshape(-1, 32)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), torch.from_numpy(packed.copy()).reshape(-1)])[1:]
    assert torch.equal(loading.dequantize_q4_1(shifted.view(-1, 20)), torch.from_numpy(expected))
    assert loading.dequantize_q4_1(torch.empty(0, 20, dtype=torch.uint8)).shape == (0, 32)


def test_what_is_no_q4_1_block_is_refused():
    for wrong in (torch.zeros(2, 18, dtype=torch.uint8), torch.zeros(20, dtype=torch.uint8), torch.zeros(2, 20)):
        with pytest.raises(CheckpointError, match="Q4_1"):
            loading.dequantize_q4_1(wrong)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("model.layers.11.self_attn.q_proj.weight", "layers.11.self_attn.q_proj.weight"),
        ("module.model.layers.0.self_attn.k_proj.bias", "layers.0.self_attn.k_proj.bias"),
        ("_orig_mod.module.model.norm.weight", "norm.weight"),
        ("base_model.model.model.embed_tokens.weight", "embed_tokens.weight"),
        ("model.model.layers.3.mlp.down_proj.weight", "layers.3.mlp.down_proj.weight"),
        ("blk.29.ffn_gate.weight", "layers.29.mlp.gate_proj.weight"),
        ("blk.0.attn_output.bias", "layers.0.self_attn.o_proj.bias"),
        ("blk.0.attn_k_norm.weight", "layers.0.self_attn.k_norm.weight"),
        ("output_norm.weight", "norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("layers.7.feed_forward.w3.weight", "layers.7.mlp.up_proj.weight"),
        ("layers.7.ffn_norm.weight", "layers.7.post_attention_layernorm.weight"),
        ("tok_embeddings.weight", "embed_tokens.weight"),
        ("rope.freqs", None),
        ("rope_freqs.weight", None),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("layers.0.attention.inner_attention.rope.freqs", None),
        ("transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weight"),
        ("model.layers.0.mlp.experts.3.w1.weight", "model.layers.0.mlp.experts.3.w1.weight"),
        ("model.layers.00.self_attn.q_proj.weight", "model.layers.00.self_attn.q_proj.weight"),
        ("modeling.norm.weight", "modeling.norm.weight"),
        ("", ""),
    ],
)
def test_names_of_every_dialect_become_canonical(name, canonical):
    assert loading.canonical_name(name) == canonical


def test_unpermute_moves_row_2i_plus_j_of_a_head_to_row_j_half_plus_i():
    heads, half = 3, 4
    weight = torch.randn(heads * 2 * half, 5)
    moved = loading.unpermute(weight, heads)
    for head in range(heads):
        for i in range(half):
            for j in range(2):
                assert torch.equal(moved[head * 2 * half + j * half + i], weight[head * 2 * half + 2 * i + j])
    assert moved.data_ptr() != weight.data_ptr() and moved.is_contiguous()
    assert loading.unpermute(torch.arange(6), 1).tolist() == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize(("rows", "heads"), [(6, 4), (6, 2), (6, 0), (0, 1)])
def test_rows_that_are_no_heads_of_even_width_are_refused(rows, heads):
    with pytest.raises(CheckpointError, match="heads"):
        loading.unpermute(torch.zeros(rows, 2), heads)


@pytest.mark.parametrize("family", FAMILIES)
def test_expected_shapes_are_those_of_transformers(family):
    model = random_model(FAMILIES[family])
    config = ModelConfig.from_hf(json.loads(model.config.to_json_string()))
    assert loading.expected_shapes(config) == {name: tuple(t.shape) for name, t in expected_tensors(model).items()}


# ---- the key report ------------------------------------------------------------------------------------------------


def _config(**changes):
    base = ModelConfig.from_hf(json.loads(FAMILIES["llama"].to_json_string()))
    return dataclasses.replace(base, **changes)


def test_a_complete_file_has_nothing_to_report():
    config = _config()
    report = loading.check_keys(loading.expected_shapes(config), config)
    assert report == loading.KeyReport() and report.ok
    assert str(report) == "Every tensor fits."


def test_a_tied_head_may_be_absent_and_an_untied_one_may_not():
    found = loading.expected_shapes(_config())
    del found["lm_head.weight"]
    tied = loading.check_keys(found, _config(tie_word_embeddings=True))
    assert tied.ok and tied.tied
    untied = loading.check_keys(found, _config())
    assert not untied.ok and untied.missing == ("lm_head.weight",)
    assert "tie_word_embeddings" in untied.probable_cause


def test_missing_unexpected_and_wrong_shapes_are_listed_in_order():
    config = _config()
    found = {"extra.weight": (3,), **loading.expected_shapes(config)}
    del found["norm.weight"], found["layers.1.mlp.up_proj.weight"]
    found["layers.0.self_attn.o_proj.weight"] = (96, 95)
    report = loading.check_keys(found, config)
    assert report.missing == ("layers.1.mlp.up_proj.weight", "norm.weight")
    assert report.unexpected == ("extra.weight",)
    assert report.wrong_shape == (("layers.0.self_attn.o_proj.weight", (96, 95), (96, 96)),)
    text = str(report)
    assert "2 missing: layers.1.mlp.up_proj.weight, norm.weight" in text and "[96, 95], expected [96, 96]" in text


def test_unexpected_tensors_alone_do_not_refuse_unless_a_layer_would_use_them():
    config = _config()
    shapes = loading.expected_shapes(config)
    assert loading.check_keys({**shapes, "vision.patch.weight": (3, 3)}, config).ok
    for name in ("layers.0.self_attn.q_proj.bias", "layers.1.self_attn.q_norm.weight", "layers.2.mlp.up_proj.weight"):
        assert not loading.check_keys({**shapes, name: (96,)}, config).ok


def _cause(changed=(), config=None, rename=lambda name: name, keep=lambda name: True):
    config = config or _config()
    shapes = {rename(name): shape for name, shape in loading.expected_shapes(config).items() if keep(name)}
    return loading.check_keys({**shapes, **dict(changed)}, config).probable_cause


def test_the_probable_cause_is_named():
    assert "no name is known" in _cause(rename=lambda name: name.replace(".", "/"))
    assert "'transformer.h.'" in _cause(rename=lambda name: f"transformer.h.{name}")
    eight = _config(num_layers=8)
    assert "layers 0-3 of 8" in _cause(
        config=eight, keep=lambda n: not n.startswith(("layers.4", "layers.5", "layers.6", "layers.7"))
    )
    assert "whole layers are missing (2 of 8)" in _cause(
        config=eight, keep=lambda n: not n.startswith(("layers.2", "layers.5"))
    )
    kv = {f"layers.{i}.self_attn.{p}_proj.weight": (48, 96) for i in range(2) for p in "kv"}
    assert "num_key_value_heads is 2" in _cause(kv) and "3 heads of 16" in _cause(kv)
    assert "vocab_size is 64" in _cause(dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), (70, 96)))
    ffn = {f"layers.{i}.mlp.{p}_proj.weight": (200, 96) for i in range(2) for p in ("gate", "up")}
    ffn |= {f"layers.{i}.mlp.down_proj.weight": (96, 200) for i in range(2)}
    assert "intermediate_size is 256" in _cause(ffn) and "200" in _cause(ffn)
    turned = {name: shape[::-1] for name, shape in loading.expected_shapes(_config()).items() if shape != shape[::-1]}
    assert "transposed" in _cause(turned)
    half = loading.expected_shapes(_config(hidden_size=48))
    assert "hidden_size is 96" in _cause(half)
    assert "biases" in _cause({"layers.0.self_attn.q_proj.bias": (96,)})
    assert "layer 2" in _cause({"layers.2.mlp.up_proj.weight": (256, 96)})
    biased = _config(attention_bias=True)
    assert "asks for biases" in _cause(config=biased, keep=lambda name: not name.endswith("bias"))


def test_a_report_on_a_thousand_missing_tensors_stays_short():
    config = _config(num_layers=1000)
    report = loading.check_keys({}, config)
    assert len(report.missing) == 9003 and len(str(report)) < 500


# ---- dtypes, devices, sizes ----------------------------------------------------------------------------------------


def test_keep_takes_the_dtype_that_most_of_the_weights_have(tmp_path):
    model = random_model(FAMILIES["llama"])

    def mixed(state):
        return {name: tensor if tensor.ndim == 1 else tensor.to(torch.float16) for name, tensor in state.items()}

    checkpoint = loading.open_checkpoint(write_hf(tmp_path, model, mixed))
    assert {tensor.dtype for tensor in checkpoint.load("keep", "cpu").values()} == {torch.float16}


def test_tensors_that_need_no_conversion_are_not_copied(tmp_path):
    checkpoint = loading.open_checkpoint(write_hf(tmp_path, random_model(FAMILIES["llama"])))
    first, second = checkpoint.load("float32", "cpu"), checkpoint.load("float32", "cpu")
    assert all(first[name].data_ptr() == second[name].data_ptr() for name in first)


def test_an_unknown_dtype_or_device_is_one_sentence(tmp_path):
    checkpoint = loading.open_checkpoint(write_hf(tmp_path, random_model(FAMILIES["llama"])))
    for wrong in ("int8", torch.int64, None):
        with pytest.raises(RequestError, match="dtype is .*float32"):
            checkpoint.load(wrong, "cpu")
    for wrong in ("tpu", "xpu", "cuda:99"):
        with pytest.raises(RequestError, match="device is"):
            checkpoint.load("float32", wrong)


def test_auto_means_the_dtype_and_the_device_that_are_fast_here(tmp_path):
    checkpoint = loading.open_checkpoint(write_hf(tmp_path, random_model(FAMILIES["llama"])))
    tensor = checkpoint.load()["norm.weight"]
    dtype, reason = devices.fast_dtype()
    assert (tensor.dtype, tensor.device.type) == (dtype, devices.resolve_device("auto").type)
    assert dtype in (torch.bfloat16, torch.float32) and reason.endswith(".")


def test_loading_refuses_before_it_allocates_more_than_there_is(tmp_path, monkeypatch):
    checkpoint = loading.open_checkpoint(write_hf(tmp_path, random_model(FAMILIES["llama"])))
    monkeypatch.setattr(devices, "available_memory", lambda device: 1000)
    with pytest.raises(OutOfMemory, match=r"need .* kB on cpu .* 1\.0 kB are free"):
        checkpoint.load("bfloat16", "cpu")
    checkpoint.load("float32", "cpu")  # stays mapped to the file: needs none


def test_available_memory_is_a_sensible_number():
    assert 2**20 < devices.available_memory("cpu") < 2**50


@pytest.mark.parametrize(
    ("parameters", "dtype", "size"),
    [(7e9, "float16", 14e9), (7e9, "int8", 7e9), (7e9, "int4", 3.5e9), (70e9, "float16", 140e9), (3, "int4", 2),
     (10, torch.float32, 40), (0, "int8", 0)],
)  # fmt: skip
def test_the_sizes_of_well_known_models(parameters, dtype, size):
    assert loading.estimate_bytes(parameters, dtype) == size


def test_an_estimate_of_nonsense_is_refused():
    for parameters, dtype in ((7e9, "float12"), (-1, "int8"), (math.nan, "int8"), (math.inf, "int8")):
        with pytest.raises(RequestError):
            loading.estimate_bytes(parameters, dtype)


def _simple_config(tied=True):
    """Embedding 4 MB in float32, layers of a little over 3 MB (750k weights and two norms), norm 4 kB."""
    return _config(
        vocab_size=1000, hidden_size=1000, num_heads=1, num_kv_heads=1, head_dim=2, intermediate_size=247, num_layers=3,
        tie_word_embeddings=tied,
    )  # fmt: skip


def test_layers_are_placed_in_order_and_a_tied_head_goes_with_the_embedding():
    config = _simple_config()
    plan = loading.place_layers(config, "float32", {"cuda:0": 8e6, "cpu": 100e6})
    assert plan.devices == {
        "embed_tokens": "cuda:0", "layers.0": "cuda:0", "layers.1": "cpu", "layers.2": "cpu", "norm": "cpu",
        "lm_head": "cuda:0",
    }  # fmt: skip
    shapes = loading.expected_shapes(config)
    assert plan.used("cpu") == 4 * sum(
        math.prod(s) for n, s in shapes.items() if n[:8] in ("layers.1", "layers.2", "norm.wei")
    )
    assert plan.used("cuda:0") + plan.used("cpu") == sum(plan.sizes.values())
    assert plan.device_of("layers.2.mlp.up_proj.weight") == "cpu"
    assert [line.split()[0] for line in str(plan).splitlines()] == ["device", "cuda:0", "cpu"]


def test_a_closed_device_is_not_filled_again_and_a_head_of_its_own_counts():
    config = _simple_config(tied=False)
    sizes = loading.module_sizes(config, "float32")
    assert sizes["lm_head"] == sizes["embed_tokens"] == 4e6
    plan = loading.place_layers(config, "float32", {"a": 5e6, "b": 7e6, "c": 8e6})
    assert list(plan.devices.values()) == ["a", "b", "b", "c", "c", "c"]


@pytest.mark.parametrize("budgets", [{}, {"cpu": 1e6}, {"cuda:0": 5e6, "cpu": 7e6}, {"cpu": math.nan}])
def test_a_model_that_does_not_fit_is_refused_with_the_numbers(budgets):
    with pytest.raises(OutOfMemory, match=r"17\.\d MB in float32"):
        loading.place_layers(_simple_config(tied=False), "float32", budgets)


def test_budgets_and_placements_are_taken_by_load(tmp_path):
    checkpoint = loading.open_checkpoint(write_hf(tmp_path, random_model(FAMILIES["llama"])))
    plan = loading.place_layers(checkpoint.config, "float32", {"cpu": 1e9})
    for device in ({"cpu": 1e9}, plan):
        assert_same(checkpoint.load("float32", device), checkpoint.load("float32", "cpu"))
    with pytest.raises(OutOfMemory):
        checkpoint.load("float32", {"cpu": 10})
