"""Decode steps that are computed together see what they see one by one: their own past, all of it, nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch import attention, decode_attention, kv_cache
from llmfromscratch.batch import Batch

LAYERS, KV_HEADS, GROUP, SIZE = 2, 3, 2, 4


def filled(lengths: list[int], block_size: int, dtype=torch.float64) -> kv_cache.PagedKVCache:
    """A cache in whose free places there is nothing but NaN, with so many tokens of each request, written in turns."""
    layout = kv_cache.CacheLayout(LAYERS, KV_HEADS, SIZE, dtype, (torch.device("cpu"),) * LAYERS)
    cache = kv_cache.PagedKVCache(layout, sum(lengths) + 3 * len(lengths), block_size)
    for stored in cache.storage:
        stored.fill_(float("nan"))
    generator = torch.Generator().manual_seed(len(lengths))
    for start in range(max(lengths)):  # one token of each in turn: blocks of different requests lie between each other
        write(cache, [(i, [7 + i], start) for i, length in enumerate(lengths) if start < length], generator)
    return cache


def write(cache, parts, generator) -> Batch:
    batch = Batch.of(parts)
    for layer in range(LAYERS):
        shape = (len(batch.token_ids), KV_HEADS, SIZE)
        keys, values = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        cache.write(layer, keys.to(cache.layout.dtype), values.to(cache.layout.dtype), batch)
    return batch


def queries(batch: Batch, dtype=torch.float64) -> torch.Tensor:
    shape = (len(batch.token_ids), KV_HEADS * GROUP, SIZE)
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=7),
    new=st.lists(st.integers(1, 3), min_size=7, max_size=7),
    block_size=st.integers(1, 5),
    group_tokens=st.sampled_from([1, 20, 3072]),
)
def test_any_mixture_of_decode_steps_and_prompts_equals_one_request_after_the_other(
    lengths, new, block_size, group_tokens
):
    cache = filled(lengths, block_size)
    generator = torch.Generator().manual_seed(3)
    batch = write(cache, [(i, [5] * new[i], length) for i, length in enumerate(lengths)], generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_attention, "_GROUP_TOKENS", group_tokens)
        for layer in range(LAYERS):
            expected = attention.attend(queries(batch), layer, batch, cache).clone()
            found = decode_attention.attend(queries(batch), layer, batch, cache)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_comes_out_as_it_does_one_by_one(dtype):
    cache = filled([5, 19, 11], 4, dtype)
    batch = write(cache, [(0, [5], 5), (1, [5], 19), (2, [5], 11)], torch.Generator().manual_seed(3))
    found = decode_attention.attend(queries(batch, dtype), 1, batch, cache)
    expected = attention.attend(queries(batch, dtype), 1, batch, cache)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=2 * torch.finfo(dtype).eps)


def test_groups_are_of_like_length_and_bounded():
    spans = Batch.of([(i, [5], start) for i, start in enumerate([1999, 9, 999, 0, 4000, 1000])]).spans
    found = [[span.start for span in group] for group in decode_attention.groups(spans)]
    assert found == [[0, 9, 999], [1000], [1999], [4000]]  # 3 x 1000 tokens fit into 3072, 4 x 1001 and 2 x 2000 do not
    assert list(decode_attention.groups([])) == []


def test_it_serves_two_decode_steps_or_more_over_blocks():
    paged, concat = filled([3, 3], 4), kv_cache.ConcatKVCache(LAYERS)
    two, one = Batch.of([(0, [5], 3), (1, [5], 3)]), Batch.of([(0, [5], 3), (1, [5, 6], 3)])
    assert decode_attention.applies(paged, two)
    assert not decode_attention.applies(paged, one)
    assert not decode_attention.applies(concat, two)


def test_the_groups_are_planned_once_a_pass_and_anew_for_the_next(monkeypatch):
    cache, planned = filled([3, 9, 4], block_size=2), []
    own = decode_attention.groups
    monkeypatch.setattr(decode_attention, "groups", lambda spans: planned.append(len(spans)) or own(spans))
    generator = torch.Generator().manual_seed(3)
    for start in (0, 1):
        batch = write(cache, [(i, [5], length + start) for i, length in enumerate([3, 9, 4])], generator)
        for layer in range(LAYERS):
            expected = attention.attend(queries(batch), layer, batch, cache).clone()
            torch.testing.assert_close(decode_attention.attend(queries(batch), layer, batch, cache), expected)
    assert planned == [3, 3]
