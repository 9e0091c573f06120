"""Answers held to an expression or a schema: allowed is what Python's re and the schema say, at bounded cost."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmfromscratch import SamplingParams, constraints
from llmfromscratch.constraint_expressions import translate
from llmfromscratch.errors import RequestError

END = 0
_PIECES = [
    "ab",
    "ba",
    "aa",
    "bc",
    "abc",
    "é",
    "éa",
    "1",
    "12",
    "0",
    '"',
    '"}',
    '":',
    '{"',
    "{",
    "}",
    "[",
    "]",
    ", ",
    ",",
    ": ",
    ":",
]
_PIECES += ["\n", " ", "  ", "\n  ", "true", "null", "a", "b", "c", "-", ".", "日", "日本", "2", "3", "e"]
VOCABULARY = [b"<end>", *dict.fromkeys(piece.encode() for piece in _PIECES), "é".encode()[:1], "é".encode()[1:]]
CONTROL = {"<end>": END}


class FewTokens:
    """A tokenizer with a vocabulary of a few dozen tokens, some of them half characters; it has no id 5."""

    special = CONTROL

    def __contains__(self, index: object) -> bool:
        return index in range(len(VOCABULARY)) and index != 5

    def token_bytes(self, index: int) -> bytes:
        return VOCABULARY[index]


TOKENIZER = FewTokens()
SIZE = len(VOCABULARY) + 3  # a model's embedding may have rows without a token


def constraint(max_tokens: int = 1000, ends=(END,), **what):
    return constraints.of(SamplingParams(max_tokens=max_tokens, **what), TOKENIZER, ends, SIZE)


def allowed(one) -> set[int]:
    return set(one.allowed().nonzero().flatten().tolist())


def walk(one, seed: int, most: int = 60) -> tuple[bytes, bool]:
    """Random allowed tokens: the text, and whether it ended."""
    generator, text = torch.Generator().manual_seed(seed), b""
    for _ in range(most):
        choices = sorted(allowed(one))
        token = choices[int(torch.randint(len(choices), (1,), generator=generator))]
        one.advance(token)
        if token == END:
            return text, True
        text += VOCABULARY[token]
    return text, False


def test_where_nothing_is_demanded_there_is_no_constraint():
    assert constraints.of(SamplingParams(), TOKENIZER, [END], SIZE) is None


def test_a_model_without_a_tokenizer_is_refused_by_name():
    with pytest.raises(RequestError, match="need a tokenizer"):
        constraints.of(SamplingParams(regex="a"), None, [END], SIZE)


def matches(expression: str, text: bytes) -> bool:
    """Whether Python's re matches the whole text; half a character is no text."""
    try:
        return re.fullmatch(expression, text.decode()) is not None
    except UnicodeDecodeError:
        return False


# expressions, against Python's re

ATOMS = st.sampled_from(
    ["a", "b", "c", "é", ".", "[ab]", "[^ab]", r"\d", r"\w", r"[^\W\d]", "日", r"\S", "(?:ab|c)", "1", r"\."]
)
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "*?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS, st.integers(0, 1000))
def test_every_walk_of_allowed_tokens_ends_in_a_full_match_and_ends_are_where_python_has_them(expression, seed):
    one, text = constraint(regex=expression), b""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(25):
        choices = sorted(allowed(one))
        assert choices, "no way leads into a dead end"
        assert (END in choices) == matches(expression, text)
        token = choices[int(torch.randint(len(choices), (1,), generator=generator))]
        if token == END:
            return
        one.advance(token)
        text += VOCABULARY[token]


def can_go_on(expression: str, text: bytes, longest: int) -> bool:
    """By brute force: some text of at most so many more characters makes it a full match."""
    waiting = [text]
    for _ in range(longest + 1):
        for candidate in waiting:
            if matches(expression, candidate):
                return True
        waiting = [candidate + piece for candidate in waiting for piece in (b"a", b"b", b"c", b"1")]
    return False


@pytest.mark.parametrize("expression", ["ab|ba", "a{2,3}b?", "(?:ab|c)*1", "[ab]c|1{2}", "a(?:b|ca)", "1?2?3?"])
def test_the_tokens_allowed_are_exactly_those_that_some_full_match_goes_on_from(expression):
    for seed in range(5):
        one, text = constraint(regex=expression), b""
        for _ in range(4):
            expected = {
                i for i, piece in enumerate(VOCABULARY) if i not in (END, 5) and can_go_on(expression, text + piece, 4)
            }
            assert allowed(one) - {END} == expected, text
            if not expected:
                break
            token = sorted(expected)[seed % len(expected)]
            one.advance(token)
            text += VOCABULARY[token]


def test_half_characters_are_allowed_where_the_character_is():
    one = constraint(regex="é")
    half = VOCABULARY.index("é".encode()[:1])
    assert half in allowed(one)
    one.advance(half)
    assert allowed(one) == {VOCABULARY.index("é".encode()[1:])}


