"""Attention over the ragged batch: every token looks back at its own request, never at another, never ahead.

Vaswani et al., "Attention Is All You Need", section 3.2; grouped queries: Ainslie et al., "GQA", section 2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmfromscratch import kv_cache
from llmfromscratch.batch import Batch


def attend(queries: Tensor, layer: int, batch: Batch, cache: kv_cache.KVCache) -> Tensor:
    """Attention of all queries [tokens, heads, head_dim] over their requests' cached keys and values; same shape."""
    output = torch.empty_like(queries)
    for span in batch.spans:
        keys, values = cache.read(layer, span.request_id)
        output[span.rows] = causal_attention(queries[span.rows], keys, values, span.start)
    return output


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """One request's attention.

    queries: [new, heads, head_dim], standing at positions start, start + 1, ...
    keys, values: [start + new, kv_heads, head_dim]; heads is a multiple of kv_heads, neighbours share a pair.
    Returns [new, heads, head_dim].
    """
    new, heads, head_dim = queries.shape
    context, kv_heads, _ = keys.shape
    grouped = queries.view(new, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = grouped.flatten(1, 2) @ keys.permute(1, 2, 0) * head_dim**-0.5  # [kv_heads, group * new, context]
    scores = scores.view(kv_heads, -1, new, context)
    if new > 1:  # a single new token may look at everything there is
        visible = torch.ones(new, context, dtype=torch.bool, device=queries.device).tril(diagonal=start)
        scores = scores.masked_fill(~visible, float("-inf"))
    # in half precision the sum over thousands of exponentials would lose the small ones
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(values.dtype)
    mixed = weights.flatten(1, 2) @ values.permute(1, 0, 2)  # [kv_heads, group * new, head_dim]
    return mixed.view(kv_heads, -1, new, head_dim).permute(2, 0, 1, 3).reshape(new, heads, head_dim)
