"""What a request may ask of decoding, each with its neutral value, checked before anything is computed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import Any

from llmfromscratch.errors import RequestError

# Starting points for kinds of work; what each does to real answers is measured in chapter 5.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "code": {"temperature": 0.2, "top_p": 0.95},
    "facts": {"temperature": 0.0},
    "chat": {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
    "stories": {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 0.3},
}
MAX_LOGPROBS = 1000
MAX_CHOICES = 256  # answers or beams of one request
Check = Callable[[str, Any], Any]  # (name of a parameter, its value) -> what is kept; raises RequestError


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. The order in which the controls act is declared in `sampling`.

    max_tokens: new tokens at most, at least 1.
    temperature: 0 takes the most probable token; above 0 the logits are divided by it before the draw.
    top_k: keep the k most probable tokens; 0 keeps all.
    top_p: keep the smallest set of most probable tokens whose probabilities reach p; the token that crosses p stays
        (Holtzman et al. 2020, section 3.1).
    min_p: drop what is less probable than min_p times the most probable token (Nguyen et al. 2024).
    typical_p: keep the tokens whose surprise is closest to the entropy, until they reach p (Meister et al. 2022).
    repetition_penalty: tokens of prompt or answer: positive logits are divided by it, negative ones multiplied, once
        for each distinct token (Keskar et al. 2019, section 4.1). 1 does nothing, above 1 repels.
    presence_penalty: taken off the logit of each token that the answer holds already.
    frequency_penalty: taken off as often as the answer holds it.
    logit_bias: {token id: what is added to its logit}; float("-inf") bans a token.
    bad_words: texts that the answer will not contain, however they are cut into tokens.
    stop: texts that end the answer, which is cut before them; include_stop: behind them.
    stop_token_ids: ids that end the text besides the model's own end tokens.
    ignore_eos: go on past the model's end tokens, until max_tokens.
    seed: makes the draws of this request repeatable; None draws differently each time.
    logprobs: record the log-probability of each chosen token and of the most probable ones, so many; None: nothing.
    prompt_logprobs: the same for the tokens of the prompt, but for its first, which nothing predicts.
    n: independent answers to one prompt.
    beam_width: beam search over so many beams, the n best are returned; None: no beam search. length_penalty: the score
        of a beam is its log-probability divided by its length to this power.
    regex, json_schema: the whole answer matches the expression, or is JSON of the schema (text or object).
    required_words: the text does not end before it contains them all.
    priority: who is served first when not all can be: the larger, the more important. 0 is usual, below 0 can wait.

    Raises RequestError for a value that cannot be meant, and for values that contradict each other.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    beam_width: int | None = None
    length_penalty: float = 1.0
    regex: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    required_words: tuple[str, ...] = ()
    priority: int = 0

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        for sentence in _contradictions(self):
            raise RequestError(sentence)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> SamplingParams:
        """The parameters of a preset, with changes: `SamplingParams.preset("chat", max_tokens=100)`.

        RequestError for a name that is not in PRESETS.
        """
        if name not in tuple(PRESETS):
            raise RequestError(f"There is no preset {_shown(name)}; there are {', '.join(PRESETS)}.")
        return cls(**{**PRESETS[name], **changes})

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are made by construction: a read-only mapping can be neither copied nor pickled."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        if self.logit_bias is not None:
            values["logit_bias"] = dict(self.logit_bias)
        return partial(type(self), **values), ()


# ---- single values: each check returns what is kept, or raises ---------------------------------------------------


def _number(low: float, high: float, expected: str) -> Check:
    def check(name: str, value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high:  # NaN fails the comparison
            raise _wrong(name, value, expected)
        return value

    return check


def _whole(low: int, high: float, expected: str, none: bool = False) -> Check:
    def check(name: str, value: Any) -> int | None:
        if not (value is None and none) and not (_is_int(value) and low <= value <= high):
            raise _wrong(name, value, expected)
        return value

    return check


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "True or False")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """A single text counts as a list of one, None as an empty list."""
    found = (value,) if isinstance(value, str) else () if value is None else _items(value)
    if found is None or not all(isinstance(text, str) and text and _is_unicode(text) for text in found):
        raise _wrong(name, value, "a list of texts of at least one character, each of which UTF-8 can hold")
    return found


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    found = _items(value)
    if found is None or not all(_is_int(token) and token >= 0 for token in found):
        raise _wrong(name, value, "a list of token ids, whole numbers from 0 on")
    return found


def _biases(name: str, value: Any) -> Mapping[int, float] | None:
    """Read-only, with numbers as keys: JSON can only have texts there."""
    if value is None:
        return None
    expected = "a mapping of token ids to numbers from -1e6 to 1e6, or to float('-inf'), which bans the token"
    if not isinstance(value, Mapping):
        raise _wrong(name, value, expected)
    found: dict[int, float] = {}
    for key, bias in value.items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 19
        token = int(key) if digits else key
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not _is_int(token) or token < 0 or token in found or not number:
            raise _wrong(name, value, expected)
        if not (-1e6 <= bias <= 1e6 or bias == -math.inf):
            raise _wrong(name, value, expected)
        found[token] = float(bias)
    return MappingProxyType(found) if found else None


def _expression(name: str, value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and _is_unicode(value)):
        raise _wrong(name, value, "None or a regular expression, a text that UTF-8 can hold")
    return value


def _schema(name: str, value: Any) -> str | Mapping[str, Any] | None:
    if value is None:
        return None
    try:
        text = json.dumps(dict(value), allow_nan=False) if isinstance(value, Mapping) else value
        fine = isinstance(text, str) and _is_unicode(text) and isinstance(json.loads(text), dict)
    except (ValueError, TypeError, RecursionError):
        fine = False
    if not fine:
        raise _wrong(name, value, "None or a JSON schema: an object, or the text of one")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold it: Python's texts may have half of a surrogate pair in them."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _items(value: Any) -> tuple[Any, ...] | None:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) else None


def _wrong(name: str, value: Any, expected: str) -> RequestError:
    return RequestError(f"{name} is {_shown(value)}; it must be {expected}.")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python does not write numbers of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= 500 else f"{text[:500]}…"


_SHARE = "above 0 and at most 1, which keeps all tokens"
_PENALTY = "from -100 to 100; 0 does nothing"
_TOP = f"None or a whole number from 0 to {MAX_LOGPROBS}"
_ABOVE_0 = math.ulp(0.0)
_CHECKS: Mapping[str, Check] = {
    "max_tokens": _whole(1, math.inf, "a whole number of at least 1"),
    "temperature": _number(0.0, sys.float_info.max, "0 (greedy) or a positive number"),
    "top_k": _whole(0, 2**31 - 1, "a whole number from 0, which keeps all tokens, to 2**31 - 1"),
    "top_p": _number(_ABOVE_0, 1.0, f"{_SHARE} (for the most probable token alone, use temperature 0)"),
    "min_p": _number(0.0, 1.0, "from 0, which keeps all tokens, to 1"),
    "typical_p": _number(_ABOVE_0, 1.0, _SHARE),
    "repetition_penalty": _number(0.01, 100.0, "from 0.01 to 100; 1 does nothing"),
    "presence_penalty": _number(-100.0, 100.0, _PENALTY),
    "frequency_penalty": _number(-100.0, 100.0, _PENALTY),
    "logit_bias": _biases,
    "bad_words": _texts,
    "stop": _texts,
    "stop_token_ids": _token_ids,
    "include_stop": _flag,
    "ignore_eos": _flag,
    "seed": _whole(0, 2**63 - 1, "None or a whole number from 0 to 2**63 - 1", none=True),
    "logprobs": _whole(0, MAX_LOGPROBS, _TOP, none=True),
    "prompt_logprobs": _whole(0, MAX_LOGPROBS, _TOP, none=True),
    "n": _whole(1, MAX_CHOICES, f"a whole number from 1 to {MAX_CHOICES}"),
    "beam_width": _whole(1, MAX_CHOICES, f"None or a whole number from 1 to {MAX_CHOICES}", none=True),
    "length_penalty": _number(-100.0, 100.0, "from -100 to 100; 1 divides by the length"),
    "regex": _expression,
    "json_schema": _schema,
    "required_words": _texts,
    "priority": _whole(-1000, 1000, "a whole number from -1000 to 1000"),  # more would drown the clock beside it
}


# ---- values that cannot be meant together ------------------------------------------------------------------------

_FILTERS = ("top_k", "top_p", "min_p", "typical_p")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_GRAMMARS = ("regex", "json_schema")
_NOT_WITH_BEAMS = (
    "temperature", *_FILTERS, *_PENALTIES, "logit_bias", "bad_words", "stop", "logprobs", "prompt_logprobs", *_GRAMMARS,
    "required_words",
)  # fmt: skip
_NOT_WITH_A_GRAMMAR = {
    "ignore_eos": "go on past its end",
    "stop": "end before it matches",
    "stop_token_ids": "end before it matches",
    "required_words": "not be allowed to end where it matches",
}


def _contradictions(params: SamplingParams) -> Iterator[str]:
    """A sentence for each contradiction."""
    asked = {one.name: getattr(params, one.name) for one in fields(params) if getattr(params, one.name) != one.default}
    if params.beam_width is None:
        yield from _without_beams(params, asked)
    else:
        yield from _with_beams(params, asked)
    if params.include_stop and not params.stop:
        yield "include_stop is True and there is no stop text to include; give stop, or leave include_stop out."
    yield from _grammars(asked)
    yield from _required(params)


def _without_beams(params: SamplingParams, asked: Mapping[str, Any]) -> Iterator[str]:
    for name in _FILTERS:
        if name in asked and params.temperature == 0:
            yield (
                f"{name} is {asked[name]!r} and temperature is 0; {name} has no effect at temperature 0, which takes "
                f"the most probable token. Give a temperature above 0, or leave {name} out."
            )
    if params.n > 1 and params.temperature == 0:
        yield (
            f"n is {params.n} and temperature is 0; {params.n} answers would be the same. Give a temperature above 0 "
            "for different ones, or a beam_width for the most probable ones."
        )
    if "length_penalty" in asked:
        yield f"length_penalty is {params.length_penalty!r} without beam_width; it scores beams. Give a beam_width too."


def _with_beams(params: SamplingParams, asked: Mapping[str, Any]) -> Iterator[str]:
    for name in _NOT_WITH_BEAMS:
        if name in asked:
            yield (
                f"{name} is {_shown(asked[name])} and beam_width is {params.beam_width}; beam search looks for the "
                f"most probable texts by the model alone, and knows no {name}. Leave one of the two out."
            )
    if params.n > (params.beam_width or 1):
        yield f"n is {params.n} and beam_width is {params.beam_width}; there are no more texts than there are beams."


def _grammars(asked: Mapping[str, Any]) -> Iterator[str]:
    given = [name for name in _GRAMMARS if name in asked]
    if len(given) > 1:
        yield "regex and json_schema are both given; an answer can be held to one of them. Leave one out."
    for name, what in _NOT_WITH_A_GRAMMAR.items():
        if given and name in asked:
            yield (
                f"{name} is {_shown(asked[name])} and {given[0]} is given; the whole answer matches {given[0]}, and "
                f"with {name} it could {what}. Leave one of the two out."
            )


def _required(params: SamplingParams) -> Iterator[str]:
    for word in params.required_words:
        for name, texts in (("bad_words", params.bad_words), ("stop", params.stop)):
            for text in texts:
                if text in word:
                    consequence = "may never be in the answer" if name == "bad_words" else "ends the answer"
                    yield (
                        f"required_words has {_shown(word)}, which contains {_shown(text)} of {name}; what is required "
                        f"{consequence}. Leave one of the two out."
                    )
