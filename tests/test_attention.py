"""Attention equals the written-out sum over visible tokens, and torch's own, for every grouping of heads."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from llmfromscratch import attention, kv_cache
from llmfromscratch.batch import Batch


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


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
    result = attention.causal_attention(queries, keys, values, start)
    torch.testing.assert_close(result, written_out(queries, keys, values, start), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("start", "new"), [(0, 33), (20, 13), (32, 1)])
def test_it_equals_torchs_own_attention(start, new):
    queries, keys, values = random(new, 9, 8), random(start + new, 3, 8, seed=1), random(start + new, 3, 8, seed=2)
    mask = torch.arange(start + new)[None, :] <= torch.arange(start, start + new)[:, None]
    expected = F.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (queries, keys, values)), attn_mask=mask, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(attention.causal_attention(queries, keys, values, start), expected)


def test_half_precision_sums_thousands_of_small_weights_without_losing_them():
    # 4096 equal keys: every weight is 2**-12; summed up in bf16 the total would stop growing at 1/16
    queries, keys = torch.zeros(1, 1, 4, dtype=torch.bfloat16), torch.zeros(4096, 1, 4, dtype=torch.bfloat16)
    values = torch.ones(4096, 1, 4, dtype=torch.bfloat16)
    result = attention.causal_attention(queries, keys, values, 4095)
    assert result.dtype == torch.bfloat16
    assert result.flatten().tolist() == pytest.approx([1.0] * 4, rel=1e-2)


def test_large_scores_do_not_overflow():
    queries, keys, values = 1e4 * torch.ones(2, 1, 2), 1e4 * torch.ones(2, 1, 2), random(2, 1, 2, dtype=torch.float32)
    result = attention.causal_attention(queries, keys, values, 0)
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
