"""Every row of a batch is sampled by its own parameters and its own random numbers, whoever shares the batch."""

from __future__ import annotations

import math

import pytest
import torch

from llmfromscratch import sampling
from llmfromscratch.errors import RequestError

LOGITS = torch.tensor([1.0, 3.0, -2.0, 2.5, 3.0])
VOCAB = 700


def one(params=None, prompt=(), constraint=None, **fields):
    return sampling.Sampler().start(params or sampling.SamplingParams(**fields), list(prompt), constraint)


def draws(count: int, logits: torch.Tensor = LOGITS, **fields) -> list[int]:
    row = one(**fields)
    return [token for _ in range(count) for token in sampling.Sampler().sample(logits.unsqueeze(0), [row])]


def banning(*tokens):
    return dict.fromkeys(tokens, -math.inf)


class Allows:
    """A constraint that allows a list of tokens, and knows what it was told."""

    def __init__(self, *allowed):
        self.mask = torch.isin(torch.arange(len(LOGITS)), torch.tensor(allowed))
        self.told = []

    def allowed(self):
        return self.mask

    def advance(self, token_id):
        self.told.append(token_id)


def test_greedy_takes_the_largest_logit_and_of_equals_the_lowest_id():
    assert draws(1, temperature=0) == [1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-39, 1e-45, 1e-320, 5e-324])
def test_the_tiniest_temperatures_draw_among_the_largest_logits_only(temperature):
    assert set(draws(50, temperature=temperature, seed=0)) == {1, 4}


