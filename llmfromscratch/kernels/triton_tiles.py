"""What the attention kernels share: one tile of keys and values, read through the block table and folded in.

A cache layer is [2 (keys, values), kv_heads, blocks, block_size, head_dim]. Position p of a request lies in block
table[p // block_size], at p % block_size; of head h the row is head_stride further on. A row of a static cache is one
block, as long as a text may get.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # scores are scaled by it: a GPU computes powers of two, not of e


@triton.jit
def load_tile(
    keys, values, table, position, seen, column, head, head_stride,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Keys and values [tile, columns] of one head at these positions; 0 where nothing is seen: it may be NaN there."""
    block = tl.load(table + position // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    row = block * BLOCK_SIZE + position % BLOCK_SIZE + head * head_stride
    place = row[:, None] * HEAD_DIM + column[None, :]
    mask = seen[:, None] & (column < HEAD_DIM)[None, :]
    k, v = tl.load(keys + place, mask=mask, other=0), tl.load(values + place, mask=mask, other=0)
    return k.to(DOT), v.to(DOT)


@triton.jit
def fold_tile(mixed, top, total, scores, values):
    """`optimization.fold_tile`, with powers of two. Every row has seen a token by its first tile: top is never -inf."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    shrink = tl.exp2(top - new_top)
    powers = tl.exp2(scores - new_top[:, None])
    # tensor cores multiply in the dtype of the values, and sum in float32; "ieee" keeps them from rounding float32
    mixed = tl.dot(powers.to(values.dtype), values, mixed * shrink[:, None], input_precision="ieee")
    return mixed, new_top, total * shrink + tl.sum(powers, axis=1)


# set by TRITON_INTERPRET=1 before Triton is imported: numpy runs the kernels, one program after the other
INTERPRETED = not isinstance(fold_tile, triton.JITFunction)


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """What numbers of a dtype are multiplied in: itself, on tensor cores. The interpreter's dot knows no bfloat16."""
    return tl.float32 if INTERPRETED and dtype == torch.bfloat16 else getattr(tl, str(dtype).removeprefix("torch."))


def tile_of(head_dim: int, itemsize: int) -> int:
    """Tokens of a tile of keys and values: 64; fewer where heads are wide, so that registers hold a thread's part."""
    return min(64, max(16, 2**13 // triton.next_power_of_2(head_dim * itemsize)))
