"""Attention over the ragged batch: every token looks back at its own request, never at another, never ahead.

The picture: a request has `start` = 3 tokens in its cache and brings `new` = 2. Row i of the mask belongs to the token
at position start + i. The corner to align is the lower right one, where the newest token sees everything:

                key   0  1  2  3  4
    query at 3        ■  ■  ■  ■  ·
    query at 4        ■  ■  ■  ■  ■

Query heads come in groups of neighbours that share one key/value head: of 9 query heads on 3 pairs, heads 0, 1, 2 look
at pair 0. Vaswani et al., "Attention Is All You Need", section 3.2; Ainslie et al., "GQA", section 2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmfromscratch import kv_cache
from llmfromscratch.batch import Batch


def causal_mask(start: int, new: int, device: str | torch.device = "cpu") -> Tensor:
    """Who may look at whom: bool [new, start + new], True where the query of that row sees the key of that column.

    The query of row i stands at position start + i and sees every key at its own position and before. This holds for
    a whole prompt (start 0), any later chunk of it, and a decode step (new 1: one row that is all True).
    """
    return torch.ones(new, start + new, dtype=torch.bool, device=device).tril(diagonal=start)


def grouped_attention(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """One request's attention: each query's weighted mean of the values, and the weights.

    queries: [new, heads, head_dim]. keys, values: [context, kv_heads, head_dim], with any strides; they may be
    long, so better not copied or repeated. heads is a multiple of kv_heads; query head h looks at pair
    h // (heads // kv_heads).
    visible: bool [new, context], True where a query may look; None where every query sees every key, as in a decode
    step. Every row has at least one True.

    Returns output [new, heads, head_dim] in the dtype of the queries, and weights [heads, new, context] in float32
    (float64 for float64 queries): softmax(query · key / sqrt(head_dim)) over the visible keys, exactly 0 for others.
    The softmax takes the largest score off first, so that no exponential overflows. It is computed in the dtype of the
    weights: in half precision a sum over thousands of keys would lose the small ones.
    """
    new, heads, head_dim = queries.shape
    context, kv_heads, _ = keys.shape
    # [kv_heads, group * new, head_dim]: all rows that look at the same keys stand under each other in one product
    rows = (queries * head_dim**-0.5).reshape(new, kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    scores = torch.bmm(rows, keys.permute(1, 2, 0)).view(heads, new, context)
    if visible is not None:
        scores.masked_fill_(~visible, float("-inf"))
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    mixed = torch.bmm(weights.to(values.dtype).view(kv_heads, -1, context), values.transpose(0, 1))
    return mixed.view(heads, new, head_dim).transpose(0, 1), weights


def attend(queries: Tensor, layer: int, batch: Batch, cache: kv_cache.KVCache) -> Tensor:
    """Attention of every row of the batch over its own request's cached keys and values in this layer.

    queries: [tokens, heads, head_dim]; returns the same shape. batch.spans says which rows belong to which request and
    how many tokens came before them; cache.read(layer, request_id) gives a request's (keys, values), this pass's own
    included. What it gives may be overwritten by the next read, so each request is finished before the next is read.
    A mask has to lie where the queries do, on queries.device.
    """
    output = torch.empty_like(queries)
    for span in batch.spans:
        keys, values = cache.read(layer, span.request_id)
        # a single newest token may look at everything there is
        visible = None if span.length == 1 else causal_mask(span.start, span.length, queries.device)
        output[span.rows] = grouped_attention(queries[span.rows], keys, values, visible)[0]
    return output
