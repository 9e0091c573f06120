"""A cache gives back what was written, per request and layer, whatever the history of writes, rewinds and releases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from llmfromscratch import kv_cache
from llmfromscratch.batch import Batch

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 4
REQUESTS = st.integers(0, 3)


class CacheHistory(RuleBasedStateMachine):
    """Holds a cache against plain lists: one value per token, from which every layer's keys and values follow."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = kv_cache.ConcatKVCache(LAYERS)
        self.tokens: dict[int, list[int]] = {}
        self.next_token = 1

    def rows(self, tokens: list[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.tensor(tokens, dtype=torch.float64)[:, None, None] + torch.arange(KV_HEADS)[:, None] / 8
        keys = keys + torch.arange(HEAD_DIM) / 64 + layer * 1000
        return keys, -keys

    def write_layers(self, lengths: dict[int, int], layers: int) -> list[tuple[int, list[int]]]:
        parts = []
        for request, length in lengths.items():
            parts.append((request, list(range(self.next_token, self.next_token + length))))
            self.next_token += length
        batch = Batch.of([(request, new, len(self.tokens.get(request, []))) for request, new in parts])
        flat = [token for _, new in parts for token in new]
        for layer in range(layers):
            self.cache.write(layer, *self.rows(flat, layer), batch)
        return parts

    @rule(lengths=st.dictionaries(REQUESTS, st.integers(1, 5), min_size=1))
    def a_forward_pass_writes_every_layer(self, lengths):
        for request, new in self.write_layers(lengths, LAYERS):
            self.tokens.setdefault(request, []).extend(new)

    @rule(lengths=st.dictionaries(REQUESTS, st.integers(1, 5), min_size=1), layers=st.integers(1, LAYERS - 1))
    def a_forward_pass_is_interrupted(self, lengths, layers):
        self.write_layers(lengths, layers)

    @rule(request=REQUESTS, share=st.floats(0, 1))
    def newest_tokens_are_forgotten(self, request, share):
        tokens = self.tokens.get(request, [])
        count = round(share * len(tokens))
        self.cache.rewind(request, count)
        del tokens[len(tokens) - count :]

    @rule(request=REQUESTS)
    def a_request_is_released(self, request):
        self.cache.release(request)
        self.tokens.pop(request, None)

    @rule(request=REQUESTS, extra=st.integers(1, 3))
    def more_than_there_is_cannot_be_forgotten(self, request, extra):
        with pytest.raises(ValueError, match="cannot rewind"):
            self.cache.rewind(request, len(self.tokens.get(request, [])) + extra)

    @invariant()
    def lengths_are_right(self):
        for request in range(4):
            assert self.cache.length(request) == len(self.tokens.get(request, []))

    @invariant()
    def every_layer_gives_back_what_was_written(self):
        for request, tokens in self.tokens.items():
            for layer in range(LAYERS) if tokens else ():
                keys, values = self.cache.read(layer, request)
                expected_keys, expected_values = self.rows(tokens, layer)
                # an interrupted pass may have left more behind; the next write drops it
                assert torch.equal(keys[: len(tokens)], expected_keys)
                assert torch.equal(values[: len(tokens)], expected_values)


TestAnyHistoryOfACache = CacheHistory.TestCase


def write(cache: kv_cache.ConcatKVCache, request: int, values: list[float], start: int, layers: int = LAYERS) -> None:
    rows = torch.tensor(values)[:, None, None].expand(-1, KV_HEADS, HEAD_DIM)
    for layer in range(layers):
        cache.write(layer, rows, -rows, Batch.of([(request, [0] * len(values), start)]))


def seen(cache: kv_cache.ConcatKVCache, request: int, layer: int = 0) -> list[float]:
    return cache.read(layer, request)[0][:, 0, 0].tolist()


def test_a_pass_that_was_interrupted_does_not_count_and_is_overwritten():
    cache = kv_cache.ConcatKVCache(LAYERS)
    write(cache, 5, [1.0, 2.0], start=0)
    write(cache, 5, [8.0, 9.0], start=2, layers=2)
    assert cache.length(5) == 2
    write(cache, 5, [3.0], start=2)
    assert [seen(cache, 5, layer) for layer in range(LAYERS)] == [[1.0, 2.0, 3.0]] * LAYERS


def test_a_first_pass_that_was_interrupted_leaves_an_empty_request():
    cache = kv_cache.ConcatKVCache(LAYERS)
    write(cache, 5, [8.0, 9.0], start=0, layers=1)
    assert cache.length(5) == 0
    cache.rewind(5, 0)
    write(cache, 5, [1.0], start=0)
    assert [seen(cache, 5, layer) for layer in range(LAYERS)] == [[1.0]] * LAYERS


def test_a_request_that_nobody_knows_can_be_rewound_by_nothing_and_then_written():
    cache = kv_cache.ConcatKVCache(LAYERS)
    cache.rewind(5, 0)
    assert cache.length(5) == 0
    write(cache, 5, [1.0], start=0)
    assert seen(cache, 5) == [1.0]


def test_a_released_request_is_gone_and_its_number_can_be_used_again():
    cache = kv_cache.ConcatKVCache(LAYERS)
    write(cache, 5, [1.0, 2.0], start=0)
    cache.release(5)
    cache.release(5)
    assert cache.length(5) == 0
    with pytest.raises(KeyError):
        cache.read(0, 5)
    write(cache, 5, [3.0], start=0)
    assert seen(cache, 5) == [3.0]


def test_a_gap_between_what_is_stored_and_what_is_written_is_refused():
    cache = kv_cache.ConcatKVCache(LAYERS)
    write(cache, 5, [1.0, 2.0], start=0)
    with pytest.raises(ValueError, match="goes on at 4, layer 0 has 2"):
        write(cache, 5, [3.0], start=4)
    with pytest.raises(ValueError, match="goes on at 1, layer 0 has 0"):
        write(cache, 6, [3.0], start=1)
    assert (cache.length(5), cache.length(6)) == (2, 0)


def test_a_layer_that_was_never_written_cannot_be_read():
    cache = kv_cache.ConcatKVCache(LAYERS)
    write(cache, 5, [1.0], start=0, layers=1)
    with pytest.raises(KeyError, match="nothing into layer 2"):
        cache.read(2, 5)
