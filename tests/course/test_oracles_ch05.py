"""The oracles of chapter 5's draws, filters and penalties are right beyond the cases that learners see: they agree with
the engine and with transformers, and no case of a check is so near a border that rounding decides it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from llmfromscratch import learner_engine
from llmfromscratch.course.exercises import drawing_checks, filter_checks, sampler_runs
from llmfromscratch.course.failures import CheckFailed
from llmfromscratch.course.sketches import ch05

ENGINE = learner_engine.reference("sampling")
examples = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def random_rows(seed: int, rows: int, columns: int) -> torch.Tensor:
    return torch.rand(rows, columns, generator=drawing_checks.seeded(seed), dtype=torch.float64)


@examples
@given(seeds, st.integers(1, 5), st.integers(1, 30))
def test_exact_sums_draw_what_the_engine_draws(seed, rows, columns):
    sparse = random_rows(seed, rows, columns) * (random_rows(seed + 1, rows, columns) > 0.3)
    sparse[:, 0] += 0.1
    numbers = random_rows(seed + 2, rows, 1)[:, 0]
    assert torch.equal(ENGINE.draw(sparse, numbers), drawing_checks.exact_draw(sparse, numbers))


@examples
@given(seeds, st.integers(1, 30))
def test_the_first_to_ring_is_the_gumbel_draw(seed, columns):
    logits = 6 * random_rows(seed, 4, columns) - 3
    numbers = random_rows(seed + 1, 4, columns)
    assert torch.equal(drawing_checks.first_to_ring(logits, numbers), ch05.gumbel_draw(logits, numbers))


@examples
@given(seeds, st.floats(1e-45, 1e300))
def test_one_division_after_the_other_is_the_engines_temperature(seed, temperature):
    logits = (6 * random_rows(seed, 2, 9) - 3).float()
    temperatures = torch.tensor([temperature, 1.0], dtype=torch.float64)
    expected = drawing_checks.one_by_one(logits, temperatures)
    torch.testing.assert_close(ENGINE.apply_temperature(logits, temperatures), expected, rtol=1e-5, atol=1e-38)


@examples
@given(seeds, st.integers(0, 14))
def test_so_many_and_no_more_are_the_engines_top_k(seed, k):
    ranked = random_rows(seed, 3, 12).softmax(-1).sort(descending=True).values
    top_k = torch.tensor([k, 0, 1])
    assert torch.equal(ENGINE.keep_top_k(ranked, top_k), filter_checks.first_so_many(ranked, top_k))


@examples
@given(seeds, st.floats(0.01, 0.99))
def test_taking_until_p_is_reached_is_transformers_top_p(seed, p):
    logits = (9 * random_rows(seed, 1, 40)).sort(descending=True).values
    kept = theirs.TopPLogitsWarper(p)(torch.tensor([[]]), logits) > -torch.inf
    assert torch.equal(filter_checks.until_reached(logits.softmax(-1), torch.tensor([p], dtype=torch.float64)), kept)


@examples
@given(seeds, st.floats(0.5, 2.0))
def test_token_by_token_is_transformers_repetition_penalty(seed, repetition):
    logits, said = (6 * random_rows(seed, 1, 20) - 3).float(), random_rows(seed + 1, 1, 20) > 0.5
    expected = theirs.RepetitionPenaltyLogitsProcessor(repetition)(said.nonzero()[:, 1].unsqueeze(0), logits.clone())
    nothing = torch.zeros(1)
    found = filter_checks.token_by_token(
        logits, said, torch.zeros_like(said).long(), torch.tensor([repetition]), nothing, nothing
    )
    torch.testing.assert_close(found, expected)


@examples
@given(seeds)
def test_token_by_token_is_the_engines_three_penalties(seed):
    logits, counts = (6 * random_rows(seed, 4, 20) - 3).float(), (5 * random_rows(seed + 1, 4, 20) - 3).clamp(0).long()
    seen = (counts > 0) | (random_rows(seed + 2, 4, 20) > 0.6)
    strengths = [0.5 + random_rows(seed + 3 + number, 4, 1)[:, 0].float() for number in range(3)]
    given_to_both = logits, seen, counts, *strengths
    torch.testing.assert_close(filter_checks.token_by_token(*given_to_both), ENGINE.apply_penalties(*given_to_both))


def test_in_the_cases_of_the_draw_a_number_lies_on_a_border_or_far_from_it():
    for case in drawing_checks.draw_cases():
        probabilities, numbers = case.args
        sums = probabilities.double().cumsum(-1)
        far = (sums / sums[:, -1:] - numbers.unsqueeze(-1)).abs()
        exact = (probabilities * 16 == (probabilities * 16).round()).all() or float(numbers.max()) > 1 - 1e-15
        assert far.min() > 2.0**-28 or exact, case.text


@pytest.mark.parametrize("case", drawing_checks.gumbel_cases(), ids=lambda case: case.text[:40])
def test_in_the_cases_of_the_gumbel_draw_the_largest_leads_clearly(case):
    logits, numbers = (part.double() for part in case.args)
    values = logits - (-numbers.clamp(min=1e-38).log()).log()
    best = values.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-3


def test_in_the_random_cases_of_top_p_no_sum_is_near_p():
    for case in filter_checks.top_p_cases():
        ranked, top_p = (part.double() for part in case.args)
        far = (ranked.cumsum(-1) - top_p.unsqueeze(-1)).abs()
        assert far.min() > 1e-5 or (ranked * 16 == (ranked * 16).round()).all(), case.text


@pytest.mark.parametrize(
    "name", ["draw", "apply_temperature", "keep_top_k", "keep_top_p", "apply_penalties", "uniforms"]
)
def test_a_wrong_function_in_the_engines_sampler_draws_other_tokens(name):
    own = getattr(ENGINE, name)

    def wrong(*given):
        right = own(*given)
        return torch.ones_like(right) if right.dtype == torch.bool else right.flip(-1)

    with pytest.raises(CheckFailed, match=f"the engine's sampler, with your {name} in it"):
        sampler_runs.check_in_sampler(name, wrong)
