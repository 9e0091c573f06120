"""The frames of a model's keys, measured once while an engine with a cache of few bits is made.

A text goes through the network, and the keys of every layer are looked at: as they are, and turned as if the text
stood further on, for each stretch of positions that a context has. Pairs of channels turn with the position (`rope`),
the slow ones so little that within a stretch they have a middle far from 0, and so far in a context that it is not the
same in another. The first tokens of a text have keys unlike all others; they stand at the beginning, and count there
alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmfromscratch import calibration, kv_cache, model, quantization, quantized_cache
from llmfromscratch.batch import Batch

TOKENS = 256  # of the text
STRETCH = 128  # positions that share a frame, where a context is no longer than quantized_cache.MOST_FRAMES of them
_FIRST = 4
_CHARACTERS = 8 * TOKENS  # of the text: enough for so many tokens


def codec(kind: str | None, network: model.Model, tokenizer: Any) -> quantized_cache.Codec | None:
    """The codec for LLM(kv_cache_dtype=kind), its frames measured; None for None. tokenizer: None reads random ids."""
    if kind is None:
        return None
    config, dtype = network.config, network.embed_tokens.weight.dtype
    stretch = max(STRETCH, -(-config.context_length // quantized_cache.MOST_FRAMES))
    found = frames(network, text_ids(network, tokenizer), stretch)
    return quantized_cache.Codec(quantized_cache.KINDS[kind], config.head_dim, dtype, found, stretch)


def text_ids(network: model.Model, tokenizer: Any) -> list[int]:
    """Token ids to measure on: the beginning of the calibration text; without a tokenizer, random ones."""
    most = min(TOKENS, network.config.context_length)
    if tokenizer is None:
        dice = torch.Generator().manual_seed(0)
        return torch.randint(network.config.vocab_size, (most,), generator=dice).tolist()
    ids: list[int] = tokenizer.encode(calibration.topics()[0][:_CHARACTERS])
    return ids[:most]


@torch.inference_mode()
def frames(network: model.Model, ids: list[int], stretch: int) -> tuple[Tensor, ...]:
    """Of each layer, where it lies, the middles and spreads of its keys in each stretch of the context: float32
    [stretches, 2, kv_heads, head_dim]."""
    config = network.config
    cache = kv_cache.ConcatKVCache(config.num_layers)
    network(Batch.of([(0, ids, 0)]), cache)
    read = [cache.read(layer, 0)[0] for layer in range(config.num_layers)]
    keys = torch.cat([each.float().cpu() for each in read], dim=1)  # the heads of all layers beside each other
    home = torch.arange(len(ids)) // stretch
    found = []
    for place in range(-(-config.context_length // stretch)):
        moved = further_on(network, keys[_FIRST:], (place - home[_FIRST:]) * stretch)
        seen = torch.cat([keys[:_FIRST], moved]) if place == 0 or not len(moved) else moved
        found.append(torch.stack(quantization.key_frame(seen)))
    of_layers = torch.stack(found).split(config.num_kv_heads, dim=2)
    with torch.inference_mode(False):
        return tuple(one.clone().to(each.device) for one, each in zip(of_layers, read, strict=True))


def further_on(network: model.Model, keys: Tensor, positions: Tensor) -> Tensor:
    """Keys [tokens, heads, head_dim] as they would be so many positions further on (int64 [tokens]; below 0: back)."""
    cos, sin = network.rotary(positions)
    size = (cos.square() + sin.square()).sqrt()  # 1, but where a context was stretched
    return model.rotate(keys, cos / size, sin / size)
