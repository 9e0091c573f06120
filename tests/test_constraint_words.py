"""Banned and required words, whatever tokens spell them, against brute force over the text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch.constraint_words import MAX_WORDS, BadWords, RequiredWords, Vocabulary
from llmfromscratch.errors import RequestError

TOKENS = [
    b"",
    b"a",
    b"b",
    b"ab",
    b"ba",
    b"aba",
    b"bab",
    b"c",
    b"abc",
    b"cab",
    "é".encode(),
    "é".encode()[:1],
    "é".encode()[1:],
    b"aa",
]
VOCABULARY = Vocabulary(TOKENS)
WORDS = st.lists(st.text("abcé", min_size=1, max_size=5), min_size=1, max_size=4)


def ids(mask: torch.Tensor) -> set[int]:
    return set(mask.nonzero().flatten().tolist())


@settings(max_examples=200, deadline=None)
@given(WORDS, st.lists(st.integers(0, len(TOKENS) - 1), max_size=12))
def test_a_token_is_banned_exactly_when_the_text_would_hold_a_bad_word(words, drawn):
    bad, text = BadWords(words, VOCABULARY), b""
    for token in drawn:
        expected = {i for i, piece in enumerate(TOKENS) if not any(word.encode() in text + piece for word in words)}
        assert ids(bad.allowed()) == expected
        if token in expected:
            bad.advance(token)
            text += TOKENS[token]


@settings(max_examples=200, deadline=None)
@given(WORDS, st.lists(st.integers(0, len(TOKENS) - 1), max_size=12))
def test_the_end_is_banned_exactly_until_every_required_word_was_said(words, drawn):
    required, text = RequiredWords(words, VOCABULARY, [0, 7]), b""
    for token in drawn:
        said = all(word.encode() in text for word in words)
        assert ids(required.allowed()) == set(range(len(TOKENS))) - (set() if said else {0, 7})
        required.advance(token)
        text += TOKENS[token]


def test_a_required_word_is_found_where_its_last_byte_comes_alone():
    required = RequiredWords(["abcab"], VOCABULARY, [0])
    for token in (b"c", b"abc", b"a"):
        required.advance(TOKENS.index(token))
        assert 0 not in ids(required.allowed())
    required.advance(TOKENS.index(b"b"))
    assert 0 in ids(required.allowed())


@given(st.binary(min_size=1, max_size=3))
def test_tokens_are_found_by_beginning_and_by_content_as_a_plain_search_finds_them(text):
    assert set(VOCABULARY.starting_with(text).tolist()) == {
        i for i, piece in enumerate(TOKENS) if piece.startswith(text)
    }
    assert VOCABULARY.containing(text) == [i for i, piece in enumerate(TOKENS) if text in piece]


@pytest.mark.parametrize("text", [b"a", b"ab", b"ba", "é".encode(), b"\xc3", b"abab", b"\xff"])
def test_tokens_are_found_where_there_are_some(text):
    assert set(VOCABULARY.starting_with(text).tolist()) == {
        i for i, piece in enumerate(TOKENS) if piece.startswith(text)
    }
    assert VOCABULARY.containing(text) == [i for i, piece in enumerate(TOKENS) if text in piece]


@pytest.mark.parametrize("words", [[""], ["a" * 300], ["\ud800"], ["a"] * (MAX_WORDS + 1)])
def test_words_that_cannot_be_meant_are_refused(words):
    with pytest.raises(RequestError, match="bad_words"):
        BadWords(words, VOCABULARY)
    with pytest.raises(RequestError, match="required_words"):
        RequiredWords(words, VOCABULARY, [0])
