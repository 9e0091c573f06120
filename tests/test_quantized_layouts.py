"""Other programs' layouts, against matrices written by hand, one code at a time (`quantized_writers`)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_writers import FP4, awq_tensors, gptq_tensors, random_blocks, random_bytes, random_grid

from llmfromscratch import quantized_layouts as layouts
from llmfromscratch.errors import CheckpointError
from llmfromscratch.packed_weight import PackedWeight
from llmfromscratch.quantized_linear import QuantizedLinear


def read_gptq(grid, less_one=True):
    tensors = gptq_tensors(grid, less_one)
    packed = (tensors["qweight"], tensors["qzeros"], tensors["scales"], tensors["g_idx"])
    return layouts.gptq(*packed, grid.bits, less_one)


def read_awq(grid):
    tensors = awq_tensors(grid)
    return layouts.awq(tensors["qweight"], tensors["qzeros"], tensors["scales"], torch.tensor(grid.group_of))


def read_blocks(blocks):
    its = blocks.tensors
    packed, absmax = its["weight"].flatten(), torch.tensor(np.array(blocks.absmax))
    return layouts.four_bits(packed, absmax, its["weight.quant_map"], blocks.codes.shape, blocks.block)


def assert_is_grid(part, grid):
    """Bit by bit what its own arithmetic gives, and no further from the layout's than float16 minimums may be."""
    packed = isinstance(part.weight, PackedWeight) and part.weight.kind == "int4"
    assert torch.equal(part.dequantize(), grid.as_packed() if packed else grid.numbers())
    assert ((part.dequantize() - grid.numbers()).abs() <= grid.steps() * 2**-11 + 1e-7).all()


# ---- GPTQ --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize("group", [None, 32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_gptq_matrix_is_what_was_written(bits, symmetric, group, mixed):
    grid = random_grid(32, 256, bits, group, symmetric, mixed)
    for less_one in (True, False):
        part = read_gptq(grid, less_one)
        assert_is_grid(part, grid)
        assert (part.order is not None) == (mixed and group is not None and isinstance(part.weight, PackedWeight))
        if bits < 8:
            assert part.weight.kind == "int4"
        elif symmetric:
            assert part.weight.kind == ("int8" if group is None else "Q8_0")


@pytest.mark.parametrize("bits", [3, 4])
def test_a_symmetric_gptq_matrix_loses_nothing_by_being_packed(bits):
    grid = random_grid(32, 128, bits, 32, symmetric=True)
    assert torch.equal(read_gptq(grid).dequantize(), grid.numbers())


def test_both_formats_of_gptq_zeros_are_read_for_what_they_are():
    grid = random_grid(32, 64, 4, 32)
    tensors = gptq_tensors(grid, less_one=True)
    packed = (tensors["qweight"], tensors["qzeros"], tensors["scales"], tensors["g_idx"], 4)
    assert not torch.equal(layouts.gptq(*packed, False).dequantize(), layouts.gptq(*packed, True).dequantize())


def test_the_zero_0_survives_the_format_that_keeps_zeros_less_one():
    grid = random_grid(32, 64, 4, 32)
    grid.zeros[:] = 0
    assert (grid.codes == 15).any()
    assert_is_grid(read_gptq(grid), grid)


def test_columns_of_act_order_come_in_the_order_of_their_groups_and_the_layer_asks_for_them_so():
    grid = random_grid(32, 128, 4, 32, mixed=True)
    part = read_gptq(grid)
    owners = torch.tensor(grid.group_of)[part.order]
    assert owners.tolist() == sorted(owners.tolist())
    for group in range(4):  # stable: within a group as they were
        columns = part.order[owners == group]
        assert columns.tolist() == sorted(columns.tolist())
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    layer = QuantizedLinear(part.weight, order=part.order, kernel="plain")
    assert torch.allclose(layer(x), x @ grid.as_packed().T, atol=1e-5)


@pytest.mark.parametrize(
    ("group", "width", "says"), [(48, 96, "groups are not multiples of 32"), (None, 40, "width of 40")]
)
def test_what_blocks_of_32_cannot_hold_becomes_numbers_and_says_why(group, width, says):
    grid = random_grid(32, width, 4, group)
    part = read_gptq(grid)
    assert isinstance(part.weight, torch.Tensor) and says in part.note
    assert torch.equal(part.weight, grid.numbers())


def test_eight_bits_around_a_zero_that_int8_does_not_reach_become_numbers():
    grid = random_grid(32, 64, 8, 32)
    grid.zeros[:] = 3
    grid.codes[0, 0] = 255
    part = read_gptq(grid)
    assert "zeros" in part.note and torch.equal(part.weight, grid.numbers())


def test_scales_beyond_float16_become_numbers():
    grid = random_grid(32, 64, 4, 32)
    tensors = gptq_tensors(grid)
    packed = (tensors["qweight"], tensors["qzeros"], tensors["scales"].float() * 1.0001, tensors["g_idx"])
    part = layouts.gptq(*packed, 4)
    assert "float16" in part.note and torch.allclose(part.weight, grid.numbers(), rtol=1e-3)
    grid.scales[:], grid.zeros[:] = 30000, 8  # the minimum is -240000
    assert "float16" in read_gptq(grid).note


