"""A cache gives back what was written, per request and layer, whatever the history; and all caches keep one promise."""

from __future__ import annotations

import pytest
import torch
from cache_rows import HEAD_DIM, KV_HEADS, LAYERS, LAYOUT, assert_texts, prefill, rows, write
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmfromscratch import cache_parts, kv_cache, kv_memory
from llmfromscratch.batch import Batch
from llmfromscratch.config import ModelConfig
from llmfromscratch.errors import OutOfMemory

LONGEST = 40
REQUESTS = st.integers(0, 3)
TOKENS = st.integers(0, 1)
# mostly zeros, so that texts often begin alike, also after some of their tokens were replaced
PROMPTS = st.builds(
    lambda zeros, rest: [0] * zeros + rest, st.integers(0, 13), st.lists(TOKENS, min_size=1, max_size=3)
)
CACHES = {
    "concat": lambda: kv_cache.ConcatKVCache(LAYERS),
    "static": lambda: kv_cache.StaticKVCache(LAYOUT, 4, LONGEST),
    "paged, blocks of 1": lambda: kv_cache.PagedKVCache(LAYOUT, 4 * LONGEST, 1),
    "paged, blocks of 3": lambda: kv_cache.PagedKVCache(LAYOUT, 4 * 14, 3),
    "paged, blocks of 4, nothing shared": lambda: kv_cache.PagedKVCache(LAYOUT, 4 * 10, 4, prefix_sharing=False),
}
each_cache = pytest.mark.parametrize("name", CACHES)


class SideBySide(RuleBasedStateMachine):
    """Drives all caches through one history, each beside plain lists of the tokens it should hold."""

    def __init__(self) -> None:
        super().__init__()
        self.caches = {name: make() for name, make in CACHES.items()}
        # a prefix hit gives a paged cache tokens that another has not: so each has its own lists
        self.texts: dict[str, dict[int, list[int]]] = {name: {} for name in CACHES}
        self.interrupted = False

    def pass_through(self, new: dict[int, list[int]], layers: int) -> None:
        for name, cache in self.caches.items():
            texts = self.texts[name]
            parts = {request: (texts.get(request, []), tokens) for request, tokens in new.items()}
            parts = {request: (old, new) for request, (old, new) in parts.items() if len(old) + len(new) <= LONGEST}
            if not parts:
                continue
            write(cache, parts, layers)
            for request, (old, tokens) in parts.items():
                texts[request] = [*old, *tokens] if layers == LAYERS else old
        self.interrupted |= layers < LAYERS

    @rule(new=st.dictionaries(REQUESTS, st.lists(TOKENS, min_size=1, max_size=7), min_size=1))
    def a_pass_writes_every_layer(self, new):
        self.pass_through(new, LAYERS)

    @rule(
        new=st.dictionaries(REQUESTS, st.lists(TOKENS, min_size=1, max_size=7), min_size=1),
        layers=st.integers(1, LAYERS - 1),
    )
    def a_pass_is_interrupted(self, new, layers):
        self.pass_through(new, layers)

    @rule(request=REQUESTS, prompt=PROMPTS, chunk=st.integers(1, 16))
    def a_new_request_begins(self, request, prompt, chunk):
        for name, cache in self.caches.items():
            cache.release(request)
            matched = prefill(cache, request, prompt, chunk)
            assert 0 <= matched < len(prompt)
            self.texts[name][request] = prompt

    @rule(request=REQUESTS, prompt=PROMPTS)
    def a_prompt_is_matched_and_nothing_more(self, request, prompt):
        for name, cache in self.caches.items():
            cache.release(request)
            self.texts[name][request] = prompt[: cache.match_prefix(request, prompt)]

    @rule(request=REQUESTS, tokens=st.integers(0, 8))
    def room_is_reserved(self, request, tokens):
        for name, cache in self.caches.items():
            if len(self.texts[name].get(request, [])) + tokens <= LONGEST:
                cache.reserve(request, tokens)
                self.texts[name].setdefault(request, [])

    @rule(request=REQUESTS, tokens=st.integers(0, 16))
    def newest_tokens_are_forgotten(self, request, tokens):
        for name, cache in self.caches.items():
            text = self.texts[name].get(request, [])
            keep = max(0, len(text) - tokens)
            cache.rewind(request, len(text) - keep)
            if request in self.texts[name]:
                self.texts[name][request] = text[:keep]

    @rule(request=REQUESTS, tokens=st.integers(1, 5), new=st.lists(TOKENS, min_size=1, max_size=5))
    def newest_tokens_are_replaced(self, request, tokens, new):
        self.newest_tokens_are_forgotten(request, tokens)
        self.pass_through({request: new}, LAYERS)

    @rule(request=REQUESTS, extra=st.integers(1, 3))
    def more_than_there_is_cannot_be_forgotten(self, request, extra):
        for name, cache in self.caches.items():
            with pytest.raises(ValueError, match="cannot rewind"):
                cache.rewind(request, len(self.texts[name].get(request, [])) + extra)

    @rule(request=REQUESTS, new=REQUESTS)
    def a_request_is_forked(self, request, new):
        for name, cache in self.caches.items():
            if new != request:
                cache.release(new)
                self.texts[name].pop(new, None)
                cache.fork(request, new)
                if request in self.texts[name]:
                    self.texts[name][new] = list(self.texts[name][request])

    @rule(request=REQUESTS)
    def a_request_is_released(self, request):
        for name, cache in self.caches.items():
            cache.release(request)
            self.texts[name].pop(request, None)

    @precondition(lambda self: any(self.texts["concat"].values()))
    @rule(data=st.data())
    def a_gap_is_refused(self, data):
        request = data.draw(st.sampled_from(sorted(self.texts["concat"])))
        for name, cache in self.caches.items():
            length = len(self.texts[name].get(request, []))
            with pytest.raises(ValueError, match=f"goes on at {length + 1}, but the cache holds {length}"):
                cache.write(0, *[torch.zeros(1, KV_HEADS, HEAD_DIM)] * 2, Batch.of([(request, [0], length + 1)]))

    @invariant()
    def every_cache_gives_back_what_was_written(self):
        for name, cache in self.caches.items():
            texts = self.texts[name]
            # an interrupted pass may have left more behind; the next write drops it
            assert_texts(cache, texts, may_hold_more=self.interrupted)
            assert not any(cache.length(request) for request in range(4) if request not in texts)

    @invariant()
    def the_books_add_up(self):
        for cache in self.caches.values():
            if isinstance(cache, kv_cache.PagedKVCache):
                cache.audit()

    def teardown(self):
        for cache in self.caches.values():
            for request in range(4):
                cache.release(request)
            assert_is_empty(cache)


