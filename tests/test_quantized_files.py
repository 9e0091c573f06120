"""Quantized checkpoints as whole folders: others' are opened, ours are saved and answer with the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from checkpoint_writers import FAMILIES, file_state, random_model
from quantized_writers import (
    FP4,
    NF4,
    awq_tensors,
    gptq_tensors,
    random_blocks,
    random_bytes,
    random_grid,
    state_json,
)
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from transformers import LlamaConfig

from llmfromscratch import LLM, SamplingParams, cli, loading, quantized_files, quantized_model
from llmfromscratch.config import RopeScaling
from llmfromscratch.errors import CheckpointError, RequestError, TokenizerError
from llmfromscratch.packed_weight import PackedWeight
from llmfromscratch.quantized_linear import QuantizedEmbedding, QuantizedLinear, W8A8Linear
from llmfromscratch.text.tokenizer_files import GGUF_COPY, read_gguf_tokenizer, read_tokenizer

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPT = [5, 9, 40, 33, 7]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
PRODUCTS = [name for name in loading.LAYER_NAMES.values() if name.endswith("_proj")]


@cache
def written(write, keep, more):
    """A random model's settings and the tensors of its file, its products written by write(rows, width, seed), and the
    numbers of all its weights under canonical names."""
    network = random_model(LlamaConfig(**{"vocab_size": 64, "num_hidden_layers": 2, **SIZES, **dict(more)}))
    tensors, numbers = {}, {}
    for seed, (name, weight) in enumerate(file_state(network).items()):
        base = name.removesuffix(".weight")
        bare = name.removeprefix("model.")
        if base.endswith("_proj") and not any(word in base for word in keep):
            parts, numbers[bare] = write(*weight.shape, seed)
            tensors |= {f"{base}.{suffix}": tensor.contiguous() for suffix, tensor in parts.items()}
        else:
            tensors[name] = numbers[bare] = weight * (1 if weight.ndim == 1 else 0.05)
    return json.loads(network.config.to_json_string()), tensors, numbers


def write_quantized(folder, said, write, keep=("lm_head",), **more):
    """Such a checkpoint in a folder, with said as its quantization_config; returns the folder and the numbers."""
    fields, tensors, numbers = written(write, keep, tuple(more.items()))
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": said}), encoding="utf-8")
    return folder, numbers


@cache
def gptq_writer(mixed=False, bits=4, symmetric=True, **how):
    def write(rows, width, seed):
        grid = random_grid(rows, width, bits, 32, symmetric, mixed, seed)
        grid.scales = (grid.scales / 4).astype(np.float16)
        return gptq_tensors(grid, **how), grid.numbers()

    return write


def awq_writer(rows, width, seed):
    grid = random_grid(rows, width, 4, 32, symmetric=True, seed=seed)
    return awq_tensors(grid), grid.numbers()


@cache
def blocks_writer(kind="nf4", nested=False):
    def write(rows, width, seed):
        blocks = random_blocks(rows, width, seed=seed, nested=nested, kind=kind, levels=FP4 if kind == "fp4" else NF4)
        return blocks.tensors, blocks.numbers(np.float16 if kind == "nf4" else None)

    return write


def bytes_writer(rows, width, seed):
    return random_bytes(rows, width, seed)


LAYOUTS = {
    "gptq": (GPTQ, gptq_writer(), "int4"),
    "gptq, v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq_writer(less_one=False), "int4"),
    "gptq, act-order": ({**GPTQ, "desc_act": True}, gptq_writer(mixed=True), "int4"),
    "gptq, without g_idx": (GPTQ, gptq_writer(with_index=False), "int4"),
    "gptq, 8 bits": ({**GPTQ, "bits": 8}, gptq_writer(bits=8), "Q8_0"),
    "gptq, 3 bits": ({**GPTQ, "bits": 3}, gptq_writer(bits=3), "int4"),
    "gptq, bits of its own": ({**GPTQ, "bits": 8, "dynamic": {"+:.*": {"bits": 4}}}, gptq_writer(bits=4), "int4"),
    "gptq, 8 bits off the middle": ({**GPTQ, "bits": 8}, gptq_writer(bits=8, symmetric=False), None),
    "awq": (AWQ, awq_writer, "int4"),
    "awq, older words": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},
        awq_writer,
        "int4",
    ),
    "nf4": (BNB, blocks_writer(), "nf4"),
    "nf4, maximums coded": (BNB, blocks_writer(nested=True), "nf4"),
    "fp4": (BNB, blocks_writer("fp4"), None),
    "llm.int8": ({"load_in_8bit": True}, bytes_writer, "int8"),
}


def edit(folder, change):
    """Writes a folder's tensors anew, changed."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def edit_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | fields), encoding="utf-8")