def test_a_scale_that_is_no_number_is_refused_by_name():
    grid = random_grid(32, 64, 4, 32)
    grid.scales[3, 1] = np.nan
    with pytest.raises(CheckpointError, match="not finite") as caught:
        read_gptq(grid)
    assert caught.value.tensor == "scales"


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 3).map(lambda n: 32 * n),
    width=st.integers(1, 6).map(lambda n: 32 * n),
    group=st.one_of(st.none(), st.integers(1, 200)),
    bits=st.sampled_from([2, 3, 4, 8]),
    mixed=st.booleans(),
    less_one=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape_of_gptq_is_what_was_written(rows, width, group, bits, mixed, less_one, seed):
    grid = random_grid(rows, width, bits, group, mixed=mixed, seed=seed)
    assert_is_grid(read_gptq(grid, less_one), grid)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_come_out_of_their_words(bits):
    codes = np.random.default_rng(0).integers(0, 2**bits, 96)
    stream = sum(int(code) << (bits * index) for index, code in enumerate(codes))
    words = np.frombuffer(stream.to_bytes(96 * bits // 8, "little"), dtype="<i4").copy()
    assert layouts.codes_in_words(torch.from_numpy(words).view(-1, 1), bits).flatten().tolist() == codes.tolist()


# ---- AWQ ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [None, 32, 64, 128])
def test_an_awq_matrix_is_what_was_written(group):
    grid = random_grid(40, 256, 4, group)
    part = read_awq(grid)
    assert part.weight.kind == "int4" and part.order is None
    assert_is_grid(part, grid)


@settings(deadline=None, max_examples=20)
@given(rows=st.integers(1, 70).map(lambda n: 8 * n), width=st.integers(1, 80), group=st.integers(1, 96))
def test_any_shape_of_awq_is_what_was_written(rows, width, group):
    grid = random_grid(rows, width, 4, group)
    assert_is_grid(read_awq(grid), grid)


# ---- bitsandbytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "width", "block"), [(3, 128, 64), (3, 96, 64), (4, 32, 64), (2, 64, 32), (2, 128, 256)]
)
def test_an_nf4_matrix_is_what_was_written_with_its_maximums_in_float16(rows, width, block):
    blocks = random_blocks(rows, width, block)
    part = read_blocks(blocks)
    assert part.weight.kind == "nf4"
    assert torch.equal(part.dequantize(), blocks.numbers(np.float16))
    assert torch.allclose(part.dequantize(), blocks.numbers(), rtol=2**-11, atol=0)


@pytest.mark.parametrize(("rows", "width", "block"), [(3, 48, 64), (3, 5, 64), (2, 64, 16)])
def test_nf4_whose_blocks_of_32_would_need_two_maximums_becomes_numbers(rows, width, block):
    blocks = random_blocks(rows, width, block)
    part = read_blocks(blocks)
    assert "multiples of 32" in part.note and torch.equal(part.weight, blocks.numbers())


def test_levels_of_another_kind_become_numbers():
    blocks = random_blocks(2, 64, levels=FP4, kind="fp4")
    part = read_blocks(blocks)
    assert "NF4" in part.note and torch.equal(part.weight, blocks.numbers())


def test_maximums_that_float16_cannot_hold_become_numbers():
    blocks = random_blocks(2, 64)
    blocks.absmax[0] = np.float32(70000)
    assert "float16" in read_blocks(blocks).note
    blocks.absmax[0] = np.float32(1e-8)
    part = read_blocks(blocks)
    assert "float16" in part.note and torch.equal(part.weight, blocks.numbers())


def test_maximums_that_were_coded_themselves_are_decoded():
    blocks = random_blocks(9, 2048, nested=True)  # 288 blocks: two maximums of maximums
    its = blocks.tensors
    read = layouts.block_maximums(
        its["weight.absmax"], its["weight.nested_quant_map"], its["weight.nested_absmax"], 256, 0.02
    )
    assert torch.equal(read, torch.tensor(np.array(blocks.absmax)))


def test_an_int8_matrix_is_what_was_written():
    tensors, numbers = random_bytes(7, 45)
    part = layouts.eight_bits(tensors["weight"], tensors["SCB"])
    assert part.weight.kind == "int8"
    assert torch.equal(part.dequantize(), numbers)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_maximums_that_are_no_numbers_are_refused_by_name(value):
    tensors, _ = random_bytes(4, 32)
    tensors["SCB"][2] = value
    with pytest.raises(CheckpointError) as caught:
        layouts.eight_bits(tensors["weight"], tensors["SCB"])
    assert caught.value.tensor == "SCB"
    blocks = random_blocks(2, 64)
    blocks.absmax[1] = np.float32(value)
    with pytest.raises(CheckpointError) as caught:
        read_blocks(blocks)
    assert caught.value.tensor == "weight.absmax"
