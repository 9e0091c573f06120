"""The allocator: a block has as many holders as were counted, and is never in two states at once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llmfromscratch import kv_cache
from llmfromscratch.errors import OutOfMemory


class AllocatorHistory(RuleBasedStateMachine):
    """Holds an allocator against a list of holders, a list of kept blocks, and what was evicted."""

    @initialize(num_blocks=st.integers(1, 6))
    def begin(self, num_blocks):
        self.size = num_blocks
        self.evicted: list[int] = []
        self.expected_evictions: list[int] = []
        self.allocator = kv_cache.BlockAllocator(num_blocks, self.evicted.append)
        self.holders: list[int] = []  # a block stands here once for every holder
        self.kept: list[int] = []  # least recently used first

    @rule()
    def a_block_is_allocated(self):
        free = self.size - len(set(self.holders)) - len(self.kept)
        if not free and not self.kept:
            with pytest.raises(OutOfMemory, match=f"all {self.size} are held"):
                self.allocator.allocate()
            return
        block = self.allocator.allocate()
        assert block not in self.holders
        if free:
            assert block not in self.kept
        else:
            assert block == self.kept.pop(0)
            self.expected_evictions.append(block)
        self.holders.append(block)

    @rule(block=st.integers(0, 5))
    def a_block_is_shared(self, block):
        block %= self.size
        if block not in self.holders and block not in self.kept:
            with pytest.raises(ValueError, match=f"block {block} is free"):
                self.allocator.share(block)
            return
        self.allocator.share(block)
        self.holders.append(block)
        if block in self.kept:
            self.kept.remove(block)

    @rule(block=st.integers(0, 5), keep=st.booleans())
    def a_block_is_released(self, block, keep):
        block %= self.size
        if block not in self.holders:
            with pytest.raises(ValueError, match=f"block {block} is freed twice"):
                self.allocator.release(block, keep)
            return
        self.allocator.release(block, keep)
        self.holders.remove(block)
        if keep and block not in self.holders:
            self.kept.append(block)

    @invariant()
    def every_block_is_in_one_state_and_counted(self):
        if not hasattr(self, "allocator"):
            return
        free = set(range(self.size)) - set(self.holders) - set(self.kept)
        assert sorted(self.allocator.free) == sorted(free)
        assert list(self.allocator.kept) == self.kept
        assert self.allocator.ref_counts == [self.holders.count(block) for block in range(self.size)]
        assert self.allocator.num_available == self.size - len(set(self.holders))
        assert self.evicted == self.expected_evictions


AllocatorHistory.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
TestAnyHistoryOfAnAllocator = AllocatorHistory.TestCase


def test_blocks_come_in_order_and_the_one_freed_last_comes_first():
    allocator = kv_cache.BlockAllocator(5)
    assert [allocator.allocate() for _ in range(3)] == [0, 1, 2]
    for block in (2, 1, 0):  # as a cache releases a request: from the end of its text
        allocator.release(block)
    assert [allocator.allocate() for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(OutOfMemory):
        allocator.allocate()


def test_free_blocks_are_handed_out_before_kept_ones_and_of_those_the_oldest():
    evicted: list[int] = []
    allocator = kv_cache.BlockAllocator(3, evicted.append)
    blocks = [allocator.allocate() for _ in range(3)]
    allocator.release(blocks[1], keep=True)
    allocator.release(blocks[0], keep=True)
    allocator.release(blocks[2])
    assert [allocator.allocate() for _ in range(3)] == [blocks[2], blocks[1], blocks[0]]
    assert evicted == [blocks[1], blocks[0]]


def test_a_kept_block_that_is_used_again_becomes_the_youngest():
    allocator = kv_cache.BlockAllocator(2)
    first, second = allocator.allocate(), allocator.allocate()
    allocator.release(first, keep=True)
    allocator.release(second, keep=True)
    allocator.share(first)
    assert allocator.num_available == 1
    allocator.release(first, keep=True)
    assert [allocator.allocate(), allocator.allocate()] == [second, first]


def test_only_the_last_holder_gives_a_block_back():
    allocator = kv_cache.BlockAllocator(1)
    block = allocator.allocate()
    allocator.share(block)
    allocator.share(block)
    for _ in range(2):
        allocator.release(block, keep=True)
        assert allocator.num_available == 0
    allocator.release(block)
    assert list(allocator.free) == [block] and not allocator.kept


def test_a_block_freed_twice_is_named_also_when_it_is_kept():
    allocator = kv_cache.BlockAllocator(2)
    block = allocator.allocate()
    allocator.release(block, keep=True)
    for keep in (True, False):
        with pytest.raises(ValueError, match=f"block {block} is freed twice: nobody holds it"):
            allocator.release(block, keep)
    assert list(allocator.kept) == [block] and list(allocator.free) == [1]


def test_the_one_who_evicts_learns_of_it_before_the_block_has_a_new_holder():
    seen: list[tuple[int, int]] = []
    allocator = kv_cache.BlockAllocator(1, lambda block: seen.append((block, allocator.ref_counts[block])))
    allocator.release(allocator.allocate(), keep=True)
    allocator.allocate()
    assert seen == [(0, 0)]


def test_without_blocks_there_is_nothing_to_give():
    with pytest.raises(OutOfMemory, match="all 0 are held"):
        kv_cache.BlockAllocator(0).allocate()
