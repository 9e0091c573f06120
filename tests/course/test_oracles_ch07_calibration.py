"""The oracles of chapter 7's damage, calibration, keys and budgets are right beyond the cases that learners see: they
agree with the engine, with PyTorch and with closed forms; and no case hangs on a tie."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch import learner_engine
from llmfromscratch.course.exercises import (
    calibration_checks,
    calibration_clinic,
    compensation_checks,
    damage_checks,
    frame_checks,
)

ENGINE = learner_engine.reference("quantization")
examples = settings(max_examples=30, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def random_numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@examples
@given(seeds, st.integers(1, 5), st.integers(2, 60))
def test_divergence_token_by_token_is_the_engines_and_pytorchs(seed, tokens, vocab):
    logits, other = 3 * random_numbers(seed, tokens, vocab), 3 * random_numbers(seed + 1, tokens, vocab)
    found = damage_checks.token_by_token(logits, other)
    torch.testing.assert_close(found, ENGINE.divergence(logits, other), rtol=1e-4, atol=1e-5)
    p, q = (torch.distributions.Categorical(logits=each.double()) for each in (logits, other))
    torch.testing.assert_close(found.double(), torch.distributions.kl_divergence(p, q), rtol=1e-6, atol=1e-9)


def test_the_worked_example_of_a_divergence_is_half_the_logarithms_of_2_and_of_two_thirds():
    logits, other = torch.zeros(1, 2), torch.tensor([[0.25, 0.75]]).log()
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert float(damage_checks.token_by_token(logits, other)) == pytest.approx(expected, abs=1e-7)


@examples
@given(seeds, st.integers(1, 8), st.integers(1, 3), st.integers(1, 9))
def test_frames_channel_by_channel_are_the_engines_and_reach_both_ends(seed, tokens, heads, size):
    keys = 4 * random_numbers(seed, tokens, heads, size) + random_numbers(seed + 1, size)
    middle, spread = frame_checks.channel_by_channel(keys).values()
    torch.testing.assert_close((middle, spread), ENGINE.key_frame(keys), rtol=1e-5, atol=1e-5)
    within = (keys - middle) / spread
    if tokens > 1:
        torch.testing.assert_close(within.amax(0), torch.ones(heads, size), rtol=0, atol=1e-4)
        torch.testing.assert_close(within.amin(0), -torch.ones(heads, size), rtol=0, atol=1e-4)


def cost(damage, bits):
    return sum(part[number] for part, number in zip(damage, bits, strict=True))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_the_greedy_choice_is_the_best_of_all_where_parts_are_equal_and_every_further_bit_wins_less(seed, steps):
    damage, _ = damage_checks.random_parts(4, seed, bits=(3, 4, 5, 6))  # a constant times a power: convex
    sizes, budget = [7] * 4, 7 * (12 + steps)
    found = damage_checks.step_by_step(damage, sizes, budget)
    assert 7 * sum(found) <= budget
    fitting = [bits for bits in itertools.product((3, 4, 5, 6), repeat=4) if 7 * sum(bits) <= budget]
    assert cost(damage, found) == pytest.approx(min(cost(damage, bits) for bits in fitting))


@examples
@given(seeds, st.integers(1, 12), st.floats(3, 8))
def test_the_rule_in_fractions_is_the_engines(seed, count, average):
    damage, sizes = damage_checks.random_parts(count, seed)
    budget = average * sum(sizes)
    found = damage_checks.step_by_step(damage, sizes, budget)
    assert found == ENGINE.choose_bits(damage, sizes, budget)
    assert sum(size * bits for size, bits in zip(sizes, found, strict=True)) <= budget


def rates(damage, sizes):
    for size, part in zip(sizes, damage, strict=True):
        for fewer, more in itertools.combinations(sorted(part), 2):
            yield (part[fewer] - part[more]) / (size * (more - fewer))


@pytest.mark.parametrize("case", damage_checks.budget_cases(), ids=lambda case: case.text)
def test_no_two_rates_of_a_case_are_nearly_equal_but_for_ties_that_are_exact(case):
    damage, sizes, _ = case.args
    sorted_rates = sorted(rate for rate in rates(damage, sizes) if rate > 0)
    near = [(a, b) for a, b in itertools.pairwise(sorted_rates) if a != b and b - a < 1e-9 * b]
    assert near == []


@pytest.mark.parametrize("case", calibration_checks.factor_cases(), ids=lambda case: case.text)
def test_the_best_exponent_of_a_case_is_the_engines_and_no_other_costs_nearly_as_little(case):
    torch.testing.assert_close(
        case.call(calibration_checks.factor_by_factor), case.call(ENGINE.awq_scale), rtol=1e-5, atol=1e-7
    )
    found = calibration_checks.errors_of(*case.args)
    least = min(error for error, _ in found)
    best = next(factors for error, factors in found if error == least)
    for error, factors in found:  # another has to be clearly worse, or the same, or as good to the last digit
        alike = torch.allclose(factors, best, rtol=1e-6)
        assert alike or error > 1.1 * least or error == least == 0


def test_among_the_factors_are_cases_that_only_the_output_error_decides_rightly():
    make = calibration_checks._scaling
    by_weight = make(error=lambda lost, moments: lost.square().sum())
    by_diagonal = make(error=lambda lost, moments: (lost.square() @ moments.diagonal()).sum())
    right = calibration_checks.factor_by_factor
    for wrong in (by_weight, by_diagonal):
        cases = calibration_checks.factor_cases()
        assert sum(not torch.allclose(case.call(wrong), case.call(right), rtol=1e-3) for case in cases) >= 2


def with_an_inverse_made_anew(weight, moments, bits, group, act_order):
    """Column after column, the inverse of what is left computed from the moments each time."""
    (scales, minimums), size = calibration_checks.grids(weight, bits, group), group or weight.shape[1]
    left, now = compensation_checks.order_of(moments, act_order), weight.double().clone()
    codes = torch.zeros(weight.shape, dtype=torch.uint8)
    while left:
        column = left[0]
        scale, minimum = scales[:, column // size], minimums[:, column // size]
        codes[:, column] = ((now[:, column] - minimum) / scale).round().clamp(0, 2**bits - 1)
        error = now[:, column] - minimum - scale * codes[:, column]
        inverse = torch.linalg.inv(compensation_checks.damped(moments)[left][:, left])
        now[:, left] -= torch.outer(error, inverse[0] / inverse[0, 0])
        left = left[1:]
    return codes


NEAR_A_TIE = 0.004  # of a step


@pytest.mark.parametrize("case", compensation_checks.rounding_cases(), ids=lambda case: case.text)
def test_rounding_with_what_is_left_of_the_inverse_is_that_with_a_new_one_and_the_engines_far_from_ties(case):
    weight, _, bits, _, _ = case.args
    found, engines = case.call(compensation_checks.column_by_column), case.call(ENGINE.gptq)
    assert torch.equal(found.codes, case.call(with_an_inverse_made_anew))
    assert torch.equal(found.codes, engines.codes) and (found.bits, found.group) == (engines.bits, engines.group)
    torch.testing.assert_close((found.scales, found.minimums), (engines.scales, engines.minimums), rtol=1e-6, atol=0)
    steps = case.call(compensation_checks.steps_of)
    assert compensation_checks.from_a_tie(steps, bits) > NEAR_A_TIE
    assert steps.shape == weight.shape


@examples
@given(seeds, st.integers(1, 4), st.integers(2, 24), st.sampled_from([None, 4, 8]), st.integers(2, 5), st.booleans())
def test_columns_one_by_one_are_the_engines_wherever_no_number_comes_near_a_tie(seed, rows, width, group, bits, act):
    moments = calibration_checks.moments_of(calibration_checks.inputs(3 * width, width, seed % 10**6, 0.5, 0.1))
    weight = random_numbers(seed, rows, width)
    found = compensation_checks.column_by_column(weight, moments, bits, group, act)
    steps = compensation_checks.steps_of(weight, moments, bits, group, act)
    if compensation_checks.from_a_tie(steps, bits) > NEAR_A_TIE:
        assert torch.equal(found.codes, ENGINE.gptq(weight, moments, bits, group, act).codes)


def test_rounding_column_by_column_is_better_for_the_output_than_plain_rounding():
    for case in compensation_checks.rounding_cases()[3:]:
        weight, moments, bits, group, _ = case.args
        compensated, plain = case.call(ENGINE.gptq), ENGINE.quantize(weight, bits, group)
        errors = [ENGINE.output_error(weight, each.dequantize(), moments) for each in (compensated, plain)]
        assert errors[0] < errors[1]


def test_one_window_again_and_again_makes_gptq_worse_than_rounding_elsewhere_and_windows_all_over_the_text_do_not():
    ids, length = calibration_clinic._text(), 12
    rank, own, other = calibration_clinic.parts_of_plain(calibration_clinic.calibration_windows(ids, 64, length))
    assert rank < length and own < 0.05 and other > 1.2
    spread = torch.stack([ids[i * len(ids) // 64 :][:length] for i in range(64)])
    rank, own, other = calibration_clinic.parts_of_plain(spread)
    assert rank == 64 and other < 0.7


@pytest.mark.parametrize("dtype", calibration_clinic._ONCE)
def test_the_numbers_that_the_hunt_of_digits_asks_for_are_float32s_rounded_once(dtype):
    for case in calibration_clinic.half_cases(dtype):
        codes, scales, minimums, _ = case.args
        size = codes.shape[1] // scales.shape[1]
        wide = [part.repeat_interleave(size, 1) for part in (scales, minimums)]
        expected = (wide[1] + wide[0] * codes).to(dtype)
        found = case.call(calibration_clinic.number_by_number)
        share = calibration_clinic._ONCE[dtype]
        assert ((found.double() - expected.double()).abs() <= share * found.double().abs() + 1e-7).all()