def read_all(folder):
    """Opens a folder and reads every part of it."""
    checkpoint = quantized_files.open_checkpoint(folder)
    return {name: part.read() for name, part in checkpoint.parts.items()}


def tokens(llm):
    return llm.generate(PROMPT, GREEDY)[0].token_ids


def load(folder, **settings):
    return LLM(folder, dtype="float32", device="cpu", **settings)


# ---- others' checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_in_a_public_layout_answers_as_its_numbers_do(layout, tmp_path):
    said, write, kind = LAYOUTS[layout]
    folder, numbers = write_quantized(tmp_path / "model", said, write)
    llm = load(folder, layers="plain")
    for name in PRODUCTS:
        part = llm.model.layers[1].get_submodule(name)
        if kind is None:
            assert torch.equal(part.weight, numbers[f"layers.1.{name}.weight"])
            continue
        assert part.kind == kind
        columns = torch.arange(part.in_features) if part.order is None else part.order
        assert torch.equal(part.packed().dequantize(), numbers[f"layers.1.{name}.weight"][:, columns])
    expected = tokens(load(save_numbers(folder, numbers, tmp_path / "numbers")))
    assert tokens(llm) == tokens(load(folder)) == expected
    quantized_model.pin(llm.model, "plain")
    assert tokens(llm) == expected


def save_numbers(folder, numbers, target):
    """The same model, unquantized."""
    target.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in numbers.items()}, target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config")
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


@pytest.mark.parametrize(("name", "said"), [("quantize_config.json", GPTQ), ("quant_config.json", AWQ)])
def test_settings_of_older_programs_are_found_in_a_file_beside(name, said, tmp_path):
    write = gptq_writer() if said is GPTQ else awq_writer
    folder, _ = write_quantized(tmp_path / "model", None, write)
    said = {key: value for key, value in said.items() if key != "quant_method"}
    (folder / name).write_text(json.dumps(said), encoding="utf-8")
    assert len(quantized_files.open_checkpoint(folder).parts) == 14


def test_a_quantized_head_is_packed_too_and_biases_stay_with_their_parts(tmp_path):
    config = {"attention_bias": True, "mlp_bias": True}
    folder, numbers = write_quantized(tmp_path / "model", GPTQ, gptq_writer(), keep=(), **config)
    head = random_grid(64, 64, 4, 32, symmetric=True)

    def add_head(tensors):
        del tensors["lm_head.weight"]
        tensors.update({f"lm_head.{name}": tensor for name, tensor in gptq_tensors(head).items()})

    edit(folder, add_head)
    llm = load(folder, layers="plain")
    assert torch.equal(llm.model.lm_head.packed().dequantize(), head.numbers())
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert torch.equal(llm.model.layers[0].get_submodule(name).bias, numbers[f"layers.0.{name}.bias"])
    assert len(tokens(llm)) == 12


def test_parts_that_were_left_out_of_quantization_stay_numbers(tmp_path):
    folder, numbers = write_quantized(tmp_path / "model", GPTQ, gptq_writer(), keep=("layers.1.", "o_proj"))
    llm = load(folder, layers="plain")
    assert isinstance(llm.model.layers[0].mlp.up_proj, QuantizedLinear)
    for name in ("layers.0.self_attn.o_proj", "layers.1.mlp.up_proj", "lm_head", "embed_tokens"):
        assert torch.equal(llm.model.get_submodule(name).weight, numbers[f"{name}.weight"]), name