def assert_is_empty(cache) -> None:
    """All memory has been given back, and no dictionary remembers a request."""
    if isinstance(cache, kv_cache.ConcatKVCache):
        assert cache._stored == {}
        return
    assert cache.counts.stored == cache.counts._ends == {}
    if isinstance(cache, kv_cache.StaticKVCache):
        assert cache.rows == {} and sorted(cache.free_rows) == list(range(4))
        return
    assert cache.block_tables == cache._tokens == cache._keys == cache.gathers._made == {}
    assert cache.num_free_blocks == len(cache.allocator.ref_counts)
    cache.audit()


SideBySide.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=25)
TestAnyHistoryOfEveryCache = SideBySide.TestCase


def test_bytes_per_token_are_those_of_known_models():
    assert bytes_of(32, 32, 128, 2) * 2048 == 2**30  # 7B, half precision: 1 GiB for 2048 tokens
    assert bytes_of(80, 64, 128, 2) == 2_621_440  # 70B without grouped queries
    assert bytes_of(80, 8, 128, 2) == 327_680  # and with them
    assert bytes_of(30, 3, 64, 4) == 46_080  # SmolLM2-135M, float32


def bytes_of(*sizes: int) -> int:
    return kv_cache.bytes_per_token(*sizes)


def test_a_layout_counts_the_bytes_that_a_cache_really_takes():
    config = ModelConfig("llama", 10, 24, 8, num_layers=5, num_heads=6, num_kv_heads=2, head_dim=4, context_length=64)
    layout = kv_cache.CacheLayout.of(config, torch.bfloat16)
    assert layout.devices == (torch.device("cpu"),) * 5
    paged = kv_cache.PagedKVCache(layout, num_blocks=7, block_size=3)
    static = kv_cache.StaticKVCache(layout, max_requests=2, max_length=11)
    assert (
        sum(stored.nbytes for stored in paged.storage)
        == 21 * kv_memory.bytes_per_token(layout)
        == 21 * 5 * 2 * 2 * 4 * 2
    )
    assert sum(stored.nbytes for stored in static.storage) == 22 * kv_memory.bytes_per_token(layout)


