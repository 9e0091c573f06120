"""Prompts that begin alike share blocks: equal tokens only, from the beginning only, and never a wrong row."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from cache_rows import LAYOUT, assert_texts, prefill, write
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch import cache_parts, kv_cache
from llmfromscratch.errors import OutOfMemory

IDS = st.integers(0, 2**31)


def paged(num_blocks: int = 16, block_size: int = 4, prefix_sharing: bool = True) -> kv_cache.PagedKVCache:
    return kv_cache.PagedKVCache(LAYOUT, num_blocks, block_size, prefix_sharing)


def text_of(cache: kv_cache.PagedKVCache, request: int) -> list[int]:
    """Keys and values of a request as numbers, to be compared after the cache has gone on."""
    return [one.tolist() for layer in range(3) for one in cache.read(layer, request)]


def test_keys_are_chained_sha256_of_the_ids_as_8_byte_little_endian_numbers():
    first = hashlib.sha256(bytes([1, 0, 0, 0, 0, 0, 0, 0, 0x39, 0x30, 0, 0, 0, 0, 0, 0])).digest()
    second = hashlib.sha256(first + bytes([2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0])).digest()
    assert kv_cache.block_keys([1, 12345, 2, 3], 2) == [first, second]
    assert kv_cache.block_keys([1, 12345, 2, 3, 4], 2) == [first, second]  # a block that is not full has no key
    assert kv_cache.block_keys([2, 3], 2, parent=first) == [second]
    assert kv_cache.block_keys([1], 2) == kv_cache.block_keys([], 2) == []


@given(text=st.lists(IDS, max_size=20), block_size=st.integers(1, 5), cut=st.integers(0, 4))
def test_keys_of_a_text_are_those_of_its_parts_chained(text, block_size, cut):
    whole = kv_cache.block_keys(text, block_size)
    assert len(whole) == len(text) // block_size
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else b""
    assert kv_cache.block_keys(text[: cut * block_size], block_size) == whole[:cut]
    assert kv_cache.block_keys(text[cut * block_size :], block_size, parent) == whole[cut:]


def test_no_two_texts_have_the_same_last_key():
    """All 2-block texts of 3 tokens, and those that a sum, a join of decimals or the last block alone would confuse."""
    texts = [list(text) for text in itertools.product(range(3), repeat=4)]
    texts += [[11, 1, 0, 0], [1, 11, 0, 0], [111, 0, 0, 0], [0, 256, 0, 0], [1, 0, 256, 0], [0, 2**32, 0, 0]]
    assert len({kv_cache.block_keys(text, 2)[-1] for text in texts}) == len(texts)


@given(
    before=st.tuples(st.lists(IDS, min_size=1, max_size=6), st.lists(IDS, min_size=1, max_size=6)),
    last=st.lists(IDS, min_size=3, max_size=3),
)
def test_the_same_last_block_after_different_texts_has_different_keys(before, last):
    texts = [(one * 3)[: 3 * len(one)] + last for one in before]  # whole blocks of 3, then the same block
    first, second = (kv_cache.block_keys(text, 3)[-1] for text in texts)
    assert (first == second) == (texts[0] == texts[1])


def test_the_same_last_block_after_another_beginning_is_not_taken_over():
    cache = paged(block_size=2)
    prefill(cache, 1, [1, 2, 5, 6, 7])
    assert prefill(cache, 2, [3, 4, 5, 6, 7]) == 0
    assert prefill(cache, 3, [5, 6, 7]) == 0
    assert_texts(cache, {1: [1, 2, 5, 6, 7], 2: [3, 4, 5, 6, 7], 3: [5, 6, 7]})


def test_ids_that_need_more_than_four_bytes_are_told_apart():
    cache = paged(block_size=1)
    prefill(cache, 1, [1, 2])
    assert prefill(cache, 2, [1 + 2**32, 2]) == 0


def test_an_index_finds_blocks_up_to_the_first_that_is_missing():
    index = cache_parts.PrefixIndex()
    for block, key in enumerate((b"a", b"b", b"c")):
        index.add(key, block)
    index.add(b"b", 7)  # both hold the same: the first one stays
    assert index.find([b"a", b"b", b"c", b"d"]) == [0, 1, 2]
    assert 7 not in index and 1 in index
    index.forget(1)
    index.forget(1)
    assert index.find([b"a", b"b", b"c"]) == [0] and index.find([b"b"]) == []
    index.add(b"b", 7)
    assert index.find([b"a", b"b", b"c"]) == [0, 7, 2]


@pytest.mark.parametrize("length", range(1, 14))
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_a_prompt_sent_twice_takes_over_all_full_blocks_but_computes_its_last_token(length, block_size):
    cache = paged(32, block_size)
    text = list(range(length))
    assert prefill(cache, 1, text) == 0
    expected = (length - 1) // block_size * block_size
    assert prefill(cache, 2, text) == expected
    shared = expected // block_size
    assert cache.block_tables[1][:shared] == cache.block_tables[2][:shared]
    assert set(cache.block_tables[1][shared:]).isdisjoint(cache.block_tables[2][shared:])
    assert_texts(cache, {1: text, 2: text})
    assert (cache.prefix_hit_tokens, cache.prefix_query_tokens) == (expected, 2 * length)
    cache.audit()


@pytest.mark.parametrize("block_size", [1, 3, 4])
@pytest.mark.parametrize("length", [8, 9])
@pytest.mark.parametrize("released", [True, False])
def test_the_same_prompt_four_times_is_four_times_the_same(block_size, length, released):
    cache = paged(48, block_size)
    text = list(range(length))
    seen = []
    for request in range(4):
        matched = prefill(cache, request, text)
        assert matched == (0 if request == 0 else (length - 1) // block_size * block_size)
        write(cache, {request: (text, [40, 41 + request, 42])})
        assert_texts(cache, {request: [*text, 40, 41 + request, 42]})
        cache.rewind(request, 3)
        seen.append(text_of(cache, request))
        cache.audit()
        if released:
            cache.release(request)
    assert seen[0] == seen[1] == seen[2] == seen[3]


def test_a_last_block_computed_twice_leaves_the_first_in_the_index():
    cache = paged(block_size=4)
    prefill(cache, 1, [1, 2, 3, 4])
    prefill(cache, 2, [1, 2, 3, 4])
    assert cache.block_tables == {1: [0], 2: [1]}
    assert list(cache.index.keys) == [0]
    cache.release(2)  # its block is in no index: it is free, not kept
    assert 1 in cache.allocator.free and not cache.allocator.kept
    assert prefill(cache, 3, [1, 2, 3, 4, 5]) == 4
    assert cache.block_tables[3][0] == 0
    cache.audit()


def test_texts_that_part_within_a_block_share_what_comes_before():
    cache = paged(block_size=4)
    prefill(cache, 1, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert prefill(cache, 2, [1, 2, 3, 4, 5, 6, 7, 0, 9]) == 4
    assert_texts(cache, {1: [1, 2, 3, 4, 5, 6, 7, 8, 9], 2: [1, 2, 3, 4, 5, 6, 7, 0, 9]})


def test_what_was_generated_serves_the_next_turn_of_a_chat():
    cache = paged(block_size=4)
    prefill(cache, 1, [1, 2, 3])
    for token in range(4, 10):
        write(cache, {1: (list(range(1, token)), [token])})
    cache.release(1)
    assert prefill(cache, 2, [*range(1, 10), 20, 21]) == 8
    assert_texts(cache, {2: [*range(1, 10), 20, 21]})


def test_blocks_of_an_interrupted_pass_are_not_published():
    cache = paged(block_size=2)
    write(cache, {1: ([], [1, 2, 3, 4])}, layers=2)
    assert cache.match_prefix(2, [1, 2, 3, 4]) == 0
    write(cache, {1: ([], [1, 2])})
    write(cache, {1: ([1, 2], [3, 4])}, layers=2)
    assert cache.match_prefix(3, [1, 2, 3, 4, 5]) == 2


@pytest.mark.parametrize("holder", ["nobody else", "a fork", "a match"])
def test_a_published_block_that_is_rewound_and_written_leaves_the_index_or_is_copied(holder):
    cache = paged(block_size=4)
    text = [1, 2, 3, 4, 5]
    prefill(cache, 1, text)
    if holder == "a fork":
        cache.fork(1, 2)
    elif holder == "a match":
        prefill(cache, 2, text)
    cache.rewind(1, 3)
    cache.audit()
    write(cache, {1: ([1, 2], [9, 9, 9])})
    cache.audit()
    assert_texts(cache, {1: [1, 2, 9, 9, 9]} | ({} if holder == "nobody else" else {2: text}))
    assert prefill(cache, 3, text) == (0 if holder == "nobody else" else 4)
    assert prefill(cache, 4, [1, 2, 9, 9, 9]) == 4
    assert_texts(cache, {3: text, 4: [1, 2, 9, 9, 9]})


def test_a_match_between_a_rewind_and_the_next_write_keeps_its_rows():
    cache = paged(block_size=4)
    prefill(cache, 1, [1, 2, 3, 4, 5])
    cache.rewind(1, 3)
    assert prefill(cache, 2, [1, 2, 3, 4, 5]) == 4
    write(cache, {1: ([1, 2], [9, 9])})
    assert_texts(cache, {1: [1, 2, 9, 9], 2: [1, 2, 3, 4, 5]})
    cache.audit()


def test_a_block_that_is_about_to_be_written_is_not_handed_out_even_if_the_pass_is_interrupted():
    cache = paged(block_size=4)
    prefill(cache, 1, [1, 2, 3, 4, 5])
    cache.rewind(1, 3)
    write(cache, {1: ([1, 2], [9, 9])}, layers=1)
    assert cache.match_prefix(2, [1, 2, 3, 4, 5]) == 0
    cache.release(1)
    assert prefill(cache, 3, [1, 2, 3, 4, 5]) == 0
    assert_texts(cache, {3: [1, 2, 3, 4, 5]})


def test_released_blocks_are_kept_and_still_count_as_free():
    cache = paged(num_blocks=4, block_size=2)
    prefill(cache, 1, [1, 2, 3, 4, 5])
    cache.release(1)
    assert cache.num_free_blocks == 4 and len(cache.allocator.kept) == 2
    assert prefill(cache, 2, [1, 2, 3, 4, 6]) == 4
    assert cache.num_free_blocks == 1 and not cache.allocator.kept


def test_a_beginning_is_evicted_after_what_follows_it():
    cache = paged(num_blocks=4, block_size=2)
    prefill(cache, 1, [1, 2, 3, 4, 5, 6, 7, 8])
    cache.release(1)
    assert list(cache.allocator.kept) == [3, 2, 1, 0]
    prefill(cache, 2, [9, 9, 9])  # takes two blocks
    cache.release(2)
    assert cache.match_prefix(3, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4


def test_the_least_recently_used_text_is_evicted_first():
    cache = paged(num_blocks=4, block_size=2)
    for request, text in enumerate(([1, 2, 0], [3, 4, 0], [5, 6, 0])):
        prefill(cache, request, text)
        cache.release(request)
    assert prefill(cache, 3, [1, 2, 0]) == 2  # used again: now [3, 4] is the oldest
    cache.release(3)
    prefill(cache, 4, [7, 8, 0])
    cache.release(4)
    assert [cache.match_prefix(10 + one, [one, one + 1, 0]) for one in (3, 1, 5, 7)] == [0, 2, 2, 2]
    cache.audit()


def test_blocks_behind_one_that_was_evicted_are_out_of_reach_but_not_lost():
    cache = paged(num_blocks=4, block_size=2)
    prefill(cache, 1, [1, 2, 3, 4, 5, 6])
    first, middle, last = cache.block_tables[1]
    cache.release(1)
    cache.allocator.kept.move_to_end(middle, last=False)  # so that the middle of the chain is evicted first
    prefill(cache, 2, [9, 9, 9])
    assert middle in cache.block_tables[2] and middle not in cache.index
    assert cache.match_prefix(3, [1, 2, 3, 4, 5, 6, 7]) == 2
    assert cache.block_tables[3] == [first] and last in cache.allocator.kept
    cache.release(2)
    cache.audit()
    write(cache, {3: ([1, 2], [8] * 6)})  # every other block is needed, the unreachable one too
    assert last in cache.block_tables[3] and cache.index.keys.get(last) != kv_cache.block_keys([1, 2, 3, 4, 5, 6], 2)[2]
    assert_texts(cache, {3: [1, 2, 8, 8, 8, 8, 8, 8]})
    cache.audit()


def test_a_chain_that_is_whole_again_is_found_again():
    cache = paged(num_blocks=6, block_size=2)
    prefill(cache, 1, [1, 2, 3, 4, 5, 6])
    cache.release(1)
    cache.allocator.kept.move_to_end(1, last=False)
    prefill(cache, 2, [9] * 8)  # the free blocks and the middle of the chain
    cache.release(2)
    cache.allocator.kept.move_to_end(2)  # the end of the chain is to stay
    assert prefill(cache, 3, [1, 2, 3, 4, 0]) == 2  # writes the middle again
    cache.release(3)
    assert prefill(cache, 4, [1, 2, 3, 4, 5, 6, 7]) == 6
    assert_texts(cache, {4: [1, 2, 3, 4, 5, 6, 7]})


def test_kept_blocks_that_a_match_takes_over_are_not_free_any_more():
    cache = paged(num_blocks=4, block_size=2)
    prefill(cache, 1, [1, 2, 3, 4, 5, 6])
    cache.release(1)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]  # 5 blocks, of which 3 are here and 1 is free
    assert cache.num_free_blocks == 4
    assert cache.match_prefix(2, prompt) == 6
    assert (cache.num_free_blocks, cache.blocks_needed(2, 3)) == (1, 2)
    with pytest.raises(OutOfMemory, match="needs 2 more blocks of 2 tokens; 1 of 4 are free"):
        cache.reserve(2, 3)
    cache.release(2)
    assert cache.num_free_blocks == 4
    assert cache.match_prefix(3, prompt) == 6  # nothing was lost
    cache.audit()


def test_reserving_does_not_evict_what_the_same_request_has_taken_over():
    cache = paged(num_blocks=4, block_size=2)
    prefill(cache, 1, [1, 2, 3, 4, 5])
    cache.release(1)
    text = [1, 2, 3, 4, 6, 7, 8, 9]
    assert prefill(cache, 2, text) == 4
    assert_texts(cache, {2: text})


@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3))))
def test_parent_fork_and_match_may_be_released_in_any_order(order):
    cache = paged(num_blocks=12, block_size=2)
    text = [1, 2, 3, 4, 5]
    prefill(cache, 1, text)
    cache.fork(1, 2)
    prefill(cache, 3, text)
    texts = {request: [*text, request, request] for request in (1, 2, 3)}
    for request, own in texts.items():
        write(cache, {request: (text, own[5:])})
    for request in order:
        cache.release(request)
        del texts[request]
        assert_texts(cache, texts)
        cache.audit()
    assert cache.num_free_blocks == 12
    assert prefill(cache, 4, text) == 4
    assert_texts(cache, {4: text})


def test_a_number_used_again_does_not_bring_back_the_old_text():
    cache = paged(block_size=2)
    prefill(cache, 1, [1, 2, 3, 4, 5])
    cache.release(1)
    assert prefill(cache, 1, [6, 7, 8]) == 0
    assert_texts(cache, {1: [6, 7, 8]})
    cache.release(1)
    assert prefill(cache, 1, [1, 2, 3, 4, 6]) == 4
    assert_texts(cache, {1: [1, 2, 3, 4, 6]})


def test_a_request_that_has_begun_cannot_be_matched_again():
    cache = paged(block_size=2)
    prefill(cache, 1, [1, 2, 3])
    with pytest.raises(ValueError, match="request 1 is in the cache already"):
        cache.match_prefix(1, [1, 2, 3])


def test_an_empty_prompt_and_a_prompt_of_one_token_match_nothing():
    cache = paged(block_size=1)
    prefill(cache, 1, [1, 2])
    assert cache.match_prefix(2, []) == cache.match_prefix(3, [1]) == 0
    assert set(cache.block_tables) == {1}


def test_without_sharing_nothing_is_published_kept_or_counted():
    cache = paged(block_size=2, prefix_sharing=False)
    prefill(cache, 1, [1, 2, 3, 4])
    cache.release(1)
    assert prefill(cache, 2, [1, 2, 3, 4]) == 0
    assert_texts(cache, {2: [1, 2, 3, 4]})
    assert not cache.index.keys and not cache.allocator.kept and cache.prefix_query_tokens == 0
    cache.audit()


@settings(deadline=None, max_examples=60)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=8),
    block_size=st.integers(1, 4),
    chunk=st.integers(1, 12),
)
def test_a_hit_is_as_long_as_the_longest_common_beginning_allows(prompts, block_size, chunk):
    """With blocks enough nothing is evicted: so a hit has exactly the blocks that some earlier prompt begins with."""
    cache = paged(8 * 12, block_size)
    for request, prompt in enumerate(prompts):
        common = 0
        for other in prompts[:request]:
            length = next((i for i, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), None)
            common = max(common, min(len(prompt), len(other)) if length is None else length)
        matched = prefill(cache, request, prompt, chunk)
        assert matched == min(common, len(prompt) - 1) // block_size * block_size
    assert_texts(cache, dict(enumerate(prompts)))
    cache.audit()
