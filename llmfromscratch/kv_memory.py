"""How much memory the key/value cache gets, and which cache that becomes: the choices behind `LLM(kv_cache=...)`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from llmfromscratch import kv_cache, quantized_cache, sparse_cache
from llmfromscratch.config import ModelConfig
from llmfromscratch.devices import available_memory
from llmfromscratch.errors import OutOfMemory, RequestError

KINDS = ("paged", "none", "concat", "static")
BLOCK_SIZE = 16  # tokens; vLLM's default too: larger blocks waste more at a text's end, smaller ones cost bookkeeping
MAX_REQUESTS = 32
_DEFAULT_SHARE = 0.25  # of what is free once the weights are there


def check(kind: str, block_size: Any, memory: Any, window: Any, prefix_sharing: Any, bits: Any = None) -> None:
    """Raises RequestError for arguments of `open_cache` that cannot be meant, before anything is loaded. bits: what
    LLM calls kv_cache_dtype."""
    if kind not in KINDS:
        raise RequestError(f"kv_cache is {kind!r}; expected one of {', '.join(KINDS)}.")
    for name, value in (("block_size", block_size), ("window", window)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise RequestError(f"{name} is {value!r}; it must be a whole number of tokens, at least 1.")
    if block_size is None:
        raise RequestError("block_size is None; it must be a whole number of tokens, at least 1.")
    if not isinstance(prefix_sharing, bool):
        raise RequestError(f"prefix_sharing is {prefix_sharing!r}; it must be True or False.")
    _check_memory(memory)
    quantized_cache.check(bits, kind, window)
    if window is not None and kind != "paged":
        raise RequestError(f"window={window} forgets tokens and kv_cache={kind!r} keeps all; leave one of them out.")
    if memory is not None and (window is not None or kind in ("none", "concat")):
        taker = "a windowed cache" if window is not None else f"kv_cache={kind!r}"
        raise RequestError(f"kv_cache_memory is for the paged and the static cache; {taker} takes what it needs.")
    if block_size != BLOCK_SIZE and (window is not None or kind != "paged"):
        raise RequestError(f"block_size={block_size} is for the paged cache alone; the one asked for has no blocks.")


def open_cache(
    kind: str,
    config: ModelConfig,
    dtype: torch.dtype,
    devices: str | torch.device | Sequence[str | torch.device],
    *,
    block_size: int = BLOCK_SIZE,
    memory: int | float | None = None,
    window: int | None = None,
    prefix_sharing: bool = True,
    max_requests: int = MAX_REQUESTS,
    codec: quantized_cache.Codec | None = None,
) -> kv_cache.KVCache:
    """The cache for a model whose layers lie on `devices` (one for all, or one each).

    kind: "paged", "static", "concat" (grows with each request), "none" (computes everything again).
    memory: as in `blocks_for`; for the static cache it becomes rows of a whole context each.
    window: keep only so many newest tokens of a request, and the first four (`sparse_cache.SlidingWindow`).
    codec: makes bytes of keys and values, so that the same memory holds more tokens. None: they are kept in `dtype`.
    Raises RequestError for unknown or contradicting arguments, OutOfMemory where the memory is too small for one.
    """
    check(kind, block_size, memory, window, prefix_sharing)
    if window is not None:
        return sparse_cache.SlidingWindow(config.num_layers, window)
    layout = kv_cache.CacheLayout.of(config, dtype, devices)
    if codec is not None:
        rows = _open(kind, codec.layout(layout), config, block_size, memory, prefix_sharing, max_requests)
        return quantized_cache.QuantizedKVCache(rows, codec)
    return _open(kind, layout, config, block_size, memory, prefix_sharing, max_requests)


def _open(
    kind: str,
    layout: kv_cache.CacheLayout,
    config: ModelConfig,
    block_size: int,
    memory: int | float | None,
    prefix_sharing: bool,
    max_requests: int,
) -> kv_cache.KVCache:
    if kind == "none":
        return kv_cache.NoKVCache(layout.num_layers)
    if kind == "concat":
        return kv_cache.ConcatKVCache(layout.num_layers)
    context = config.context_length
    if kind == "static":
        rows = blocks_for(memory, layout, context, context, max_requests)
        return kv_cache.StaticKVCache(layout, min(rows, max_requests), context)
    num_blocks = blocks_for(memory, layout, block_size, context, max_requests)
    return kv_cache.PagedKVCache(layout, num_blocks, block_size, prefix_sharing)


def blocks_for(
    memory: int | float | None, layout: kv_cache.CacheLayout, block_size: int, context_length: int, max_requests: int
) -> int:
    """Blocks of `block_size` tokens that the memory holds, keys and values of all layers counted.

    memory: bytes in all (1 or more); a share (below 1) of what is free on each device; None: a quarter of what is free,
    but no more than `max_requests` whole contexts take. Layers on several devices: the one that runs out first decides.
    Raises RequestError for a memory that cannot be meant, OutOfMemory where it is more than is free or less than a
    block takes; the message has the numbers.
    """
    _check_memory(memory)
    block_bytes = bytes_per_token(layout) * block_size
    free = {device: available_memory(device) for device in set(layout.devices)}
    # what a block takes of each device: its share of the layers
    taken = {device: block_bytes * layout.devices.count(device) // layout.num_layers for device in free}
    share = _DEFAULT_SHARE if memory is None else memory if memory < 1 else 1.0
    blocks = min(int(free[device] * share) // taken[device] for device in free)
    if memory is None:
        blocks = min(blocks, max_requests * math.ceil(context_length / block_size))
    elif memory >= 1:
        fitting, blocks = blocks, int(memory) // block_bytes
        if blocks > fitting:
            raise OutOfMemory(
                f"kv_cache_memory asks for {_bytes(memory)}, and {_bytes(fitting * block_bytes)} are free for it; "
                "ask for less, or for a share below 1."
            )
    if blocks < 1:
        given = _bytes(memory) if memory and memory >= 1 else f"{share:.3g} of the {_bytes(sum(free.values()))} free"
        raise OutOfMemory(
            f"the cache gets {given}, and one block of {block_size} tokens takes {_bytes(block_bytes)}; "
            "give kv_cache_memory more (bytes, or a share below 1 of what is free), or make room by closing programs."
        )
    return blocks


def _check_memory(memory: Any) -> None:
    if memory is None:
        return
    number = isinstance(memory, int | float) and not isinstance(memory, bool)
    if not number or not 0 < memory < math.inf:  # NaN fails the comparison
        raise RequestError(
            f"kv_cache_memory is {memory!r}; give bytes (1 or more), a share of what is free (below 1), or None."
        )


def _bytes(number: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{int(number)} bytes"


def bytes_per_token(layout: kv_cache.CacheLayout) -> int:
    """Bytes that one token takes in all layers together."""
    sizes = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.dtype.itemsize)
    return kv_cache.bytes_per_token(*sizes)