def test_a_layers_keys_and_values_lie_where_the_layer_lies():
    config = ModelConfig("llama", 10, 24, 8, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=4, context_length=64)
    layout = kv_cache.CacheLayout.of(config, devices=["cpu", "meta"])
    for cache in (kv_cache.PagedKVCache(layout, 4), kv_cache.StaticKVCache(layout, 1, 8)):
        assert [stored.device.type for stored in cache.storage] == ["cpu", "meta"]
        for layer, device in enumerate(("cpu", "meta")):
            new = torch.zeros(3, 2, 4, device=device)
            cache.write(layer, new, new, Batch.of([(1, [0, 0, 0], 0)]))
            assert {one.device.type for one in cache.read(layer, 1)} == {device}
    with pytest.raises(ValueError, match="3 devices were given for 2 layers"):
        kv_cache.CacheLayout.of(config, devices=["cpu"] * 3)


def test_no_cache_holds_the_rows_of_the_pass_and_no_more():
    cache = kv_cache.NoKVCache(LAYERS)
    assert (cache.match_prefix(5, [1, 2, 3]), cache.length(5)) == (0, 0)
    write(cache, {5: ([], [1, 2]), 6: ([], [4])})
    assert (cache.length(5), cache.length(6)) == (0, 0)
    with pytest.raises(KeyError):
        cache.read(0, 5)
    write(cache, {5: ([], [1, 2, 3])})  # all over again, with the new token
    cache.rewind(5, 1)
    cache.fork(5, 7)
    write(cache, {5: ([], [1, 2]), 7: ([], [1, 2])})
    with pytest.raises(ValueError, match="goes on at 2, but the cache holds 0"):
        write(cache, {5: ([1, 2], [3])})
    cache.release(5)
    cache.release(5)
    with pytest.raises(KeyError):
        cache.read(LAYERS - 1, 5)


@each_cache
def test_a_pass_that_was_interrupted_does_not_count_and_is_overwritten(name):
    cache = CACHES[name]()
    write(cache, {5: ([], [1, 2])})
    write(cache, {5: ([1, 2], [8, 9])}, layers=2)
    assert cache.length(5) == 2
    write(cache, {5: ([1, 2], [3])})
    assert_texts(cache, {5: [1, 2, 3]})


@each_cache
def test_a_first_pass_that_was_interrupted_leaves_an_empty_request(name):
    cache = CACHES[name]()
    write(cache, {5: ([], [8, 9])}, layers=1)
    assert cache.length(5) == 0
    cache.rewind(5, 0)
    write(cache, {5: ([], [1])})
    assert_texts(cache, {5: [1]})


@each_cache
def test_an_interrupted_pass_and_then_another_request(name):
    cache = CACHES[name]()
    write(cache, {5: ([], [1, 2])})
    write(cache, {5: ([1, 2], [8, 9])}, layers=2)
    write(cache, {6: ([], [7])})
    assert_texts(cache, {6: [7]})
    assert_texts(cache, {5: [1, 2]}, may_hold_more=True)
    cache.release(6)
    write(cache, {5: ([1, 2], [3]), 6: ([], [4, 5])})
    assert_texts(cache, {5: [1, 2, 3], 6: [4, 5]})


@each_cache
def test_a_request_that_nobody_knows_can_be_rewound_by_nothing_and_then_written(name):
    cache = CACHES[name]()
    cache.rewind(5, 0)
    assert cache.length(5) == 0
    write(cache, {5: ([], [1])})
    assert_texts(cache, {5: [1]})


@each_cache
def test_a_released_request_is_gone_and_its_number_can_be_used_again(name):
    cache = CACHES[name]()
    write(cache, {5: ([], [1, 2])})
    cache.release(5)
    cache.release(5)
    assert cache.length(5) == 0
    with pytest.raises(KeyError):
        cache.read(0, 5)
    write(cache, {5: ([], [3])})
    assert_texts(cache, {5: [3]})


@each_cache
def test_a_request_that_only_reserved_can_be_released(name):
    cache = CACHES[name]()
    cache.reserve(5, 4)
    cache.reserve(5, 4)
    assert cache.length(5) == 0
    cache.fork(5, 6)
    cache.release(5)
    write(cache, {6: ([], [3])})
    assert_texts(cache, {6: [3]})
    cache.release(6)
    assert_is_empty(cache)


@each_cache
def test_neither_a_gap_nor_an_overlap_is_written(name):
    cache = CACHES[name]()
    write(cache, {5: ([], [1, 2])})
    for start, request, length in ((4, 5, 2), (1, 5, 2), (1, 6, 0)):
        with pytest.raises(ValueError, match=f"request {request} goes on at {start}, but the cache holds {length} tok"):
            cache.write(0, *[torch.zeros(1, KV_HEADS, HEAD_DIM)] * 2, Batch.of([(request, [3], start)]))
    assert (cache.length(5), cache.length(6)) == (2, 0)
    assert_texts(cache, {5: [1, 2]})


