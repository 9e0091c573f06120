"""Packed weights say what was rounded, byte for byte as their formats are described.

Oracles: `Quantized.dequantize`, straight loops over bytes, the gguf package, and the closed form of NF4.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from llmfromscratch import quantization
from llmfromscratch.errors import RequestError
from llmfromscratch.kernels import block_kinds
from llmfromscratch.packed_weight import BLOCKS, GGML_KINDS, NF4_LEVELS, PackedWeight


def numbers(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def random_packed(kind: str, rows: int, width: int) -> PackedWeight:
    """Any bytes at all, but with scales that are small numbers."""
    columns, nbytes = BLOCKS[kind]
    generator = torch.Generator().manual_seed(7)
    data = torch.randint(256, (rows, width // columns, nbytes), dtype=torch.uint8, generator=generator)
    places = {"int4": (0, 2), "int3": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,), "int8": ()}.get(kind, (0,))
    for place in places:
        halves = torch.randn(rows, width // columns, 1, generator=generator).half() / 8
        data[:, :, place : place + 2] = halves.view(torch.uint8)
    scales = torch.rand(rows, generator=generator) if kind == "int8" else torch.empty(0)
    return PackedWeight(kind, width, data.flatten(1), scales)


# ---- what was rounded comes back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("symmetric", [False, True])
def test_groups_of_few_bits_come_back_as_they_were_rounded(bits, group, symmetric):
    rounded = quantization.quantize(numbers(5, 576), bits, group, symmetric)  # 128 leaves a last group of 64
    packed = PackedWeight.of(rounded)
    assert packed.kind == "int4" and packed.data.shape == (5, 18 * 20)
    assert torch.equal(packed.dequantize(), rounded.dequantize())


def test_int4_lies_as_a_straight_loop_over_the_format_says():
    rounded = quantization.quantize(numbers(2, 64), 4, 32)
    data = PackedWeight.of(rounded).data.numpy()
    for row in range(2):
        for block in range(2):
            piece = data[row, 20 * block : 20 * block + 20]
            scale, minimum = (float(x) for x in piece[:4].view(np.float16))
            for i in range(16):
                for column, code in ((i, piece[4 + i] & 15), (i + 16, piece[4 + i] >> 4)):
                    value = rounded.dequantize()[row, 32 * block + column].item()
                    assert minimum + scale * int(code) == pytest.approx(value, rel=1e-6)


def test_three_bits_take_16_bytes_a_block_and_come_back():
    rounded = quantization.quantize(numbers(3, 96), 3, 32)
    packed = PackedWeight.of(rounded, compact=True)
    assert packed.kind == "int3" and packed.data.shape == (3, 3 * 16)
    assert torch.equal(packed.dequantize(), rounded.dequantize())


def test_three_bits_lie_as_a_straight_loop_over_the_format_says():
    rounded = quantization.quantize(numbers(1, 32), 3, 32)
    piece = PackedWeight.of(rounded, compact=True).data[0].tolist()
    for column in range(32):
        low = piece[4 + column % 8] >> 2 * (column // 8) & 3
        high = piece[12 + column % 4] >> column // 4 & 1
        assert low + 4 * high == rounded.codes[0, column]


def test_eight_bits_a_row_are_int8_with_float32_scales():
    rounded = quantization.quantize(numbers(6, 37), 8, None, symmetric=True)
    packed = PackedWeight.of(rounded)
    assert packed.kind == "int8" and packed.nbytes == 6 * 37 + 6 * 4
    torch.testing.assert_close(packed.dequantize(), rounded.dequantize(), rtol=1e-5, atol=1e-6)
    codes = packed.data.view(torch.int8)
    assert codes.amin() >= -127 and codes.abs().amax() == 127
    assert torch.equal(packed.dequantize(), codes.float() * packed.scales[:, None])


def test_eight_bits_in_groups_are_gguf_s_q8_0():
    rounded = quantization.quantize(numbers(6, 64), 8, 32, symmetric=True)
    packed = PackedWeight.of(rounded)
    assert packed.kind == "Q8_0" and packed.data.shape == (6, 2 * 34)
    torch.testing.assert_close(packed.dequantize(), rounded.dequantize(), rtol=1e-5, atol=1e-6)


def test_a_channel_of_zeros_comes_back_as_zeros():
    weight = numbers(4, 64)
    weight[1] = 0
    for packed in (
        PackedWeight.of(quantization.quantize(weight, 8, None, symmetric=True)),
        PackedWeight.of(quantization.quantize(weight, 4, 32)),
        PackedWeight.nf4(weight),
    ):
        assert torch.equal(packed.dequantize()[1], torch.zeros(64))
        assert packed.dequantize()[0].abs().sum() > 0


# ---- NF4 ---------------------------------------------------------------------------------------------------------


def test_nf4_takes_the_nearest_of_its_sixteen_levels():
    weight = numbers(4, 96)
    packed = PackedWeight.nf4(weight)
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float64)
    for group, back in zip(weight.view(-1, 32), packed.dequantize().view(-1, 32), strict=True):
        scale = group.abs().max().half().double()
        nearest = levels[(group.double()[:, None] / scale - levels).abs().argmin(dim=1)] * scale
        torch.testing.assert_close(back.double(), nearest, rtol=1e-6, atol=0)


def test_the_levels_of_nf4_are_quantiles_of_a_normal_distribution():
    # the construction in the paper: 8 and 9 quantiles on either side of 0, scaled to end at -1 and 1
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))
    offset = 0.5 * ((1 - 1 / 30) + (1 - 1 / 32))  # as the authors have it: between the last quantiles of both halves
    above = normal.icdf(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    below = -normal.icdf(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat([below, torch.zeros(1, dtype=torch.float64), above]).sort().values
    torch.testing.assert_close(torch.tensor(NF4_LEVELS, dtype=torch.float64), levels / levels.max(), rtol=0, atol=2e-4)


# ---- GGUF's own --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int4", *GGML_KINDS])
def test_gguf_s_kinds_mean_what_the_gguf_package_says(kind):
    packed = random_packed(kind, 6, 512)
    kind = gguf.GGMLQuantizationType["Q4_1" if kind == "int4" else kind]
    expected = torch.from_numpy(gguf.dequantize(packed.data.numpy(), kind))
    torch.testing.assert_close(packed.dequantize(), expected, rtol=1e-6, atol=1e-6)


def test_the_table_of_kinds_is_the_kernels_and_gguf_s():
    assert {kind: BLOCKS[kind] for kind in block_kinds.BLOCKS} == block_kinds.BLOCKS
    for kind in ("int4", *GGML_KINDS):
        sizes = gguf.constants.GGML_QUANT_SIZES[gguf.GGMLQuantizationType["Q4_1" if kind == "int4" else kind]]
        assert BLOCKS[kind] == sizes


# ---- parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BLOCKS)
def test_parts_and_rows_and_what_is_put_together_again_say_the_same(kind):
    packed = random_packed(kind, 9, 512)
    whole = packed.dequantize()
    assert torch.equal(packed.dequantize(torch.bfloat16), whole.bfloat16())
    assert torch.equal(packed.dequantize(first=2, end=5), whole[2:5])
    assert torch.equal(packed.part(2, 5).dequantize(), whole[2:5])
    assert packed.part(2, 5).data.data_ptr() == packed.data[2].data_ptr()  # a view
    ids = torch.tensor([8, 0, 0, 3])
    assert torch.equal(packed.take(ids).dequantize(), whole[ids])
    again = PackedWeight.cat([packed.part(0, 4), packed.part(4, 9)])
    assert torch.equal(again.dequantize(), whole) and again.nbytes == packed.nbytes


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_large_matrix_is_unpacked_in_pieces_that_say_the_same(kind):
    packed = random_packed(kind, 2500, 512)  # two pieces and a bit
    assert torch.equal(packed.dequantize(first=2040, end=2060), packed.dequantize()[2040:2060])


# ---- what cannot be ----------------------------------------------------------------------------------------------


def test_what_cannot_be_packed_is_refused_in_a_sentence():
    weight = numbers(4, 64)
    refused = {
        "a width of 36 is not a multiple of the 32 columns": lambda: PackedWeight.of(
            quantization.quantize(numbers(4, 36), 4, 32)
        ),
        "a width of 36 is not a multiple of the 32 columns of a block of nf4": lambda: PackedWeight.nf4(numbers(4, 36)),
        "groups of 16 columns": lambda: PackedWeight.of(quantization.quantize(weight, 4, 16)),
        "5 bits have no packed form": lambda: PackedWeight.of(quantization.quantize(weight, 5, 32)),
        "grid is symmetric, and this one is not": lambda: PackedWeight.of(quantization.quantize(weight, 8, None)),
        "float16, which ends at 65504": lambda: PackedWeight.nf4(weight * 1e6),
        "kind is 'int5'": lambda: PackedWeight("int5", 64, torch.zeros(1, 64, dtype=torch.uint8), torch.empty(0)),
        "are uint8": lambda: PackedWeight("int8", 64, torch.zeros(1, 64, dtype=torch.int8), torch.ones(1)),
        "scales of int8": lambda: PackedWeight("int8", 64, torch.zeros(1, 64, dtype=torch.uint8), torch.empty(0)),
        "of one kind and width": lambda: PackedWeight.cat([random_packed("int8", 2, 64), random_packed("nf4", 2, 64)]),
    }
    for words, attempt in refused.items():
        with pytest.raises(RequestError, match=words):
            attempt()
