"""Each processor is transformers' of the same name or a closed form, one by one and in the declared order."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from llmfromscratch import sampling

VOCAB = 400
examples = settings(max_examples=60, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
shares = st.floats(0.02, 0.98)


def random_logits(seed: int, rows: int = 1, scale: float = 3.0, vocab: int = VOCAB) -> torch.Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def one(prompt=(), answer=(), **fields) -> sampling.Row:
    row = sampling.Sampler().start(sampling.SamplingParams(**fields), list(prompt))
    row.token_ids.extend(answer)
    return row


def ours(logits: torch.Tensor, **fields) -> torch.Tensor:
    return sampling.distribution(logits, [one(temperature=1.0, **fields)])


def processed(logits: torch.Tensor, *processors, ids=()) -> torch.Tensor:
    """The distribution after processors of transformers, in float64."""
    scores = logits.double()
    for processor in processors:
        scores = processor(torch.tensor([list(ids)]), scores)
    return scores.softmax(dim=-1)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found > 0, expected > 0), "other tokens are kept"
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-12)


# ---- one by one --------------------------------------------------------------------------------------------------


@examples
@given(seeds, st.floats(0.05, 20))
def test_temperature_is_transformers_temperature(seed, temperature):
    logits = random_logits(seed)
    found = sampling.distribution(logits, [one(temperature=temperature)])
    expected = processed(logits, theirs.TemperatureLogitsWarper(temperature))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-12)


@examples
@given(seeds, st.integers(1, 2 * VOCAB))
def test_top_k_is_transformers_top_k(seed, k):
    logits = random_logits(seed)
    assert_same(ours(logits, top_k=k), processed(logits, theirs.TopKLogitsWarper(k)))


@examples
@given(seeds, shares, st.floats(0.1, 5))
def test_top_p_is_transformers_top_p(seed, p, scale):
    logits = random_logits(seed, scale=scale)
    assert_same(ours(logits, top_p=p), processed(logits, theirs.TopPLogitsWarper(p)))


@examples
@given(seeds, shares, st.floats(0.1, 5))
def test_min_p_is_transformers_min_p(seed, p, scale):
    logits = random_logits(seed, scale=scale)
    assert_same(ours(logits, min_p=p), processed(logits, theirs.MinPLogitsWarper(p)))


@examples
@given(seeds, shares, st.floats(0.1, 5))
def test_typical_p_is_transformers_typical_p(seed, p, scale):
    logits = random_logits(seed, scale=scale)
    assert_same(ours(logits, typical_p=p), processed(logits, theirs.TypicalLogitsWarper(p)))


@examples
@given(seeds, st.floats(0.1, 5), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), st.integers(0, 39))
def test_the_repetition_penalty_is_transformers_over_prompt_and_answer(seed, penalty, ids, cut):
    logits = random_logits(seed)
    found = sampling.adjust(logits, [one(ids[:cut], ids[cut:], repetition_penalty=penalty)])
    expected = theirs.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), logits)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@examples
@given(
    seeds,
    st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100) | st.just(-math.inf), min_size=1, max_size=30),
)
def test_a_logit_bias_is_transformers_bias_of_single_tokens(seed, bias):
    logits = random_logits(seed)
    given_bias = {(token,): value for token, value in bias.items()}
    if any(value != 0 for value in bias.values()):
        expected = theirs.SequenceBiasLogitsProcessor(given_bias)(torch.tensor([[0]]), logits)
        torch.testing.assert_close(sampling.adjust(logits, [one(logit_bias=bias)]), expected, rtol=0, atol=0)


@examples
@given(seeds, st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=VOCAB - 1))
def test_a_bias_of_minus_infinity_is_transformers_suppression(seed, tokens):
    logits = random_logits(seed)
    expected = processed(logits, theirs.SuppressTokensLogitsProcessor(sorted(tokens)))
    assert_same(ours(logits, logit_bias=dict.fromkeys(tokens, -math.inf)), expected)


# ---- all of them, in the declared order --------------------------------------------------------------------------


@examples
@given(
    seeds, st.floats(0.2, 3), st.integers(0, 150), shares | st.just(1.0), st.floats(0, 0.2), shares | st.just(1.0),
    st.floats(0.5, 2), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
    st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5) | st.just(-math.inf), max_size=30),
)  # fmt: skip
def test_the_whole_chain_is_transformers_processors_one_after_the_other(
    seed, temperature, top_k, top_p, min_p, typical_p, repetition, ids, bias
):
    logits = random_logits(seed)
    bias = {token: value for token, value in bias.items() if value != 0}
    chain = [
        *([theirs.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})] if bias else []),
        theirs.RepetitionPenaltyLogitsProcessor(repetition), theirs.TemperatureLogitsWarper(temperature),
        *([theirs.TopKLogitsWarper(top_k)] if top_k else []), theirs.TopPLogitsWarper(top_p),
        theirs.MinPLogitsWarper(min_p), *([theirs.TypicalLogitsWarper(typical_p)] if typical_p < 1 else []),
    ]  # fmt: skip
    row = one(
        ids, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p, logit_bias=bias,
        repetition_penalty=repetition,
    )  # fmt: skip
    found, expected = sampling.distribution(logits, [row]), processed(logits, *chain, ids=ids)
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-12)


def test_the_temperature_acts_before_top_p():
    """At temperature 1 the first two reach 0.75; at temperature 3 it takes three."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert (sampling.distribution(logits, [one(temperature=1.0, top_p=0.75)]) > 0).tolist() == [
        [True, True, False, False]
    ]
    assert (sampling.distribution(logits, [one(temperature=3.0, top_p=0.75)]) > 0).tolist() == [
        [True, True, True, False]
    ]


