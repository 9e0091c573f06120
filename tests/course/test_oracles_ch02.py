"""The oracles of chapter 2's checks agree with the engine beyond the cases that learners see; its mistakes differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmfromscratch import learner_engine
from llmfromscratch.course.calling import result_of
from llmfromscratch.course.exercises import special_checks, stopping_checks, streaming_checks, tokenizer_checks

_CUT = st.lists(st.text("ab!", max_size=4), max_size=8)
# Python's incremental decoder waits one byte longer than it must after 0xED, since half a surrogate pair might follow
_BYTES = st.binary(max_size=3).filter(lambda data: 0xED not in data)
_TOKENS = st.lists(_BYTES | st.sampled_from([b"\xc3", b"\xa9", b"\xe2\x82", b" a", "👍".encode()]))


@given(st.lists(st.text("ab!", min_size=1, max_size=4), max_size=3, unique=True), _CUT, st.booleans())
def test_the_search_of_the_whole_text_stops_where_the_engine_stops(stops, pieces, include):
    matcher = learner_engine.reference("tokenizer").StopMatcher
    engines = stopping_checks._stop(matcher, stops, pieces, include)
    assert stopping_checks._stops()(stops, pieces, include) == engines


@given(_TOKENS, _TOKENS, st.booleans())
def test_what_is_certain_of_the_whole_text_is_what_the_engine_gives(prompt, answer, strip):
    decoder = learner_engine.reference("tokenizer").IncrementalDecoder
    engines = streaming_checks._stream(decoder, prompt, answer, strip_first_space=strip)
    assert streaming_checks._streamed()(prompt, answer, strip_first_space=strip) == engines


@given(
    st.lists(st.integers(0, 5), max_size=12),
    st.integers(1, 8),
    st.sampled_from(["left", "right", "middle"]),
    st.booleans(),
)
def test_the_places_that_stay_are_those_that_the_engine_keeps(ids, limit, truncation, add_bos):
    config = tokenizer_checks._config(max_length=limit, truncation=truncation, bos_id=1, add_bos=add_bos)
    assert tokenizer_checks._kept()(ids, config) == learner_engine.reference("tokenizer").truncate(ids, config)


@given(st.text("<ab>|", max_size=14), st.dictionaries(st.text("<ab>|", min_size=1, max_size=4), st.integers(0, 9)))
def test_the_scan_for_control_tokens_finds_what_the_engine_finds(text, special):
    engines = learner_engine.reference("tokenizer").split_special(text, special)
    assert special_checks._parted()(text, special) == engines


MADE = {
    "2.4": (special_checks._parted, special_checks._MISTAKES, special_checks._texts()),
    "2.7": (streaming_checks._streamed, streaming_checks._MISTAKES, streaming_checks._streams()),
    "2.8": (stopping_checks._stops, stopping_checks._MISTAKES, stopping_checks._stopping()),
}
MISTAKES = [(exercise_id, *mistake) for exercise_id, (_, mistakes, _) in MADE.items() for mistake in mistakes]


@pytest.mark.parametrize(("exercise_id", "sentence", "settings"), MISTAKES)
def test_a_mistake_that_is_made_on_purpose_shows_in_some_case_and_under_its_own_sentence(
    exercise_id, sentence, settings
):
    make, mistakes, cases = MADE[exercise_id]
    results = [result_of(make(**settings), case) for case in cases]
    assert results != [result_of(make(), case) for case in cases]
    same = [said for said, other in mistakes if [result_of(make(**other), case) for case in cases] == results]
    assert set(same) == {sentence}
