"""Tiny random models in pairs: transformers' own (the oracle) and ours with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from llmfromscratch import kv_cache, model, sampling
from llmfromscratch.batch import Batch
from llmfromscratch.config import ModelConfig

VOCAB = 97
_SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 3, "intermediate_size": 40, "max_position_embeddings": 96}
_ENDS = {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": None}

_CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

# What the field's models look like where it hurts: odd head counts, heads wider than their share, biases, tied heads.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, 3 heads on 1": ("llama", {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "llama, 9 heads on 3, tied, other rope base and epsilon": (
        "llama",
        {
            "hidden_size": 36,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "llama, wide heads, every bias": (
        "llama",
        {
            "hidden_size": 20,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "head_dim": 6,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "mistral, narrow heads": (
        "mistral",
        {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "sliding_window": None},
    ),
    "qwen2, biases on q, k and v": (
        "qwen2",
        {"hidden_size": 28, "num_attention_heads": 7, "num_key_value_heads": 1},
    ),
    "qwen3, normalized heads": (
        "qwen3",
        {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10},
    ),
}


def transformers_model(shape: str = "llama, 3 heads on 1", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of transformers, float32. The weights are large enough for every part to matter."""
    kind, fields = SHAPES[shape]
    config_class, model_class = _CLASSES[kind]
    network = model_class(config_class(**{**_SIZES, **_ENDS, **fields, **changes})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if "norm" in name else 0.4 * noise)
    return network


def ours(network: PreTrainedModel, dtype: torch.dtype = torch.float32) -> model.Model:
    """Our model with the weights of one of transformers'."""
    own = model.Model(ModelConfig.from_hf(network.config.to_dict()))
    own.load_state_dict({name.removeprefix("model."): weight for name, weight in network.state_dict().items()})
    return own.to(dtype)


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> model.Model:
    """Our model alone. In float64 no near tie can decide a greedy token."""
    return ours(transformers_model("llama, 9 heads on 3, tied, other rope base and epsilon", seed, **changes), dtype)


def all_logits(network: model.Model, ids: list[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of one request in one forward pass, from an empty cache."""
    return network(Batch.of([(0, ids, 0)], all_logits=True), kv_cache.ConcatKVCache(network.config.num_layers))


def said_without_an_engine(network: model.Model, prompt: tuple[int, ...], params: sampling.SamplingParams) -> list[int]:
    """What a request says in the plainest way, each token computed from the whole text before it."""
    ids, ends = list(prompt), () if params.ignore_eos else network.config.eos_token_ids
    sampler = sampling.Sampler()
    row = sampler.start(params, prompt)
    while len(ids) - len(prompt) < params.max_tokens and not (len(ids) > len(prompt) and ids[-1] in ends):
        ids += sampler.sample(all_logits(network, ids)[-1:].float(), [row])
    return ids[len(prompt) :]


CACHES = ("none", "concat", "static", *(f"paged, blocks of {size}" for size in (1, 3, 8, 16, 32)), "paged, scattered")


def new_cache(kind: str, network: model.Model, tokens: int = 512, **settings: Any) -> kv_cache.KVCache:
    """A cache of one of CACHES for a network, with room for so many tokens in all (static: for each row).

    "scattered": blocks of 3 that were handed out and given back out of order, so that hardly two neighbours follow.
    """
    weight = next(network.parameters())
    layout = kv_cache.CacheLayout.of(network.config, weight.dtype, weight.device)
    if kind == "none":
        return kv_cache.NoKVCache(layout.num_layers)
    if kind == "concat":
        return kv_cache.ConcatKVCache(layout.num_layers)
    if kind == "static":
        return kv_cache.StaticKVCache(layout, max_requests=8, max_length=tokens)
    size = 3 if kind == "paged, scattered" else int(kind.split()[-1])
    cache = kv_cache.PagedKVCache(layout, -(-tokens // size), size, **settings)
    if kind == "paged, scattered":
        scatter(cache)
    return cache


def scatter(cache: kv_cache.PagedKVCache) -> None:
    """Every block is held once and given back in a random order: the free ones no longer follow each other."""
    count = cache.num_free_blocks
    for request in range(count):
        cache.reserve(-1 - request, cache.block_size)
    for request in torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist():
        cache.release(-1 - request)


def random_ids(length: int, seed: int = 0) -> list[int]:
    """Token ids below VOCAB."""
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


CONTROL = ["<|endoftext|>", "<|start|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token a byte after three control tokens: 259 ids, and text of any kind comes back."""
    tokens = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    result = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens(CONTROL)
    return result


def save_tiny(folder: Path, with_tokenizer: bool = True, **changes: Any) -> Path:
    """A whole checkpoint of a random model as transformers writes it, with a tokenizer of single bytes."""
    fields = {"vocab_size": 259, "eos_token_id": [2, 0], **changes}
    transformers_model("llama, 9 heads on 3, tied, other rope base and epsilon", **fields).save_pretrained(folder)
    if with_tokenizer:
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        config = {"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
