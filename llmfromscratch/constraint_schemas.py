"""JSON schemas: which of their keywords are supported, how large one may be, and what is handed to the library.

The library passes over keywords that it does not know, and takes some that it follows only in part; here each is looked
at first, so that nothing is silently ignored. What is handed on may be narrower than what was asked for, never wider:
every answer is valid under the schema as it was given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from llmfromscratch.constraint_expressions import translate
from llmfromscratch.errors import RequestError

MAX_TEXT, MAX_NODES, MAX_DEPTH = 200_000, 5_000, 60
MAX_PATTERNS = 8  # that may all have to match one text: what following them costs doubles with each
MAX_COUNT = 10_000  # of the items, characters or properties that a bound may ask for
_LARGEST = 2**53 - 1  # whole numbers beyond it are not the same in every reader of JSON (RFC 8259, section 6)
_ANNOTATIONS = {
    "$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
}  # fmt: skip
_TEXTS, _COUNTS, _NUMBERS = (str,), (int,), (int, float)
_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNTS),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), _NUMBERS),
    **dict.fromkeys(("pattern", "format", "$ref", "$schema", "$id"), _TEXTS),
    **dict.fromkeys(("enum", "required", "anyOf", "oneOf", "allOf", "prefixItems"), (list,)),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), (dict,)),
    **dict.fromkeys(("items", "additionalProperties"), (dict, bool)),
    "type": (str, list),
    "const": (object,),
}
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # name -> schema
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
# Narrower than the library has them, which lets 11:52:60 and endless fractions pass: no leap seconds, no 29 February.
_DATE = (
    r"[1-9]\d{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_OWN_FORMATS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}
_DRAFTS = ("2020-12", "2019-09", "draft-07", "draft-06")


def prepare(schema: str | Mapping[str, Any] | bool) -> str:
    """Checks a schema and writes it out for the library, as JSON. Raises RequestError, naming the place."""
    root = _read(schema)
    _check_size(root)
    if root is False:
        raise RequestError("json_schema is false: no JSON is valid under it.")
    prepared = _prepare({} if root is True else root, "#")
    _check_patterns(prepared)
    return json.dumps(prepared, ensure_ascii=False)


def _read(schema: str | Mapping[str, Any] | bool) -> Any:
    """A schema as plain objects of its own, whatever it came as."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False, default=dict)
        if len(text) > MAX_TEXT:
            raise RequestError(f"json_schema has {len(text)} characters; at most {MAX_TEXT} are supported.")
        root = json.loads(text, parse_constant=_no_constant)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"json_schema is no JSON: {error}.") from error
    if not isinstance(root, dict | bool):
        raise RequestError(f"json_schema is {_named(root)}; a schema is an object (or true).")
    return root


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check_size(root: Any) -> None:
    """Few enough values, not too deep, no number that readers of JSON disagree about."""
    nodes, level = 0, [root]
    for _ in range(MAX_DEPTH):
        nodes += len(level)
        if nodes > MAX_NODES:
            raise RequestError(f"json_schema holds more than {MAX_NODES} values; make it smaller.")
        for number in level:
            if isinstance(number, int | float) and not abs(number) <= _LARGEST:
                raise RequestError(f"json_schema: the number {number:.6g} is beyond 2**53 - 1; keep within it.")
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise RequestError(f"json_schema is nested more than {MAX_DEPTH} deep; make it flatter, or use $defs and $ref.")


