"""Pages: where a token lies, who may write there, what happens when blocks run out, and that nothing leaks."""

from __future__ import annotations

import copy
import tracemalloc

import pytest
import torch
from cache_rows import KV_HEADS, LAYERS, LAYOUT, assert_texts, prefill, rows, write
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llmfromscratch import kv_cache
from llmfromscratch.batch import Batch
from llmfromscratch.errors import OutOfMemory

REQUESTS = st.integers(0, 4)
TOKENS = st.integers(0, 1)
# mostly zeros, so that texts often begin alike, also after some of their tokens were replaced
PROMPTS = st.builds(
    lambda zeros, rest: [0] * zeros + rest, st.integers(0, 12), st.lists(TOKENS, min_size=1, max_size=3)
)


def paged(num_blocks: int = 16, block_size: int = 4, prefix_sharing: bool = True) -> kv_cache.PagedKVCache:
    return kv_cache.PagedKVCache(LAYOUT, num_blocks, block_size, prefix_sharing)


def books(cache: kv_cache.PagedKVCache) -> tuple:
    """All that must not change when something fails."""
    allocator = cache.allocator
    state = (cache.block_tables, cache.counts.stored, cache._tokens, cache._keys, cache.index.blocks, cache.index.keys)
    return copy.deepcopy((*state, list(allocator.free), list(allocator.kept), allocator.ref_counts))


def slots(cache: kv_cache.PagedKVCache, request: int, start: int, length: int) -> torch.Tensor:
    return kv_cache.slots_of(cache.block_tables[request], start, length, cache.block_size)