def test_control_tokens_and_ids_without_a_token_are_never_allowed():
    second_half = VOCABULARY.index("é".encode()[1:])  # no text begins with it
    assert allowed(constraint(regex="(?s:.)*")) == set(range(len(VOCABULARY))) - {5, second_half}


def test_an_end_token_with_a_text_of_its_own_ends_and_is_not_taken_for_its_text():
    a = VOCABULARY.index(b"a")
    one = constraint(regex="aa|b", ends=(END, a))
    assert a not in allowed(one)
    one.advance(VOCABULARY.index(b"aa"))
    assert allowed(one) == {END, a}


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        (r"a\b", "word boundary"),
        ("(?=a)a", "looking ahead"),
        ("(?<!a)b", "looking ahead or behind"),
        (r"(a)\1", "reference back"),
        ("(?i)a", "ignoring case"),
        ("(?:a(?i:b))", "ignoring case"),
        ("a$b", "anchor"),
        ("a++", "possessive"),
        ("(?>a)b", "atomic"),
        ("(a)?(?(1)b|c)", "condition"),
        ("(", "no regular expression"),
        ("a{100000}", "too large"),
        ("(?:a{1000}){1000}", "too large"),
        ("a" * 300_000, "at most"),
        ("(" * 200 + "a" + ")" * 200, "deep"),
        (r"[^\s\S]", "cannot"),
    ],
)
def test_what_is_not_supported_in_an_expression_is_refused_by_name(expression, name):
    with pytest.raises(RequestError, match=name):
        constraint(regex=expression)


def test_anchors_at_the_ends_are_what_a_full_match_has_anyway():
    assert translate("^ab$") == translate("ab") == translate(r"\Aab\Z")


@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS, st.sampled_from(["{}", "^{}", "{}$", "^{}$", "a|{}", "^a|{}$"]), st.text("abc1.", max_size=6))
def test_an_expression_that_is_searched_for_translates_to_one_that_matches_the_whole(expression, frame, text):
    pattern = frame.format(expression)
    python = re.sub(
        r"\\x\{([0-9a-f]+)\}", lambda match: re.escape(chr(int(match[1], 16))), translate(pattern, search=True)
    )
    assert bool(re.search(pattern, text)) == bool(re.fullmatch(python, text))


def test_in_a_schema_the_short_forms_are_the_narrower_of_what_ecma_and_python_mean():
    assert translate(r"^\d$", search=True) == translate("^[0-9]$", search=True)
    assert len(translate(r"^\D$", search=True)) > len(translate(r"^[^0-9]$", search=True))


# schemas


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' is not supported"),
        ({"not": {}}, "'not'"),
        ({"if": {}, "then": {}}, "'if'"),
        ({"type": "array", "contains": {}}, "'contains'"),
        ({"properties": {"a": {"maxLenght": 3}}}, "#/properties/a.*'maxLenght'"),
        ({"x-guidance": {"lenient": True}}, "'x-guidance'"),
        ({"type": "string", "format": "color"}, "format 'color'"),
        ({"type": "string", "pattern": "(?=a)"}, "looking ahead"),
        ({"$ref": "http://example.org/schema"}, r"'\$ref'"),
        ({"$ref": "#/$defs/missing"}, "not supported.*missing"),
        ({"type": "array", "items": [{}]}, "prefixItems"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "object", "minProperties": 3}, "minProperties"),
        ({"minimum": 10**30}, "2\\*\\*53"),
        ({"minLength": -1}, "minLength"),
        ({"maxLength": "3"}, "maxLength"),
        ({"multipleOf": 0}, "multipleOf"),
        ({"exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"$schema": "http://json-schema.org/draft-04/schema#"}, "schema"),
        ({"type": "strin"}, "strin"),
        ({"enum": []}, "json_schema"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum"),
        ({"$ref": "#"}, "cannot be followed|cannot be met"),
        ({"properties": {"a": 3}}, "number 3"),
    ],
)
def test_what_is_not_supported_in_a_schema_is_refused_by_name(schema, name):
    with pytest.raises(RequestError, match=name):
        constraint(json_schema=schema)


def test_a_schema_may_come_as_text_or_as_an_object_and_annotations_change_nothing():
    plain = allowed(constraint(json_schema={"type": "boolean"}))
    assert plain == allowed(
        constraint(json_schema='{"type": "boolean", "title": "t", "default": false, "$comment": ""}')
    )


def test_white_space_is_bounded():
    one = constraint(json_schema={"type": "array", "items": {"type": "null"}, "maxItems": 2})
    blank = {i for i, piece in enumerate(VOCABULARY) if piece.isspace()}
    assert not allowed(one) & blank, "none before the text"
    one.advance(VOCABULARY.index(b"["))
    for _ in range(30):
        choices = allowed(one) & blank
        if not choices:
            break
        one.advance(min(choices))
    else:
        pytest.fail("thirty tokens of white space in a row were allowed")


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"enum": [1, True, "é"]}, "maxItems": 3},
        "b": {"type": ["null", "string"]},
    },
    "required": ["a"],
    "additionalProperties": {"type": "integer"},
}


