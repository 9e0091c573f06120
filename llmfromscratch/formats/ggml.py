"""GGML's block formats: how a few dozen weights share a scale, and how to get them back.

A quantized tensor is a row of blocks. A block holds one or two float16 scales and a small integer per weight; the
K types hold 256 weights in sub-blocks, whose own scales are small integers too. Layouts after the GGUF
specification and the `block_*` structs of ggml (ggml-common.h); byte order is little endian, `d` and `m` are float16.

Every `dequantize_*` takes uint8 [n, bytes per block], contiguous, and gives float32 [n, weights per block]. Q4_1, the
type of the packaged model, is taught in chapter 1 and lives in `loading.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# type -> (weights per block, bytes per block); a plain type has "blocks" of one.
BLOCK_SIZES: dict[str, tuple[int, int]] = {
    "F64": (1, 8),
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "I64": (1, 8),
    "I32": (1, 4),
    "I16": (1, 2),
    "I8": (1, 1),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}

# The numbers of `enum ggml_type`, also those that are not supported or were given up, so that errors can name them.
TYPE_NAMES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    4: "Q4_2",
    5: "Q4_3",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}


def _half(blocks: torch.Tensor, byte: int) -> torch.Tensor:
    """The float16 at an even byte of each block, as float32 [n, 1]. All block sizes are even, so a view is enough."""
    return blocks.view(torch.float16)[:, byte // 2 : byte // 2 + 1].float()


def dequantize_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """[n, 34] -> [n, 32]. Block: d, 32 x int8 q. w = d * q."""
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def dequantize_q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """[n, 18] -> [n, 32]. Block: d, 16 bytes; byte i holds weight i low and weight i + 16 high. w = d * (q - 8)."""
    return _low_then_high(blocks[:, 2:]).float().sub_(8).mul_(_half(blocks, 0))


def dequantize_q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """[n, 22] -> [n, 32]. Block: d, 32 fifth bits (bit i for weight i), 16 bytes as in Q4_0. w = d * (q - 16)."""
    q = _low_then_high(blocks[:, 6:]).add_(_fifth_bits(blocks[:, 2:6]))
    return q.float().sub_(16).mul_(_half(blocks, 0))


def dequantize_q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """[n, 24] -> [n, 32]. Block: d, m, 32 fifth bits, 16 bytes as in Q4_0. w = d * q + m."""
    q = _low_then_high(blocks[:, 8:]).add_(_fifth_bits(blocks[:, 4:8]))
    return q.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _low_then_high(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 16] -> uint8 [n, 32]: all low halves of the bytes, then all high halves."""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 4] -> uint8 [n, 32]: bit i of the 32-bit number, already worth 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).mul_(16).flatten(1)


def dequantize_q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """[n, 144] -> [n, 256]. Block: d, m, 12 bytes of packed scales, 128 bytes; 8 sub-blocks of 32 weights.

    Bytes 32 j to 32 j + 31 hold sub-block 2 j low and sub-block 2 j + 1 high. w = (d * scale) * q - (m * minimum),
    where scale and minimum are the sub-block's 6-bit integers.
    """
    return _scaled_sub_blocks(blocks, _halves_of_32(blocks[:, 16:]))


def dequantize_q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """[n, 176] -> [n, 256]. Block: d, m, 12 bytes of packed scales, 32 bytes of fifth bits, 128 bytes as in Q4_K.

    Bit j of fifth-bit byte i belongs to weight i of sub-block j. w = (d * scale) * q - (m * minimum).
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(8, 1)
    fifth = ((blocks[:, None, 16:48] >> shifts) & 1).mul_(16)
    return _scaled_sub_blocks(blocks, _halves_of_32(blocks[:, 48:]).add_(fifth))


def _halves_of_32(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 128] -> uint8 [n, 8, 32]: of every 32 bytes the low halves, then the high halves."""
    packed = packed.unflatten(1, (4, 32))
    return torch.stack([packed & 15, packed >> 4], dim=2).flatten(1, 2)


def _scaled_sub_blocks(blocks: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """q uint8 [n, 8, 32] with the scales of a Q4_K or Q5_K block -> float32 [n, 256]."""
    scales, minimums = _six_bit_scales(blocks[:, 4:16])
    scales = (_half(blocks, 0) * scales).unsqueeze(-1)
    minimums = (_half(blocks, 2) * minimums).unsqueeze(-1)
    return q.float().mul_(scales).sub_(minimums).flatten(1)


def _six_bit_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [n, 12] -> 8 scales and 8 minimums, uint8 [n, 8] each.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minimums 0-3 in their low six bits. Scales and minimums 4-7 have their low
    four bits in the two halves of bytes 8-11, and their high two bits in what is left of bytes 0-3 and 4-7.
    """
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([a & 63, (c & 15) | (a >> 6) << 4], dim=1)
    minimums = torch.cat([b & 63, (c >> 4) | (b >> 6) << 4], dim=1)
    return scales, minimums


def dequantize_q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """[n, 210] -> [n, 256]. Block: 128 bytes of low fours, 64 bytes of high twos, 16 x int8 scale, d.

    Each half of 128 weights has 64 low and 32 high bytes. Its four runs of 32 weights take their low four bits from
    bytes 0-31 low, 32-63 low, 0-31 high, 32-63 high, and their two high bits from bits 0-1, 2-3, 4-5, 6-7 of the
    high bytes. A scale serves 16 weights. w = (d * scale) * (q - 32).
    """
    low = blocks[:, :128].unflatten(1, (2, 64))
    low = torch.cat([low & 15, low >> 4], dim=2).unflatten(2, (4, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).view(4, 1)
    high = ((blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts) & 3).mul_(16)
    scales = blocks[:, 192:208].view(torch.int8) * _half(blocks, 208)
    return low.add_(high).float().sub_(32).view(-1, 16, 16).mul_(scales.unsqueeze(-1)).flatten(1)


DEQUANTIZERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q8_0": dequantize_q8_0,
    "Q4_0": dequantize_q4_0,
    "Q5_0": dequantize_q5_0,
    "Q5_1": dequantize_q5_1,
    "Q4_K": dequantize_q4_k,
    "Q5_K": dequantize_q5_k,
    "Q6_K": dequantize_q6_k,
}