def test_what_runs_as_numbers_is_said_once_and_why(tmp_path, caplog):
    folder, _ = write_quantized(tmp_path / "model", *LAYOUTS["gptq, 8 bits off the middle"][:2])
    load(folder)
    said = [record.message for record in caplog.records if "quantized matrices run as" in record.message]
    assert len(said) == 1 and said[0].startswith("14 quantized matrices") and "zeros are not in the middle" in said[0]


def test_the_numbers_of_a_quantized_checkpoint_can_be_loaded_as_well(tmp_path):
    folder, numbers = write_quantized(tmp_path / "model", {**GPTQ, "desc_act": True}, gptq_writer(mixed=True))
    weights = quantized_files.open_checkpoint(folder).load("float32", "cpu")
    assert weights.keys() == numbers.keys()
    assert all(torch.equal(weights[name], numbers[name]) for name in numbers)


def test_a_checkpoint_that_is_not_quantized_is_opened_as_ever(tmp_path):
    folder = save_tiny(tmp_path / "model")
    assert not isinstance(quantized_files.open_checkpoint(folder), quantized_files.QuantizedCheckpoint)


def test_the_compute_dtype_is_that_of_the_call(tmp_path):
    folder, _ = write_quantized(tmp_path / "model", GPTQ, gptq_writer())
    llm = LLM(folder, dtype="bfloat16", device="cpu")
    assert llm.model.embed_tokens.weight.dtype == llm.model.layers[0].mlp.up_proj.dtype == torch.bfloat16
    assert len(tokens(llm)) == 12


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path):
    folder, _ = write_quantized(tmp_path / "model", GPTQ, gptq_writer())
    with pytest.raises(RequestError, match="quantized already .gptq."):
        load(folder, quantization="int8")


# ---- what cannot be read -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"quant_method": "fp8"}, ["fp8", "gptq, awq, bitsandbytes, llmfromscratch"]),
        ({"quant_method": "hqq"}, ["hqq", "can be read"]),
        ({"quant_method": ["gptq"]}, ["gptq", "can be read"]),
        ({"bits": 4}, ["None", "can be read"]),
        ("gptq", ["str"]),
        ({**GPTQ, "bits": 5}, ["bits", "5", "2, 3, 4, 8"]),
        ({**GPTQ, "bits": True}, ["bits", "True"]),
        ({**GPTQ, "bits": 4.0}, ["bits", "4.0"]),
        ({**GPTQ, "group_size": 0}, ["group_size", "0"]),
        ({**GPTQ, "group_size": "128"}, ["group_size", "128"]),
        ({**GPTQ, "checkpoint_format": "marlin"}, ["checkpoint_format", "marlin"]),
        ({**GPTQ, "is_marlin_format": True}, ["is_marlin_format"]),
        ({**GPTQ, "pack_dtype": "int8"}, ["pack_dtype", "int8"]),
        ({**AWQ, "version": "gemv"}, ["version", "gemv", "gemm"]),
        ({**AWQ, "bits": 8}, ["bits", "8"]),
        ({**AWQ, "zero_point": False}, ["zero_point"]),
        ({"quant_method": "llmfromscratch", "version": 2, "parts": {}}, ["version", "2"]),
        ({"quant_method": "llmfromscratch", "version": 1}, ["parts"]),
        ({"quant_method": "llmfromscratch", "version": 1, "parts": {"lm_head": "int5"}}, ["lm_head", "int5"]),
    ],
)
def test_another_way_of_quantizing_is_refused_by_name(said, words, tmp_path):
    folder, _ = write_quantized(tmp_path / "model", said, gptq_writer())
    with pytest.raises(CheckpointError) as caught:
        quantized_files.open_checkpoint(folder)
    assert all(word in str(caught.value) for word in [*words, "config.json"]), str(caught.value)


