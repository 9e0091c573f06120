"""Other programs' quantized matrices: where they put each code, and what it becomes here.

    GPTQ              scale * (code - zero), codes in 32-bit words down the inputs, [in / 8, out]; v1 keeps zero - 1
    AWQ (GEMM)        scale * (code - zero), words along the outputs, [in, out / 8], eight in the order 0 2 4 6 1 3 5 7
    bitsandbytes, 4   level[code] * absmax of its block, two codes a byte, the first above; absmax may be coded itself
    bitsandbytes, 8   code * SCB / 127, int8 [out, in]

Each function takes a part's tensors and gives a `Part`: packed where a kind of `packed_weight` holds it, else numbers.
Errors name the tensor by what its name ends with. Blocks of int4 keep a scale and a minimum in float16: -scale * zero
is rounded to it (not where zero is a power of two, as in symmetric grids), by at most scale * zero / 2048. The absmax
of 4-bit blocks is rounded to float16 too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmfromscratch import quantization
from llmfromscratch.errors import CheckpointError
from llmfromscratch.packed_weight import NF4_LEVELS, PackedWeight

BLOCK = 32  # columns of a packed block
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs of the eight codes in a word, the lowest bits first
_AT_ONCE = 512  # outputs whose words are taken apart at a time


@dataclass(frozen=True, eq=False)
class Part:
    """One matrix as it will run.

    weight: packed, or float32 [rows, width] where no kind holds it; `note` then says why. order: int64 [width], the
    input column that each column of weight belongs to, or None where they are in order.
    """

    weight: PackedWeight | Tensor
    order: Tensor | None = None
    note: str = ""

    def to(self, device: torch.device) -> Part:
        """The same on another device."""
        order = None if self.order is None else self.order.to(device)
        return Part(self.weight.to(device), order, self.note)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix [rows, width], its columns in the order of the input."""
        numbers = self.weight.dequantize(dtype) if isinstance(self.weight, PackedWeight) else self.weight.to(dtype)
        if self.order is None:
            return numbers
        result = torch.empty_like(numbers)
        result[:, self.order] = numbers
        return result


def codes_in_words(words: Tensor, bits: int) -> Tensor:
    """Takes 32-bit words apart, lowest bits first: int32 [words, n] to uint8 [words * 32 / bits, n].

    The words of a column are one stream of bits, so that a code of 3 bits may lie in two of them.
    """
    start = torch.arange(len(words) * 32 // bits) * bits
    word, offset = start // 32, (start % 32).unsqueeze(1)
    following = (word + 1).clamp(max=len(words) - 1)
    wide = words.long() & 0xFFFFFFFF
    return (((wide[word] >> offset) | (wide[following] << (32 - offset))) & (2**bits - 1)).to(torch.uint8)


def gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group_of: Tensor, bits: int, zeros_less_one: bool = True
) -> Part:
    """A matrix of AutoGPTQ or GPTQModel. Frantar et al. 2022, and those programs' QuantLinear.

    qweight: int32 [width * bits / 32, rows]; qzeros: int32 [groups, rows * bits / 32]; scales: float [groups, rows];
    group_of: int [width], the group of each input column (g_idx). zeros_less_one: format v1 keeps zero - 1; 0 has
    become all ones there, which are taken for 0 again.
    """
    codes = torch.cat([codes_in_words(words, bits) for words in qweight.split(_AT_ONCE, dim=1)], dim=1).T
    zeros = codes_in_words(qzeros.T.contiguous(), bits)
    if zeros_less_one:
        zeros = (zeros + 1) & (2**bits - 1)
    return grouped(codes, zeros, scales.T, group_of, bits)


def awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group_of: Tensor) -> Part:
    """A matrix of AutoAWQ in its "GEMM" version, 4 bits.

    qweight: int32 [width, rows / 8]; qzeros: int32 [groups, rows / 8]; scales: float [groups, rows]; group_of: int
    [width].
    """
    codes = torch.cat([_awq_codes(words) for words in qweight.T.contiguous().split(_AT_ONCE // 8)])
    return grouped(codes, _awq_codes(qzeros.T.contiguous()), scales.T, group_of, 4)


def _awq_codes(words: Tensor) -> Tensor:
    """int32 [rows / 8, n] to uint8 [rows, n], the outputs in order."""
    place = [AWQ_ORDER.index(output) for output in range(8)]
    return codes_in_words(words, 4).view(len(words), 8, -1)[:, place].flatten(0, 1)


def grouped(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor, bits: int) -> Part:
    """scale * (code - zero), scale and zero those of the column's group.

    codes: uint8 [rows, width]; zeros: uint8 and scales: float, both [rows, groups]; group_of: int [width]. Columns
    whose groups are mixed up (act-order) are brought together, those of a group in the order in which they come.
    Raises CheckpointError for a scale that is no number.
    """
    scales, group_of = scales.float(), group_of.long()
    if not scales.isfinite().all():
        raise CheckpointError("Some of its values are not finite; fetch the file again.", tensor="scales")
    order = None if bool((group_of[1:] >= group_of[:-1]).all()) else group_of.argsort(stable=True)
    sorted_codes, owners = (codes, group_of) if order is None else (codes[:, order], group_of[order])
    if bits == 8:
        weight = _signed_bytes(sorted_codes, zeros, scales, owners)
    else:
        weight = _nibbles(sorted_codes, zeros, scales, owners)
    if isinstance(weight, PackedWeight):
        return Part(weight, order)
    return Part(scales[:, group_of] * (codes.float() - zeros[:, group_of].float()), note=weight)


def _nibbles(codes: Tensor, zeros: Tensor, scales: Tensor, owners: Tensor) -> PackedWeight | str:
    """Kind int4, or why it cannot be."""
    blocks = _groups_of_blocks(owners)
    if isinstance(blocks, str):
        return blocks
    scales, minimums = scales[:, blocks], -(scales * zeros)[:, blocks]
    if not _held_by_half(scales) or not minimums.half().isfinite().all():
        return "its scales do not fit float16"
    return PackedWeight.of(quantization.Quantized(codes.contiguous(), scales, minimums, 4, BLOCK))


def _signed_bytes(codes: Tensor, zeros: Tensor, scales: Tensor, owners: Tensor) -> PackedWeight | str:
    """Kind int8 where a row has one group, else Q8_0; or why it can be neither."""
    shifted = codes.short() - zeros.short()[:, owners] + 128
    if shifted.min() < 0 or shifted.max() > 255:
        return "its zeros are not in the middle, and int8 has none"
    shifted = shifted.to(torch.uint8)
    if scales.shape[1] == 1:
        return PackedWeight.of(quantization.Quantized(shifted, scales, -128 * scales, 8, shifted.shape[1]))
    blocks = _groups_of_blocks(owners)
    if isinstance(blocks, str):
        return blocks
    if not _held_by_half(scales) or not _held_by_half(128 * scales):
        return "its scales do not fit float16"
    scales = scales[:, blocks]
    return PackedWeight.of(quantization.Quantized(shifted, scales, -128 * scales, 8, BLOCK))


def _groups_of_blocks(owners: Tensor) -> Tensor | str:
    """The group of each block of 32 columns, [blocks], or why a block would need two."""
    if len(owners) % BLOCK:
        return f"its width of {len(owners)} is not a multiple of {BLOCK}"
    by_block = owners.view(-1, BLOCK)
    if not torch.equal(by_block, by_block[:, :1].expand_as(by_block)):
        return f"its groups are not multiples of {BLOCK} columns"
    return by_block[:, 0]


def _held_by_half(scales: Tensor) -> bool:
    return torch.equal(scales.half().float(), scales)


# ---- bitsandbytes ------------------------------------------------------------------------------------------------


def block_maximums(coded: Tensor, levels: Tensor, maximums: Tensor, block: int, offset: float) -> Tensor:
    """What "double quantization" made of the absmax: float32 [blocks]. Dettmers et al. 2023, "QLoRA", section 3.

    coded: uint8 [blocks]; levels: float32 [256]; maximums: float32, one for every `block` of coded; offset: the mean
    that was taken off before.
    """
    return levels[coded.long()] * maximums.repeat_interleave(block)[: len(coded)] + offset


def four_bits(packed: Tensor, absmax: Tensor, levels: Tensor, shape: tuple[int, int], block: int) -> Part:
    """A matrix of bitsandbytes in 16 levels (NF4, FP4).

    packed: uint8, flat, two codes in a byte, the first in its upper half. absmax: float32, one for every `block` codes
    in the order of the rows. levels: float32 [16], from -1 to 1. Other levels than NF4's are not packed.
    Raises CheckpointError for an absmax that is no number.
    """
    rows, width = shape
    if not absmax.isfinite().all():
        raise CheckpointError("Some of its values are not finite; fetch the file again.", tensor="weight.absmax")
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten()[: rows * width]
    note = _why_not_nf4(absmax, levels, width, block)
    if note:
        numbers = levels[codes.long()] * absmax.repeat_interleave(block)[: len(codes)]
        return Part(numbers.view(rows, width), note=note)
    # a block of 32 never crosses a border: 32 divides the width and the blocks of the file
    halves = absmax[torch.arange(0, len(codes), BLOCK) // block].half().view(rows, -1, 1)
    nibbles = quantization.pack_int4(codes.view(rows, width)).view(rows, -1, BLOCK // 2)
    data = torch.cat([halves.view(torch.uint8), nibbles], dim=-1).flatten(1)
    return Part(PackedWeight("nf4", width, data, torch.empty(0)))


def _why_not_nf4(absmax: Tensor, levels: Tensor, width: int, block: int) -> str:
    if not torch.allclose(levels, torch.tensor(NF4_LEVELS), rtol=0, atol=1e-6):
        return "its levels are not those of NF4"
    if width % BLOCK or block % BLOCK:
        return f"its width of {width} and its blocks of {block} are not both multiples of {BLOCK}"
    if ((absmax.half().float() - absmax).abs() > absmax.abs() / 1024).any():
        return "its maximums do not fit float16"
    return ""


def eight_bits(codes: Tensor, row_maximums: Tensor) -> Part:
    """A matrix of LLM.int8. Dettmers et al. 2022, section 2. Rows become int8 with scales of their own.

    codes: int8 [rows, width]; row_maximums: float [rows], SCB: what the code 127 stands for.
    Raises CheckpointError for a maximum that is no number.
    """
    scales = row_maximums.float() / 127
    if not scales.isfinite().all():
        raise CheckpointError("Some of its values are not finite; fetch the file again.", tensor="SCB")
    return Part(PackedWeight("int8", codes.shape[1], codes.contiguous().view(torch.uint8), scales))