def _check_patterns(root: Any) -> None:
    """Few enough patterns, where one text may have to match several of them."""
    patterns, joined, level = 0, False, [root]
    while level:
        for schema in level:
            if isinstance(schema, dict):
                patterns += len(schema.keys() & {"pattern", "format"}) + len(schema.get("patternProperties", ()))
                choice = schema.keys() & {"anyOf", "oneOf", "$ref"}
                joined |= "allOf" in schema or "patternProperties" in schema or bool(choice and len(schema) > 1)
        level = [child for value in level for child in _children(value)]
    if joined and patterns > MAX_PATTERNS:
        raise RequestError(
            f"json_schema holds {patterns} patterns and formats, and allOf, patternProperties, or a $ref or anyOf with "
            f"other keywords beside it; at most {MAX_PATTERNS} are supported then, as one text may have to match all."
        )


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _prepare(schema: Any, place: str) -> Any:
    """One schema and those in it: checked, and written as the library takes it."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise RequestError(f"json_schema, {place}: {_named(schema)} stands where a schema is expected.")
    ready: dict[str, Any] = {}
    for keyword, value in schema.items():
        _check_keyword(keyword, value, place)
        inner = f"{place}/{keyword}"
        if keyword in _MAPS:
            ready[keyword] = {name: _prepare(one, f"{inner}/{name}") for name, one in value.items()}
        elif keyword in _LISTS:
            ready[keyword] = [_prepare(one, f"{inner}/{number}") for number, one in enumerate(value)]
        elif keyword in ("items", "additionalProperties"):
            ready[keyword] = _prepare(value, inner)
        elif keyword == "pattern":
            ready[keyword] = f"^(?:{translate(value, search=True)})$"
        elif keyword == "format" and value in _OWN_FORMATS and "pattern" not in schema:
            ready["pattern"] = f"^(?:{translate(f'^{_OWN_FORMATS[value]}$', search=True)})$"
        elif keyword not in _ANNOTATIONS:
            ready[keyword] = value
    for pattern in schema.get("patternProperties", ()):
        translate(pattern, search=True)  # for its refusals
    _check_properties(schema, place)
    return ready | _bounds(schema)


def _check_keyword(keyword: str, value: Any, place: str) -> None:
    if keyword in _ANNOTATIONS and keyword not in _KINDS:
        return
    if keyword not in _KINDS:
        raise RequestError(
            f"json_schema, {place}: the keyword {keyword!r} is not supported. Supported are {', '.join(_KINDS)}."
        )
    kinds = _KINDS[keyword]
    right = isinstance(value, kinds)  # in a name of its own: the checker of types would narrow value
    if not right or (isinstance(value, bool) and bool not in kinds and object not in kinds):
        remedy = "; give prefixItems instead" if keyword == "items" and isinstance(value, list) else ""
        raise RequestError(f"json_schema, {place}: {keyword!r} cannot be {_named(value)}{remedy}.")
    if kinds == _COUNTS and not 0 <= value <= MAX_COUNT:
        raise RequestError(f"json_schema, {place}: {keyword!r} is {value}; supported is 0 to {MAX_COUNT}.")
    if keyword == "multipleOf" and value <= 0:
        raise RequestError(f"json_schema, {place}: 'multipleOf' is {value}; it must be above 0.")
    if keyword == "format" and value not in _FORMATS:
        raise RequestError(
            f"json_schema, {place}: the format {value!r} is not supported. Supported are {', '.join(_FORMATS)}."
        )
    if keyword == "$ref" and not value.startswith("#"):
        raise RequestError(
            f"json_schema, {place}: '$ref' is {value!r}; only references inside the schema, '#...', are."
        )
    if keyword == "$schema" and not any(draft in value for draft in _DRAFTS):
        raise RequestError(f"json_schema: '$schema' is {value!r}; supported are the drafts {', '.join(_DRAFTS)}.")
    if keyword == "$id" and place != "#":
        raise RequestError(f"json_schema, {place}: '$id' is supported at the root alone.")
    if keyword == "required" and not all(isinstance(name, str) for name in value):
        raise RequestError(f"json_schema, {place}: 'required' must list names.")


def _check_properties(schema: Mapping[str, Any], place: str) -> None:
    """Names outside of `properties` could come twice: then there would be fewer properties than were counted."""
    least = schema.get("minProperties", 0)
    if least > max(1, len(set(schema.get("required", ())))):
        raise RequestError(
            f"json_schema, {place}: 'minProperties' is {least}, more than are required by name; that is not supported."
        )


def _bounds(schema: Mapping[str, Any]) -> dict[str, int]:
    """Whole numbers that no bound was given for stay within what every reader of JSON can hold."""
    types = schema.get("type")
    if "integer" not in (types if isinstance(types, list) else [types]):
        return {}
    bounds = {}
    if not schema.keys() & {"minimum", "exclusiveMinimum"}:
        bounds["minimum"] = -_LARGEST
    if not schema.keys() & {"maximum", "exclusiveMaximum"}:
        bounds["maximum"] = _LARGEST
    return bounds


def _named(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"the number {value}")