def test_the_largest_temperatures_draw_evenly_among_what_is_not_banned():
    drawn = draws(5_000, temperature=1.7e308, seed=0, logit_bias=banning(0))
    assert drawn.count(0) == 0
    assert all(abs(drawn.count(token) / 5_000 - 0.25) < 0.04 for token in range(1, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_precision_can_be_drawn_from(dtype):
    assert set(draws(50, LOGITS.to(dtype), temperature=1e-3, seed=0)) == {1, 4}


# ---- random streams ----------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_draws_and_another_seed_others():
    assert draws(30, temperature=1.0, seed=7) == draws(30, temperature=1.0, seed=7)
    assert draws(30, temperature=1.0, seed=7) != draws(30, temperature=1.0, seed=8)


def test_without_a_seed_draws_differ_each_time():
    assert draws(60, temperature=2.0) != draws(60, temperature=2.0)


def test_drawing_leaves_torchs_global_random_numbers_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    draws(5, temperature=1.0, seed=3)
    draws(5, temperature=1.0)
    assert torch.equal(torch.rand(3), expected)


def test_a_step_takes_one_number_of_the_stream_of_a_row_that_draws_and_none_of_a_greedy_one():
    rows = [one(temperature=1.0, top_p=0.9, seed=5, logprobs=3), one(seed=5)]
    sampling.Sampler().sample(torch.stack([LOGITS, LOGITS]), rows)
    expected = torch.rand(2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    assert sampling.uniforms([rows[0].stream]) == expected[1]
    assert sampling.uniforms([rows[1].stream]) == expected[0]


def many_kinds() -> list[sampling.SamplingParams]:
    """Thirty requests, each with other parameters, so that each kind of row has every kind of neighbour."""
    kinds = [
        {}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 20}, {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 3.0, "top_p": 0.99}, {"temperature": 1.0, "min_p": 0.1}, {"temperature": 1.0, "typical_p": 0.6},
        {"temperature": 1.0, "top_k": 300, "typical_p": 0.9},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.0, "logit_bias": banning(*range(100))},
    ]  # fmt: skip
    extras = [
        {},
        {"repetition_penalty": 1.3, "logprobs": 2},
        {"presence_penalty": 0.5, "frequency_penalty": 0.2, "logprobs": 5},
    ]
    return [sampling.SamplingParams(**kind, **extra, seed=len(extra)) for kind in kinds for extra in extras]


def steps_of(logits: torch.Tensor, params, order) -> dict[int, tuple]:
    """What each row [step, row, vocab] gets in a batch of the rows in `order`."""
    sampler = sampling.Sampler()
    rows = {place: sampler.start(params[place], [place, place + 1]) for place in order}
    for step in logits:
        sampler.sample(step[order], [rows[place] for place in order])
    return {place: (row.token_ids, row.logprobs) for place, row in rows.items()}


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct logits", "many equal logits"])
def test_a_rows_tokens_and_logprobs_depend_neither_on_who_shares_the_batch_nor_on_the_order(rounded):
    params = many_kinds()
    logits = 2 * torch.randn(3, len(params), VOCAB, generator=torch.Generator().manual_seed(1))
    logits = logits.round() if rounded else logits
    together = steps_of(logits, params, list(range(len(params))))
    assert steps_of(logits, params, list(reversed(range(len(params))))) == together
    for place in range(len(params)):
        assert steps_of(logits, params, [place])[place] == together[place]


def test_at_the_size_of_a_real_vocabulary_a_row_alone_has_the_very_same_distribution():
    params, before = many_kinds()[::3], torch.get_num_threads()
    logits = 3 * torch.randn(len(params), 49_152, generator=torch.Generator().manual_seed(2))
    rows = [one(row, prompt=[5, 6]) for row in params]
    torch.set_num_threads(2)
    try:
        together = sampling.distribution(logits, rows)
        for place, row in enumerate(rows):
            assert torch.equal(sampling.distribution(logits[place : place + 1], [row])[0], together[place])
    finally:
        torch.set_num_threads(before)


# ---- edges -------------------------------------------------------------------------------------------------------


def test_a_tiny_top_p_is_the_most_probable_token():
    assert set(draws(50, temperature=5.0, top_p=1e-9, seed=0)) == {1}
    assert set(draws(50, temperature=5.0, top_p=5e-324, seed=0)) == {1}


def test_a_top_k_beyond_the_vocabulary_keeps_all_of_it():
    assert draws(200, temperature=2.0, top_k=2**31 - 1, seed=0) == draws(200, temperature=2.0, top_k=5, seed=0)
    assert set(draws(500, temperature=2.0, top_k=1_000, seed=0)) == set(range(5))


def test_top_k_takes_of_equal_logits_the_lowest_ids():
    assert set(draws(50, torch.zeros(5), temperature=1.0, top_k=2, seed=0)) == {0, 1}
    assert set(draws(80, torch.zeros(2_000), temperature=1.0, top_k=3, seed=0)) == {0, 1, 2}


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.2}, {"typical_p": 0.5}, {"top_k": 2, "typical_p": 0.5}],
    ids=str,
)
def test_when_all_but_one_are_banned_that_one_is_taken_through_every_filter(filters):
    assert set(draws(20, temperature=1.0, seed=0, logit_bias=banning(0, 1, 3, 4), **filters)) == {2}
    assert draws(1, logit_bias=banning(0, 1, 3, 4)) == [2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_which_nothing_is_left_gives_none_and_its_neighbours_their_tokens(temperature):
    rows = [
        one(seed=1, temperature=1.0),
        one(temperature=temperature, logit_bias=banning(*range(5)), logprobs=1),
        one(),
    ]
    alone = draws(1, temperature=1.0, seed=1)
    assert sampling.Sampler().sample(LOGITS.repeat(3, 1), rows) == [*alone, None, 1]
    assert rows[1].token_ids == [] and rows[1].logprobs == [] and rows[2].token_ids == [1]
    with pytest.raises(RequestError, match="Nothing is left to choose from in row 1: every token is banned."):
        sampling.distribution(LOGITS.repeat(3, 1), rows)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_named_as_the_models_error_and_not_sampled(value, temperature):
    logits = LOGITS.repeat(4, 1)
    logits[1, 2] = logits[3, 0] = value
    rows = [one(temperature=temperature, seed=3) for _ in range(4)]
    with pytest.raises(
        ValueError, match="logits of row 1, 3 are not all finite numbers; this is an error of the model"
    ):
        sampling.Sampler().sample(logits, rows)
    assert all(row.token_ids == [] for row in rows)
    assert sampling.uniforms([rows[0].stream]) == sampling.uniforms([sampling.random_stream(3)])


def test_finite_logits_whose_sum_overflows_are_sampled():
    assert draws(1, torch.full((5,), 3e38)) == [0]


def test_no_rows_give_no_tokens():
    assert sampling.Sampler().sample(torch.zeros(0, 5), []) == []


def test_sampling_does_not_change_the_logits_it_is_given():
    logits = LOGITS.repeat(2, 1)
    rows = [one(prompt=[1], repetition_penalty=2.0, logit_bias={3: 9.0}), one(constraint=Allows(0))]
    assert sampling.Sampler().sample(logits, rows) == [3, 0]
    assert torch.equal(logits, LOGITS.repeat(2, 1))


# ---- what narrows from outside -----------------------------------------------------------------------------------


def test_a_constraint_bans_all_that_it_does_not_allow_and_learns_of_every_token_once():
    constraint = Allows(0, 2)
    row = one(constraint=constraint, temperature=1.0, seed=0)
    drawn = [sampling.Sampler().sample(LOGITS.unsqueeze(0), [row])[0] for _ in range(40)]
    sampling.distribution(LOGITS.unsqueeze(0), [row])
    assert set(drawn) == {0, 2} and constraint.told == drawn


def test_no_bias_allows_what_a_constraint_bans():
    assert draws(1, constraint=Allows(0, 2), logit_bias={1: 1e6}) == [0]


def test_after_a_constraint_has_failed_the_other_rows_are_sampled_as_if_nothing_had_happened():
    class Fails(Allows):
        def advance(self, token_id):
            raise RuntimeError("a limit was reached")

    rows = [one(temperature=1.0, seed=4, constraint=Allows(*range(5))), one(constraint=Fails(1))]
    logits = LOGITS.repeat(2, 1)
    tokens = [sampling.Sampler().sample(logits, rows)[0]]
    with pytest.raises(RuntimeError, match="a limit was reached"):
        sampling.Sampler().sample(logits, rows)
    tokens += sampling.Sampler().sample(logits[:1], rows[:1])
    assert tokens == draws(2, temperature=1.0, seed=4) == rows[0].token_ids
    assert rows[0].constraint.told == tokens[:1]


# ---- log-probabilities -------------------------------------------------------------------------------------------


def softmax(logits):
    weights = [math.exp(value) for value in logits]
    return [weight / sum(weights) for weight in weights]


def test_raw_logprobs_are_the_models_and_processed_ones_those_of_the_draw():
    row = one(prompt=[1], temperature=0.5, top_k=2, repetition_penalty=2.0, seed=0, logprobs=3)
    (token,) = sampling.Sampler().sample(LOGITS.unsqueeze(0), [row])
    raw = [math.log(p) for p in softmax(LOGITS.tolist())]
    left = dict(zip((3, 4), softmax([2.5 / 0.5, 3.0 / 0.5]), strict=True))  # 1 has fallen to 1.5
    (found,) = row.logprobs
    assert found.token_id == token
    assert found.raw == pytest.approx(raw[token], abs=1e-6)
    assert found.processed == pytest.approx(math.log(left[token]), abs=1e-6)
    assert [entry[0] for entry in found.top] == [1, 4, 3]
    assert [entry[1] for entry in found.top] == pytest.approx([raw[1], raw[4], raw[3]], abs=1e-6)
    assert found.top[0][2] == -math.inf
    assert [entry[2] for entry in found.top[1:]] == pytest.approx([math.log(left[4]), math.log(left[3])], abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_raw_logprobs_do_not_change_with_the_temperature_and_processed_ones_do(temperature):
    row = one(temperature=temperature, seed=1, logprobs=5)
    sampling.Sampler().sample(LOGITS.unsqueeze(0), [row])
    expected = sorted((math.log(p) for p in softmax(LOGITS.tolist())), reverse=True)
    assert [raw for _, raw, _ in row.logprobs[0].top] == pytest.approx(expected, abs=1e-6)
    if temperature:
        processed = [math.log(p) for p in sorted(softmax((LOGITS / temperature).tolist()), reverse=True)]
    else:
        processed = [0.0, *[-math.inf] * 4]
    assert [value for _, _, value in row.logprobs[0].top] == pytest.approx(processed, abs=1e-6)


def test_no_logprobs_are_recorded_unless_asked_for_and_none_asked_for_gives_the_chosen_token_alone():
    rows = [one(), one(logprobs=0)]
    sampling.Sampler().sample(LOGITS.repeat(2, 1), rows)
    assert rows[0].logprobs == []
    assert rows[1].logprobs[0].token_id == 1 and rows[1].logprobs[0].top == ()


def test_of_equally_probable_tokens_the_lowest_ids_are_listed_whatever_the_neighbours_ask_for():
    rows = [one(logprobs=2), one(logprobs=1_000), one(logprobs=400)]
    sampling.Sampler().sample(torch.zeros(3, VOCAB), rows)
    for row, count in zip(rows, (2, VOCAB, 400), strict=True):
        assert [token for token, _, _ in row.logprobs[0].top] == list(range(count))


# ---- beams -------------------------------------------------------------------------------------------------------


def test_the_best_ways_on_are_those_of_all_beams_and_of_equals_the_lower_beam_then_the_lower_token():
    scores = torch.tensor([-1.0, -1.0, -2.0])
    following = torch.tensor([[-1.0, -3.0, -1.0], [-3.0, -1.0, -3.0], [-0.5, -9.0, -9.0]])
    expected = [(-2.0, 0, 0), (-2.0, 0, 2), (-2.0, 1, 1), (-2.5, 2, 0), (-4.0, 0, 1), (-4.0, 1, 0)]
    for count in range(1, 7):
        assert sampling.best_beams(scores, following, count) == expected[:count]
    assert len(sampling.best_beams(scores, following, 100)) == 9
