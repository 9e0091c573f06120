"""The oracles of 5.8 to 5.10 are right beyond the cases that learners see: they agree with the engine."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch import learner_engine
from llmfromscratch.course.exercises import beam_checks, choosing_checks, grammar_checks
from llmfromscratch.course.sketches import ch05

ENGINE = learner_engine.reference("sampling")


def some_requests(chosen: random.Random) -> list[dict]:
    """Settings of one to seven rows."""
    kinds = ({}, {"top_k": chosen.randint(1, 9)}, {"top_p": chosen.uniform(0.05, 1)}, {"min_p": chosen.uniform(0, 0.5)},
             {"top_k": chosen.randint(2, 9), "top_p": chosen.uniform(0.3, 1), "min_p": 0.05})  # fmt: skip
    rows = [
        {"temperature": chosen.choice((0.1, 0.7, 1.0, 3.0)), **chosen.choice(kinds)} if chosen.random() < 0.7 else {}
        for _ in range(chosen.randint(1, 7))
    ]
    return [{**row, "seed": chosen.randint(0, 99)} for row in rows]


@pytest.mark.parametrize("seed", range(60))
def test_the_draws_by_hand_are_the_engines(seed):
    requests = some_requests(random.Random(seed))
    generator = torch.Generator().manual_seed(seed)
    logits = [(torch.randn(len(requests), 15, generator=generator) * 8).round() / 4 for _ in range(3)]  # with ties
    want, got = choosing_checks.by_hand(logits, requests), choosing_checks._chosen(ENGINE.choose, logits, requests)
    assert want.keys() == got.keys()
    assert all(torch.equal(got[name], one) if torch.is_tensor(one) else got[name] == one for name, one in want.items())


def test_no_case_of_the_choice_hangs_on_a_last_digit():
    for case in choosing_checks._batches():
        logits, requests = case.args
        want = choosing_checks.by_hand(logits, requests)
        for factor in (1 - 1e-4, 1 + 1e-4):
            got = choosing_checks.by_hand([step * factor for step in logits], requests)
            assert all(torch.equal(got[name], one) for name, one in want.items() if torch.is_tensor(one)), case.text


def test_a_stream_used_in_another_way_is_told_from_one_that_numbers_were_taken_of():
    for use, want in (
        (lambda stream: None, 0),
        (lambda stream: torch.rand(3, generator=stream, dtype=torch.float64), 3),
        (lambda stream: torch.rand(1, generator=stream), -1),
    ):
        stream = torch.Generator().manual_seed(4)
        use(stream)
        assert choosing_checks._taken(stream, 4) == want


EIGHTHS = st.integers(-40, 0).map(lambda number: number / 8)


@settings(deadline=None)  # the first call waits for torch
@given(st.data(), st.integers(1, 4), st.integers(1, 6))
def test_the_sorted_list_of_all_ways_is_the_engines_choice(data, beams, vocab):
    scores = torch.tensor(data.draw(st.lists(EIGHTHS, min_size=beams, max_size=beams)))
    row = st.lists(EIGHTHS, min_size=vocab, max_size=vocab)
    table = torch.tensor(data.draw(st.lists(row, min_size=beams, max_size=beams)))
    count = data.draw(st.integers(1, beams * vocab))
    assert beam_checks.all_ways(scores, table, count) == ENGINE.best_beams(scores, table, count)


BYTES = st.sampled_from(b"abc")


@settings(deadline=None)
@given(st.data(), st.integers(1, 4))
def test_the_texts_along_an_automaton_are_what_the_sketch_allows(data, states):
    arrows = data.draw(st.lists(st.dictionaries(BYTES, st.integers(0, states - 1)), min_size=states, max_size=states))
    words = data.draw(st.lists(st.lists(BYTES, max_size=4).map(bytes), min_size=1, max_size=8))
    state = data.draw(st.integers(0, states - 1))
    found = ch05.allowed_tokens(ch05.Automaton(arrows, {0}), state, words)
    assert torch.equal(found, grammar_checks.along_all_texts(arrows, [0], state, words))
    automaton = ch05.Automaton(arrows, {0})
    assert found.tolist() == [len(word) > 0 and automaton.next_state(state, word) is not None for word in words]
