"""Chapter 2's sketch: the plain merge is what its docstring says, and what the engine's fast one gives."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from llmfromscratch import learner_engine
from llmfromscratch.course.sketches.ch02 import merge_plain

_pieces = st.lists(st.sampled_from(["a", "b", "ab", "ba", "aa"]), max_size=12)
_texts = st.text("ab", min_size=1, max_size=4)
_ranks = st.dictionaries(st.tuples(_texts, _texts), st.one_of(st.integers(-3, 3), st.floats(-2, 2)), max_size=12)


def test_the_example_of_the_docstring_holds():
    ranks = {("h", "e"): 0, ("t", "h"): 1, ("t", "he"): 2}
    assert merge_plain(list("the"), ranks) == ["the"]
    del ranks["t", "he"]
    assert merge_plain("the", ranks) == ["t", "he"]


@given(_pieces, _ranks)
def test_the_plain_merge_is_the_fast_one_whatever_the_pieces_and_ranks(pieces, ranks):
    assert merge_plain(pieces, ranks) == learner_engine.reference("tokenizer").merge_pieces(pieces, ranks)


@given(_pieces, _ranks)
def test_no_pair_with_a_rank_is_left_and_no_character_is_lost_and_the_pieces_stay_as_they_were(pieces, ranks):
    before = list(pieces)
    merged = merge_plain(pieces, ranks)
    assert pieces == before
    assert "".join(merged) == "".join(pieces)
    assert not any(pair in ranks for pair in pairwise(merged))
