"""A request's parameters are checked before they are used: one by one, and against each other."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmfromscratch import sampling
from llmfromscratch.errors import RequestError

NAN, INF = math.nan, math.inf
WRONG = [
    ("max_tokens", 0, "max_tokens is 0; it must be a whole number of at least 1."),
    ("max_tokens", -3, "at least 1"),
    ("max_tokens", 2.0, "whole number"),
    ("max_tokens", True, "max_tokens is True"),
    ("max_tokens", None, "max_tokens is None"),
    ("max_tokens", NAN, "max_tokens is nan"),
    ("temperature", -0.1, "temperature is -0.1; it must be 0 \\(greedy\\) or a positive number."),
    ("temperature", NAN, "temperature is nan"),
    ("temperature", INF, "temperature is inf"),
    ("temperature", 10**400, "temperature is 1000"),
    ("temperature", 10**5000, "temperature is a number of thousands of digits; it must be 0"),
    ("temperature", "hot", "temperature is 'hot'"),
    ("temperature", "h" * 10_000, "temperature is 'hhh.*…; it must be"),
    ("temperature", True, "temperature is True"),
    ("top_k", -1, "top_k is -1; it must be a whole number from 0, which keeps all tokens, to 2\\*\\*31 - 1."),
    ("top_k", 2.5, "top_k is 2.5"),
    ("top_k", 2**31, "top_k is 2147483648"),
    (
        "top_p",
        0,
        "top_p is 0; it must be above 0 and at most 1, .*\\(for the most probable token alone, use temperature 0",
    ),
    ("top_p", 1.01, "top_p is 1.01"),
    ("top_p", NAN, "top_p is nan"),
    ("min_p", -0.1, "min_p is -0.1; it must be from 0, which keeps all tokens, to 1."),
    ("min_p", 1.5, "min_p is 1.5"),
    ("min_p", NAN, "min_p is nan"),
    ("typical_p", 0.0, "typical_p is 0.0; it must be above 0 and at most 1"),
    ("typical_p", NAN, "typical_p is nan"),
    ("repetition_penalty", 0, "repetition_penalty is 0; it must be from 0.01 to 100; 1 does nothing."),
    ("repetition_penalty", -1.0, "repetition_penalty is -1.0"),
    ("repetition_penalty", NAN, "repetition_penalty is nan"),
    ("presence_penalty", 101, "presence_penalty is 101; it must be from -100 to 100; 0 does nothing."),
    ("presence_penalty", NAN, "presence_penalty is nan"),
    ("frequency_penalty", -INF, "frequency_penalty is -inf"),
    ("frequency_penalty", NAN, "frequency_penalty is nan"),
    ("logit_bias", [1], "logit_bias is \\[1\\]; it must be a mapping of token ids to numbers"),
    ("logit_bias", {-1: 1.0}, "mapping of token ids"),
    ("logit_bias", {"one": 1.0}, "mapping of token ids"),
    ("logit_bias", {"": 1.0}, "mapping of token ids"),
    ("logit_bias", {"1" * 5000: 1.0}, "mapping of token ids"),
    ("logit_bias", {True: 1.0}, "mapping of token ids"),
    ("logit_bias", {1: 1.0, "1": 2.0}, "mapping of token ids"),
    ("logit_bias", {1: NAN}, "logit_bias is \\{1: nan\\}; .*float\\('-inf'\\), which bans the token."),
    ("logit_bias", {1: INF}, "logit_bias is \\{1: inf\\}"),
    ("logit_bias", {1: 1e7}, "from -1e6 to 1e6"),
    ("logit_bias", {1: "2"}, "mapping of token ids"),
    ("bad_words", [""], "bad_words is \\[''\\]; it must be a list of texts of at least one character"),
    ("bad_words", [b"x"], "list of texts"),
    ("bad_words", 3, "bad_words is 3; it must be a list of texts"),
    ("bad_words", {"a": 1}, "list of texts"),
    ("stop", "", "stop is ''; it must be a list of texts of at least one character"),
    ("stop", ["\ud800"], "each of which UTF-8 can hold"),
    ("stop", [None], "list of texts"),
    ("required_words", ["a", ""], "required_words is \\['a', ''\\]; it must be a list of texts"),
    ("stop_token_ids", "2", "stop_token_ids is '2'; it must be a list of token ids"),
    ("stop_token_ids", b"2", "must be a list of token ids"),
    ("stop_token_ids", 2, "stop_token_ids is 2; it must be a list"),
    ("stop_token_ids", None, "stop_token_ids is None; it must be a list"),
    ("stop_token_ids", [2, -1], "whole numbers from 0 on"),
    ("stop_token_ids", [2, 1.5], "whole numbers"),
    ("stop_token_ids", [True], "whole numbers"),
    ("include_stop", 1, "include_stop is 1; it must be True or False."),
    ("ignore_eos", 1, "ignore_eos is 1; it must be True or False."),
    ("ignore_eos", None, "ignore_eos is None"),
    ("seed", -1, "seed is -1; it must be None or a whole number from 0 to 2\\*\\*63 - 1."),
    ("seed", 2**63, "seed is 9223372036854775808"),
    ("seed", 1.5, "seed is 1.5"),
    ("seed", True, "seed is True"),
    ("logprobs", -1, "logprobs is -1; it must be None or a whole number from 0 to 1000."),
    ("logprobs", 1001, "logprobs is 1001"),
    ("logprobs", True, "logprobs is True"),
    ("prompt_logprobs", 2.0, "prompt_logprobs is 2.0"),
    ("n", 0, "n is 0; it must be a whole number from 1 to 256."),
    ("n", 257, "n is 257"),
    ("n", None, "n is None"),
    ("beam_width", 0, "beam_width is 0; it must be None or a whole number from 1 to 256."),
    ("length_penalty", NAN, "length_penalty is nan; it must be from -100 to 100"),
    ("length_penalty", INF, "length_penalty is inf"),
    ("regex", 3, "regex is 3; it must be None or a regular expression"),
    ("regex", "\udfff", "UTF-8 can hold"),
    ("json_schema", "{", "json_schema is '\\{'; it must be None or a JSON schema: an object, or the text of one."),
    ("json_schema", "[1]", "an object"),
    ("json_schema", 3, "json_schema is 3"),
    ("json_schema", {"enum": [object]}, "an object, or the text of one"),
    ("json_schema", {"const": NAN}, "an object, or the text of one"),
    ("json_schema", "[" * 100_000, "an object, or the text of one"),
    ("priority", 1.5, "priority is 1.5; it must be a whole number from -1000 to 1000."),
    ("priority", 1001, "priority is 1001"),
    ("priority", -(10**400), "priority is -1000"),
    ("priority", True, "priority is True"),
    ("priority", None, "priority is None"),
]


@pytest.mark.parametrize(
    ("name", "value", "sentence"), WRONG, ids=lambda value: str(value)[:20] if isinstance(value, str) else ""
)
def test_a_parameter_that_cannot_be_meant_is_refused_with_its_value_and_what_is_expected(name, value, sentence):
    with pytest.raises(RequestError, match=sentence):
        sampling.SamplingParams(**{name: value})


def test_there_is_a_wrong_value_here_for_every_parameter():
    assert {name for name, _, _ in WRONG} == {one.name for one in dataclasses.fields(sampling.SamplingParams)}


def test_unknown_parameters_are_refused_instead_of_ignored():
    with pytest.raises(TypeError, match="temprature"):
        sampling.SamplingParams(temprature=0.5)


CONTRADICTIONS = [
    ({"top_k": 5}, "top_k is 5 and temperature is 0; top_k has no effect at temperature 0, .* Give a temperature"),
    ({"top_p": 0.9}, "top_p has no effect at temperature 0"),
    ({"min_p": 0.1}, "min_p has no effect at temperature 0"),
    ({"typical_p": 0.5}, "typical_p has no effect at temperature 0"),
    ({"n": 3}, "n is 3 and temperature is 0; 3 answers would be the same. Give a temperature above 0 .* a beam_width"),
    ({"beam_width": 2, "n": 3}, "n is 3 and beam_width is 2; there are no more texts than there are beams."),
    ({"length_penalty": 0.5}, "length_penalty is 0.5 without beam_width; it scores beams. Give a beam_width too."),
    ({"regex": "a", "json_schema": "{}"}, "regex and json_schema are both given; .* Leave one out."),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos is True and regex is given; .* could go on past its end."),
    ({"regex": "a", "stop": ["b"]}, "stop is \\('b',\\) and regex is given; .* could end before it matches."),
    ({"json_schema": "{}", "stop_token_ids": [3]}, "stop_token_ids is \\(3,\\) and json_schema is given"),
    ({"json_schema": {}, "required_words": ["b"]}, "required_words is \\('b',\\) and json_schema is given"),
    ({"include_stop": True}, "include_stop is True and there is no stop text to include"),
    ({"required_words": ["abc"], "bad_words": ["x", "b"]}, "required_words has 'abc', which contains 'b' of bad_words"),
    ({"required_words": ["abc"], "stop": ["c"]}, "required_words has 'abc', which contains 'c' of stop"),
    *[
        ({"beam_width": 4, **field}, f"{next(iter(field))} is .* and beam_width is 4; .* Leave one of the two out.")
        for field in (
            {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"typical_p": 0.5},
            {"repetition_penalty": 1.1}, {"presence_penalty": 1}, {"frequency_penalty": 1}, {"logit_bias": {1: 1.0}},
            {"bad_words": ["x"]}, {"stop": ["x"]}, {"logprobs": 0}, {"prompt_logprobs": 0}, {"regex": "a"},
            {"json_schema": "{}"}, {"required_words": ["x"]},
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize(("values", "sentence"), CONTRADICTIONS, ids=lambda value: str(value)[:40])
def test_parameters_that_contradict_each_other_are_refused_and_the_way_out_is_named(values, sentence):
    with pytest.raises(RequestError, match=sentence):
        sampling.SamplingParams(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0, "seed": 3, "repetition_penalty": 1.2, "logprobs": 5},
        {"temperature": 1, "top_k": 1, "top_p": 1, "min_p": 1, "typical_p": 1, "n": 256},
        {"temperature": 1e308, "top_k": 2**31 - 1, "top_p": 5e-324, "typical_p": 5e-324},
        {
            "beam_width": 4,
            "n": 4,
            "length_penalty": -2,
            "stop_token_ids": [3],
            "ignore_eos": True,
            "seed": 1,
            "priority": 3,
        },
        {"beam_width": 4, "logit_bias": {}, "bad_words": [], "required_words": None},
        {
            "regex": "[0-9]+",
            "temperature": 1,
            "top_p": 0.9,
            "n": 3,
            "logit_bias": {1: 2},
            "bad_words": ["3"],
            "logprobs": 1,
        },
        {"json_schema": {"type": "object"}, "repetition_penalty": 1.1},
        {"stop": "\n", "include_stop": True, "required_words": ["Ω"], "bad_words": ["abc"]},
    ],
    ids=str,
)
def test_what_can_be_meant_together_is_accepted(values):
    params = sampling.SamplingParams(**values)
    assert dataclasses.replace(params) == params


JUNK = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3))
NAMES = [one.name for one in dataclasses.fields(sampling.SamplingParams)]
MORE_JUNK = JUNK | st.lists(JUNK, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=3), JUNK, max_size=3)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, MORE_JUNK)))
def test_any_junk_is_accepted_or_refused_with_our_own_error_that_names_a_field_at_fault(values):
    try:
        params = sampling.SamplingParams(**values)
    except RequestError as error:
        assert any(name in str(error) for name in values)
    else:
        assert params.max_tokens >= 1 and 0 <= params.temperature < math.inf and 0 < params.top_p <= 1


# ---- what is kept ------------------------------------------------------------------------------------------------


def test_stop_tokens_may_come_from_any_iterable_and_are_kept():
    assert sampling.SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
    assert sampling.SamplingParams(stop_token_ids=(token for token in (3, 4))).stop_token_ids == (3, 4)
    assert sampling.SamplingParams(stop_token_ids={3}).stop_token_ids == (3,)


@pytest.mark.parametrize("name", ["stop", "bad_words", "required_words"])
def test_texts_become_tuples_one_text_alone_is_a_list_of_one_and_none_an_empty_list(name):
    for given_value, kept in ((["a", "b"], ("a", "b")), ("ab", ("ab",)), (None, ()), ((x for x in "ab"), ("a", "b"))):
        assert getattr(sampling.SamplingParams(**{name: given_value}), name) == kept


def test_a_logit_bias_takes_its_ids_as_numbers_or_as_json_has_them_and_cannot_be_changed_afterwards():
    given_bias = {5: -1, "7": -math.inf}
    params = sampling.SamplingParams(logit_bias=given_bias)
    given_bias[9] = 1.0
    assert params.logit_bias == {5: -1.0, 7: -math.inf}
    with pytest.raises(TypeError):
        params.logit_bias[5] = 2.0


@pytest.mark.parametrize("schema", ['{"type": "string"}', {"type": "string"}], ids=["text", "object"])
def test_a_schema_is_kept_as_it_was_given(schema):
    assert sampling.SamplingParams(json_schema=schema).json_schema is schema


def test_parameters_cannot_be_changed_after_they_were_checked():
    params = sampling.SamplingParams()
    with pytest.raises(AttributeError):
        params.max_tokens = 0


def test_parameters_can_be_copied_pickled_and_changed_by_replace_which_checks_again():
    params = sampling.SamplingParams(temperature=0.5, logit_bias={3: 1.0}, stop=["x"], seed=4)
    for twin in (copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert twin == params and twin.logit_bias == {3: 1.0}
    assert dataclasses.replace(params, seed=5).logit_bias == {3: 1.0}
    with pytest.raises(RequestError, match="top_p is 2"):
        dataclasses.replace(params, top_p=2)


# ---- presets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["code", "facts", "chat", "stories"])
def test_a_preset_sets_what_it_says_and_nothing_else(name):
    preset, neutral = sampling.SamplingParams.preset(name), sampling.SamplingParams()
    for field in NAMES:
        assert getattr(preset, field) == sampling.PRESETS[name].get(field, getattr(neutral, field))


def test_changes_of_a_preset_go_before_it():
    params = sampling.SamplingParams.preset("chat", temperature=0.1, max_tokens=7)
    assert (params.temperature, params.top_p, params.max_tokens) == (0.1, 0.9, 7)


@pytest.mark.parametrize("name", ["poems", None, 3, ["chat"]])
def test_an_unknown_preset_is_refused_and_the_known_ones_are_named(name):
    with pytest.raises(RequestError, match="There is no preset .*; there are code, facts, chat, stories."):
        sampling.SamplingParams.preset(name)


def test_a_preset_is_held_against_its_changes():
    with pytest.raises(RequestError, match="top_k has no effect at temperature 0"):
        sampling.SamplingParams.preset("facts", top_k=3)
