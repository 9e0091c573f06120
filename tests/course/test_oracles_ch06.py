"""The oracles of chapter 6's floor, online softmax, fused products and buckets are right beyond the cases that learners
see: they agree with the engine, with a real model's parameters and with torch's attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from llmfromscratch import learner_engine, model
from llmfromscratch.course.comparing import compare
from llmfromscratch.course.exercises import fusing_checks, online_softmax_checks, product_checks, roofline_checks
from llmfromscratch.course.exercises.in_engine import in_engine
from llmfromscratch.course.failures import CheckFailed

ENGINE = learner_engine.reference("optimization")
examples = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
few = st.integers(1, 4)


def random_numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@examples
@given(few, st.integers(1, 40), st.integers(1, 40), few, few, few, st.integers(1, 50), st.integers(0, 99))
def test_counting_tensor_by_tensor_is_the_engines_floor(layers, hidden, ffn, group, kv_heads, half, vocab, context):
    config = roofline_checks.config_of((layers, hidden, ffn, group * kv_heads, kv_heads, 2 * half, vocab))
    expected = ENGINE.decode_bytes(config, context, 0.5, 2)
    assert roofline_checks.tensor_by_tensor(config, context, 0.5, 2) == expected


def test_the_floor_without_a_context_is_the_parameters_of_the_models_linear_layers():
    config = roofline_checks.config_of((2, 10, 14, 6, 2, 8, 17))
    layers = [part for part in model.Model(config).modules() if isinstance(part, torch.nn.Linear)]
    expected = sum(part.weight.numel() for part in layers)
    assert len(layers) == 15 and roofline_checks.tensor_by_tensor(config, 0, 1, 1) == expected


@examples
@given(seeds, st.integers(1, 6), st.integers(1, 9), st.integers(1, 5))
def test_sum_by_sum_is_the_engines_fold(seed, rows, tile, head_dim):
    scores = 5 * random_numbers(seed, 2, rows, 2 * tile)
    scores[random_numbers(seed + 1, 2, rows, 2 * tile) > 0.5] = -torch.inf
    values = random_numbers(seed + 2, 2, 2 * tile, head_dim)
    state = online_softmax_checks.nothing_yet(2, rows, head_dim, dtype=torch.float64)
    for part in (slice(tile), slice(tile, None)):
        found = online_softmax_checks.sum_by_sum(*state, scores[..., part], values[:, part])
        state = ENGINE.fold_tile(*state, scores[..., part], values[:, part])
        for one, other in zip(found.values(), state, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@examples
@given(seeds, st.integers(1, 5), st.integers(1, 9))
def test_sums_over_one_tile_divided_are_the_softmax(seed, rows, tile):
    scores, values = 30 * random_numbers(seed, rows, tile), random_numbers(seed + 1, tile, 3)
    found = online_softmax_checks.sum_by_sum(
        *online_softmax_checks.nothing_yet(rows, 3, dtype=torch.float64), scores, values
    )
    torch.testing.assert_close(found["mixed"] / found["total"].unsqueeze(-1), scores.softmax(-1) @ values)


@pytest.mark.parametrize("case", online_softmax_checks.attention_cases(), ids=lambda case: case.text)
def test_attention_in_one_go_is_torchs(case):
    queries, keys, values, visible, _ = case.args
    expected = F.scaled_dot_product_attention(
        *(part.double().transpose(0, 1) for part in (queries, keys, values)), attn_mask=visible, enable_gqa=True
    )
    found = case.call(online_softmax_checks.in_one_go)
    torch.testing.assert_close(found, expected.transpose(0, 1).float(), rtol=1e-5, atol=1e-6)


@examples
@given(seeds, st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 6))
def test_row_under_row_is_the_engines_fusion(seed, rows, width):
    weights = [random_numbers(seed + place, many, width) for place, many in enumerate(rows)]
    fused, views = ENGINE.fuse_rows(weights)
    found = fusing_checks.row_under_row(weights)
    assert torch.equal(found["the fused weight"], fused)
    assert all(torch.equal(one, other) for one, other in zip(found["the views"], views, strict=True))


@pytest.mark.parametrize("case", fusing_checks.gain_cases(), ids=lambda case: case.text)
def test_number_by_number_gives_what_the_product_with_the_scaled_vector_gives(case):
    weight, gain = case.args
    x = random_numbers(7, weight.shape[1])
    expected = weight.double() @ (gain.double() * x)
    found = case.call(fusing_checks.number_by_number).double() @ x
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05 if weight.dtype == torch.bfloat16 else 1e-5)


@examples
@given(seeds, st.integers(1, 3), st.integers(1, 12), st.integers(1, 40), st.booleans(), st.data())
def test_products_row_by_row_are_the_engines(seed, inputs, rows, width, bits, data):
    first = data.draw(st.integers(0, rows))
    end = data.draw(st.integers(first, rows))
    x, weight = (
        random_numbers(seed + place, *shape).float() for place, shape in enumerate([(inputs, width), (rows, width)])
    )
    stored = product_checks.as_bits(weight) if bits else weight.numpy()
    expected = product_checks.row_by_row(x.numpy(), stored, first, end)
    np.testing.assert_allclose(product_checks.writing(ENGINE.multiply_rows)(x.numpy(), stored, first, end), expected,
                               rtol=1e-4, atol=1e-4)  # fmt: skip


@examples
@given(st.integers(0, 2**40), st.integers(1, 1000))
def test_the_first_bucket_that_holds_is_the_engines(count, smallest):
    found = roofline_checks.first_that_holds(count, smallest)
    assert found == ENGINE.bucket_of(count, smallest) and found >= count
    assert found == smallest or found // 2 < count


@pytest.mark.parametrize("case", product_checks.prefetch_cases(), ids=lambda case: case.text)
@pytest.mark.parametrize("ahead", [1, 3, 7])
def test_a_product_that_asks_ahead_gives_a_complaint_only_where_a_longer_distance_is_asked_for(case, ahead):
    def multiply(x, weight, output, first, end):
        for row in range(first, end):
            for column in range(0, weight.shape[1], product_checks.words.LINE // weight.itemsize):
                product_checks.words.prefetch(weight, min(row + ahead, len(weight) - 1), column)
            for i in range(weight.shape[1]):
                output[0, row] += weight[row, i]

    _, _, first, end = case.args
    notes = product_checks.noted(multiply, case)
    assert product_checks.complaint(notes, case, ahead) is None
    # one row later is as good as asking after the row was read, not before
    assert product_checks.complaint(notes, case, ahead + 1) is None
    if first + ahead + 2 < end:
        assert product_checks.complaint(notes, case, ahead + 2) is not None


def test_a_wrong_fold_in_the_engines_tiled_attention_is_found_though_one_tile_is_right():
    right = ENGINE.fold_tile

    def forgets(mixed, top, total, scores, values):
        return right(0 * mixed, top, total, scores, values)

    with in_engine("optimization", "fold_tile", forgets) as engine, pytest.raises(CheckFailed):
        compare(engine.tiled_attention, online_softmax_checks.in_one_go, online_softmax_checks.attention_cases(),
                expected="")  # fmt: skip
