"""RMSNorm, and the addition before it, as one Triton kernel: the smallest whole example of a kernel for GPUs.

A GPU computes a row of a few hundred numbers faster than it reads them, so what counts is how often they travel. In
PyTorch the sum is written, read, squared, read again, scaled, and so on: some eight trips. Here each number is read
once, all of the row's work happens in registers, and two results are written.

How to read a kernel: many copies of the function run side by side, here one for each row. `program_id` says which copy
this is. Pointers and numbers are whole blocks: `columns` is [0, 1, 2, ...], so `x + columns` are that many addresses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(x, added, weight, stream, normed, eps, width, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """stream = x + added; normed = stream / sqrt(mean(stream²) + eps) * weight. One program computes one row."""
    columns = tl.arange(0, BLOCK)  # a block's size is a power of two: 1024 for a row of 576
    inside = columns < width  # so what lies behind the row is neither read nor written; it counts as 0
    here = tl.program_id(0).to(tl.int64) * width + columns
    row = tl.load(x + here, mask=inside, other=0).to(tl.float32)
    if ADD:  # known when the kernel is compiled: without an addition nothing of this is left
        row += tl.load(added + here, mask=inside, other=0).to(tl.float32)
        row = row.to(x.dtype.element_ty).to(tl.float32)  # goes on with the sum as it is stored
        tl.store(stream + here, row, mask=inside)
    mean_square = tl.sum(row * row) / width
    row = (row / tl.sqrt(mean_square + eps)).to(x.dtype.element_ty)
    gain = tl.load(weight + columns, mask=inside, other=0)
    tl.store(normed + here, row.to(tl.float32) * gain.to(tl.float32), mask=inside)


def add_and_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream x + added, and its RMSNorm times weight, as `model.RMSNorm` computes it.

    x, added: [rows, width], contiguous, float32, bfloat16 or float16; added None leaves x as it is, and gives it back.
    weight: [width]. The sum is rounded to x's dtype, as PyTorch would; the norm is computed in float32.
    """
    rows, width = x.shape
    normed, stream = torch.empty_like(x), x if added is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    # a warp is 32 lanes: each then holds some 8 numbers of the row, enough reads in flight to keep memory busy
    warps = min(max(block // 256, 1), 16)
    other = x if added is None else added
    if rows:
        rms_norm_kernel[(rows,)](
            x, other, weight, stream, normed, eps, width, BLOCK=block, ADD=added is not None, num_warps=warps
        )
    return stream, normed
