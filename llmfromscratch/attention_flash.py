"""Attention by the flash-attn package, on CUDA: its kernel reads our caches where they lie, through block tables.

`flash_attn_with_kvcache` takes as many queries of each request as there are in its batch's second dimension, so decode
steps go in one call, and each prompt in one of its own. Dao et al. 2022 and 2023, "FlashAttention" and
"FlashAttention-2".
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache as once
from typing import Any

import torch
from torch import Tensor

from llmfromscratch import kv_cache, masks
from llmfromscratch.batch import Batch, Span

_PAGE = 256  # its pages hold a multiple of so many tokens
_HALF = (torch.float16, torch.bfloat16)


def lacking(cache: kv_cache.KVCache, mask: masks.Mask | None) -> str | None:
    """Why it cannot serve this cache and mask here, in one sentence; None where it can."""
    if not isinstance(cache, kv_cache.PagedKVCache | kv_cache.StaticKVCache):
        return f"it reads a paged or a static cache, and this one is a {type(cache).__name__}."
    # layers are placed in their order, so what does not fit onto the GPU is at the end
    if {cache.storage[0].device.type, cache.storage[-1].device.type} != {"cuda"}:
        return (
            'it computes on CUDA alone, and a part of the cache lies elsewhere; give device="cuda", where there is one.'
        )
    if cache.storage[0].dtype not in _HALF:
        return f'it computes in half precision, and the cache is in {cache.storage[0].dtype}; give dtype="bfloat16".'
    if isinstance(cache, kv_cache.PagedKVCache) and cache.block_size % _PAGE:
        return f'its pages hold a multiple of {_PAGE} tokens; give block_size={_PAGE}, or kv_cache="static".'
    if mask is not None and not _is_window(mask):
        return f"it knows sliding windows, and no mask like {mask!r}."
    return None if callable(_kernel()) else _kernel()


@once
def _kernel() -> Any:
    """The package's function, or the sentence that says why there is none."""
    try:
        return importlib.import_module("flash_attn").flash_attn_with_kvcache
    except Exception as error:  # noqa: BLE001 - built for another torch, it can fail with anything
        return f"flash_attn cannot be imported ({type(error).__name__}: {error}); install the package flash-attn."


def attend(
    queries: Tensor,
    layer: int,
    batch: Batch,
    cache: kv_cache.PagedKVCache | kv_cache.StaticKVCache,
    mask: masks.Mask | None,
) -> Tensor:
    """As `attention.attend`, under a mask: queries [tokens, heads, head_dim]; the same shape."""
    output = torch.empty_like(queries)
    steps = [span for span in batch.spans if span.length == 1]
    for spans in [steps] * bool(steps) + [[span] for span in batch.spans if span.length > 1]:
        rows = torch.cat([torch.arange(span.first_row, span.first_row + span.length) for span in spans])
        rows = rows.to(queries.device)
        asked = queries[rows].view(len(spans), -1, *queries.shape[1:])
        output[rows] = _call(asked, layer, spans, cache, mask).flatten(0, 1)
    return output


def _call(
    queries: Tensor,
    layer: int,
    spans: Sequence[Span],
    cache: kv_cache.PagedKVCache | kv_cache.StaticKVCache,
    mask: masks.Mask | None,
) -> Tensor:
    """queries: [requests, new, heads, head_dim], of requests with as many new tokens each; the same shape."""
    stored = cache.storage[layer]
    lengths = [span.start + span.length for span in spans]
    where = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=stored.device)}
    if isinstance(cache, kv_cache.PagedKVCache):
        keys, values = stored.permute(0, 2, 3, 1, 4)  # each [blocks, block_size, kv_heads, head_dim], nothing copied
        widest = -(-max(lengths) // cache.block_size)
        tables = [cache.block_tables[span.request_id][:widest] for span in spans]
        filled = [[*table, *[0] * (widest - len(table))] for table in tables]
        where["block_table"] = torch.tensor(filled, dtype=torch.int32, device=stored.device)
    else:
        keys, values = stored.transpose(2, 3)  # each [rows, max_length, kv_heads, head_dim]
        rows = [cache.rows[span.request_id] for span in spans]
        where["cache_batch_idx"] = torch.tensor(rows, dtype=torch.int32, device=stored.device)
    back = (mask.window - 1, 0) if isinstance(mask, masks.Dilated) else (-1, -1)  # tokens besides the own one
    return _kernel()(queries, keys, values, causal=True, window_size=back, **where)


def _is_window(mask: masks.Mask) -> bool:
    return isinstance(mask, masks.Dilated) and mask.stride == 1