PART = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("layout", "suffix"),
    [
        *(("gptq, act-order", suffix) for suffix in ("qweight", "qzeros", "scales", "g_idx")),
        *(("awq", suffix) for suffix in ("qweight", "qzeros", "scales")),
        *(("nf4", f"weight{suffix}") for suffix in ("", ".absmax", ".quant_map")),
        *(("nf4, maximums coded", f"weight.{suffix}") for suffix in ("nested_absmax", "nested_quant_map")),
        ("nf4", "weight.quant_state.bitsandbytes__nf4"),
        ("llm.int8", "weight"),
        ("llm.int8", "SCB"),
    ],
)
def test_a_missing_sibling_is_named(layout, suffix, tmp_path):
    folder, _ = write_quantized(tmp_path / "model", *LAYOUTS[layout][:2])
    edit(folder, lambda tensors: tensors.pop(f"{PART}.{suffix}"))
    with pytest.raises(CheckpointError, match="missing") as caught:
        read_all(folder)
    assert caught.value.tensor == f"{PART}.{suffix}"


def cut(tensor):
    return tensor[:-1] if tensor.ndim else tensor.reshape(1)


@pytest.mark.parametrize(
    ("layout", "suffix", "change"),
    [
        *(("gptq", suffix, cut) for suffix in ("qzeros", "scales", "g_idx")),
        ("gptq, without g_idx", "scales", cut),
        ("gptq", "qweight", lambda tensor: tensor.long()),
        ("gptq", "qweight", lambda tensor: tensor[0]),
        ("gptq", "scales", lambda tensor: tensor.int()),
        ("gptq", "qzeros", lambda tensor: tensor[:, :-1]),
        ("gptq, 3 bits", "qweight", cut),
        ("gptq, bits of its own", "qweight", cut),
        ("gptq", "g_idx", lambda tensor: tensor + 1),
        ("gptq", "g_idx", lambda tensor: tensor - 1),
        ("gptq", "scales", lambda tensor: tensor * float("nan")),
        *(("awq", suffix, cut) for suffix in ("qzeros", "scales")),
        ("nf4", "weight", cut),
        ("nf4", "weight.absmax", cut),
        ("nf4", "weight.quant_map", cut),
        ("nf4", "weight.absmax", lambda tensor: tensor * float("inf")),
        *(("nf4, maximums coded", f"weight.{name}", cut) for name in ("absmax", "nested_absmax", "nested_quant_map")),
        ("llm.int8", "SCB", cut),
        ("llm.int8", "SCB", lambda tensor: tensor * float("nan")),
        ("llm.int8", "weight_format", lambda tensor: tensor + 1),
        ("llm.int8", "weight_format", cut),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(layout, suffix, change, tmp_path):
    folder, _ = write_quantized(tmp_path / "model", *LAYOUTS[layout][:2])

    def damage(tensors):
        tensors[f"{PART}.{suffix}"] = change(tensors[f"{PART}.{suffix}"])

    edit(folder, damage)
    with pytest.raises(CheckpointError) as caught:
        read_all(folder)
    assert caught.value.tensor in (f"{PART}.{suffix}", f"{PART}.qweight", f"{PART}.qzeros"), str(caught.value)
    assert caught.value.file is not None


@pytest.mark.parametrize(
    "state",
    [
        torch.zeros(0, dtype=torch.uint8),
        torch.tensor([255, 254], dtype=torch.uint8),
        torch.tensor(list(b"[1, 2]"), dtype=torch.uint8),
        torch.tensor(list(b"[" * 100_000), dtype=torch.uint8),
        state_json(shape=[96, 64]),
        state_json(shape=[128], blocksize=64),
        state_json(shape=[96, -64], blocksize=64),
        state_json(shape=[96.0, 64], blocksize=64),
        state_json(shape=[2**50, 2**50], blocksize=64),
        state_json(shape=[96, 64], blocksize=0),
        state_json(shape=[96, 64], blocksize=64, nested_offset=float("nan")),
        state_json(shape=[96, 64], blocksize=64, nested_offset="0"),
        state_json(shape=[96, 64], blocksize=64, nested_blocksize="256"),
    ],
)
def test_a_damaged_state_of_bitsandbytes_is_named(state, tmp_path):
    folder, _ = write_quantized(tmp_path / "model", *LAYOUTS["nf4"][:2])
    name = f"{PART}.weight.quant_state.bitsandbytes__nf4"
    edit(folder, lambda tensors: tensors.update({name: state}))
    with pytest.raises(CheckpointError) as caught:
        read_all(folder)
    assert caught.value.tensor == name


def test_a_matrix_that_is_there_twice_is_refused(tmp_path):
    folder, numbers = write_quantized(tmp_path / "model", GPTQ, gptq_writer())
    edit(folder, lambda tensors: tensors.update({f"{PART}.weight": numbers["layers.1.mlp.up_proj.weight"]}))
    with pytest.raises(CheckpointError, match="both quantized and not") as caught:
        quantized_files.open_checkpoint(folder)
    assert caught.value.tensor == f"{PART}.weight"


def test_a_matrix_of_another_shape_than_the_configs_is_in_the_report(tmp_path):
    folder, _ = write_quantized(tmp_path / "model", GPTQ, gptq_writer())
    edit_config(folder, intermediate_size=128)
    with pytest.raises(CheckpointError, match="does not fit its config") as caught:
        quantized_files.open_checkpoint(folder)
    assert "layers.0.mlp.up_proj.weight" in str(caught.value)


# ---- saving ------------------------------------------------------------------------------------------------------


def quantized_llm(source, kind, **settings):
    """An LLM of a tiny model in float32."""
    return LLM(source, dtype="float32", device="cpu", quantization=kind, **settings)


PLANS = {
    "int8": "int8",
    "int4": "int4",
    "nf4": "nf4",
    "w8a8": "w8a8",
    "int3 and the ends kept": quantized_model.Plan(products="int3", embed_tokens="keep"),
    "mixed": quantized_model.Plan(
        products="int4", embed_tokens="int4", parts={"layers.1": "int8", "mlp.down_proj": "keep"}
    ),
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_saved_model_answers_with_the_same_tokens(plan, tied, tmp_path):
    source = save_tiny(tmp_path / "source", **SIZES, tie_word_embeddings=tied)
    llm = quantized_llm(source, PLANS[plan])
    folder = quantized_files.save(llm, tmp_path / "saved", source)
    again = load(folder)
    assert again.config == llm.config
    assert again.tokenizer.encode("Good day.") == llm.tokenizer.encode("Good day.")
    assert tokens(again) == tokens(llm)
    assert (
        again.chat([{"role": "user", "content": "Hi"}], GREEDY).text
        == llm.chat([{"role": "user", "content": "Hi"}], GREEDY).text
    )
    ours, theirs = again.model.state_dict(), llm.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)
    kinds = [type(part) for part in llm.model.modules()]
    assert [type(part) for part in again.model.modules()] == kinds
    assert W8A8Linear in kinds or plan != "w8a8"
    if tied and isinstance(again.model.embed_tokens, QuantizedEmbedding):
        assert again.model.lm_head.data.data_ptr() == again.model.embed_tokens.data.data_ptr()


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama with a tied head"])
def test_models_of_every_family_are_saved_whole(family, tmp_path):
    random_model(FAMILIES[family]).save_pretrained(tmp_path / "source")
    llm = quantized_llm(tmp_path / "source", "int4")
    again = load(quantized_files.save(llm, tmp_path / "saved", tmp_path / "source"))
    assert again.config == llm.config and again.tokenizer is None
    ours, theirs = again.model.state_dict(), llm.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("layout", ["gptq, act-order", "nf4", "gptq, 8 bits", "llm.int8"])
def test_others_checkpoints_can_be_saved_as_ours(layout, tmp_path):
    folder, _ = write_quantized(tmp_path / "model", *LAYOUTS[layout][:2])
    llm = load(folder)
    again = load(quantized_files.save(llm, tmp_path / "saved", folder))
    ours, theirs = again.model.state_dict(), llm.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert tokens(again) == tokens(llm)


def test_a_saved_model_can_be_saved_again(tmp_path):
    source = save_tiny(tmp_path / "source", **SIZES)
    first = quantized_files.save(quantized_llm(source, "int4"), tmp_path / "first", source)
    second = quantized_files.save(load(first), tmp_path / "second", first)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert (first / "config.json").read_text("utf-8") == (second / "config.json").read_text("utf-8")


def test_what_hugging_faces_config_has_no_words_for_is_kept(tmp_path):
    source = save_tiny(tmp_path / "source", **SIZES)
    llm = quantized_llm(source, "int8")
    factors = RopeScaling("factors", 1.0, 96, factors=tuple(1.0 + index for index in range(8)))
    llm.model.config = replace(llm.config, rope_scaling=factors, context_length=77)
    folder = quantized_files.save(llm.model, tmp_path / "saved", source)
    assert quantized_files.open_checkpoint(folder).config == llm.model.config


@pytest.mark.parametrize(
    "more",
    [
        [],
        {"unknown": 1},
        {"rope_scaling": {"kind": "linear"}},
        {"rope_scaling": {"kind": "linear", "factor": -1.0, "original_context": 96, "factors": []}},
        {"rope_scaling": {"kind": "factors", "factor": 1.0, "original_context": 96, "factors": [1.0, 0.0]}},
        {"rope_scaling": {"kind": "factors", "factor": 1.0, "original_context": 96, "factors": ["x"]}},
        {"context_length": -5},
        {"context_length": "5"},
        {"attention_bias": "no"},
    ],
)
def test_a_damaged_config_of_ours_is_refused(more, tmp_path):
    source = save_tiny(tmp_path / "source", **SIZES)
    folder = quantized_files.save(quantized_llm(source, "int8"), tmp_path / "saved", source)
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    edit_config(folder, quantization_config=said | {"config": more})
    with pytest.raises(CheckpointError) as caught:
        quantized_files.open_checkpoint(folder)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("model.layers.0.mlp.up_proj.data", lambda t: t[:, :-1], "blocks of int4"),
        ("model.layers.0.mlp.up_proj.data", lambda t: t.view(torch.int8), "I8"),
        ("model.layers.0.mlp.up_proj.data", None, "missing"),
        ("model.layers.0.mlp.up_proj.order", lambda t: torch.zeros(64, dtype=torch.int64), "each column once"),
        ("model.layers.0.mlp.up_proj.order", lambda t: torch.arange(63), "expected I64"),
        ("model.embed_tokens.scales", lambda t: t[:-1], "expected F32"),
        ("model.embed_tokens.order", lambda t: torch.arange(64), "no order"),
        ("model.layers.0.extra.data", lambda t: torch.zeros(1, 20, dtype=torch.uint8), "does not say"),
    ],
)
def test_a_damaged_file_of_ours_is_refused_with_the_tensors_name(name, change, says, tmp_path):
    source = save_tiny(tmp_path / "source", **SIZES)
    folder = quantized_files.save(quantized_llm(source, "int4"), tmp_path / "saved", source)

    def damage(tensors):
        old = tensors.pop(name, None)
        if change:
            tensors[name] = change(old)

    edit(folder, damage)
    with pytest.raises(CheckpointError, match=says) as caught:
        load(folder)
    assert str(caught.value.tensor).removeprefix("model.") == name.removeprefix("model.")


