"""Attention equals the written-out sum over visible tokens, and torch's own, for every grouping of heads."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from llmfromscratch import attention, kv_cache
from llmfromscratch.batch import Batch


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def one_chunk(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
    """A chunk that follows `start` tokens, under its causal mask."""
    return attention.grouped_attention(queries, keys, values, attention.causal_mask(start, len(queries)))[0]


def written_out(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
    """One number at a time: query row i at position start + i sees keys 0 .. start + i; head h uses pair h // group."""
    new, heads, head_dim = queries.shape
    group = heads // keys.shape[1]
    result = torch.zeros_like(queries)
    for row in range(new):
        for head in range(heads):
            seen = range(start + row + 1)
            pair = head // group
            scores = [float(queries[row, head] @ keys[past, pair]) / math.sqrt(head_dim) for past in seen]
            weights = [math.exp(score - max(scores)) for score in scores]
            for past in seen:
                result[row, head] += weights[past] / sum(weights) * values[past, pair]
    return result


# Field case 10: a mask aligned at the upper left corner is right for a whole prompt and wrong for every later chunk.
@pytest.mark.parametrize(("start", "new"), [(0, 1), (0, 4), (3, 2), (5, 1), (1, 6)])
def test_the_mask_lets_each_token_see_itself_and_all_before_it(start, new):
    mask = attention.causal_mask(start, new)
    assert (mask.dtype, mask.shape) == (torch.bool, (new, start + new))
    for row in range(new):
        assert mask[row].tolist() == [key <= start + row for key in range(start + new)]


@settings(deadline=None)
@given(
    new=st.integers(1, 4),
    start=st.integers(0, 5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 1000),
)
def test_it_is_the_weighted_sum_over_what_each_token_may_see(new, start, kv_heads, group, head_dim, seed):
    queries = random(new, kv_heads * group, head_dim, seed=seed)
    keys, values = random(start + new, kv_heads, head_dim, seed=seed + 1), random(start + new, kv_heads, head_dim)
    result = one_chunk(queries, keys, values, start)
    torch.testing.assert_close(result, written_out(queries, keys, values, start), rtol=0, atol=1e-12)


def test_a_decode_step_needs_no_mask():
    queries, keys, values = random(1, 6, 4), random(7, 2, 4, seed=1), random(7, 2, 4, seed=2)
    everything, weights = attention.grouped_attention(queries, keys, values, None)
    torch.testing.assert_close(everything, written_out(queries, keys, values, 6), rtol=0, atol=1e-12)
    assert (weights > 0).all()