class TooFewBlocks(RuleBasedStateMachine):
    """A cache that is nearly full all the time: every step either does its whole work or changes nothing."""

    @initialize(num_blocks=st.integers(2, 9), block_size=st.integers(1, 4), prefix_sharing=st.booleans())
    def begin(self, num_blocks, block_size, prefix_sharing):
        self.cache = paged(num_blocks, block_size, prefix_sharing)
        self.texts: dict[int, list[int]] = {}
        self.interrupted = False

    def blocks_lacking(self, request: int, tokens: int) -> bool:
        """Whether the blocks that anybody holds, and those that `tokens` more take, are more than there are."""
        size, tables = self.cache.block_size, self.cache.block_tables
        held = {block for table in tables.values() for block in table}
        length, table = len(self.texts.get(request, [])), tables.get(request, [])
        end = length + tokens
        wanted = max(0, (end + size - 1) // size - len(table))
        if tokens and length % size:
            wanted += sum(table[length // size] in other for key, other in tables.items() if key != request) > 0
        return len(held) + wanted > len(self.cache.allocator.ref_counts)

    def tries(self, request: int, tokens: int) -> bool:
        """Reserves; True if there was room. Without it, nothing may have changed."""
        before = books(self.cache)
        if self.blocks_lacking(request, tokens):
            with pytest.raises(OutOfMemory, match=f"request {request} needs .* more blocks"):
                self.cache.reserve(request, tokens)
            assert books(self.cache) == before
            return False
        self.cache.reserve(request, tokens)
        self.texts.setdefault(request, [])
        assert self.cache.blocks_needed(request, tokens) == 0
        reserved = books(self.cache)
        self.cache.reserve(request, tokens)
        assert books(self.cache) == reserved
        return True

    @rule(request=REQUESTS, tokens=st.integers(0, 9))
    def room_is_reserved(self, request, tokens):
        self.tries(request, tokens)

    @rule(request=REQUESTS, new=st.lists(TOKENS, min_size=1, max_size=9), layers=st.integers(1, LAYERS))
    def a_pass_writes(self, request, new, layers):
        if self.tries(request, len(new)):
            places = slots(self.cache, request, len(self.texts[request]), len(new)).tolist()
            write(self.cache, {request: (self.texts[request], new)}, layers)
            assert slots(self.cache, request, len(self.texts[request]), len(new)).tolist() == places
            if layers == LAYERS:
                self.texts[request] = [*self.texts[request], *new]
            self.interrupted |= layers < LAYERS

    @rule(request=REQUESTS, prompt=PROMPTS)
    def a_new_request_begins(self, request, prompt):
        self.cache.release(request)
        self.texts[request] = prompt[: self.cache.match_prefix(request, prompt)]
        rest = prompt[len(self.texts[request]) :]
        if self.tries(request, len(rest)):
            write(self.cache, {request: (self.texts[request], rest)})
            self.texts[request] = prompt
        else:
            self.a_request_is_released(request)

    @rule(request=REQUESTS, tokens=st.integers(0, 12))
    def newest_tokens_are_forgotten(self, request, tokens):
        text = self.texts.get(request, [])
        keep = max(0, len(text) - tokens)
        self.cache.rewind(request, len(text) - keep)
        if request in self.texts:
            self.texts[request] = text[:keep]

    @rule(request=REQUESTS, tokens=st.integers(1, 5), new=st.lists(TOKENS, min_size=1, max_size=5))
    def newest_tokens_are_replaced(self, request, tokens, new):
        self.newest_tokens_are_forgotten(request, tokens)
        self.a_pass_writes(request, new, LAYERS)

    @rule(request=REQUESTS, new=REQUESTS)
    def a_request_is_forked(self, request, new):
        if new in self.texts:
            with pytest.raises(ValueError, match="in the cache already"):
                self.cache.fork(request, new)
            return
        held = self.cache.num_free_blocks
        self.cache.fork(request, new)
        assert self.cache.num_free_blocks == held
        if request in self.texts:
            self.texts[new] = list(self.texts[request])

    @rule(request=REQUESTS, fork=REQUESTS, new=st.lists(TOKENS, min_size=1, max_size=3))
    def a_fork_is_made_and_written(self, request, fork, new):
        if request != fork:
            self.a_request_is_released(fork)
            self.a_request_is_forked(request, fork)
            self.a_pass_writes(fork, new, LAYERS)

    @rule(request=REQUESTS)
    def a_request_is_released(self, request):
        self.cache.release(request)
        self.texts.pop(request, None)

    @invariant()
    def texts_are_right_and_the_books_add_up(self):
        if hasattr(self, "cache"):
            assert_texts(self.cache, self.texts, may_hold_more=self.interrupted)
            self.cache.audit()
            if self.cache.prefix_sharing:
                keys = {
                    request: kv_cache.block_keys(text, self.cache.block_size) for request, text in self.texts.items()
                }
                assert (self.cache._tokens, self.cache._keys) == (self.texts, keys)

    def teardown(self):
        if hasattr(self, "cache"):
            for request in range(5):
                self.cache.release(request)
            assert self.cache.num_free_blocks == len(self.cache.allocator.ref_counts)
            self.cache.audit()


TooFewBlocks.TestCase.settings = settings(deadline=None, max_examples=80, stateful_step_count=30)
TestAnyHistoryWithTooFewBlocks = TooFewBlocks.TestCase


def test_a_token_lies_where_the_block_table_says():
    cache = paged(block_size=4)
    cache.reserve(1, 4)
    cache.reserve(2, 4)
    cache.reserve(1, 10)
    cache.block_tables[1] = [5, 0, 3]
    assert slots(cache, 1, 0, 10).tolist() == [20, 21, 22, 23, 0, 1, 2, 3, 12, 13]
    assert slots(cache, 1, 7, 1).tolist() == [3]
    assert slots(cache, 1, 3, 6).dtype == torch.int64


def test_rows_are_stored_at_their_slots():
    cache = paged(block_size=4)
    write(cache, {1: ([], [7, 8, 9, 7, 8]), 2: ([], [1])})
    for request, text in ((1, [7, 8, 9, 7, 8]), (2, [1])):
        for position, slot in enumerate(slots(cache, request, 0, len(text)).tolist()):
            block, offset = divmod(slot, 4)
            for layer in range(LAYERS):
                expected = rows(text, layer)[position]
                assert torch.equal(cache.storage[layer][0, :, block, offset], expected)
                assert torch.equal(cache.storage[layer][1, :, block, offset], -expected)


def test_the_slot_mapping_is_made_once_a_pass(monkeypatch):
    cache = paged()
    calls = []
    right = kv_cache.slots_of
    monkeypatch.setattr(kv_cache, "slots_of", lambda table, *span: calls.append(span) or right(table, *span))
    write(cache, {1: ([], [7] * 9), 2: ([], [1])})
    assert calls == [(0, 9, 4), (0, 1, 4)]
    assert cache.slot_mapping[torch.device("cpu")].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 12]


def test_neighbouring_blocks_are_read_without_copying_and_others_into_one_buffer():
    cache = paged(block_size=2)
    write(cache, {1: ([], [1, 2, 3])})
    stored = cache.storage[0]
    assert all(stored.data_ptr() <= one.data_ptr() < stored.data_ptr() + stored.nbytes for one in cache.read(0, 1))
    write(cache, {2: ([], [5])})
    write(cache, {1: ([1, 2, 3], [4, 5])})
    assert cache.block_tables[1] == [0, 1, 3]
    assert_texts(cache, {1: [1, 2, 3, 4, 5], 2: [5]})
    assert len({cache.read(layer, 1)[0].data_ptr() for layer in range(LAYERS)}) == 1


def test_the_buffer_serves_in_inference_mode_and_outside_it():
    cache = paged(block_size=1)
    with torch.inference_mode():
        write(cache, {1: ([], [1]), 2: ([], [2])})
        write(cache, {1: ([1], [3])})
        assert_texts(cache, {1: [1, 3]})
    write(cache, {1: ([1, 3], [4])})
    assert_texts(cache, {1: [1, 3, 4], 2: [2]})


def test_a_read_after_a_copy_on_write_sees_the_copy():
    cache = paged(block_size=4)
    write(cache, {1: ([], [1, 2])})
    cache.fork(1, 2)
    cache.read(0, 2)
    cache.reserve(2, 1)
    write(cache, {1: ([1, 2], [3])})
    cache.storage[0][:, :, cache.block_tables[1][0]] = 0.0
    assert torch.equal(cache.read(0, 2)[0], rows([1, 2], 0))


def test_a_fork_shares_full_blocks_and_copies_the_last_one_when_it_is_written():
    cache = paged(block_size=4)
    write(cache, {1: ([], [1, 2, 3, 4, 5])})
    cache.fork(1, 2)
    assert cache.block_tables == {1: [0, 1], 2: [0, 1]} and cache.allocator.ref_counts[:3] == [2, 2, 0]
    assert (cache.blocks_needed(1, 1), cache.blocks_needed(2, 4)) == (1, 2)
    write(cache, {1: ([1, 2, 3, 4, 5], [6]), 2: ([1, 2, 3, 4, 5], [7])})
    assert cache.block_tables == {1: [0, 2], 2: [0, 1]} and cache.allocator.ref_counts[:4] == [2, 1, 1, 0]
    assert_texts(cache, {1: [1, 2, 3, 4, 5, 6], 2: [1, 2, 3, 4, 5, 7]})
    cache.release(1)
    assert_texts(cache, {2: [1, 2, 3, 4, 5, 7]})
    cache.audit()


def test_a_fork_at_a_full_block_copies_nothing():
    cache = paged(block_size=4)
    write(cache, {1: ([], [1, 2, 3, 4])})
    cache.fork(1, 2)
    assert cache.blocks_needed(1, 1) == cache.blocks_needed(2, 1) == 1
    write(cache, {2: ([1, 2, 3, 4], [6]), 1: ([1, 2, 3, 4], [7])})
    assert cache.block_tables == {1: [0, 2], 2: [0, 1]}
    assert_texts(cache, {1: [1, 2, 3, 4, 7], 2: [1, 2, 3, 4, 6]})


def test_blocks_reserved_for_the_parent_do_not_go_to_the_fork():
    cache = paged(block_size=4)
    write(cache, {1: ([], [1, 2, 3, 4])})
    cache.reserve(1, 8)
    cache.fork(1, 2)
    assert cache.block_tables == {1: [0, 1, 2], 2: [0]}
    write(cache, {1: ([1, 2, 3, 4], [6]), 2: ([1, 2, 3, 4], [7])})
    assert_texts(cache, {1: [1, 2, 3, 4, 6], 2: [1, 2, 3, 4, 7]})
    cache.audit()


def test_a_copy_has_every_layer():
    cache = paged(block_size=8)
    write(cache, {1: ([], [1, 2, 3])})
    cache.fork(1, 2)
    kv_cache.make_writable(cache.block_tables[2], 0, cache.allocator, cache.storage)
    assert cache.block_tables == {1: [0], 2: [1]}
    for stored in cache.storage:
        assert torch.equal(stored[:, :, 0, :3], stored[:, :, 1, :3])


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_rewind_into_a_shared_block_and_other_tokens_leave_the_other_request_alone(block_size):
    cache = paged(24, block_size)
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    write(cache, {1: ([], text)})
    cache.fork(1, 2)
    cache.rewind(2, 3)
    cache.audit()
    write(cache, {2: (text[:5], [9, 9, 9])})
    assert_texts(cache, {1: text, 2: [*text[:5], 9, 9, 9]})
    cache.audit()


def test_a_rewind_gives_back_the_blocks_behind_it_those_reserved_too():
    cache = paged(block_size=4, prefix_sharing=False)
    write(cache, {1: ([], [1, 2, 3, 4, 5, 6, 7, 8, 9])})
    cache.reserve(1, 12)
    cache.rewind(1, 4)
    assert cache.block_tables == {1: [0, 1]} and cache.num_free_blocks == 14
    cache.rewind(1, 1)
    assert cache.block_tables == {1: [0]}
    cache.rewind(1, 4)
    assert cache.block_tables == {1: []} and cache.num_free_blocks == 16


def test_a_position_written_again_goes_to_the_same_slot():
    cache = paged(block_size=4)
    write(cache, {1: ([], [1, 2, 3])})
    write(cache, {1: ([1, 2, 3], [8, 9])}, layers=2)
    places = slots(cache, 1, 3, 2).tolist()
    write(cache, {1: ([1, 2, 3], [4, 5])})
    assert slots(cache, 1, 3, 2).tolist() == places
    assert_texts(cache, {1: [1, 2, 3, 4, 5]})


def test_running_out_says_the_numbers_and_changes_nothing():
    cache = paged(num_blocks=2, block_size=4)
    with pytest.raises(OutOfMemory, match="request 1 needs 3 more blocks of 4 tokens; 2 of 2 are free"):
        cache.reserve(1, 12)
    assert cache.block_tables == {} and cache.num_free_blocks == 2
    write(cache, {2: ([], [1, 2, 3, 4, 5])})
    before = books(cache)
    with pytest.raises(OutOfMemory, match="request 2 needs 1 more blocks of 4 tokens; 0 of 2 are free"):
        cache.reserve(2, 4)
    with pytest.raises(OutOfMemory, match="request 1 needs 1 more"):
        write(cache, {1: ([], [7])})
    assert books(cache) == before
    cache.reserve(2, 3)  # fits the block that is there
    assert_texts(cache, {2: [1, 2, 3, 4, 5]})
    cache.release(2)
    write(cache, {1: ([], [1, 2, 3, 4, 5, 6, 7, 8])})
    assert_texts(cache, {1: [1, 2, 3, 4, 5, 6, 7, 8]})


def test_the_copy_of_a_shared_block_is_counted_before_it_is_made():
    cache = paged(num_blocks=1, block_size=4)
    write(cache, {1: ([], [1, 2])})
    cache.fork(1, 2)
    before = books(cache)
    with pytest.raises(OutOfMemory, match="request 2 needs 1 more blocks of 4 tokens; 0 of 1 are free"):
        write(cache, {2: ([1, 2], [3])})
    assert books(cache) == before
    cache.release(1)
    write(cache, {2: ([1, 2], [3])})
    assert_texts(cache, {2: [1, 2, 3]})


def test_a_batch_that_does_not_fit_leaks_nothing():
    cache = paged(num_blocks=3, block_size=4)
    with pytest.raises(OutOfMemory, match="request 2 needs 2 more"):
        write(cache, {1: ([], [1] * 5), 2: ([], [2] * 5)})
    cache.audit()
    assert cache.length(1) == 0
    write(cache, {1: ([], [1] * 5)})  # what was reserved for it is used
    assert cache.num_free_blocks == 1
    cache.release(1)
    cache.release(2)
    assert cache.num_free_blocks == 3


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_an_allocator_that_fails_in_the_middle_leaks_nothing(fails_at, monkeypatch):
    cache = paged(num_blocks=8, block_size=2)
    write(cache, {1: ([], [1, 2, 3])})
    cache.fork(1, 2)
    allocate, calls = cache.allocator.allocate, []

    def failing() -> int:
        calls.append(1)
        if len(calls) == fails_at:
            raise OutOfMemory("lied to")
        return allocate()

    monkeypatch.setattr(cache.allocator, "allocate", failing)
    with pytest.raises(OutOfMemory, match="lied to"):
        cache.reserve(2, 4)
    cache.audit()
    assert_texts(cache, {1: [1, 2, 3], 2: [1, 2, 3]})
    cache.release(2)
    cache.release(1)
    assert cache.num_free_blocks == 8


def test_the_memory_of_a_long_run_is_flat():
    cache = paged(num_blocks=24, block_size=4)
    sizes = []
    tracemalloc.start()
    try:
        for request in range(300):
            text = [(request * 7 + index) % 11 for index in range(1 + request % 17)]
            prefill(cache, request, text, 5)
            cache.fork(request, -1)
            write(cache, {-1: (text, [3]), request: (text, [4, 5])})
            cache.rewind(request, 1)
            cache.release(request)
            cache.release(-1)
            assert cache.num_free_blocks == 24
            if request % 100 == 99:
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert cache.block_tables == cache.counts.stored == cache._tokens == cache._keys == {}
    assert len(cache.index.blocks) == len(cache.index.keys) <= 24
    assert len(cache.gathers._made) == 0
    assert sizes[-1] - sizes[0] < 20_000


def test_the_gather_buffer_grows_by_doubling_and_not_with_every_block():
    cache = paged(num_blocks=64, block_size=1, prefix_sharing=False)
    write(cache, {1: ([], [1]), 2: ([], [2])})
    buffers, text = set(), [1]
    for token in range(50):
        write(cache, {1: (text, [token])})
        text.append(token)
        buffers.add(cache.gathers._buffers[torch.device("cpu")].data_ptr())
    assert len(buffers) <= 6
    row = cache.storage[0][:, :, 0].numel()
    assert cache.gathers._buffers[torch.device("cpu")].numel() <= 2 * 51 * row


def damaged(cache: kv_cache.PagedKVCache, how: str) -> None:
    allocator, index = cache.allocator, cache.index
    if how == "a block nobody has":
        allocator.free.popleft()
    elif how == "a block that is free and used":
        allocator.free.append(cache.block_tables[1][0])
    elif how == "a count too high":
        allocator.ref_counts[cache.block_tables[1][0]] += 1
    elif how == "a reserved block shared":
        allocator.ref_counts[cache.block_tables[1][2]] += 1
        cache.block_tables[2].append(cache.block_tables[1][2])
    elif how == "a reserved block published":
        index.add(b"key", cache.block_tables[1][2])
    elif how == "a free block published":
        index.add(b"key", allocator.free[0])
    elif how == "a kept block without a key":
        index.forget(next(iter(allocator.kept)))
    elif how == "another text's key":
        index.forget(cache.block_tables[1][0])
        index.add(b"key", cache.block_tables[1][0])
    elif how == "an index that contradicts itself":
        index.keys[cache.block_tables[1][0]] = b"key"
    elif how == "tokens without a block":
        allocator.release(cache.block_tables[2].pop())


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("a block nobody has", "each once"),
        ("a block that is free and used", "each once"),
        ("a count too high", "the reference counts are"),
        ("a reserved block shared", "request 1: block 4 will be written, but is shared or published"),
        ("a reserved block published", "request 1: block 4 will be written, but is shared or published"),
        ("a free block published", "are free, but a key leads to them"),
        ("a kept block without a key", "are kept, but no key leads to them"),
        ("another text's key", "request 1: block 1 is published under the key of another text"),
        ("an index that contradicts itself", "back to another key"),
        ("tokens without a block", "request 2: its tokens need 1 blocks, its table has 0"),
    ],
)
def test_the_audit_names_what_does_not_add_up(how, named):
    cache = paged(block_size=2)
    write(cache, {3: ([], [9, 9])})
    write(cache, {1: ([], [1, 2, 3]), 2: ([], [5])})
    cache.release(3)
    cache.reserve(1, 3)
    assert cache.block_tables == {1: [1, 2, 4], 2: [3]} and list(cache.allocator.kept) == [0]
    cache.audit()
    damaged(cache, how)
    with pytest.raises(RuntimeError, match="does not add up") as raised:
        cache.audit()
    assert named in str(raised.value)


def test_batches_mix_prompts_and_single_steps():
    cache = paged(block_size=3)
    write(cache, {1: ([], [1, 2, 3, 4]), 2: ([], [5])})
    write(cache, {3: ([], [6] * 7), 1: ([1, 2, 3, 4], [7]), 2: ([5], [8, 9])})
    assert_texts(cache, {1: [1, 2, 3, 4, 7], 2: [5, 8, 9], 3: [6] * 7})


def test_a_gap_is_found_before_anything_is_written():
    cache = paged(num_blocks=2, block_size=4)
    write(cache, {1: ([], [1, 2])})
    new = torch.zeros(2, KV_HEADS, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="request 1 goes on at 3"):
        cache.write(0, new, new, Batch.of([(1, [1, 2], 3)]))
    assert_texts(cache, {1: [1, 2]})
