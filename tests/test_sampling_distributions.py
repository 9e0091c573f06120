"""What is drawn follows the distribution that was asked for: chi-square of 100,000 seeded draws, by closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch import sampling

DRAWS = 100_000
LOGITS = [2.0, 1.0, 1.0, 0.0, -1.0, 3.0, 0.5, -3.0]


def assert_drawn_from(expected: list[float], drawn: torch.Tensor) -> None:
    """Pearson's chi-square at 1 in a million, by Wilson and Hilferty's approximation of its quantile."""
    counts = torch.bincount(drawn, minlength=len(expected)).tolist()
    assert len(counts) == len(expected)
    assert all(count == 0 for count, share in zip(counts, expected, strict=True) if share == 0), "a cut token was drawn"
    total = sum(expected)
    cells = [(count, len(drawn) * share / total) for count, share in zip(counts, expected, strict=True) if share > 0]
    assert all(mean > 5 for _, mean in cells), "too few draws are expected of some token for this test"
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = len(cells) - 1
    if freedom:
        spread = 2 / (9 * freedom)
        assert statistic < freedom * (1 - spread + 4.753 * math.sqrt(spread)) ** 3


def softmax(logits, temperature=1.0):
    weights = [math.exp(value / temperature) for value in logits]
    return [weight / sum(weights) for weight in weights]


def only(kept, shares):
    return [share if token in kept else 0.0 for token, share in enumerate(shares)]


def nucleus(shares, p):
    order = sorted(range(len(shares)), key=lambda token: (-shares[token], token))
    kept, total = [], 0.0
    while total < p:
        kept.append(order[len(kept)])
        total += shares[kept[-1]]
    return only(kept, shares)


def typical(shares, p):
    entropy = -sum(share * math.log(share) for share in shares)
    order = sorted(
        range(len(shares)), key=lambda token: (abs(-math.log(shares[token]) - entropy), -shares[token], token)
    )
    kept, total = [], 0.0
    while total < p:
        kept.append(order[len(kept)])
        total += shares[kept[-1]]
    return only(kept, shares)


HOT = softmax(LOGITS, 2.0)
FIVE = [share / sum(only({0, 1, 2, 5, 6}, HOT)) for share in only({0, 1, 2, 5, 6}, HOT)]
BIASED = [2.0, 1.0, 1.0, 2.0, -1.0, -math.inf, 0.5, -3.0]
CASES = [
    ({"temperature": 0.75}, softmax(LOGITS, 0.75)),
    ({"temperature": 1.0}, softmax(LOGITS)),
    ({"temperature": 2.0}, HOT),
    ({"temperature": 1.0, "top_k": 3}, only({5, 0, 1}, softmax(LOGITS))),
    ({"temperature": 2.0, "top_p": 0.8}, nucleus(HOT, 0.8)),
    ({"temperature": 2.0, "min_p": 0.3}, [share if share >= 0.3 * max(HOT) else 0.0 for share in HOT]),
    ({"temperature": 2.0, "typical_p": 0.6}, typical(HOT, 0.6)),
    ({"temperature": 1.0, "logit_bias": {5: -math.inf, 3: 2.0}}, softmax(BIASED)),
    ({"temperature": 1.0, "repetition_penalty": 2.0}, softmax([1.0, 1.0, 1.0, 0.0, -2.0, 3.0, 0.5, -3.0])),
    ({"temperature": 2.0, "top_k": 5, "top_p": 0.7}, nucleus(FIVE, 0.7)),
]  # fmt: skip


@pytest.mark.parametrize("few", [2, 256])
@pytest.mark.parametrize(("fields", "expected"), CASES, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_draws_of_one_seeded_stream_follow_the_closed_form(monkeypatch, fields, expected, few):
    monkeypatch.setattr(sampling, "_FEW", few)
    row = sampling.Sampler().start(sampling.SamplingParams(seed=0, **fields), [0, 4, 4])
    adjusted = sampling.adjust(torch.tensor([LOGITS]), [row]).expand(DRAWS, -1)
    assert_drawn_from(expected, sampling.choose(adjusted, [row] * DRAWS))


@pytest.mark.parametrize(("fields", "expected"), CASES, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_the_distribution_that_is_told_is_the_closed_form(fields, expected):
    row = sampling.Sampler().start(sampling.SamplingParams(**fields), [0, 4, 4])
    found = sampling.distribution(torch.tensor([LOGITS]), [row])[0].tolist()
    assert found == pytest.approx([share / sum(expected) for share in expected], abs=1e-6)


def test_first_draws_of_many_seeds_follow_the_softmax_too():
    params = [sampling.SamplingParams(temperature=1.0, seed=seed) for seed in range(20_000)]
    rows = [sampling.Sampler().start(one, []) for one in params]
    tokens = sampling.Sampler().sample(torch.tensor([LOGITS[:7]]).expand(len(rows), -1), rows)
    assert_drawn_from(softmax(LOGITS[:7]), torch.tensor(tokens))


@pytest.mark.parametrize("weights", [[0.2, 0.0, 0.5, 0.3], [3, 1, 0, 0], [0, 0, 7.0, 1e-30 * 0, 9.0], [1.0]])
def test_draws_follow_the_weights_which_need_not_add_up_to_one(weights):
    uniforms = torch.rand(DRAWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = sampling.draw(torch.tensor([weights], dtype=torch.float32).expand(DRAWS, -1), uniforms)
    assert_drawn_from([float(weight) for weight in weights], drawn)


def test_the_example_of_draw_is_right_at_its_borders():
    row = torch.tensor([[0.2, 0.0, 0.5, 0.3]], dtype=torch.float64)
    numbers = [0.0, 0.1999, 0.2001, 0.6999, 0.7001, 1 - 2**-53]
    drawn = sampling.draw(row.expand(len(numbers), -1), torch.tensor(numbers, dtype=torch.float64))
    assert drawn.tolist() == [0, 0, 2, 2, 3, 3]
    halves = torch.tensor([[0.25, 0.25, 0.5]]).expand(3, -1)
    assert sampling.draw(halves, torch.tensor([0.25, 0.5, 0.75])).tolist() == [1, 2, 2]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.just(0.0) | st.floats(1e-30, 1e30), min_size=1, max_size=20).filter(any),
    st.just(0.0) | st.just(1 - 2**-53) | st.floats(0, 1, exclude_max=True),
)
def test_a_column_of_probability_zero_is_never_drawn(weights, number):
    drawn = sampling.draw(torch.tensor([weights], dtype=torch.float64), torch.tensor([number], dtype=torch.float64))
    assert weights[int(drawn)] > 0


def test_each_stream_gives_its_own_numbers_whoever_else_is_asked():
    alone = [sampling.uniforms([sampling.random_stream(seed)]).item() for seed in range(5)]
    together = sampling.uniforms([sampling.random_stream(seed) for seed in range(5)])
    assert together.dtype == torch.float64 and together.tolist() == alone
    assert len(set(alone)) == 5 and all(0 <= number < 1 for number in alone)
    assert sampling.uniforms([sampling.random_stream(None)]) != sampling.uniforms([sampling.random_stream(None)])
