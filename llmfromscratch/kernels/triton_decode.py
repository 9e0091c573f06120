"""Decode steps as a Triton kernel: one query a request, over all keys and values that the request has, where they lie.

One program takes the query heads of one request that share a key/value head, and some of its tokens:

    grid    requests x kv_heads x splits

With few requests that would be too few programs for a GPU of a hundred processors, so a long text is split and the
parts are merged: each knows its result, and how much weight it has (FlashDecoding; Dao et al. 2023).
Kwon et al. 2023, "PagedAttention", section 4.3; Milakov and Gimelshein 2018, for the one pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmfromscratch.kernels.triton_tiles import LOG2_E, dot_dtype, fold_tile, load_tile, tile_of

LEAST = 256  # tokens of a split, and what it is a multiple of: fewer are not worth a program
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _decode(
    queries, keys, values, tables, lengths, output, weights,
    scale, table_width, head_stride, tokens_per_split,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    request, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    requests, kv_heads = tl.num_programs(0), tl.num_programs(1)
    member, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    row = (request * kv_heads + head) * GROUP + member  # of the queries, as [requests * heads, head_dim]
    asked = tl.load(queries + row[:, None] * HEAD_DIM + column[None, :], mask=inside, other=0).to(DOT)

    mixed = tl.zeros([ROWS, COLUMNS], tl.float32)
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    first = split * tokens_per_split
    end = tl.minimum(tl.load(lengths + request), first + tokens_per_split)
    for start in range(first, end, TILE):
        position = start + tl.arange(0, TILE)
        seen = position < end
        table = tables + request * table_width
        k, v = load_tile(keys, values, table, position, seen, column, head, head_stride, BLOCK_SIZE, HEAD_DIM, DOT)
        scores = tl.dot(asked, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        mixed, top, total = fold_tile(mixed, top, total, scores, v)

    # the largest score has the power 1, so a total below 1 means that this split lies behind the request's end
    total = tl.maximum(total, 1.0)
    row += split * requests * kv_heads * GROUP
    tl.store(output + row[:, None] * HEAD_DIM + column[None, :], mixed / total[:, None], mask=inside)
    tl.store(weights + row, (top + tl.log2(total)) * _LN_2, mask=member < GROUP)


def attend_steps(
    queries: Tensor,
    stored: Tensor,
    tables: Tensor,
    lengths: Tensor,
    kv_heads: int,
    block_size: int,
    head_stride: int,
    splits: int = 1,
    tokens_per_split: int = 2**30,
) -> Tensor:
    """Attention of one new token each for some requests, over the tokens that they have in one layer of a cache.

    queries: [requests, heads, head_dim], contiguous. stored: [2 (keys, values), ...], laid out as `triton_tiles` says,
    head_stride rows from a head to the next. tables: int32 [requests, most blocks]; lengths: int32 [requests], at least
    1. splits, tokens_per_split: how a text is cut, see `cut`. Returns the queries' shape and dtype; scores and sums are
    float32.
    """
    requests, heads, head_dim = queries.shape
    group = heads // kv_heads
    # a part that will be merged is kept in float32; what is not cut is the result already
    dtype = queries.dtype if splits == 1 else torch.float32
    parts = torch.empty((splits, *queries.shape), dtype=dtype, device=queries.device)
    weights = torch.empty((splits, requests, heads), dtype=torch.float32, device=queries.device)
    _decode[(requests, kv_heads, splits)](
        queries, stored[0], stored[1], tables, lengths, parts, weights,
        LOG2_E * head_dim**-0.5, tables.shape[1], head_stride, tokens_per_split,
        # tensor cores multiply 16 rows at least: of a group of 3, the other 13 are 0
        GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, ROWS=max(16, triton.next_power_of_2(group)),
        COLUMNS=max(16, triton.next_power_of_2(head_dim)), TILE=tile_of(head_dim, stored.element_size()),
        DOT=dot_dtype(queries.dtype), num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits == 1:
        return parts[0]
    return (parts * weights.softmax(dim=0).unsqueeze(-1)).sum(dim=0).to(queries.dtype)


def cut(programs: int, longest: int, wanted: int) -> tuple[int, int]:
    """(splits, tokens of each) for texts of at most `longest` tokens, so that some `wanted` programs run at once.

    programs: those that there would be without splitting.
    """
    splits = max(1, min(wanted // programs, longest // LEAST))
    tokens = -(-longest // (splits * LEAST)) * LEAST
    return -(-longest // tokens), tokens
