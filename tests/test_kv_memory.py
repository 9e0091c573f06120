"""Memory becomes blocks by the formula, and a setting that cannot be meant is refused in a sentence."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import tiny_model

from llmfromscratch import kv_cache, kv_memory, sparse_cache
from llmfromscratch.errors import OutOfMemory, RequestError

CONFIG = tiny_model().config  # 3 layers, 3 key/value heads of 4 numbers, a context of 96
TOKEN = 3 * 2 * 3 * 4 * 4  # bytes in float32
LAYOUT = kv_cache.CacheLayout.of(CONFIG, torch.float32, "cpu")
FREE = 1_000_000


@pytest.fixture(autouse=True)
def free_memory(monkeypatch) -> dict[str, int]:
    """What each device has free; tests may change it."""
    free = {"cpu": FREE, "meta": FREE}
    monkeypatch.setattr(kv_memory, "available_memory", lambda device: free[str(device)])
    return free


def blocks(memory, block_size: int = 16, max_requests: int = 1000, layout: kv_cache.CacheLayout = LAYOUT) -> int:
    return kv_memory.blocks_for(memory, layout, block_size, CONFIG.context_length, max_requests)


# ---- blocks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_bytes_become_as_many_blocks_as_fit_into_them(block_size):
    block = block_size * TOKEN
    assert blocks(10 * block, block_size) == 10
    assert blocks(10 * block - 1, block_size) == 9
    assert blocks(float(10 * block), block_size) == 10


def test_half_the_precision_gives_twice_the_blocks():
    half = kv_cache.CacheLayout.of(CONFIG, torch.bfloat16, "cpu")
    assert blocks(100_000, layout=half) in (2 * blocks(100_000), 2 * blocks(100_000) + 1)


def test_a_share_is_a_share_of_what_is_free():
    assert blocks(0.5) == FREE // 2 // (16 * TOKEN)


def test_without_a_wish_it_is_a_quarter_of_what_is_free():
    assert blocks(None) == FREE // 4 // (16 * TOKEN)


def test_without_a_wish_it_is_no_more_than_all_requests_can_use(free_memory):
    free_memory["cpu"] = 10**15
    assert blocks(None, max_requests=3) == 3 * 96 // 16
    assert blocks(None, block_size=36, max_requests=3) == 3 * 3  # 96 tokens take three blocks of 36
    assert blocks(0.5, max_requests=3) == 10**15 // 2 // (16 * TOKEN)  # who asks for more gets it


def test_the_device_that_runs_out_first_decides(free_memory):
    layout = kv_cache.CacheLayout.of(CONFIG, torch.float32, ["cpu", "cpu", "meta"])
    free_memory |= {"cpu": 100_000, "meta": 1_000_000}
    assert blocks(0.5, layout=layout) == 50_000 // (16 * TOKEN * 2 // 3)
    free_memory |= {"cpu": 1_000_000, "meta": 100_000}
    assert blocks(0.5, layout=layout) == 50_000 // (16 * TOKEN // 3)


def test_less_than_a_block_is_out_of_memory_with_the_numbers():
    with pytest.raises(OutOfMemory) as caught:
        blocks(16 * TOKEN - 1)
    assert "the cache gets 4.61 kB, and one block of 16 tokens takes 4.61 kB" in str(caught.value)
    with pytest.raises(OutOfMemory, match="the cache gets 1 bytes"):
        blocks(1)
    with pytest.raises(OutOfMemory, match="the cache gets 0.001 of the 1 MB free.*give kv_cache_memory more"):
        blocks(0.001)


def test_more_than_is_free_is_out_of_memory_with_the_numbers(free_memory):
    with pytest.raises(OutOfMemory, match="asks for 8 GB, and 9.97 MB are free for it; ask for less"):
        free_memory["cpu"] = 9_970_000
        blocks(8e9)
    free_memory["cpu"] = 0
    with pytest.raises(OutOfMemory, match="0.25 of the 0 bytes free"):
        blocks(None)


NO_MEMORY = [0, 0.0, -1, -0.5, math.nan, math.inf, True, "8GB", "0.5", [1]]


@pytest.mark.parametrize("memory", NO_MEMORY)
def test_what_is_no_memory_is_refused_with_its_value(memory):
    for attempt in (lambda: blocks(memory), lambda: cache(memory=memory), lambda: cache("static", memory=memory)):
        with pytest.raises(RequestError) as caught:
            attempt()
        assert f"kv_cache_memory is {memory!r}; give bytes" in str(caught.value)


# ---- the cache of that kind --------------------------------------------------------------------------------------


def cache(kind: str = "paged", **changes):
    return kv_memory.open_cache(kind, CONFIG, torch.float32, "cpu", **changes)


def test_each_kind_is_the_cache_of_that_name():
    kinds = {
        "none": kv_cache.NoKVCache,
        "concat": kv_cache.ConcatKVCache,
        "static": kv_cache.StaticKVCache,
        "paged": kv_cache.PagedKVCache,
    }
    assert set(kinds) == set(kv_memory.KINDS)
    for kind, expected in kinds.items():
        assert type(cache(kind)) is expected


def test_the_paged_cache_has_the_blocks_that_were_paid_for():
    own = cache(memory=50 * 8 * TOKEN, block_size=8, prefix_sharing=False)
    assert (own.num_free_blocks, own.block_size, own.prefix_sharing) == (50, 8, False)
    assert [tuple(stored.shape) for stored in own.storage] == [(2, 3, 50, 8, 4)] * 3
    assert sum(stored.nbytes for stored in own.storage) == 50 * 8 * TOKEN


def test_the_static_cache_has_a_whole_context_for_each_row_that_was_paid_for():
    own = cache("static", memory=3 * 96 * TOKEN)
    assert (len(own.free_rows), own.max_length) == (3, 96)
    assert len(cache("static", max_requests=2, memory=5 * 96 * TOKEN).free_rows) == 2
    with pytest.raises(OutOfMemory, match="one block of 96 tokens takes 27.6 kB"):
        cache("static", memory=96 * TOKEN - 1)


def test_a_window_is_a_cache_that_forgets():
    own = cache(window=7)
    assert type(own) is sparse_cache.SlidingWindow
    assert (own.window, own.sinks) == (7, 4)


def test_the_cache_has_the_dtype_of_the_model():
    own = kv_memory.open_cache("paged", CONFIG, torch.bfloat16, ["cpu"] * 3)
    assert {stored.dtype for stored in own.storage} == {torch.bfloat16}


CONTRADICTIONS = [
    (("page",), {}, "kv_cache is 'page'; expected one of paged, none, concat, static"),
    ((None,), {}, "kv_cache is None"),
    (("paged",), {"block_size": 0}, "block_size is 0; it must be a whole number of tokens, at least 1"),
    (("paged",), {"block_size": 1.5}, "block_size is 1.5"),
    (("paged",), {"block_size": True}, "block_size is True"),
    (("paged",), {"block_size": None}, "block_size is None"),
    (("paged",), {"window": 0}, "window is 0"),
    (("paged",), {"window": "8"}, "window is '8'"),
    (("paged",), {"prefix_sharing": 1}, "prefix_sharing is 1; it must be True or False"),
    (("none",), {"window": 8}, "window=8 forgets tokens and kv_cache='none' keeps all"),
    (("static",), {"window": 8}, "kv_cache='static' keeps all"),
    (("none",), {"memory": 0.5}, "kv_cache='none' takes what it needs"),
    (("concat",), {"memory": 10**6}, "kv_cache='concat' takes what it needs"),
    (("paged",), {"window": 8, "memory": 0.5}, "a windowed cache takes what it needs"),
    (("concat",), {"block_size": 8}, "block_size=8 is for the paged cache alone"),
    (("paged",), {"window": 8, "block_size": 8}, "block_size=8 is for the paged cache alone"),
]


@pytest.mark.parametrize(("kind", "changes", "sentence"), CONTRADICTIONS)
def test_what_is_unknown_or_contradicts_itself_is_refused(kind, changes, sentence):
    with pytest.raises(RequestError) as caught:
        cache(*kind, **changes)
    assert sentence in str(caught.value)
