"""Checkpoints of every kind give transformers' own tensors, and what does not fit is named before it runs."""

from __future__ import annotations

import itertools
import json

import gguf
import numpy as np
import pytest
import torch
from benchmarks import load as load_benchmark
from checkpoint_writers import (
    FAMILIES,
    TYPES,
    assert_same,
    expected_tensors,
    file_state,
    random_model,
    write_config,
    write_gguf,
    write_hf,
    write_meta,
)
from safetensors.torch import save_file
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from llmfromscratch import loading
from llmfromscratch.config import ModelConfig, RopeScaling
from llmfromscratch.errors import CheckpointError


@pytest.fixture(params=FAMILIES, ids=lambda name: name.replace(" ", "-"))
def model(request):
    return random_model(FAMILIES[request.param])


def test_one_safetensors_file_gives_the_tensors_of_transformers(model, tmp_path):
    model.save_pretrained(tmp_path)
    checkpoint = loading.open_checkpoint(tmp_path)
    assert_same(checkpoint.load("float32", "cpu"), expected_tensors(model))
    assert checkpoint.report.ok and checkpoint.report.tied == model.config.tie_word_embeddings
    assert_same(loading.open_checkpoint(tmp_path / "model.safetensors").load("keep", "cpu"), expected_tensors(model))


def test_shards_of_safetensors_give_the_tensors_of_transformers(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(loading.open_checkpoint(tmp_path).load("float32", "cpu"), expected_tensors(model))


def test_torch_files_whole_and_in_shards_give_the_tensors_of_transformers(model, tmp_path):
    state = file_state(model)
    whole, parts, other = tmp_path / "whole", tmp_path / "parts", tmp_path / "other"
    for folder in (whole, parts, other):
        folder.mkdir()
        write_config(folder, model.config)
    torch.save(state, whole / "pytorch_model.bin")
    torch.save(state, other / "weights.pt")
    weight_map = {name: f"pytorch_model-{1 + i % 2:05d}-of-00002.bin" for i, name in enumerate(state)}
    for shard in set(weight_map.values()):
        torch.save({name: state[name] for name in state if weight_map[name] == shard}, parts / shard)
    (parts / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8"
    )
    for folder in (whole, parts, other):
        assert_same(loading.open_checkpoint(folder).load("float32", "cpu"), expected_tensors(model))


def test_stray_prefixes_of_wrappers_are_taken_off(tmp_path):
    model = random_model(FAMILIES["llama"])
    write_config(tmp_path, model.config)
    save_file(
        {f"module._orig_mod.{name}": tensor for name, tensor in file_state(model).items()}, tmp_path / "a.safetensors"
    )
    assert_same(loading.open_checkpoint(tmp_path).load("float32", "cpu"), expected_tensors(model))


def test_a_gguf_in_float32_gives_the_tensors_of_transformers(model, tmp_path):
    write_gguf(tmp_path / "model.gguf", model)
    checkpoint = loading.open_checkpoint(tmp_path / "model.gguf")
    assert_same(checkpoint.load("float32", "cpu"), expected_tensors(model))
    theirs = ModelConfig.from_hf(json.loads(model.config.to_json_string()))
    same = ("attention_bias", "output_bias", "mlp_bias", "qk_norm", "tie_word_embeddings", "head_dim", "num_kv_heads")
    assert [getattr(checkpoint.config, name) for name in same] == [getattr(theirs, name) for name in same]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_type_of_a_gguf_is_unpacked_as_the_gguf_package_does(kind, tmp_path):
    model = random_model(FAMILIES["llama with a tied head"])
    expected = write_gguf(tmp_path / "model.gguf", model, lambda name, array: TYPES[kind])
    assert_same(loading.open_checkpoint(tmp_path).load("float32", "cpu"), expected)


def test_field_case_3_types_are_mixed_where_a_width_is_not_a_multiple_of_256(tmp_path):
    model = random_model(FAMILIES["llama"])
    wide = {"layers.0.mlp.down_proj": TYPES.Q4_K, "layers.1.mlp.down_proj": TYPES.Q6_K}
    narrow = itertools.cycle([TYPES.Q5_0, TYPES.Q5_1, TYPES.Q8_0, TYPES.Q4_1, TYPES.BF16])

    def type_of(name, array):
        return next((kind for part, kind in wide.items() if part in name), None) or next(narrow)

    expected = write_gguf(tmp_path / "model.gguf", model, type_of)
    checkpoint = loading.open_checkpoint(tmp_path / "model.gguf")
    assert {stored.dtype for stored in checkpoint.tensors.values()} >= {"Q4_K", "Q6_K", "Q5_0", "Q5_1", "F32"}
    assert_same(checkpoint.load("float32", "cpu"), expected)


def test_a_tensor_is_put_together_from_many_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "_CHUNK_NUMBERS", 7 * 256)  # the last piece of each matrix is a shorter one
    model = random_model(FAMILIES["llama"])
    kinds = itertools.cycle([TYPES.Q4_1, TYPES.Q8_0, TYPES.F16])
    expected = write_gguf(tmp_path / "model.gguf", model, lambda name, array: next(kinds))
    assert_same(loading.open_checkpoint(tmp_path).load("float32", "cpu"), expected)


