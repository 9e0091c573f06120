"""Prompts as a Triton kernel: attention of many new tokens in tiles, over the blocks of the cache (FlashAttention).

One program takes ROWS neighbouring tokens of one request and one query head, and goes once over the keys that the last
of them may see. Scores live in registers, a tile at a time: nothing of the size context x context is ever written.

              keys   0 ···· 63   64 ··· 127   128 ·· 191
    queries 64..127     all        up to         not
                                  the own       visited

Prompts of several requests, and chunks that go on behind what is cached, are tiles of one launch.
Dao et al. 2022, "FlashAttention", algorithm 1; Dao 2023, "FlashAttention-2", section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from llmfromscratch.batch import Span
from llmfromscratch.kernels.triton_tiles import LOG2_E, dot_dtype, fold_tile, load_tile, tile_of


@triton.jit
def _prefill(
    queries, keys, values, tiles, tables, output, scale, table_width, head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    table = tables + tl.load(tiles + 4 * tile) * table_width
    first_row, first = tl.load(tiles + 4 * tile + 1).to(tl.int64), tl.load(tiles + 4 * tile + 2)
    count = tl.load(tiles + 4 * tile + 3)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < count)[:, None] & (column < HEAD_DIM)[None, :]
    place = ((first_row + row) * HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    asked = tl.load(queries + place, mask=inside, other=0).to(DOT)

    mixed = tl.zeros([ROWS, COLUMNS], tl.float32)
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    end = first + count
    for start in range(0, end, TILE):
        position = start + tl.arange(0, TILE)
        k, v = load_tile(
            keys, values, table, position, position < end, column, head // GROUP, head_stride, BLOCK_SIZE, HEAD_DIM, DOT
        )
        scores = tl.dot(asked, tl.trans(k), input_precision="ieee") * scale
        # the corner to align is the lower right one: row 0 stands at position `first`
        scores = tl.where(position[None, :] <= (first + row)[:, None], scores, float("-inf"))
        mixed, top, total = fold_tile(mixed, top, total, scores, v)
    tl.store(output + place, mixed / total[:, None], mask=inside)


def tiles_of(spans: Sequence[Span], rows: int) -> list[tuple[int, int, int, int]]:
    """Spans cut into tiles of at most `rows` tokens: (which span, first row of the batch, first position, tokens)."""
    return [
        (index, span.first_row + first, span.start + first, min(rows, span.length - first))
        for index, span in enumerate(spans)
        for first in range(0, span.length, rows)
    ]


def rows_of(longest: int, head_dim: int, itemsize: int) -> int:
    """Tokens of a tile: 64 or 32 for prompts, as many as registers hold; 16, the least, for short spans."""
    return 16 if longest <= 16 else 64 if head_dim <= 128 and itemsize == 2 else 32


def attend_tiles(
    queries: Tensor,
    output: Tensor,
    stored: Tensor,
    tiles: Tensor,
    rows: int,
    tables: Tensor,
    kv_heads: int,
    block_size: int,
    head_stride: int,
) -> None:
    """Attention of the tokens in these tiles, each over its own request up to itself; written into their output rows.

    queries, output: [tokens, heads, head_dim], contiguous. stored, block_size, head_stride: as in
    `triton_decode.attend_steps`, this pass's own keys and values included. tiles: int32 [tiles, 4], see `tiles_of`;
    rows: 16, 32 or 64, tokens that a tile has at most. tables: int32 [spans, most blocks].
    """
    _, heads, head_dim = queries.shape
    _prefill[(len(tiles), heads)](
        queries, stored[0], stored[1], tiles, tables, output,
        LOG2_E * head_dim**-0.5, tables.shape[1], head_stride,
        HEADS=heads, GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        ROWS=rows, COLUMNS=max(16, triton.next_power_of_2(head_dim)), TILE=tile_of(head_dim, stored.element_size()),
        DOT=dot_dtype(queries.dtype), num_warps=4, num_stages=2,
    )  # fmt: skip
