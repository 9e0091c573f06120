"""Prompts through torch's own attention, `scaled_dot_product_attention`: one pass in tiles, written in C++ or CUDA.

Its gain grows with the prompt, since the plain attention holds all scores and goes over them three times. Measured on
two cores of a processor, SmolLM2's heads, times faster than plain:

    new tokens x context     128 x 128    512 x 512    512 x 2048    2000 x 2000      1 x 1024
    float32                     1.3          2.5          2.8            5.0             1.0
    bfloat16                    0.7          0.7          2.5            4.4             0.14

In half precision on a processor it loses until the plain scores no longer fit into the caches, and a decode step takes
it seven times as long: so a single query goes the plain way there, whoever asks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from llmfromscratch import attention, kv_cache, masks
from llmfromscratch.batch import Batch, Span

_DEVICES = ("cpu", "cuda")
_MANY_SCORES = 2**18  # of a head: from here on it is the faster one in half precision too


def lacking(cache: kv_cache.KVCache, mask: masks.Mask | None) -> str | None:
    """None: every cache can be read, every mask given along."""
    return None


def pays(queries: Tensor, batch: Batch) -> bool:
    """Whether it was measured to be faster for this batch: one of prompts alone, and in half precision a long one."""
    if queries.device.type not in _DEVICES or any(span.length == 1 for span in batch.spans):
        return False
    scores = max(span.length * (span.start + span.length) for span in batch.spans)
    return not _half_on_processor(queries) or scores > _MANY_SCORES


def attend(queries: Tensor, layer: int, batch: Batch, cache: kv_cache.KVCache, mask: masks.Mask | None) -> Tensor:
    """As `attention.attend`, under a mask: queries [tokens, heads, head_dim]; the same shape."""
    output = torch.empty_like(queries)
    for span in batch.spans:
        keys, values = cache.read(layer, span.request_id)
        output[span.rows] = attend_one(queries[span.rows], keys, values, span, mask)
    return output


def attend_one(queries: Tensor, keys: Tensor, values: Tensor, span: Span, mask: masks.Mask | None) -> Tensor:
    """One request: queries [new, heads, head_dim], keys and values [context, kv_heads, head_dim]; as the queries."""
    visible = None
    if mask is not None:
        visible = masks.table(mask, span.start, span.length, queries.device)
    elif span.start and span.length > 1:
        # `is_causal` would put the corner at the upper left, as if nothing stood before the new tokens
        visible = attention.causal_mask(span.start, span.length, queries.device)
    if span.length == 1 and _half_on_processor(queries):
        return attention.grouped_attention(queries, keys, values, visible)[0]
    asked, read, mixed = (part.transpose(0, 1).unsqueeze(0) for part in (queries, keys, values))
    whole = visible is None and span.length > 1
    found = F.scaled_dot_product_attention(asked, read, mixed, attn_mask=visible, is_causal=whole, enable_gqa=True)
    return found[0].transpose(0, 1)


def _half_on_processor(queries: Tensor) -> bool:
    return queries.device.type == "cpu" and queries.dtype.itemsize == 2
