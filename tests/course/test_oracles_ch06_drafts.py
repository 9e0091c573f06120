"""The oracles of chapter 6's drafts are right beyond the cases that learners see: they agree with the engine, and the
sums over everything that may happen tell a rule that keeps the distribution from one that does not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch import learner_engine
from llmfromscratch.course.exercises import acceptance_checks, lookup_checks, speculative_checks
from llmfromscratch.course.failures import CheckFailed
from llmfromscratch.course.sketches import ch06

ENGINE = learner_engine.reference("optimization")
examples = settings(max_examples=100, deadline=None, derandomize=True)
tokens = st.lists(st.integers(0, 2), max_size=14)


@examples
@given(tokens, st.integers(1, 6), st.integers(0, 6))
def test_every_ending_at_every_place_finds_the_engines_draft(ids, longest, count):
    assert lookup_checks.every_place(ids, longest, count) == ENGINE.lookup_draft(ids, longest, count)


@examples
@given(tokens, st.integers(0, 99))
def test_one_token_at_a_time_is_the_engines_greedy_acceptance(drafts, seed):
    best = torch.randint(3, (len(drafts) + 1,), generator=torch.Generator().manual_seed(seed)).tolist()
    assert acceptance_checks.one_at_a_time(drafts, best) == ENGINE.accept_greedy(drafts, best)


@examples
@given(st.integers(0, 4), st.integers(2, 9), st.integers(0, 10_000))
def test_the_rule_in_fractions_is_the_engines(count, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    drafted = torch.rand(count, vocab, generator=generator, dtype=torch.float64) + 0.01
    wanted = torch.rand(count + 1, vocab, generator=generator, dtype=torch.float64) ** 3
    drafts = torch.randint(vocab, (count,), generator=generator).tolist()
    given_to_both = (
        drafts,
        drafted / drafted.sum(-1, keepdim=True),
        wanted / wanted.sum(-1, keepdim=True),
        torch.rand(count + 1, generator=generator, dtype=torch.float64).tolist(),
    )
    assert acceptance_checks.by_the_rule(*given_to_both) == ENGINE.accept_drafts(*given_to_both)


@examples
@given(st.floats(0, 1), st.integers(0, 20))
def test_every_end_of_a_pass_adds_up_to_the_engines_average(acceptance, drafts):
    assert acceptance_checks.every_end(acceptance, drafts) == pytest.approx(
        ENGINE.expected_tokens(acceptance, drafts), rel=1e-12
    )


def test_the_average_is_what_passes_give_whose_drafts_stand_by_chance():
    stand = torch.rand(20_000, 5, generator=torch.Generator().manual_seed(3)) < 0.7
    given_up = [ENGINE.accept_greedy(row, [1] * 6) for row in stand.int().tolist()]
    mean = sum(map(len, given_up)) / len(given_up)
    assert acceptance_checks.every_end(0.7, 5) == pytest.approx(mean, abs=0.05)


@pytest.mark.parametrize("guesser", [acceptance_checks.one_draft(), acceptance_checks.two_drafts()])
def test_what_a_guesser_says_and_guesses_are_distributions(guesser):
    assert sum(guesser.spoken().values()) == pytest.approx(1)
    assert sum(chance for chance, _ in guesser.happenings()) == pytest.approx(1)
    acceptance_checks._check_promise(ENGINE.accept_drafts, guesser)


@pytest.mark.parametrize("guesser", [acceptance_checks.one_draft(), acceptance_checks.two_drafts()])
@pytest.mark.parametrize(
    "wrong",
    [
        {"left": lambda have, want, draft: want},
        {"stands": lambda u, have, want: u < want},
        {"stands": lambda u, have, want: True},
        {"number": lambda uniforms, place: uniforms[place]},
    ],
)
def test_a_rule_that_bends_the_distribution_breaks_the_promise(guesser, wrong):
    with pytest.raises(CheckFailed, match="with the probabilities of the model"):
        acceptance_checks._check_promise(acceptance_checks._ruled(**wrong), guesser)


@pytest.mark.parametrize("prompt", [[3, 17, 5], [12, 25, 0, 7, 7]])
def test_computing_everything_again_gives_the_plain_answer(prompt):
    plain = ch06.plain_answer(speculative_checks.small_model(), speculative_checks.new_cache(), prompt, 12)
    assert speculative_checks.recomputed(prompt, 12) == plain
    assert len(set(plain)) > 5  # an answer of one token alone would hide what is lost


def test_the_guesses_are_right_as_far_as_they_say():
    text = [8, 2, 9]
    right = speculative_checks.recomputed(text, 9)
    said = {name: list(guess(list(text))) for name, guess in speculative_checks.GUESSES.items()}
    assert said["no drafts"] == [] and said["9 right drafts"] == right and said["2 right drafts"] == right[:2]
    assert [a == b for a, b in zip(said["2 wrong drafts"], right, strict=False)] == [False, False]
    assert [a == b for a, b in zip(said["a right draft and a wrong one"], right, strict=False)] == [True, False]
    assert [a == b for a, b in zip(said["4 drafts, the second wrong"], right, strict=False)] == [
        True,
        False,
        True,
        True,
    ]


def test_no_near_tie_decides_an_answer_of_the_cases():
    for case in speculative_checks.answer_cases():
        prompt, count, _ = case.args
        text = [*prompt, *speculative_checks.recomputed(prompt, count)]
        batch = speculative_checks.Batch.of([(0, text, 0)], all_logits=True)
        best = speculative_checks.small_model()(batch, speculative_checks.new_cache()).topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-6