@each_cache
def test_a_fork_and_its_parent_go_their_own_ways(name):
    cache = CACHES[name]()
    write(cache, {5: ([], [1, 2, 3, 4, 5])})
    cache.fork(5, 6)
    with pytest.raises(ValueError, match="request 6 is in the cache already"):
        cache.fork(5, 6)
    write(cache, {5: ([1, 2, 3, 4, 5], [6]), 6: ([1, 2, 3, 4, 5], [7, 8])})
    assert_texts(cache, {5: [1, 2, 3, 4, 5, 6], 6: [1, 2, 3, 4, 5, 7, 8]})
    cache.rewind(6, 4)
    write(cache, {6: ([1, 2, 3], [9])})
    cache.release(5)
    assert_texts(cache, {6: [1, 2, 3, 9]})


@each_cache
def test_a_fork_of_nobody_is_nobody(name):
    cache = CACHES[name]()
    cache.fork(5, 6)
    assert cache.length(6) == 0
    cache.release(6)
    assert_is_empty(cache)


@each_cache
def test_any_chunks_give_the_same_rows(name):
    text = list(range(20))
    for chunk in (1, 3, 4, 5, 20):
        cache = CACHES[name]()
        prefill(cache, 5, text, chunk)
        assert_texts(cache, {5: text})


def test_concat_refuses_to_read_a_layer_that_was_never_written():
    cache = kv_cache.ConcatKVCache(LAYERS)
    write(cache, {5: ([], [1])}, layers=1)
    with pytest.raises(KeyError, match="nothing into layer 2"):
        cache.read(2, 5)


@pytest.mark.parametrize("name", ["static", "paged, blocks of 3"])
def test_layers_that_a_pass_has_not_reached_show_no_new_tokens(name):
    cache = CACHES[name]()
    write(cache, {5: ([], [1, 2])})
    write(cache, {5: ([1, 2], [3, 4])}, layers=1)
    assert [cache.read(layer, 5)[0].shape[0] for layer in range(LAYERS)] == [4, 2, 2]
    cache.rewind(5, 0)  # whoever changes a request has given the pass up
    assert [cache.read(layer, 5)[0].shape[0] for layer in range(LAYERS)] == [2, 2, 2]


@pytest.mark.parametrize("name", ["static", "paged, blocks of 3"])
def test_layers_written_out_of_order_are_refused(name):
    cache = CACHES[name]()
    write(cache, {5: ([], [1, 2])}, layers=1)
    new = rows([1, 2], 2)
    with pytest.raises(ValueError, match="layer 2 was written after layer 0"):
        cache.write(2, new, -new, Batch.of([(5, [1, 2], 0)]))
    assert cache.length(5) == 0


def test_counts_notice_a_batch_that_changes_in_the_middle_of_a_pass():
    counts = cache_parts.TokenCounts(2)
    assert not counts.advance(0, Batch.of([(5, [1, 2], 0)]))
    with pytest.raises(ValueError, match="one batch into layer 0, 1"):
        counts.advance(1, Batch.of([(6, [1, 2], 0)]))
    assert counts.stored == {}


def test_static_refuses_what_outgrows_a_row_and_says_the_numbers():
    cache = kv_cache.StaticKVCache(LAYOUT, 1, 4)
    write(cache, {5: ([], [1, 2, 3])})
    with pytest.raises(OutOfMemory, match="request 5 needs room for 5 tokens; a row holds 4"):
        write(cache, {5: ([1, 2, 3], [4, 5])})
    with pytest.raises(OutOfMemory, match="request 6 needs a row; all 1 are taken"):
        cache.reserve(6, 1)
    with pytest.raises(OutOfMemory, match="request 6 needs a row"):
        cache.fork(5, 6)
    assert_texts(cache, {5: [1, 2, 3]})
    write(cache, {5: ([1, 2, 3], [4])})
    cache.release(5)
    write(cache, {6: ([], [7])})
    assert_texts(cache, {6: [7]})


def test_static_reads_without_copying():
    cache = kv_cache.StaticKVCache(LAYOUT, 2, 8)
    write(cache, {5: ([], [1, 2, 3])})
    stored = cache.storage[1]
    for one in cache.read(1, 5):
        assert stored.data_ptr() <= one.data_ptr() < stored.data_ptr() + stored.nbytes