def test_the_weights_of_each_head_add_up_to_one_and_are_zero_where_nothing_may_be_seen():
    queries, keys, values = random(3, 6, 4), random(8, 2, 4, seed=1), random(8, 2, 4, seed=2)
    mask = random(3, 8, seed=3) > 0
    mask[:, 0] = True
    output, weights = attention.grouped_attention(queries, keys, values, mask)
    assert weights.shape == (6, 3, 8)
    torch.testing.assert_close(weights.sum(-1), torch.ones(6, 3, dtype=torch.float64))
    assert ((weights > 0) == mask).all()
    # head h reads pair h // 3: the weights are those of that head, not of another in its group
    for head in range(6):
        torch.testing.assert_close(output[:, head], weights[head] @ values[:, head // 3])


def test_the_weights_are_counted_in_float32_where_the_model_is_in_half_precision():
    queries, keys, values = (random(2, 2, 4, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    output, weights = attention.grouped_attention(queries, keys, values, attention.causal_mask(0, 2))
    assert (output.dtype, weights.dtype) == (torch.bfloat16, torch.float32)


def test_keys_and_values_may_lie_in_memory_in_any_order_and_stay_as_they_are():
    queries = random(4, 6, 5).transpose(0, 1).contiguous().transpose(0, 1)  # heads first in memory
    plain = random(9, 3, 5, seed=1), random(9, 3, 5, seed=2)
    expected = written_out(queries, *plain, 5)
    head_major = [pair.transpose(0, 1).contiguous().transpose(0, 1) for pair in plain]
    part_of_more = [torch.cat([pair, pair]).repeat(1, 2, 2)[:9, :3, :5] for pair in plain]
    for keys, values in (plain, head_major, part_of_more):
        before = keys.clone(), values.clone(), queries.clone()
        torch.testing.assert_close(one_chunk(queries, keys, values, 5), expected, rtol=0, atol=1e-12)
        assert all(map(torch.equal, (keys, values, queries), before))


@pytest.mark.parametrize(("start", "new"), [(0, 33), (20, 13), (32, 1)])
def test_it_equals_torchs_own_attention(start, new):
    queries, keys, values = random(new, 9, 8), random(start + new, 3, 8, seed=1), random(start + new, 3, 8, seed=2)
    mask = torch.arange(start + new)[None, :] <= torch.arange(start, start + new)[:, None]
    expected = F.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (queries, keys, values)), attn_mask=mask, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(one_chunk(queries, keys, values, start), expected)


def test_half_precision_sums_thousands_of_small_weights_without_losing_them():
    # 4096 equal keys: every weight is 2**-12; summed up in bf16 the total would stop growing at 1/16
    queries, keys = torch.zeros(1, 1, 4, dtype=torch.bfloat16), torch.zeros(4096, 1, 4, dtype=torch.bfloat16)
    values = torch.ones(4096, 1, 4, dtype=torch.bfloat16)
    result = one_chunk(queries, keys, values, 4095)
    assert result.dtype == torch.bfloat16
    assert result.flatten().tolist() == pytest.approx([1.0] * 4, rel=1e-2)


def test_large_scores_do_not_overflow():
    queries, keys, values = 1e4 * torch.ones(2, 1, 2), 1e4 * torch.ones(2, 1, 2), random(2, 1, 2, dtype=torch.float32)
    result = one_chunk(queries, keys, values, 0)
    torch.testing.assert_close(result, torch.stack([values[0], values.mean(0)]))


def test_each_request_of_a_batch_sees_its_own_cache_only():
    cache = kv_cache.ConcatKVCache(2)
    first, second = Batch.of([(1, [0, 0, 0], 0)]), Batch.of([(2, [0, 0], 0), (1, [0], 3)])
    keys, values = random(3, 2, 4, seed=1), random(3, 2, 4, seed=2)
    later_keys, later_values = random(3, 2, 4, seed=3), random(3, 2, 4, seed=4)
    cache.write(1, keys, values, first)
    cache.write(1, later_keys, later_values, second)
    queries = random(3, 4, 4, seed=5)
    result = attention.attend(queries, 1, second, cache)
    torch.testing.assert_close(result[:2], written_out(queries[:2], later_keys[:2], later_values[:2], 0))
    own_keys, own_values = torch.cat([keys, later_keys[2:]]), torch.cat([values, later_values[2:]])
    torch.testing.assert_close(result[2:], written_out(queries[2:], own_keys, own_values, 3))


def test_a_cache_may_use_the_same_memory_for_every_read():
    # the paged cache gathers into one buffer: what the last read gave is gone by the next
    batch = Batch.of([(1, [0, 0], 0), (2, [0, 0, 0], 0)])
    keys, values, queries = random(5, 2, 4, seed=1), random(5, 2, 4, seed=2), random(5, 4, 4, seed=3)
    buffer = torch.empty(2, 5, 2, 4, dtype=torch.float64)

    class Reusing(kv_cache.ConcatKVCache):
        def read(self, layer, request_id):
            found = torch.stack(super().read(layer, request_id))
            buffer.fill_(float("nan"))
            buffer[:, : found.shape[1]] = found
            return buffer[0, : found.shape[1]], buffer[1, : found.shape[1]]

    cache = Reusing(1)
    cache.write(0, keys, values, batch)
    result = attention.attend(queries, 0, batch, cache)
    torch.testing.assert_close(result[:2], written_out(queries[:2], keys[:2], values[:2], 0))
    torch.testing.assert_close(result[2:], written_out(queries[2:], keys[2:], values[2:], 0))
