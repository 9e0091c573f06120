"""The oracles of chapter 7's rounding, packing and int8 product are right beyond the cases that learners see: they
agree with the engine, with the gguf package and with closed forms; and no case hangs on a tie."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch import learner_engine
from llmfromscratch.course.exercises import (
    matrix_checks,
    packed_product_checks,
    product_checks,
    quantization_clinic,
    rounding_checks,
    row_checks,
)

ENGINE = learner_engine.reference("quantization")
examples = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
NEAR_A_TIE = 1e-4  # of a step; float32 gets a step right to about 1e-5 of 255


def random_numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def from_ties(steps: torch.Tensor) -> float:
    """How near the nearest of all steps comes to the middle between two whole numbers."""
    return float((steps - steps.floor() - 0.5).abs().min())


@examples
@given(seeds, st.integers(1, 4), st.integers(1, 40), st.integers(2, 8), st.booleans())
def test_grids_group_by_group_are_the_engines(seed, rows, size, bits, symmetric):
    groups = 5 * random_numbers(seed, 2, rows, size) + random_numbers(seed + 1, 1)
    found = rounding_checks.group_by_group(groups, bits, symmetric)
    for one, other in zip(found.values(), ENGINE.grid_of(groups, bits, symmetric), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("bits", "symmetric"), [(bits, kind) for bits in (2, 3, 4, 8) for kind in (False, True)])
def test_a_grid_by_hand_reaches_from_end_to_end(bits, symmetric):
    scale, minimum = rounding_checks.grid_by_hand([-3.0, 1.0, 6.0], bits, symmetric)
    levels = [minimum + scale * code for code in range(2**bits)]
    assert levels[-1] == pytest.approx(6) and len(levels) == 2**bits
    if symmetric:
        assert levels[2 ** (bits - 1)] == pytest.approx(0) and levels[1] == pytest.approx(-6)
    else:
        assert levels[0] == -3


@examples
@given(seeds, st.integers(1, 4), st.integers(1, 20), st.integers(1, 8))
def test_the_nearest_of_all_levels_is_the_engines_code_where_no_tie_decides(seed, rows, size, bits):
    groups, scales, minimums = rounding_checks._on_a_grid(rows, size, bits=bits, seed=seed, beyond=0.5)
    found = rounding_checks.level_by_level(groups, scales, minimums, bits)
    assert torch.equal(found, ENGINE.codes_of(groups, scales, minimums, bits))


@pytest.mark.parametrize("case", rounding_checks.codes_cases(), ids=lambda case: case.text)
def test_no_code_of_a_case_hangs_on_a_tie(case):
    groups, scales, minimums, _ = case.args
    steps = (groups.double() - minimums.double().unsqueeze(-1)) / scales.double().unsqueeze(-1)
    assert from_ties(steps) > NEAR_A_TIE


@pytest.mark.parametrize("case", matrix_checks.matrix_cases(), ids=lambda case: case.text)
def test_every_group_by_itself_is_the_engines_matrix_and_no_code_hangs_on_a_tie(case):
    weight, bits, _, _ = case.args
    found, engines = case.call(matrix_checks.row_by_row), case.call(ENGINE.quantize)
    assert torch.equal(found.codes, engines.codes) and (found.bits, found.group) == (engines.bits, engines.group)
    torch.testing.assert_close(
        (found.scales, found.minimums), (engines.scales, engines.minimums), rtol=1e-6, atol=1e-12
    )
    wide = [part.double().repeat_interleave(found.group, 1)[:, : weight.shape[1]]
            for part in (found.scales, found.minimums)]  # fmt: skip
    steps = (weight.double() - wide[1]) / wide[0]
    assert from_ties(steps) > NEAR_A_TIE
    inside = steps.clamp(0, 2**bits - 1) == steps
    assert float(((engines.dequantize() - weight.float()).abs() / wide[0])[inside].max()) < 0.5001


def test_among_the_matrices_are_codes_that_only_the_stored_grid_gives():
    def unrounded(case):
        weight, bits, group, symmetric = case.args
        parts = weight.float().split(group or weight.shape[1], 1)
        return torch.cat([ENGINE.codes_of(part, *ENGINE.grid_of(part, bits, symmetric), bits) for part in parts], 1)

    cases = [case for case in matrix_checks.matrix_cases() if case.args[2]]
    assert any(not torch.equal(unrounded(case), case.call(matrix_checks.row_by_row).codes) for case in cases)


@examples
@given(seeds, st.integers(1, 5), st.integers(1, 4))
def test_byte_by_byte_is_the_engines_packing_and_the_gguf_packages(seed, rows, blocks):
    codes = torch.randint(0, 16, (rows, 32 * blocks), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = matrix_checks.byte_by_byte(codes)
    assert torch.equal(packed, ENGINE.pack_int4(codes))
    assert torch.equal(ENGINE.unpack_int4(packed), codes)
    grid = np.tile(np.array([1, 0], np.float16).view(np.uint8), (rows, blocks, 1))  # value = 1 * code + 0
    q4_1 = np.concatenate([grid, packed.numpy().reshape(rows, blocks, 16)], axis=2).reshape(rows, -1)
    read = gguf.quants.dequantize(q4_1, gguf.GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(read, codes.numpy())


@examples
@given(seeds, st.integers(1, 3), st.integers(1, 12), st.integers(1, 90), st.data())
def test_int8_products_row_by_row_are_the_engines(seed, inputs, rows, width, data):
    first = data.draw(st.integers(0, rows))
    end = data.draw(st.integers(first, rows))
    x, scales = random_numbers(seed, inputs, width).numpy(), random_numbers(seed + 1, rows).numpy()
    codes = np.random.default_rng(seed).integers(-128, 128, (rows, width), dtype=np.int8)
    found = packed_product_checks.writing(ENGINE.multiply_int8_rows)(x, codes, scales, first, end)
    expected = packed_product_checks.row_by_row(x, codes, scales, first, end)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
    assert (expected[:, :first] == -7).all() and (expected[:, end:] == -7).all()


@pytest.mark.parametrize("case", packed_product_checks.prefetch_cases(), ids=lambda case: case.text)
def test_the_engines_int8_product_asks_so_many_rows_ahead_and_no_others(case):
    notes, unscaled = packed_product_checks.noted(ENGINE.multiply_int8_rows, case)
    assert product_checks.complaint(notes, unscaled, ENGINE.AHEAD) is None
    assert product_checks.complaint(notes, unscaled, ENGINE.AHEAD + 2) is not None


@pytest.mark.parametrize("case", row_checks.vectors_cases(), ids=lambda case: case.text)
def test_vectors_one_by_one_are_the_engines_and_no_code_hangs_on_a_tie(case):
    (x,) = case.args
    found, (codes, scales) = case.call(row_checks.vector_by_vector), case.call(ENGINE.quantize_rows)
    assert torch.equal(found["codes"], codes)
    torch.testing.assert_close(found["scales"], scales, rtol=1e-6, atol=0)
    assert from_ties(x.double() / scales.double().unsqueeze(-1)) > NEAR_A_TIE
    assert (codes.float().abs().amax(1)[scales != 1] == 127).all()


@pytest.mark.parametrize("case", quantization_clinic.axis_cases(), ids=lambda case: case.text)
def test_the_product_that_the_hunt_of_the_axis_asks_for_is_that_of_the_engines_rounded_rows(case):
    x, weight = case.args
    codes, scales = ENGINE.quantize_rows(weight)
    expected = x @ (codes.float() * scales.unsqueeze(-1)).T
    torch.testing.assert_close(case.call(quantization_clinic._in_rows), expected, rtol=1e-4, atol=1e-4)
    assert from_ties(weight.double() / scales.double().unsqueeze(-1)) > NEAR_A_TIE


@pytest.mark.parametrize("case", quantization_clinic.zero_cases(), ids=lambda case: case.text)
def test_the_zero_points_that_the_hunt_asks_for_fit_and_no_number_is_a_step_off(case):
    (numbers,) = case.args
    scales, zeros, codes = (part.double() for part in case.call(quantization_clinic.group_by_group).values())
    column = scales.unsqueeze(-1)
    off = (column * (codes - zeros.unsqueeze(-1)) - numbers).abs() / column
    assert zeros.max() <= 15 and off.max() < 1
    assert from_ties(numbers / column) > NEAR_A_TIE
    assert from_ties(numbers.amin(-1).clamp(max=0) / scales) > NEAR_A_TIE


def test_the_whole_number_product_of_the_hunt_is_numpys():
    codes, scales, weight_codes, weight_scales = quantization_clinic._codes(5, 4, 576)
    sums = codes.numpy().astype(np.int64) @ weight_codes.numpy().astype(np.int64).T
    expected = torch.from_numpy(sums * scales.double().numpy()[:, None] * weight_scales.double().numpy()).float()
    found = quantization_clinic._in_whole_numbers(codes, scales, weight_codes, weight_scales)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