def test_a_part_that_the_config_names_must_be_there(tmp_path):
    source = save_tiny(tmp_path / "source", **SIZES)
    folder = quantized_files.save(quantized_llm(source, "int4"), tmp_path / "saved", source)
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    edit_config(folder, quantization_config=said | {"parts": said["parts"] | {"layers.9.mlp.up_proj": "int4"}})
    with pytest.raises(CheckpointError, match="layers.9.mlp.up_proj"):
        quantized_files.open_checkpoint(folder)


def test_a_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    source = save_tiny(tmp_path / "source", **SIZES)
    llm = quantized_llm(source, "int4")

    def full(*args, **more):
        raise OSError("no space left on device")

    monkeypatch.setattr(quantized_files, "_copy_tokenizer", full)
    with pytest.raises(OSError, match="no space"):
        quantized_files.save(llm, tmp_path / "saved", source)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_nothing_is_overwritten_and_nothing_unquantized_is_saved(tmp_path):
    source = save_tiny(tmp_path / "source", **SIZES)
    llm = quantized_llm(source, "int4")
    (tmp_path / "saved").mkdir()
    with pytest.raises(RequestError, match="there already"):
        quantized_files.save(llm, tmp_path / "saved", source)
    with pytest.raises(RequestError, match="nothing in this network is quantized"):
        quantized_files.save(load(source), tmp_path / "other", source)


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_a_saved_folder_has_the_permissions_of_any_new_one(tmp_path):
    source = save_tiny(tmp_path / "source", **SIZES)
    folder = quantized_files.save(quantized_llm(source, "int4"), tmp_path / "saved", source)
    (tmp_path / "any").mkdir()
    assert folder.stat().st_mode == (tmp_path / "any").stat().st_mode


