"""Rotary embedding and cache write as one Triton kernel: a new token's query, key and value are touched once.

In PyTorch the key is rotated (six operations), joined with the value, and copied to its slot. Here one program takes
one token: it rotates the queries, and puts rotated keys and plain values straight where the cache keeps them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turn(source, target, cos, sin, mask, HALF: tl.constexpr):
    """Rotates the pairs (source[i], source[i + HALF]) and stores them."""
    first = tl.load(source, mask=mask, other=0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0).to(tl.float32)
    tl.store(target, first * cos - second * sin, mask=mask)
    tl.store(target + HALF, second * cos + first * sin, mask=mask)


@triton.jit
def _rotate_and_write(
    queries, keys, values, cos, sin, slots, rotated, cached_keys, cached_values,
    query_step, key_step, value_step, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, ROWS)[:, None], tl.arange(0, PAIRS)[None, :]
    in_head = pair < HALF
    c = tl.load(cos + token * HALF + pair, mask=in_head, other=0)
    s = tl.load(sin + token * HALF + pair, mask=in_head, other=0)
    here = head * 2 * HALF + pair
    of_query, of_key = in_head & (head < HEADS), in_head & (head < KV_HEADS)
    _turn(queries + token * query_step + here, rotated + token * HEADS * 2 * HALF + here, c, s, of_query, HALF)
    # the cache holds [kv_heads, slots, head_dim]: from a head to the next it is head_stride rows
    row = tl.load(slots + token) + head * head_stride
    place = row * 2 * HALF + pair
    _turn(keys + token * key_step + here, cached_keys + place, c, s, of_key, HALF)
    for half in tl.static_range(2):  # a value is not rotated
        value = tl.load(values + token * value_step + here + half * HALF, mask=of_key, other=0)
        tl.store(cached_values + place + half * HALF, value, mask=of_key)


def rotate_and_write(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    stored: Tensor,
    slots: Tensor,
    head_stride: int,
) -> Tensor:
    """Rotates queries and keys as `model.rotate` does, writes keys and values to the cache; the rotated queries.

    queries: [tokens, heads, head_dim]; keys, values: [tokens, kv_heads, head_dim]; a token's heads lie next to each
    other, tokens may be further apart (views of one fused product). cos, sin: float32 [tokens, head_dim / 2].
    stored: one layer of a cache, [2 (keys, values), ...], contiguous; of both halves, token t's head h goes to row
    slots[t] + h * head_stride, a row being head_dim numbers. slots: int64 [tokens].
    Returns [tokens, heads, head_dim], contiguous. Computed in float32 and rounded once.
    """
    tokens, heads, head_dim = queries.shape
    rotated = torch.empty((tokens, heads, head_dim), dtype=queries.dtype, device=queries.device)
    rows, pairs = triton.next_power_of_2(heads), triton.next_power_of_2(head_dim // 2)
    if tokens:
        _rotate_and_write[(tokens,)](
            queries, keys, values, cos, sin, slots, rotated, stored[0], stored[1],
            queries.stride(0), keys.stride(0), values.stride(0), head_stride,
            HEADS=heads, KV_HEADS=keys.shape[1], HALF=head_dim // 2, ROWS=rows, PAIRS=pairs,
            num_warps=min(max(rows * pairs // 256, 1), 8),
        )  # fmt: skip
    return rotated
