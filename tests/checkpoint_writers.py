"""Writes tiny random models the way each format has them, and says what a reader must get back."""

from __future__ import annotations

import json

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

SIZES = {
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "llama with a tied head": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
}
TYPES = gguf.GGMLQuantizationType


def random_model(config):
    """A random model of transformers; every tensor differs from every other, biases and norms too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return model.eval()


def expected_tensors(model):
    return {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}


def assert_same(weights, expected):
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].dtype == tensor.dtype, name
        assert torch.equal(weights[name], tensor), name


def write_config(folder, config):
    (folder / "config.json").write_text(config.to_json_string(), encoding="utf-8")


def file_state(model):
    """What a file would hold: a tied head is written once, as the embedding."""
    tied = model.config.tie_word_embeddings
    return {n: t.clone() for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}


def write_hf(folder, model, change=lambda state: state, **config):
    folder.mkdir(exist_ok=True)
    settings = json.loads(model.config.to_json_string()) | config
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file(change(file_state(model)), folder / "model.safetensors")
    return folder


def interleaved_rows(weight, heads):
    """Half-split rows into interleaved ones, as llama.cpp and Meta's format have them."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(path, model, type_of=lambda name, tensor: TYPES.F32, interleaved=True, **keys):
    """Writes the model as llama.cpp would; type_of(name, array) chooses how each tensor is packed.

    Returns the values that the packed tensors stand for, under Hugging Face names and in Hugging Face order.
    """
    config = model.config
    arch = {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_key_length(getattr(config, "head_dim", None) or 16)
    writer.add_eos_token_id(2)
    for key, value in keys.items():
        getattr(writer, key)(value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.num_hidden_layers)
    values = {}
    for name, tensor in file_state(model).items():
        array = tensor.numpy()
        kind = TYPES.F32 if array.ndim == 1 else type_of(name, array)
        if kind in (TYPES.Q4_K, TYPES.Q5_K, TYPES.Q6_K):
            packed = _random_blocks(kind, array)  # the gguf package reads these types and cannot write them
        else:
            packed = gguf.quants.quantize(array, kind)
        values[name.removeprefix("model.")] = torch.from_numpy(
            gguf.quants.dequantize(packed, kind).reshape(array.shape)
        )
        if interleaved and arch == "llama" and ".q_proj." in name:
            packed = interleaved_rows(packed, config.num_attention_heads)
        if interleaved and arch == "llama" and ".k_proj." in name:
            packed = interleaved_rows(packed, config.num_key_value_heads)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if config.tie_word_embeddings:
        values["lm_head.weight"] = values["embed_tokens.weight"]
    return values


def _random_blocks(kind, array):
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (array.size // elements, size), dtype=np.uint8)
    scales = slice(208, 210) if kind == TYPES.Q6_K else slice(0, 4)
    blocks[:, scales] = np.array([0.01] * ((scales.stop - scales.start) // 2), dtype=np.float16).view(np.uint8)
    return blocks.reshape(array.shape[0], -1)


META_NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight", "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "model.layers": "layers",
}  # fmt: skip


def write_meta(folder, model, shards=1, embedding_cut=1):
    """Meta's layout: interleaved q and k rows, and each matrix cut over the shards by rows or by columns."""
    params = {"dim": 96, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "multiple_of": 256, "norm_eps": 1e-5}
    (folder / "params.json").write_text(json.dumps({**params, "vocab_size": -1}), encoding="utf-8")
    parts = [{"rope.freqs": torch.ones(8)} for _ in range(shards)]
    for name, tensor in file_state(model).items():
        if "q_proj" in name or "k_proj" in name:
            tensor = interleaved_rows(tensor, 6 if "q_proj" in name else 2)
        for theirs, metas in META_NAMES.items():
            name = name.replace(theirs, metas)
        cut = 1 if name.endswith(("wo.weight", "w2.weight")) else 0
        cut = embedding_cut if name.startswith("tok") else cut
        pieces = [tensor] * shards if name.endswith("norm.weight") else tensor.chunk(shards, cut)
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece.clone()
    for index, part in enumerate(parts):
        torch.save(part, folder / f"consolidated.{index:02d}.pth")