def test_a_damaged_copy_of_a_ggufs_tokenizer_is_refused(tmp_path):
    (tmp_path / GGUF_COPY).write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match=GGUF_COPY):
        read_tokenizer(tmp_path)
    (tmp_path / GGUF_COPY).write_text('{"tokenizer.ggml.model": "gpt2"}', encoding="utf-8")
    with pytest.raises(TokenizerError, match=GGUF_COPY):
        read_tokenizer(tmp_path)


# ---- the command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["int4", "gptq", "awq+gptq"])
def test_the_command_writes_a_folder_and_says_how_small_it_became(method, tmp_path, capsys):
    source = save_tiny(tmp_path / "source", **SIZES, num_hidden_layers=1, max_position_embeddings=512)
    arguments = ["quantize", str(source), "--method", method, "--out", str(tmp_path / "saved"), "--dtype", "float32"]
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert method in said and "float32" in said and "times less" in said
    assert tokens(load(tmp_path / "saved")) == tokens(quantized_llm(source, method))
    assert cli.main(arguments) == 1
    assert "there already" in capsys.readouterr().err


def test_the_command_offers_every_kind_that_can_be_saved():
    assert quantized_model.KINDS[1:] == cli._METHODS


def test_the_command_needs_no_torch_to_say_what_it_does():
    code = (
        "import sys\nfrom llmfromscratch import cli\ntry: cli.main(['quantize', '--help'])\nexcept SystemExit: pass\n"
    )
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# ---- the real model ----------------------------------------------------------------------------------------------


@pytest.mark.model
def test_the_real_model_is_saved_out_of_its_gguf_and_answers_the_same(smollm2_gguf, tmp_path):
    llm = LLM(smollm2_gguf, dtype="float32", device="cpu", quantization="int4")
    again = load(quantized_files.save(llm, tmp_path / "saved", smollm2_gguf))
    params = SamplingParams(max_tokens=8)
    messages = [{"role": "user", "content": "Name three colours.\n\n1. a  7"}]
    assert again.chat(messages, params).token_ids == llm.chat(messages, params).token_ids
    assert again.config == llm.config
    raw = loading.open_checkpoint(smollm2_gguf)
    assert read_tokenizer(tmp_path / "saved") == read_gguf_tokenizer(raw.metadata, smollm2_gguf)
    assert isinstance(again.model.layers[3].mlp.up_proj.packed(), PackedWeight)
    assert (tmp_path / "saved" / "model.safetensors").stat().st_size < 100e6
