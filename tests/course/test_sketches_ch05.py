"""Chapter 5's sketches: the draw against the softmax, the hand-made automaton against re and the library."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch import SamplingParams, constraints
from llmfromscratch.course.sketches import ch05

SMALL = [
    "[0-9]{3}",
    "(ab|a)*b",
    "a?b+c{2,}",
    ".a",
    "[^a-c]x",
    r"\d\.\d{1,2}",
    "(|a)b",
    "x{0,2}",
    "((a|b)c){2}",
    "a|bc|",
]


def test_the_draw_follows_the_softmax():
    logits = torch.tensor([0.5, -1.0, 2.0, -torch.inf])
    uniforms = torch.rand(100_000, 4, generator=torch.Generator().manual_seed(0))
    drawn = ch05.gumbel_draw(logits.expand(100_000, 4), uniforms)
    observed = torch.bincount(drawn, minlength=4).double()
    expected = logits.double().softmax(-1) * 100_000
    assert observed[3] == 0
    assert ((observed - expected)[:3] ** 2 / expected[:3]).sum() < 13.8  # chi-square, 2 degrees of freedom, p = 0.001


def test_the_docstrings_example_and_a_uniform_of_zero():
    assert ch05.gumbel_draw(torch.zeros(1, 2), torch.tensor([[0.9, 0.2]])).tolist() == [0]
    assert ch05.gumbel_draw(torch.zeros(1, 3), torch.tensor([[0.0, 0.5, 0.0]])).tolist() == [1]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SMALL), st.text("abcx019.\n", max_size=8))
def test_the_automaton_accepts_what_python_matches(expression, text):
    automaton = ch05.compile_expression(expression)
    assert (automaton.next_state(0, text.encode()) in automaton.accepting) == bool(re.fullmatch(expression, text))


def test_allowed_tokens_as_the_docstring_has_them():
    automaton = ch05.compile_expression("[0-9]{2}")
    assert ch05.allowed_tokens(automaton, 0, [b"7", b"42", b"", b"123", b"4a"]).tolist() == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_generate_keeps_to_the_automaton_and_ends_where_it_may():
    vocabulary = [b"", b"1", b"2", b"12", b"x"]
    answer = ch05.generate(
        lambda ids: torch.tensor([0.5, 0.1, 0.2, 0.3, 1.0]), [4], ch05.compile_expression("[0-9]{3,5}"), vocabulary, 0
    )
    assert answer == [3, 3]


@pytest.mark.model
@pytest.mark.parametrize("expression", [r"\(\d{3}\) \d{3}-\d{4}", r"\d{4}-\d{2}-\d{2}", r"\d+", "(yes|no)[.!]?"])
def test_the_hand_made_automaton_and_the_library_allow_the_same_on_the_real_vocabulary(smollm2_fp32, expression):
    tokenizer, size = smollm2_fp32.tokenizer, smollm2_fp32.config.vocab_size
    control = set(tokenizer.special.values())
    vocabulary = [b"" if i in control or i not in tokenizer else tokenizer.token_bytes(i) for i in range(size)]
    (end,) = tokenizer.eos_ids
    automaton, state = ch05.compile_expression(expression), 0
    ascii_only = expression.replace(r"\d", "[0-9]")  # the sketch's \d, without the other digits of Unicode
    library = constraints.of(SamplingParams(regex=ascii_only, max_tokens=200), tokenizer, [end], size)
    generator = torch.Generator().manual_seed(5)
    for _ in range(12):
        allowed = ch05.allowed_tokens(automaton, state, vocabulary)
        allowed[end] = state in automaton.accepting
        assert torch.equal(allowed, library.allowed())
        choices = allowed.nonzero().flatten()
        token = int(choices[torch.randint(len(choices), (1,), generator=generator)])
        if token == end:
            break
        library.advance(token)
        state = automaton.next_state(state, vocabulary[token])
