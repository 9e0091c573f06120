"""A GGUF's blocks stay as they lie in the file, and compute what they stand for.

Files are written by the gguf package; the oracle is our own model with the values that its reader gives them.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch
from checkpoint_writers import FAMILIES, TYPES, random_model, write_gguf
from tiny_models import all_logits, save_tiny
from transformers import LlamaConfig

from llmfromscratch import LLM, SamplingParams, loading, native_weights
from llmfromscratch.errors import RequestError
from llmfromscratch.quantized_linear import QuantizedEmbedding, QuantizedLinear
from llmfromscratch.quantized_model import PRODUCTS, nbytes

SIZES = {**FAMILIES["llama"].to_dict(), "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
WIDE = {tied: LlamaConfig(**{**SIZES, "head_dim": 32, "tie_word_embeddings": tied}) for tied in (True, False)}
STEPS = SamplingParams(max_tokens=6, ignore_eos=True)
IDS = [5, 0, 63, 7, 7, 31, 12, 48, 9, 22, 3, 40]  # of a vocabulary of 64
PACKED = {"Q4_0": "Q4_0", "Q4_1": "int4", "Q8_0": "Q8_0", "Q4_K": "Q4_K", "Q6_K": "Q6_K"}


def llm_of(path, **settings) -> LLM:
    return LLM(path, **{"dtype": "float64", "device": "cpu", "layers": "plain", **settings})


def same(path, ids) -> LLM:
    """The native model says what the unpacked one says, in float64, where products are the same; returns it."""
    native, unpacked = llm_of(path, quantization="native"), llm_of(path)
    torch.testing.assert_close(all_logits(native.model, ids), all_logits(unpacked.model, ids), rtol=0, atol=1e-9)
    return native


@pytest.mark.parametrize("kind", PACKED)
def test_blocks_of_every_kind_stay_packed_and_mean_the_same(tmp_path, kind):
    write_gguf(tmp_path / "model.gguf", random_model(WIDE[False]), lambda name, array: TYPES[kind])
    llm = same(tmp_path / "model.gguf", IDS[:12])
    for layer in llm.model.layers:
        assert all(layer.get_submodule(name).kind == PACKED[kind] for name in PRODUCTS)
        assert type(layer.input_layernorm.weight) is torch.nn.Parameter
    assert isinstance(llm.model.embed_tokens, QuantizedEmbedding) and isinstance(llm.model.lm_head, QuantizedLinear)


def test_the_bytes_are_those_of_the_file_with_rows_of_queries_and_keys_moved(tmp_path):
    model, config = random_model(WIDE[False]), WIDE[False]
    write_gguf(tmp_path / "model.gguf", model, lambda name, array: TYPES.Q8_0)
    llm = llm_of(tmp_path / "model.gguf", quantization="native")
    checkpoint = loading.open_checkpoint(tmp_path / "model.gguf")
    layer = llm.model.layers[1]
    for name, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads), ("v_proj", 0)):
        part = layer.self_attn.get_submodule(name)
        stored = checkpoint.tensors[f"layers.1.self_attn.{name}.weight"].read().view(part.out_features, -1).numpy()
        if not heads:
            assert (part.data.numpy() == stored).all()
        # in the file the two rows of a pair stand side by side; here half a head lies between them
        width = part.out_features // max(heads, 1)
        for head in range(heads):
            for pair in range(width // 2):
                first, second = part.data[head * width + pair], part.data[head * width + width // 2 + pair]
                assert (first.numpy() == stored[head * width + 2 * pair]).all()
                assert (second.numpy() == stored[head * width + 2 * pair + 1]).all()


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_shares_the_embedding_s_blocks(tmp_path, tied):
    write_gguf(tmp_path / "model.gguf", random_model(WIDE[tied]), lambda name, array: TYPES.Q8_0)
    llm = same(tmp_path / "model.gguf", IDS[:9])
    assert (llm.model.lm_head.data.data_ptr() == llm.model.embed_tokens.data.data_ptr()) is tied


@pytest.mark.parametrize("family", ["llama with biases", "qwen2", "qwen3", "mistral"])
def test_other_families_keep_their_biases_norms_and_order_of_rows(tmp_path, family):
    write_gguf(tmp_path / "model.gguf", random_model(FAMILIES[family]), lambda name, array: TYPES.Q4_0)
    same(tmp_path / "model.gguf", IDS[:9])


def test_kinds_may_differ_and_what_has_no_product_is_unpacked_with_one_sentence(tmp_path, caplog):
    def type_of(name, array):
        for part, kind in (("v_proj", TYPES.Q6_K), ("down_proj", TYPES.Q5_0), ("o_proj", TYPES.F16)):
            if part in name:
                return kind
        return TYPES.Q4_K if "gate" in name else TYPES.Q4_1

    write_gguf(tmp_path / "model.gguf", random_model(WIDE[True]), type_of)
    with caplog.at_level(logging.WARNING):
        llm = same(tmp_path / "model.gguf", IDS[:9])
    layer = llm.model.layers[0]
    kinds = [getattr(layer.get_submodule(name), "kind", "float") for name in PRODUCTS]
    assert kinds == ["int4", "int4", "Q6_K", "float", "Q4_K", "int4", "float"]
    said = [record.getMessage() for record in caplog.records if record.name == native_weights.__name__]
    assert said == ["4 of 15 matrices (F16, Q5_0) have no packed product, and were unpacked."]


def test_a_file_of_plain_numbers_loads_too(tmp_path):
    write_gguf(tmp_path / "model.gguf", random_model(WIDE[True]), lambda name, array: TYPES.F16)
    same(tmp_path / "model.gguf", IDS[:9])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_not_packed_is_in_the_compute_dtype(tmp_path, dtype):
    write_gguf(tmp_path / "model.gguf", random_model(WIDE[True]), lambda name, array: TYPES.Q4_0)
    llm = llm_of(tmp_path / "model.gguf", quantization="native", dtype=dtype)
    assert llm.model.norm.weight.dtype == llm.model.embed_tokens.weight.dtype == getattr(torch, dtype)
    assert all_logits(llm.model, [1, 2, 3]).dtype == getattr(torch, dtype)


def test_checkpoints_that_have_no_blocks_are_refused_in_a_sentence(tmp_path):
    folder = save_tiny(tmp_path)
    with pytest.raises(RequestError, match="keeps the blocks of a GGUF file, and this is a huggingface checkpoint"):
        LLM(folder, dtype="float32", device="cpu", quantization="native")


# ---- the real model ----------------------------------------------------------------------------------------------

PEAK = """
import sys, threading, time
import psutil, torch
from llmfromscratch import loading, model, native_weights
torch.empty(1).add_(1)
checkpoint = loading.open_checkpoint(sys.argv[1])
with torch.device("meta"):
    network = model.Model(checkpoint.config)
process, peak, over = psutil.Process(), 0, False
def watch():
    global peak
    while not over:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.0005)
before = process.memory_info().rss
watching = threading.Thread(target=watch)
watching.start()
native_weights.load(network, checkpoint, "bfloat16", "cpu")
over = True
watching.join()
print(peak - before)
"""


@pytest.mark.model
def test_the_real_model_never_takes_more_than_110_megabytes_while_it_is_loaded(smollm2_gguf):
    environment = {**os.environ, "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(smollm2_gguf)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert 90e6 < int(done.stdout) <= 110e6


@pytest.mark.model
def test_the_real_model_s_tokens_are_those_of_the_unpacked_one(smollm2_gguf, smollm2_fp32):
    llm = LLM(smollm2_gguf, dtype="float32", device="cpu", quantization="native", kv_cache_memory=2**26)
    assert nbytes(llm.model) <= 110e6
    params = SamplingParams(max_tokens=10)
    for text in ("Why is the sky blue?", "Name three colours."):
        prompt = [{"role": "user", "content": text}]
        assert llm.chat(prompt, params).token_ids == smollm2_fp32.chat(prompt, params).token_ids