def test_rows_of_a_quantized_gguf_move_whole_in_every_dtype(tmp_path):
    model = random_model(FAMILIES["llama"])
    expected = write_gguf(tmp_path / "model.gguf", model, lambda name, array: TYPES.Q4_1)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        weights = loading.open_checkpoint(tmp_path).load(dtype, "cpu")
        assert_same(weights, {name: tensor.to(dtype) for name, tensor in expected.items()})


def test_rope_factors_stored_in_a_gguf_become_part_of_the_config(tmp_path, monkeypatch):
    model = random_model(FAMILIES["llama"])
    write_gguf(tmp_path / "plain.gguf", model)
    factors = np.linspace(1.0, 8.0, 8, dtype=np.float32)

    class WithFactors(gguf.GGUFWriter):
        def write_header_to_file(self, path=None):
            self.add_tensor("rope_freqs.weight", factors)
            super().write_header_to_file(path)

    def write(name, **keys):
        monkeypatch.setattr(gguf, "GGUFWriter", WithFactors)
        write_gguf(tmp_path / name, model, **keys)

    write("model.gguf")
    write("linear.gguf", add_rope_scaling_type=gguf.RopeScalingType.LINEAR, add_rope_scaling_factor=2.0)
    assert loading.open_checkpoint(tmp_path / "plain.gguf").config.rope_scaling is None
    scaling = loading.open_checkpoint(tmp_path / "model.gguf").config.rope_scaling
    assert scaling == RopeScaling("factors", 1.0, 128, factors=tuple(factors.tolist()))
    linear = loading.open_checkpoint(tmp_path / "linear.gguf").config.rope_scaling
    assert linear is not None and linear.factors == tuple((factors * 2).tolist())
    factors[3] = np.nan
    with pytest.raises(CheckpointError, match=r"model\.gguf: tensor 'rope_freqs\.weight': a rope factor is nan"):
        write("model.gguf")
        loading.open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize(("shards", "embedding_cut"), [(1, 0), (2, 0), (2, 1)])
def test_metas_consolidated_shards_are_merged_and_unpermuted(tmp_path, shards, embedding_cut):
    model = random_model(FAMILIES["llama"])
    write_meta(tmp_path, model, shards, embedding_cut)
    checkpoint = loading.open_checkpoint(tmp_path)
    assert checkpoint.dialect == "meta" and checkpoint.config.vocab_size == 64
    assert_same(checkpoint.load("float32", "cpu"), expected_tensors(model))


def test_metas_shards_that_do_not_fit_each_other_are_refused(tmp_path):
    write_meta(tmp_path, random_model(FAMILIES["llama"]), shards=2)
    (tmp_path / "consolidated.00.pth").rename(tmp_path / "elsewhere.bak")
    with pytest.raises(CheckpointError, match="Shard 00"):
        loading.open_checkpoint(tmp_path)
    other = torch.load(tmp_path / "elsewhere.bak")
    other["norm.weight"] += 1
    torch.save(other, tmp_path / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match="norm with different values"):
        loading.open_checkpoint(tmp_path)


def test_field_case_2_without_unpermuting_q_and_k_are_nearly_unrelated(tmp_path):
    model = random_model(FAMILIES["llama"])
    write_gguf(tmp_path / "model.gguf", model)
    checkpoint = loading.open_checkpoint(tmp_path)
    weights = checkpoint.load("float32", "cpu")
    for part in ("q_proj", "k_proj"):
        name = f"layers.0.self_attn.{part}.weight"
        right, stored, loaded = expected_tensors(model)[name], checkpoint.tensors[name].read(), weights[name]
        assert abs(torch.cosine_similarity(right.flatten(), stored.flatten(), dim=0)) < 0.2
        assert torch.cosine_similarity(right.flatten(), loaded.flatten(), dim=0) == pytest.approx(1.0)


def test_a_model_with_holes_is_refused_with_the_report(tmp_path):
    def without_norm(state):
        return {name: tensor for name, tensor in state.items() if name != "model.norm.weight"}

    write_hf(tmp_path, random_model(FAMILIES["llama"]), without_norm)
    with pytest.raises(CheckpointError, match=r"1 missing: norm\.weight"):
        loading.open_checkpoint(tmp_path)


def test_biases_that_the_config_denies_are_refused(tmp_path):
    write_hf(tmp_path, random_model(FAMILIES["llama with biases"]), attention_bias=False)
    with pytest.raises(CheckpointError, match="biases that the config says are absent"):
        loading.open_checkpoint(tmp_path)


def test_field_case_1_an_extra_head_equal_to_the_embedding_is_tied_and_loaded_once(tmp_path):
    model = random_model(FAMILIES["llama with a tied head"])
    write_hf(tmp_path, model, lambda state: {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()})
    checkpoint = loading.open_checkpoint(tmp_path)
    assert checkpoint.report.tied and "repeats the embedding" in str(checkpoint.report)
    weights = checkpoint.load("bfloat16", "cpu")
    assert weights["lm_head.weight"].data_ptr() == weights["embed_tokens.weight"].data_ptr()


