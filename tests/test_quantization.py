"""The taught module keeps its contracts: against closed forms, the gguf package, and slow exact references.

The slow references: every level tried for every number, least squares solved anew for every column, distributions
summed in float64, every choice within a budget.
"""

from __future__ import annotations

import itertools

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch import quantization

seeds = st.integers(0, 2**32 - 1)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(width: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Inputs [tokens, width] as products see them: columns that go together, and some far larger than others."""
    mixed = numbers(tokens, width, seed=seed) @ numbers(width, width, seed=seed + 1) / width**0.5
    return (mixed + 0.3 * numbers(tokens, width, seed=seed + 2)) * numbers(width, seed=seed + 3).exp()


def moments_of(x: torch.Tensor) -> torch.Tensor:
    return x.T @ x


def nearest(weight: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """The value of the nearest level for each number, every level tried, in float64."""
    width = weight.shape[1]
    of_column = torch.arange(width) // group
    levels = minimums[:, of_column, None].double() + scales[:, of_column, None].double() * torch.arange(2**bits)
    best = (levels - weight[:, :, None].double()).abs().argmin(dim=-1, keepdim=True)
    return levels.gather(-1, best)[:, :, 0]


# ---- grids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_an_asymmetric_grid_reaches_from_the_smallest_number_to_the_largest(bits):
    groups = numbers(3, 5, 16)
    scales, minimums = quantization.grid_of(groups, bits, symmetric=False)
    assert torch.equal(minimums, groups.amin(dim=-1))
    torch.testing.assert_close(minimums + scales * (2**bits - 1), groups.amax(dim=-1))
    assert scales.shape == minimums.shape == (3, 5) and scales.dtype == torch.float32


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_symmetric_grid_has_a_level_at_zero_and_one_at_the_number_largest_in_size(bits):
    groups = torch.cat([numbers(4, 16), -numbers(4, 16)])
    scales, minimums = quantization.grid_of(groups, bits, symmetric=True)
    half = 2 ** (bits - 1)
    assert torch.equal(minimums + scales * half, torch.zeros(8))
    torch.testing.assert_close(scales * (half - 1), groups.abs().amax(dim=-1))


def test_worked_grids():
    scales, minimums = quantization.grid_of(torch.tensor([[-1.0, 0.5, 2.0]]), 2, symmetric=False)
    assert (scales.item(), minimums.item()) == (1.0, -1.0)  # levels -1, 0, 1, 2
    scales, minimums = quantization.grid_of(torch.tensor([[-3.0, 0.5, 2.0]]), 3, symmetric=True)
    assert (scales.item(), minimums.item()) == (1.0, -4.0)  # levels -4, -3, ... 3


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("value", [0.0, 1.5, -7.0])
def test_groups_of_equal_numbers_divide_by_nothing(value, symmetric):
    scales, minimums = quantization.grid_of(torch.full((2, 8), value), 4, symmetric)
    assert scales.isfinite().all() and (scales > 0).all()
    codes = quantization.codes_of(torch.full((2, 8), value), scales, minimums, 4)
    torch.testing.assert_close(minimums[:, None] + scales[:, None] * codes, torch.full((2, 8), value))


def test_grids_of_half_precision_weights_are_found_in_float32():
    groups = numbers(4, 32).bfloat16()
    for symmetric in (False, True):
        for own, wide in zip(
            quantization.grid_of(groups, 4, symmetric), quantization.grid_of(groups.float(), 4, symmetric), strict=True
        ):
            assert own.dtype == torch.float32 and torch.equal(own, wide)


@given(seeds, st.integers(2, 8), st.booleans())
@settings(max_examples=40, deadline=None)
def test_no_level_is_nearer_than_the_one_that_is_taken(seed, bits, symmetric):
    weight = numbers(4, 12, seed=seed)
    scales, minimums = quantization.grid_of(weight * 0.8, bits, symmetric)  # some numbers lie beyond
    codes = quantization.codes_of(weight, scales, minimums, bits)
    values = minimums[:, None] + scales[:, None] * codes
    best = nearest(weight, scales[:, None], minimums[:, None], bits, 12)
    torch.testing.assert_close((values - weight).abs().double(), (best - weight).abs(), atol=1e-6, rtol=1e-5)
    assert codes.dtype == torch.uint8 and int(codes.max()) < 2**bits


def test_numbers_beyond_the_grid_take_its_ends():
    codes = quantization.codes_of(torch.tensor([[-1e6, -0.1, 0.4, 0.6, 1e6]]), torch.ones(1), torch.zeros(1), 8)
    assert codes.tolist() == [[0, 0, 0, 1, 255]]


# ---- matrices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "groups"), [(32, 3), (40, 2), (64, 2), (128, 1), (None, 1)])
def test_groups_lie_along_a_row_and_the_last_may_be_shorter(group, groups):
    weight = numbers(5, 80)
    rounded = quantization.quantize(weight, 4, group)
    assert rounded.codes.shape == (5, 80) and rounded.scales.shape == rounded.minimums.shape == (5, groups)
    first = min(group or 80, 80)
    alone = quantization.quantize(weight[:, :first], 4, group)
    torch.testing.assert_close(rounded.dequantize()[:, :first], alone.dequantize())
    assert torch.equal(quantization.quantize(weight[2:3], 4, group).dequantize(), rounded.dequantize()[2:3])


@given(seeds, st.sampled_from([2, 3, 4, 8]), st.sampled_from([8, 24, 32]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_codes_are_the_nearest_of_the_grid_that_is_stored(seed, bits, group, symmetric):
    weight = numbers(3, 48, seed=seed)
    rounded = quantization.quantize(weight, bits, group, symmetric)
    for grid in (rounded.scales, rounded.minimums):
        assert torch.equal(grid, grid.half().float())
    best = nearest(weight, rounded.scales, rounded.minimums, bits, group)
    torch.testing.assert_close(
        (rounded.dequantize() - weight).abs().double(), (best - weight).abs(), atol=1e-6, rtol=1e-5
    )


def test_the_grid_of_a_whole_row_stays_in_float32():
    weight = numbers(3, 48)
    scales, _ = quantization.grids_of(weight, 8, None, symmetric=True)
    assert torch.equal(scales[:, 0], quantization.grid_of(weight, 8, True)[0])
    assert not torch.equal(scales, scales.half().float())


def test_groups_too_small_for_a_float16_scale_divide_by_nothing():
    rounded = quantization.quantize(1e-9 * numbers(2, 32), 4, 32)
    assert rounded.scales.min() > 0 and rounded.dequantize().abs().max() < 1e-6


def test_values_on_a_lattice_come_back_exactly():
    """What rounding with a real-valued minimum does to weights that were rounded so before: nothing."""
    once = quantization.quantize(numbers(8, 64), 4, 32)
    spread = once.codes.view(8, 2, 32)
    assert (spread.amin(dim=-1) == 0).all() and (spread.amax(dim=-1) == 15).all()
    torch.testing.assert_close(quantization.quantize(once.dequantize(), 4, 32).dequantize(), once.dequantize())


@given(seeds, st.sampled_from([2, 3, 4]), st.booleans())
@settings(max_examples=30, deadline=None)
def test_the_best_clip_is_the_best_of_those_tried_and_never_worse_than_none(seed, bits, symmetric):
    groups = numbers(6, 32, seed=seed) ** 3  # long tails: clipping pays

    def error(factors):
        low, high = groups.amin(-1).clamp(max=0) * factors, groups.amax(-1).clamp(min=0) * factors
        clipped = torch.minimum(torch.maximum(groups, low[:, None]), high[:, None])
        scales, minimums = quantization.grid_of(clipped, bits, symmetric)
        return (nearest(groups, scales[:, None], minimums[:, None], bits, 32) - groups).square().sum(-1)

    found = quantization.best_clip(groups, bits, symmetric)
    assert ((found >= 0.5) & (found <= 1)).all()
    tried = torch.stack([error(torch.full((6,), factor)) for factor in torch.linspace(1, 0.5, 20).tolist()])
    torch.testing.assert_close(error(found), tried.amin(dim=0), rtol=1e-4, atol=1e-7)


def test_what_lies_on_its_grid_already_is_not_clipped():
    levels = torch.arange(16.0).repeat(3, 2)
    assert torch.equal(quantization.best_clip(levels, 4, symmetric=False), torch.ones(3))


# ---- packed ------------------------------------------------------------------------------------------------------


@given(seeds, st.integers(1, 5), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_packing_four_bits_can_be_undone(seed, rows, blocks):
    codes = torch.randint(16, (rows, 32 * blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = quantization.pack_int4(codes)
    assert packed.dtype == torch.uint8 and packed.shape == (rows, 16 * blocks)
    assert torch.equal(quantization.unpack_int4(packed), codes)


def test_a_byte_holds_a_column_and_the_one_sixteen_further_in_its_block():
    codes = torch.arange(64, dtype=torch.uint8).remainder(13).view(1, 64)
    packed = quantization.pack_int4(codes)[0]
    for block, i in itertools.product(range(2), range(16)):
        low, high = codes[0, 32 * block + i], codes[0, 32 * block + i + 16]
        assert packed[16 * block + i] == low + 16 * high


def test_gguf_reads_packed_codes_as_its_own_q4_1():
    rounded = quantization.quantize(numbers(3, 64), 4, 32)
    grids = torch.stack([rounded.scales, rounded.minimums], dim=-1).half().view(torch.uint8)
    blocks = torch.cat([grids.view(3, 2, 4), quantization.pack_int4(rounded.codes).view(3, 2, 16)], dim=-1)
    read = gguf.quants.dequantize(blocks.flatten(1).numpy(), gguf.GGMLQuantizationType.Q4_1)
    np.testing.assert_allclose(read, rounded.dequantize().numpy(), rtol=1e-6, atol=1e-7)


# ---- products ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "end"), [(0, 6), (2, 5), (3, 3)])
def test_the_product_reads_int8_rows_in_full_and_writes_only_what_is_asked_for(first, end):
    dice = np.random.default_rng(0)
    x = dice.standard_normal((2, 70)).astype(np.float32)
    codes = dice.integers(-127, 128, (6, 70)).astype(np.int8)
    scales = dice.random(6).astype(np.float32)
    output = np.full((2, 6), -99, np.float32)
    quantization.multiply_int8_rows(x, codes, scales, output, first, end)
    expected = x.astype(np.float64) @ (codes.astype(np.float64) * scales[:, None]).T
    np.testing.assert_allclose(output[:, first:end], expected[:, first:end], rtol=1e-4, atol=1e-3)
    assert (np.delete(output, range(first, end), axis=1) == -99).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_by_a_scale_of_their_own(dtype):
    x = (numbers(5, 40) * torch.tensor([1e-3, 1, 50, 0, 7])[:, None]).to(dtype)
    codes, scales = quantization.quantize_rows(x)
    assert codes.dtype == torch.int8 and scales.dtype == torch.float32 and scales.shape == (5,)
    assert codes.abs().amax(dim=1).tolist() == [127, 127, 127, 0, 127] and scales[3] == 1
    assert ((codes * scales[:, None] - x.float()).abs() <= scales[:, None] * 0.5001).all()


def test_a_worked_row():
    codes, scales = quantization.quantize_rows(torch.tensor([[254.0, -254.0, 3.0, -1.0]]))
    assert codes.tolist() == [[127, -127, 2, 0]] and scales.tolist() == [2.0]  # 1.5 and -0.5 go to the even number


# ---- AWQ ---------------------------------------------------------------------------------------------------------


def test_the_output_error_is_that_of_the_products():
    weight, rounded, x = numbers(6, 20, seed=1), numbers(6, 20, seed=2), numbers(50, 20, seed=3)
    each = (x.double() @ (weight - rounded).double().T).square().sum()
    assert quantization.output_error(weight, rounded, moments_of(x)) == pytest.approx(each.item(), rel=1e-5)


@given(seeds, st.sampled_from([2, 3, 4]), st.sampled_from([8, 32, None]))
@settings(max_examples=25, deadline=None)
def test_awq_is_never_worse_than_rounding_by_its_own_measure(seed, bits, group):
    weight, moments = numbers(12, 32, seed=seed), moments_of(correlated(32, 100, seed % 2**31))
    factors = quantization.awq_scale(weight, moments, bits, group)
    plain = quantization.quantize(weight, bits, group).dequantize()
    protected = quantization.quantize(weight * factors, bits, group).dequantize() / factors
    least = quantization.output_error(weight, protected, moments)
    assert least <= quantization.output_error(weight, plain, moments) * (1 + 1e-6)


def test_awq_finds_the_best_of_its_exponents():
    weight, x = numbers(24, 64), correlated(64, 300)
    size = x.square().sum(dim=0).sqrt()

    def error(alpha):
        factors = size**alpha
        rounded = quantization.quantize(weight * factors, 3, 32).dequantize() / factors
        return (x @ (weight - rounded).T).square().sum().item()

    factors = quantization.awq_scale(weight, moments_of(x), 3, 32)
    rounded = quantization.quantize(weight * factors, 3, 32).dequantize() / factors
    best = min(error(step / 20) for step in range(21))
    # the factors differ by one of all, which moves a grid's rounding to float16 a little
    assert (x @ (weight - rounded).T).square().sum().item() == pytest.approx(best, rel=0.02)
    assert best < 0.8 * error(0)
    assert factors.max() * factors.min() == pytest.approx(1, rel=1e-4)


def test_columns_without_input_count_as_the_weakest_that_has_one():
    weight, x = numbers(16, 32), correlated(32, 200)
    x[:, [3, 17]] = 0
    factors = quantization.awq_scale(weight, moments_of(x), 3, 32)
    assert factors.isfinite().all() and (factors > 0).all()
    assert factors[3] == factors[17] == factors.min()
    assert torch.equal(quantization.awq_scale(weight, torch.zeros(32, 32), 3, 32), torch.ones(32))


def test_a_given_size_takes_the_place_of_the_moments_diagonal():
    weight, x = numbers(16, 32), correlated(32, 200)
    size = torch.rand(16, generator=torch.Generator().manual_seed(5)).add(0.1).repeat(2)
    factors = quantization.awq_scale(weight, moments_of(x), 3, 32, size)
    assert torch.equal(factors[:16], factors[16:])


# ---- GPTQ --------------------------------------------------------------------------------------------------------


def least_squares_rounding(weight, moments, bits, group, order):
    """GPTQ by its meaning: after each rounded column, those left are the least-squares answer to all errors so far."""
    rows, width = weight.shape
    scales, minimums = (each.double() for each in quantization.grids_of(weight, bits, group))
    damped = moments.double() + (0.01 * moments.diagonal().double().mean() + 1e-12) * torch.eye(width).double()
    left, error = weight.double().clone(), torch.zeros(rows, width, dtype=torch.float64)
    codes = torch.empty(rows, width, dtype=torch.uint8)
    for place, column in enumerate(order):
        scale, minimum = scales[:, column // (group or width)], minimums[:, column // (group or width)]
        codes[:, column] = ((left[:, column] - minimum) / scale).round().clamp(0, 2**bits - 1)
        error[:, column] = minimum + scale * codes[:, column] - weight[:, column].double()
        done, others = order[: place + 1], order[place + 1 :]
        if others:
            # the least of error · moments · error over what is left, given what is done
            answer = torch.linalg.solve(damped[others][:, others], damped[others][:, done] @ error[:, done].T)
            left[:, others] = weight[:, others].double() - answer.T
    return codes


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("width", "group", "bits"), [(24, 8, 3), (40, None, 4), (150, 32, 4)])
def test_gptq_rounds_as_least_squares_solved_anew_for_every_column(width, group, bits, act_order):
    weight, moments = numbers(5, width), moments_of(correlated(width, 2 * width))
    found = quantization.gptq(weight, moments, bits, group, act_order)
    order = moments.diagonal().argsort(descending=True, stable=True).tolist() if act_order else list(range(width))
    expected = least_squares_rounding(weight, moments, bits, group, order)
    # one sum in float32 against one in float64: a number half-way between two levels may fall either way
    assert (found.codes == expected).float().mean() > 0.995
    assert found.bits == bits and found.group == (group or width)
    for own, theirs in zip((found.scales, found.minimums), quantization.grids_of(weight, bits, group), strict=True):
        assert torch.equal(own, theirs)


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_without_correlation_is_plain_rounding(act_order):
    weight = numbers(7, 48)
    found = quantization.gptq(weight, torch.diag(torch.arange(1.0, 49)), 3, 16, act_order)
    assert torch.equal(found.dequantize(), quantization.quantize(weight, 3, 16).dequantize())


def test_gptq_makes_the_products_less_wrong_than_rounding():
    weight, moments = numbers(32, 160), moments_of(correlated(160, 600))
    rounded = quantization.output_error(weight, quantization.quantize(weight, 3, 32).dequantize(), moments)
    for act_order in (False, True):
        found = quantization.gptq(weight, moments, 3, 32, act_order).dequantize()
        assert quantization.output_error(weight, found, moments) < 0.75 * rounded


def test_gptq_bears_moments_of_fewer_tokens_than_columns_and_of_none():
    weight, x = numbers(4, 64), correlated(64, 10)
    assert quantization.gptq(weight, moments_of(x), 4, 32).dequantize().isfinite().all()
    x[:, 5] = 0
    assert quantization.gptq(weight, moments_of(x), 4, 32).dequantize().isfinite().all()
    nothing = quantization.gptq(weight, torch.zeros(64, 64), 4, 32)
    assert torch.equal(nothing.dequantize(), quantization.quantize(weight, 4, 32).dequantize())


# ---- the cache ---------------------------------------------------------------------------------------------------


def test_in_their_frame_all_channels_reach_from_minus_one_to_one():
    keys = numbers(50, 2, 8) * numbers(2, 8, seed=1).exp() * 4 + 10 * numbers(2, 8, seed=2)
    middle, spread = quantization.key_frame(keys)
    assert middle.shape == spread.shape == (2, 8)
    framed = (keys - middle) / spread
    torch.testing.assert_close(framed.amax(dim=0), torch.ones(2, 8), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(framed.amin(dim=0), -torch.ones(2, 8), rtol=1e-4, atol=1e-4)


def test_a_channel_that_never_changes_has_the_spread_one():
    keys = numbers(9, 1, 4).bfloat16()
    keys[:, 0, 2] = 3
    middle, spread = quantization.key_frame(keys)
    assert middle[0, 2] == 3 and spread[0, 2] == 1 and middle.dtype == spread.dtype == torch.float32


def test_attention_does_not_see_the_frame():
    keys, query = numbers(30, 1, 8).double() * 5 + 20, numbers(8, seed=3).double()
    middle, spread = quantization.key_frame(keys)
    framed = (keys - middle) / spread
    plain, moved = keys[:, 0] @ query, framed[:, 0] @ (query * spread[0])
    torch.testing.assert_close(moved.softmax(0), plain.softmax(0), rtol=1e-5, atol=1e-9)


# ---- damage ------------------------------------------------------------------------------------------------------


def test_divergence_is_the_sum_of_p_times_the_log_of_p_over_q():
    ours, theirs = numbers(6, 30, seed=1) * 3, numbers(6, 30, seed=2) * 3
    p, q = (np.exp(x.double().numpy()) for x in (ours, theirs))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    found = quantization.divergence(ours, theirs)
    np.testing.assert_allclose(found.numpy(), (p * np.log(p / q)).sum(1), rtol=1e-4)
    assert found.dtype == torch.float32 and (found > 0).all()
    assert not torch.allclose(found, quantization.divergence(theirs, ours), rtol=0.05)


def test_a_worked_divergence():
    ours = torch.tensor([[0.5, 0.5]]).log()
    theirs = torch.tensor([[0.25, 0.75]]).log()
    assert quantization.divergence(ours, theirs).item() == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))


def test_divergence_bears_logits_far_apart_and_half_precision():
    far = torch.tensor([[3e4, -3e4, 0.0]])
    assert quantization.divergence(far, far).item() == 0
    assert quantization.divergence(far, -far).item() == pytest.approx(6e4)
    ours, theirs = numbers(3, 500, seed=1), numbers(3, 500, seed=2)
    found = quantization.divergence(ours.bfloat16(), theirs.bfloat16())
    wide = quantization.divergence(ours.bfloat16().float(), theirs.bfloat16().float())
    assert found.dtype == torch.float32 and torch.equal(found, wide)


# ---- choosing ----------------------------------------------------------------------------------------------------


@given(seeds, st.integers(1, 4), st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_with_equal_sizes_and_falling_gains_the_choice_is_the_best_of_all(seed, parts, spare):
    """There greedy is right, so every assignment within the budget can be tried."""
    dice = np.random.default_rng(seed)
    damage = []
    for _ in range(parts):
        gains = np.sort(dice.random(3))[::-1]  # what the next bit wins gets less
        costs = gains.sum() - np.concatenate([[0], gains.cumsum()])
        damage.append({bits: float(cost) for bits, cost in zip((3, 4, 5, 6), costs, strict=True)})
    sizes, budget = [10] * parts, 10.0 * (3 * parts + spare)
    chosen = quantization.choose_bits(damage, sizes, budget)
    assert sum(10 * bits for bits in chosen) <= budget
    fitting = [each for each in itertools.product((3, 4, 5, 6), repeat=parts) if 10 * sum(each) <= budget]
    best = min(sum(damage[i][bits] for i, bits in enumerate(each)) for each in fitting)
    assert sum(damage[i][bits] for i, bits in enumerate(chosen)) == pytest.approx(best)


def test_what_wins_most_for_a_bit_goes_first_and_large_parts_must_earn_more():
    damage = [{4: 1.0, 8: 0.0}, {4: 2.0, 8: 0.0}, {4: 2.5, 8: 0.0}]
    assert quantization.choose_bits(damage, [10, 10, 100], 520) == [4, 8, 4]
    assert quantization.choose_bits(damage, [10, 10, 100], 600) == [8, 8, 4]
    assert quantization.choose_bits(damage, [10, 10, 100], 960) == [8, 8, 8]


def test_a_step_that_wins_nothing_is_not_taken_and_the_first_of_equals_is():
    assert quantization.choose_bits([{4: 0.5, 8: 0.5}], [10], 1e9) == [4]
    assert quantization.choose_bits([{4: 1.0, 8: 0.0}] * 3, [10] * 3, 160) == [8, 4, 4]


def test_a_step_may_go_on_from_where_another_ended_or_skip_one():
    assert quantization.choose_bits([{3: 9.0, 4: 1.0, 8: 0.0}], [10], 80) == [8]
    assert quantization.choose_bits([{3: 9.0, 4: 8.9, 8: 0.0}], [10], 80) == [8]


def test_a_budget_below_the_fewest_bits_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="already take 4,000 bits; the budget is 3,999"):
        quantization.choose_bits([{4: 1.0, 8: 0.0}], [1000], 3999)
    assert quantization.choose_bits([{4: 1.0, 8: 0.0}], [1000], 4000) == [4]