@pytest.mark.parametrize("seed", range(15))
def test_random_allowed_tokens_give_json_that_is_valid_and_whole_before_max_tokens(seed):
    text, ended = walk(constraint(max_tokens=60, json_schema=SCHEMA), seed, most=60)
    assert ended
    jsonschema.validate(json.loads(text), SCHEMA)


def test_without_max_tokens_in_sight_the_same_walks_do_not_all_end():
    assert not all(
        walk(constraint(max_tokens=10_000, json_schema={"type": "string"}), seed, 12)[1] for seed in range(15)
    )


def test_an_answer_that_still_fits_is_not_narrowed():
    one = constraint(max_tokens=4, regex="[0-9]{3}")
    digits = {VOCABULARY.index(digit) for digit in (b"0", b"1", b"2", b"3")}
    assert digits <= allowed(one)


def test_requests_with_the_same_grammar_do_not_share_where_they_are():
    first, second = constraint(regex="abc"), constraint(regex="abc")
    first.advance(VOCABULARY.index(b"ab"))
    assert allowed(first) == {VOCABULARY.index(b"c")} and VOCABULARY.index(b"ab") in allowed(second)


def test_a_token_that_was_not_allowed_is_refused():
    with pytest.raises(RequestError, match="not allowed"):
        constraint(regex="abc").advance(VOCABULARY.index(b"c"))


def test_compiled_grammars_are_kept_for_the_next_request_but_not_without_end():
    own = FewTokens()
    for number in range(40):
        constraints.of(SamplingParams(regex=f"a{{{number + 1}}}"), own, [END], SIZE)
    workshop = constraints._workshop(own, SIZE)
    assert len(workshop._kept) == 32


# bounded cost

HEAVY_EXPRESSIONS = [
    "(?:a|b)*a(?:a|b){2000}",
    "(?:a?){4000}a{4000}",
    "(?:(?:a+)+)+b",
    r"(?:.*a.*b|.*b.*c|.*c.*d){30}",
    r"(?:\w{1,100} ){1,90}",
    "(?:[a-m]{1,50}[g-z]{1,50}){100}",
    "(?:" + "|".join(f".{{{length}}}" for length in range(1, 130)) + ")x",
]
_REFS = {
    f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}", "minLength": i}, {"$ref": f"#/$defs/a{i + 1}"}]}
    for i in range(30)
}
HEAVY_SCHEMAS = [
    {"enum": [f"value {number}" for number in range(100_000)]},
    {"enum": [f"value {number}" for number in range(4_000)]},
    {"type": "array", "minItems": 10**9},
    {"type": "array", "minItems": 10_000},
    {"type": "string", "minLength": 9_000, "pattern": "a.*b"},
    {"type": "object", "properties": {f"p{number}": {} for number in range(2_000)}},
    {"allOf": [{"type": "string", "pattern": f"a{number}.*b{number}"} for number in range(40)]},
    {"allOf": [{"anyOf": [{"type": "string", "pattern": f"a{i}"} for i in range(8)]} for _ in range(8)]},
    {"$defs": {**_REFS, "a30": {"type": "string"}}, "$ref": "#/$defs/a0"},
    {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}, "$ref": "#/$defs/a"},
    {"anyOf": [{"type": "array", "maxItems": 9_999, "items": {"maximum": number}} for number in range(500)]},
]
_BOUNDED = """
import json, resource, sys, time
import test_constraints as tests

for what in json.load(sys.stdin):
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        tests.walk(tests.constraint(max_tokens=300, **what), 0, most=100)
    except tests.RequestError:
        pass
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps([time.process_time() - began, grown / 1024]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux alone")
def test_whatever_is_asked_for_costs_bounded_time_and_memory():
    cases = [{"regex": each} for each in HEAVY_EXPRESSIONS] + [{"json_schema": each} for each in HEAVY_SCHEMAS]
    done = subprocess.run(
        [sys.executable, "-c", _BOUNDED],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
        cwd=Path(__file__).parent,
    )
    costs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(costs) == len(cases)
    for what, (seconds, megabytes) in zip(cases, costs, strict=True):
        assert seconds < 10 and megabytes < 300, (json.dumps(what)[:80], seconds, megabytes)


def test_a_text_nested_a_thousand_deep_is_refused_before_anything_is_compiled():
    began = time.process_time()
    with pytest.raises(RequestError):
        constraint(json_schema='{"items":' * 1000 + "{}" + "}" * 1000)
    assert time.process_time() - began < 2
    nested: dict = {}
    for _ in range(200):
        nested = {"type": "array", "items": nested}
    params = SimpleNamespace(regex=None, json_schema=nested, bad_words=(), required_words=(), max_tokens=9)
    with pytest.raises(RequestError, match="deep"):
        constraints.of(params, TOKENIZER, [END], SIZE)