def test_top_p_counts_shares_of_what_top_k_has_left():
    """Of 0.4, 0.3, 0.2, 0.1 top-k leaves 0.57 and 0.43 of two: the first alone reaches 0.5."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert ours(logits, top_k=2, top_p=0.5).tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert ours(logits, top_p=0.5)[0, 1] > 0


def test_a_bias_is_penalized_with_the_logit_it_was_added_to():
    logits = torch.tensor([[1.0, 2.0, -3.0]])
    row = one([0, 2], [1, 1], logit_bias={0: 3.0, 2: 4.0}, repetition_penalty=2.0, frequency_penalty=0.25)
    assert sampling.adjust(logits, [row]).tolist() == [[(1 + 3) / 2, 2 / 2 - 2 * 0.25, (-3 + 4) / 2]]


# ---- closed forms ------------------------------------------------------------------------------------------------


@examples
@given(seeds, st.floats(-2, 2), st.floats(-2, 2), st.lists(st.integers(0, 30), max_size=60))
def test_presence_and_frequency_penalties_are_openais_formula_over_the_answer_alone(seed, presence, frequency, answer):
    """mu[j] -> mu[j] - c[j] * frequency - (c[j] > 0) * presence, c[j]: how often the answer holds j."""
    logits, counts = random_logits(seed, vocab=40), Counter(answer)
    row = one([1, 2, 3, 35], answer, presence_penalty=presence, frequency_penalty=frequency)
    expected = [
        mu - counts[j] * frequency - float(counts[j] > 0) * presence for j, mu in enumerate(logits[0].double().tolist())
    ]
    assert sampling.adjust(logits, [row])[0].tolist() == pytest.approx(expected, abs=2e-5)


def test_the_repetition_penalty_makes_every_seen_token_less_likely_once_whatever_its_sign():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 0.0]])
    row = one([0, 0, 0, 1], [0, 1, 1, 4], repetition_penalty=2.0)
    assert sampling.adjust(logits, [row]).tolist() == [[1.0, -4.0, 2.0, -2.0, 0.0]]


def test_penalties_on_whole_rows_are_penalties_on_the_columns_of_seen_tokens():
    logits = random_logits(0, rows=3, vocab=50)
    rows = [
        one([3, 4, 4], [5] * 7, repetition_penalty=1.7),
        one([], [9, 9, 3], presence_penalty=1.0, frequency_penalty=0.5),
        one(range(50), [49], repetition_penalty=0.8, frequency_penalty=-1.0),
    ]
    counts = torch.stack([torch.bincount(torch.tensor(row.token_ids), minlength=50) for row in rows])
    seen = counts > 0
    for place, row in enumerate(rows):
        seen[place, row.prompt_token_ids] = True
    parts = [torch.tensor(column) for column in ([1.7, 1.0, 0.8], [0.0, 1.0, 0.0], [0.0, 0.5, -1.0])]
    assert torch.equal(sampling.apply_penalties(logits, seen, counts, *parts), sampling.adjust(logits, rows))


def test_a_row_that_has_seen_nothing_is_not_penalized_and_its_neighbour_is():
    logits = torch.ones(2, 4)
    rows = [one(repetition_penalty=2.0), one([3], repetition_penalty=2.0)]
    assert sampling.adjust(logits, rows).tolist() == [[1, 1, 1, 1], [1, 1, 1, 0.5]]


def test_logits_without_anything_to_adjust_are_handed_on_uncopied():
    logits = random_logits(0)
    assert sampling.adjust(logits, [one([1, 2], temperature=0.5, top_k=3)]) is logits


def test_the_token_that_crosses_top_p_stays():
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    assert ours(logits, top_p=0.6)[0].tolist() == pytest.approx([0, 0, 3 / 7, 4 / 7], abs=1e-6)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.25, 1), (0.5, 1), (0.5 + 2**-20, 2), (0.75, 2), (0.75 + 2**-20, 3), (0.875, 3), (1.0, 4), (2**-40, 1)],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it_exactly(top_p, kept):
    ranked = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64)
    assert sampling.keep_top_p(ranked, torch.tensor([top_p], dtype=torch.float64)).tolist() == [
        [True] * kept + [False] * (4 - kept)
    ]


def test_filters_take_each_row_by_its_own_setting():
    ranked = torch.tensor([[0.5, 0.3, 0.2]] * 3, dtype=torch.float64)
    assert sampling.keep_top_k(ranked, torch.tensor([0, 1, 7])).sum(dim=-1).tolist() == [3, 1, 3]
    assert sampling.keep_top_p(ranked, torch.tensor([0.4, 0.6, 1.0])).sum(dim=-1).tolist() == [1, 2, 3]
    assert sampling.keep_min_p(ranked, torch.tensor([0.0, 0.5, 1.0])).sum(dim=-1).tolist() == [3, 2, 1]


def test_what_is_banned_comes_through_no_filter():
    logits = random_logits(0, rows=1)
    banned = dict.fromkeys(range(0, VOCAB, 2), -math.inf)
    for filters in (
        {"top_k": 300},
        {"top_p": 1 - 1e-12},
        {"min_p": 1e-300},
        {"typical_p": 1 - 1e-12},
        {"top_k": 250, "typical_p": 0.999},
    ):
        found = ours(logits, logit_bias=banned, **filters)
        assert found.isfinite().all() and found[0, ::2].sum() == 0 and found.sum() == pytest.approx(1)


# ---- partial selection -------------------------------------------------------------------------------------------


def whole_ranking(logits: torch.Tensor, rows) -> list[dict[int, float]]:
    """What the filters leave of a ranking of all tokens by plain Python: {token: share}."""
    left = []
    for values, row in zip(logits, rows, strict=True):
        log_probabilities = sampling.apply_temperature(values.unsqueeze(0), torch.tensor([row.params.temperature]))[
            0
        ].log_softmax(-1)
        order = sorted(range(len(values)), key=lambda token: (-log_probabilities[token].item(), token))
        ranked = log_probabilities[order].exp().double().unsqueeze(0)
        shares = sampling.apply_filters(ranked, [row.params])[0].tolist()
        left.append({token: share for token, share in zip(order, shares, strict=True) if share > 0})
    return left


FILTERS = [
    {"top_k": 1}, {"top_k": 7}, {"top_k": 8}, {"top_k": 9}, {"top_k": 60}, {"top_p": 0.3}, {"top_p": 0.9},
    {"top_p": 0.999}, {"min_p": 0.5}, {"min_p": 0.01}, {"min_p": 1.0}, {"typical_p": 0.5}, {"typical_p": 0.95},
    {"top_k": 5, "typical_p": 0.5}, {"top_k": 50, "typical_p": 0.5}, {"top_p": 0.5, "typical_p": 0.7},
    {"top_k": 6, "top_p": 0.8, "min_p": 0.1}, {},
]  # fmt: skip


@pytest.mark.parametrize("few", [1, 2, 8, 64])
@pytest.mark.parametrize("kind", ["random", "rounded", "bfloat16", "flat", "two values", "mostly banned"])
def test_ranking_a_few_first_leaves_exactly_what_ranking_all_leaves(monkeypatch, few, kind):
    monkeypatch.setattr(sampling, "_FEW", few)
    logits = random_logits(1, rows=len(FILTERS), scale=0.01 if kind == "flat" else 3.0, vocab=150)
    if kind == "rounded":
        logits = logits.round()
    elif kind == "bfloat16":
        logits = (logits / 3 + 20).bfloat16().float()
    elif kind == "two values":
        logits = (logits > 4).float()
    elif kind == "mostly banned":
        logits = logits.masked_fill(torch.arange(150) % 40 != 3, -math.inf)
    rows = [one(temperature=0.9, **filters) for filters in FILTERS]
    log_probabilities = sampling.apply_temperature(logits, torch.full((len(rows),), 0.9)).log_softmax(dim=-1)
    expected = whole_ranking(logits, rows)
    seen = []
    for places, ids, shares in sampling.survivors(log_probabilities, [row.params for row in rows]):
        for place, row_ids, row_shares in zip(places, ids.tolist(), shares.tolist(), strict=True):
            found = {token: share for token, share in zip(row_ids, row_shares, strict=True) if share > 0}
            if FILTERS[place]:
                assert list(found.items()) == list(expected[place].items())
            else:
                assert found.keys() == expected[place].keys()
            seen.append(place)
    assert sorted(seen) == list(range(len(rows)))


@pytest.mark.parametrize("rounded", [False, True])
def test_the_same_number_draws_the_same_token_from_a_few_as_from_all(monkeypatch, rounded):
    filters = FILTERS[:-1] * 20
    logits = random_logits(5, rows=len(filters), vocab=900)
    log_probabilities = (logits.round() if rounded else logits).log_softmax(dim=-1)
    params = [sampling.SamplingParams(temperature=1.0, **one) for one in filters]
    numbers = torch.rand(len(params), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = sampling.draw_filtered(log_probabilities, params, numbers)
    monkeypatch.setattr(sampling, "_FEW", 900)
    assert torch.equal(sampling.draw_filtered(log_probabilities, params, numbers), drawn)


def test_a_few_candidates_are_enough_for_a_peaked_row_and_all_are_ranked_for_a_flat_one(monkeypatch):
    counts = []
    rank = sampling.rank
    monkeypatch.setattr(
        sampling, "rank", lambda values, count: counts.append((len(values), count)) or rank(values, count)
    )
    logits = torch.stack([random_logits(0, vocab=2_000)[0], torch.zeros(2_000)])
    sampling.distribution(logits, [one(temperature=1.0, top_p=0.9), one(temperature=1.0, top_p=0.9)])
    assert counts == [(2, sampling._FEW), (1, 2_000)]


SPECIAL = [0.0, -0.0, math.inf, -math.inf, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0, 0.0]


@pytest.mark.parametrize("count", [0, 1, 3, 700, 900])
def test_ranking_is_torchs_stable_sort(count):
    rows = torch.stack(
        [random_logits(0, vocab=700)[0], random_logits(1, vocab=700)[0].round(), torch.tensor((SPECIAL * 60)[:700])]
    )
    expected, ids = rows.sort(dim=-1, descending=True, stable=True)
    found, found_ids = sampling.largest(rows, count)
    assert torch.equal(found, expected[:, :count]) and torch.equal(found_ids, ids[:, :count])
    found, found_ids = sampling.rank(rows, count)
    assert torch.equal(found, expected[:, :count]) and torch.equal(rows.gather(-1, found_ids), found)
    for values, tokens in zip(found.tolist(), found_ids.tolist(), strict=True):
        assert all(a > b or c < d for a, b, c, d in zip(values, values[1:], tokens, tokens[1:], strict=False))