def test_field_case_1_a_gguf_without_output_weight_is_tied(tmp_path):
    write_gguf(
        tmp_path / "model.gguf", random_model(FAMILIES["llama with a tied head"]), lambda name, array: TYPES.Q8_0
    )
    checkpoint = loading.open_checkpoint(tmp_path / "model.gguf")
    assert checkpoint.report.tied and checkpoint.config.tie_word_embeddings
    weights = checkpoint.load("float32", "cpu")
    assert weights["lm_head.weight"] is weights["embed_tokens.weight"]


def test_a_head_that_claims_to_be_tied_but_differs_is_used_and_reported(tmp_path):
    model = random_model(FAMILIES["llama with a tied head"])
    head = torch.randn(64, 96)
    write_hf(tmp_path, model, lambda state: {**state, "lm_head.weight": head})
    checkpoint = loading.open_checkpoint(tmp_path)
    assert not checkpoint.config.tie_word_embeddings and not checkpoint.report.tied
    assert "differs" in str(checkpoint.report)
    weights = checkpoint.load("float32", "cpu")
    assert torch.equal(weights["lm_head.weight"], head)
    assert torch.equal(weights["embed_tokens.weight"], model.state_dict()["model.embed_tokens.weight"])


def test_weights_that_are_no_floats_and_names_that_collide_are_refused(tmp_path):
    model = random_model(FAMILIES["llama"])
    write_hf(tmp_path / "a", model, lambda state: {**state, "model.norm.weight": torch.ones(96, dtype=torch.int64)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*I64"):
        loading.open_checkpoint(tmp_path / "a")
    write_hf(tmp_path / "b", model, lambda state: {**state, "norm.weight": torch.ones(96)})
    with pytest.raises(CheckpointError, match="would both be"):
        loading.open_checkpoint(tmp_path / "b")


def test_a_config_with_more_layers_than_the_file_has_tensors_is_refused_at_once(tmp_path):
    write_hf(tmp_path, random_model(FAMILIES["llama"]), num_hidden_layers=1000)
    with pytest.raises(CheckpointError, match="1000 layers"):
        loading.open_checkpoint(tmp_path)


def test_end_tokens_of_the_generation_config_join_those_of_the_config(tmp_path):
    write_hf(tmp_path, random_model(FAMILIES["llama"]), eos_token_id=2)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}', encoding="utf-8")
    assert loading.open_checkpoint(tmp_path).config.eos_token_ids == (2, 7)
    for wrong in ('{"eos_token_id": "x"}', '{"eos_token_id": 64}'):
        (tmp_path / "generation_config.json").write_text(wrong, encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
            loading.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"model_type": NaN}', "NaN"),
        ("[" * 100000, "nested too deeply"),
        ("[1]", "list"),
        ("{", "not valid JSON"),
        ("\x80", "model_type"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
)
def test_a_config_json_that_is_not_usable_is_refused(tmp_path, text, word):
    write_hf(tmp_path, random_model(FAMILIES["llama"]))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe" if text == "\x80" else text.encode())
    with pytest.raises(CheckpointError, match=word if text != "\x80" else "not valid JSON"):
        loading.open_checkpoint(tmp_path)


def test_where_nothing_is_found_the_message_says_what_was_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json.*params\.json.*\.gguf"):
        loading.open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        loading.open_checkpoint(tmp_path / "nothing.gguf")
    (tmp_path / "a.txt").write_text("x", encoding="utf-8")
    with pytest.raises(CheckpointError, match="not a kind of checkpoint"):
        loading.open_checkpoint(tmp_path / "a.txt")
    save_file({"x": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        loading.open_checkpoint(tmp_path / "a.safetensors")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        loading.open_checkpoint(tmp_path)


@pytest.mark.model
def test_all_272_tensors_of_the_real_model_equal_the_gguf_package(smollm2_gguf):
    checkpoint = loading.open_checkpoint(smollm2_gguf)
    weights = checkpoint.load("float32", "cpu")
    config = {"num_attention_heads": 9, "num_key_value_heads": 3}
    unpermute = LlamaTensorProcessor(config)
    tensors = gguf.GGUFReader(smollm2_gguf).tensors
    assert len(tensors) == 272
    for tensor in tensors:
        expected = unpermute.process(gguf.quants.dequantize(tensor.data, tensor.tensor_type), tensor.name).weights
        assert torch.equal(weights[loading.canonical_name(tensor.name)], torch.tensor(expected)), tensor.name
    assert weights["lm_head.weight"] is weights["embed_tokens.weight"]
    assert checkpoint.num_parameters == 134_515_008


@pytest.mark.model
def test_loading_the_real_model_takes_little_memory_beyond_its_weights(smollm2_gguf):
    figures = load_benchmark.measure_memory(smollm2_gguf)
    assert figures["weight_bytes"] == 2 * 134_515_008
    assert 1.0 < figures["memory_ratio"] <= load_benchmark.MAX_MEMORY_RATIO
