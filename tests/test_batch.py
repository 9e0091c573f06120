"""The ragged batch holds each request's new tokens once, one request after another, without padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import all_logits, tiny_model

from llmfromscratch import kv_cache
from llmfromscratch.batch import Batch, Span


def test_the_example_of_the_docstring():
    batch = Batch.of([(7, [12, 905, 33], 0), (4, [271], 57)])
    assert batch.token_ids.tolist() == [12, 905, 33, 271]
    assert batch.positions.tolist() == [0, 1, 2, 57]
    assert batch.spans == (Span(7, 0, 0, 3), Span(4, 3, 57, 1))
    assert batch.logit_rows.tolist() == [2, 3]
    assert {x.dtype for x in (batch.token_ids, batch.positions, batch.logit_rows)} == {torch.int64}


def test_every_row_can_be_asked_for_its_logits():
    assert Batch.of([(7, [12, 905, 33], 0), (4, [271], 57)], all_logits=True).logit_rows.tolist() == [0, 1, 2, 3]


def test_logits_can_be_asked_for_anywhere_in_a_part_or_nowhere():
    parts = [(7, [12, 905, 33], 0), (4, [271], 57), (5, [8, 9], 3)]
    assert Batch.of(parts, logits_at=[1, None, 0]).logit_rows.tolist() == [1, 4]
    assert Batch.of(parts, logits_at=[None, 0, 1]).logit_rows.tolist() == [3, 5]
    assert Batch.of(parts, logits_at=[range(1, 3), (), 1]).logit_rows.tolist() == [1, 2, 5]
    nobody = Batch.of(parts, logits_at=[None, None, None]).logit_rows
    assert (nobody.tolist(), nobody.dtype) == ([], torch.int64)


@pytest.mark.parametrize("index", [3, -1])
def test_logits_beyond_a_part_are_refused_because_they_would_be_a_neighbours(index):
    with pytest.raises(ValueError, match="request 7 has 3 new tokens"):
        Batch.of([(7, [12, 905, 33], 0), (4, [271], 57)], logits_at=[index, 0])


def test_each_part_needs_an_entry_about_its_logits():
    with pytest.raises(ValueError, match="zip"):
        Batch.of([(7, [12, 905, 33], 0), (4, [271], 57)], logits_at=[0])


def test_the_model_computes_a_batch_of_which_nobody_wants_logits():
    network = tiny_model()
    cache = kv_cache.ConcatKVCache(network.config.num_layers)
    logits = network(Batch.of([(0, [5, 6, 7], 0), (1, [8], 0)], logits_at=[None, None]), cache)
    assert logits.shape == (0, network.config.vocab_size)
    after = network(Batch.of([(0, [9], 3)]), cache)[0]
    torch.testing.assert_close(after, all_logits(network, [5, 6, 7, 9])[-1])


def test_a_part_without_tokens_is_refused_because_it_has_no_last_row():
    with pytest.raises(ValueError, match="request 3 has no new tokens"):
        Batch.of([(2, [1], 0), (3, [], 5)])


PARTS = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.integers(0, 50000), min_size=1, max_size=6), st.integers(0, 100)),
    min_size=1,
    max_size=6,
    unique_by=lambda part: part[0],
)


@given(PARTS)
def test_each_span_finds_its_own_tokens_positions_and_last_row(parts):
    batch = Batch.of(parts)
    assert len(batch.token_ids) == sum(len(ids) for _, ids, _ in parts)
    for (request, ids, start), span, row in zip(parts, batch.spans, batch.logit_rows.tolist(), strict=True):
        assert span.request_id == request
        assert batch.token_ids[span.rows].tolist() == ids
        assert batch.positions[span.rows].tolist() == list(range(start, start + len(ids)))
        assert row == span.rows.stop - 1
