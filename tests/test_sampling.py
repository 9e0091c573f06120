"""The sampler draws from the softmax it is asked for, and a request's parameters are checked before they are used."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmfromscratch import sampling
from llmfromscratch.errors import RequestError

LOGITS = torch.tensor([1.0, 3.0, -2.0, 2.5, 3.0])


def draws(count: int, temperature: float, seed: int | None = 0, logits: torch.Tensor = LOGITS) -> list[int]:
    sampler, params = sampling.Sampler(), sampling.SamplingParams(temperature=temperature, seed=seed)
    stream = sampler.random_stream(seed)
    return [sampler.sample(logits, params, stream) for _ in range(count)]


def test_greedy_takes_the_largest_logit_and_of_equals_the_lowest_id():
    assert draws(1, temperature=0) == [1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_the_temperature(temperature):
    count = 20_000
    weights = [math.exp(logit / temperature) for logit in LOGITS.tolist()]
    drawn = draws(count, temperature)
    for token, weight in enumerate(weights):
        share = weight / sum(weights)
        deviation = math.sqrt(share * (1 - share) / count)
        assert abs(drawn.count(token) / count - share) < 5 * deviation + 1e-9


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-39, 1e-45, 1e-320, 5e-324])
def test_the_tiniest_temperatures_draw_among_the_largest_logits_only(temperature):
    assert set(draws(50, temperature)) == {1, 4}


def test_the_largest_temperatures_draw_evenly():
    drawn = draws(5_000, temperature=1.7e308)
    assert all(abs(drawn.count(token) / 5_000 - 0.2) < 0.04 for token in range(5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_precision_can_be_drawn_from(dtype):
    assert set(draws(50, 1e-3, logits=LOGITS.to(dtype))) == {1, 4}


def test_the_same_seed_gives_the_same_draws_and_another_seed_others():
    assert draws(30, 1.0, seed=7) == draws(30, 1.0, seed=7)
    assert draws(30, 1.0, seed=7) != draws(30, 1.0, seed=8)


def test_without_a_seed_draws_differ_each_time():
    assert draws(60, 2.0, seed=None) != draws(60, 2.0, seed=None)


def test_drawing_leaves_torchs_global_random_numbers_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    draws(5, 1.0, seed=3)
    draws(5, 1.0, seed=None)
    assert torch.equal(torch.rand(3), expected)


WRONG = [
    ("max_tokens", 0, "max_tokens is 0; it must be a whole number of at least 1."),
    ("max_tokens", -3, "at least 1"),
    ("max_tokens", 2.0, "whole number"),
    ("max_tokens", True, "max_tokens is True"),
    ("max_tokens", None, "max_tokens is None"),
    ("temperature", -0.1, "temperature is -0.1; it must be 0 \\(greedy\\) or a positive number."),
    ("temperature", float("nan"), "temperature is nan"),
    ("temperature", float("inf"), "temperature is inf"),
    ("temperature", 10**400, "temperature is 1000"),
    ("temperature", "hot", "temperature is 'hot'"),
    ("temperature", True, "temperature is True"),
    ("stop_token_ids", "2", "stop_token_ids is '2'; it must be a list of token ids"),
    ("stop_token_ids", b"2", "must be a list of token ids"),
    ("stop_token_ids", 2, "stop_token_ids is 2; it must be a list"),
    ("stop_token_ids", None, "stop_token_ids is None; it must be a list"),
    ("stop_token_ids", [2, -1], "whole numbers from 0 on"),
    ("stop_token_ids", [2, 1.5], "whole numbers"),
    ("stop_token_ids", [True], "whole numbers"),
    ("ignore_eos", 1, "ignore_eos is 1; it must be True or False."),
    ("ignore_eos", None, "ignore_eos is None"),
    ("seed", -1, "seed is -1; it must be None or a whole number from 0 to 2\\*\\*63 - 1."),
    ("seed", 2**63, "seed is 9223372036854775808"),
    ("seed", 1.5, "seed is 1.5"),
    ("seed", True, "seed is True"),
    ("priority", 1.5, "priority is 1.5; it must be a whole number from -1000 to 1000."),
    ("priority", 1001, "priority is 1001"),
    ("priority", -(10**400), "priority is -1000"),
    ("priority", True, "priority is True"),
    ("priority", None, "priority is None"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), WRONG)
def test_a_parameter_that_cannot_be_meant_is_refused_with_its_value_and_what_is_expected(name, value, sentence):
    with pytest.raises(RequestError, match=sentence):
        sampling.SamplingParams(**{name: value})


def test_unknown_parameters_are_refused_instead_of_ignored():
    with pytest.raises(TypeError, match="temprature"):
        sampling.SamplingParams(temprature=0.5)


def test_stop_tokens_may_come_from_any_iterable_and_are_kept():
    assert sampling.SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
    assert sampling.SamplingParams(stop_token_ids=(token for token in (3, 4))).stop_token_ids == (3, 4)
    assert sampling.SamplingParams(stop_token_ids={3}).stop_token_ids == (3,)


def test_parameters_cannot_be_changed_after_they_were_checked():
    params = sampling.SamplingParams()
    with pytest.raises(AttributeError):
        params.max_tokens = 0


JUNK = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3))


@given(st.fixed_dictionaries({}, optional={name: JUNK | st.lists(JUNK, max_size=3) for name, _, _ in WRONG}))
def test_any_junk_is_accepted_or_refused_with_our_own_error(fields):
    try:
        params = sampling.SamplingParams(**fields)
    except RequestError as error:
        assert any(f"{name} is {value!r}" in str(error) for name, value in fields.items())
    else:
        assert params.max_tokens >= 1
        assert 0 <= params.temperature < math.inf
