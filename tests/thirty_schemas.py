"""Thirty JSON schemas of the kinds that people ask models to fill in, each with what is asked for."""

from __future__ import annotations

from typing import Any

_NAME = {"type": "string", "minLength": 1, "maxLength": 20}


def _object(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


SCHEMAS: dict[str, dict[str, Any]] = {
    "a person": _object({"name": _NAME, "age": {"type": "integer", "minimum": 0, "maximum": 120}}),
    "a person, some of it optional": _object(
        {"name": _NAME, "nickname": _NAME, "email": {"type": "string", "format": "email", "maxLength": 30}}, ["name"]
    ),
    "an address in a person": _object(
        {
            "name": _NAME,
            "address": _object({"street": _NAME, "city": _NAME, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}),
        }
    ),
    "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
    "exactly three numbers": {
        "type": "array",
        "items": {"type": "integer", "minimum": 1, "maximum": 99},
        "minItems": 3,
        "maxItems": 3,
    },
    "a matrix": {
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "items": {
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "items": {"type": "integer", "minimum": -9, "maximum": 9},
        },
    },
    "a pair of different things": {
        "type": "array",
        "prefixItems": [{"type": "string", "maxLength": 8}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "a feeling": {"enum": ["glad", "sad", "angry", "calm"]},
    "mixed values": {"enum": [1, 2.5, "three", None, True, [4], {"five": 5}]},
    "one fixed value": _object({"version": {"const": "1.0"}, "kind": {"const": 7}}),
    "a text or a number": {
        "anyOf": [{"type": "string", "maxLength": 12}, {"type": "integer", "minimum": 0, "maximum": 999}]
    },
    "one of two shapes": {
        "oneOf": [
            _object({"kind": {"const": "circle"}, "radius": {"type": "integer", "minimum": 1, "maximum": 50}}),
            _object({"kind": {"const": "square"}, "side": {"type": "integer", "minimum": 1, "maximum": 50}}),
        ]
    },
    "a share": {"type": "number", "minimum": 0, "maximum": 1},
    "a temperature": _object(
        {"celsius": {"type": "number", "exclusiveMinimum": -90, "exclusiveMaximum": 60}, "sunny": {"type": "boolean"}}
    ),
    "a whole number": {"type": "integer"},
    "a price in steps of five": {"type": "integer", "minimum": 5, "maximum": 500, "multipleOf": 5},
    "yes or no": _object({"answer": {"type": "boolean"}}),
    "perhaps nothing": _object({"middle_name": {"type": ["string", "null"], "maxLength": 10}}),
    "nothing": {"type": "null"},
    "a short text": {"type": "string", "minLength": 5, "maxLength": 40},
    "a licence plate": _object({"plate": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"}}),
    "a date": _object({"born": {"type": "string", "format": "date"}}),
    "a moment": _object({"at": {"type": "string", "format": "time"}, "host": {"type": "string", "format": "ipv4"}}),
    "an identifier": _object({"id": {"type": "string", "format": "uuid"}}),
    "a tree": {
        "$defs": {
            "node": _object(
                {
                    "value": {"type": "integer", "minimum": 0, "maximum": 9},
                    "left": {"$ref": "#/$defs/leaf"},
                    "right": {"$ref": "#/$defs/leaf"},
                },
                ["value"],
            ),
            "leaf": {"anyOf": [{"type": "null"}, _object({"value": {"type": "integer", "minimum": 0, "maximum": 9}})]},
        },
        "$ref": "#/$defs/node",
    },
    "the same definition twice": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "definitions": {
            "point": _object(
                {
                    "x": {"type": "integer", "minimum": 0, "maximum": 99},
                    "y": {"type": "integer", "minimum": 0, "maximum": 99},
                }
            )
        },
        **_object({"from": {"$ref": "#/definitions/point"}, "to": {"$ref": "#/definitions/point"}}),
    },
    "names that are not English": _object(
        {
            "größe": {"type": "integer", "minimum": 40, "maximum": 230},
            "名前": {"type": "string", "maxLength": 6},
            "🙂": {"type": "boolean"},
        }
    ),
    "scores by name": {
        "type": "object",
        "properties": {"total": {"type": "integer", "minimum": 0, "maximum": 100}},
        "required": ["total"],
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 100},
        "maxProperties": 3,
    },
    "two demands at once": {"allOf": [{"type": "string", "maxLength": 10}, {"pattern": "^[a-z ]+$", "minLength": 3}]},
    "an order": _object(
        {
            "title": {"type": "string", "description": "what was ordered", "maxLength": 20},
            "items": {
                "type": "array",
                "minItems": 1,
                "maxItems": 2,
                "items": _object(
                    {
                        "sku": {"type": "string", "pattern": "^[A-Z]{3}[0-9]{2}$"},
                        "count": {"type": "integer", "minimum": 1, "maximum": 20},
                    }
                ),
            },
            "paid": {"type": "boolean", "default": False},
        },
    ),
}
