"""The oracles of chapter 2's checks are right beyond the cases that learners see: they agree with the engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmfromscratch import learner_engine
from llmfromscratch.course.exercises import streaming_checks, tokenizer_checks

_CUT = st.lists(st.text("ab!", max_size=4), max_size=8)
# Python's incremental decoder waits one byte longer than it must after 0xED, since half a surrogate pair might follow
_BYTES = st.binary(max_size=3).filter(lambda data: 0xED not in data)
_TOKENS = st.lists(_BYTES | st.sampled_from([b"\xc3", b"\xa9", b"\xe2\x82", b" a", "👍".encode()]))


@given(st.lists(st.text("ab!", min_size=1, max_size=4), max_size=3, unique=True), _CUT, st.booleans())
def test_the_search_of_the_whole_text_stops_where_the_engine_stops(stops, pieces, include):
    matcher = learner_engine.reference("tokenizer").StopMatcher
    engines = streaming_checks._stop(matcher, stops, pieces, include)
    assert streaming_checks._stops()(stops, pieces, include) == engines


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
    assert tokenizer_checks._scanned(max)(text, special) == engines
