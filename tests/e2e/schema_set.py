"""JSON Schemas of many shapes, made by a seed and bounded, so that a small model comes to an end of each."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
Maker = Callable[[random.Random, int], Schema]

WORDS = [
    "red",
    "green",
    "blue",
    "north",
    "x-1",
    "a b",
    'say "hi"',
    "back\\slash",
    "naïve",
    "日本",
    "😀",
    "tab\t",
]
PATTERNS = ["^[a-z]{2,6}$", "^[A-Z][0-9]{3}$", "^(on|off)$", r"^\d{4}-\d{2}$", "^#[0-9a-f]{6}$", "^a.c?$"]
_OBJECT: Schema = {"type": "object", "additionalProperties": False}
FORMATS = ["date", "uuid", "ipv4", "ipv6"]


def make_schemas(count: int, seed: int) -> list[Schema]:
    """`count` schemas; the same ones for the same seed."""
    rng = random.Random(seed)
    return [_top(rng, index) for index in range(count)]


def _top(rng: random.Random, index: int) -> Schema:
    schema = _MAKERS[index % len(_MAKERS)](rng, 2)
    if index % 7 == 0:  # all of it by reference
        schema = {"$defs": {"it": schema}, "$ref": "#/$defs/it"}
    elif index % 40 == 2:  # a list by reference to itself
        node = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
        schema = {
            "$defs": {
                "node": {**_OBJECT, "properties": {"v": schema, "next": node}, "required": ["v", "next"]}
            },
            "$ref": "#/$defs/node",
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _any(rng: random.Random, depth: int) -> Schema:
    makers = _MAKERS if depth > 0 else _FLAT
    return rng.choice(makers)(rng, depth - 1)


def _string(rng: random.Random, _depth: int) -> Schema:
    low = rng.randint(0, 4)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 10)}


def _pattern(rng: random.Random, _depth: int) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def _format(rng: random.Random, _depth: int) -> Schema:
    return {"type": "string", "format": rng.choice(FORMATS)}


def _enum(rng: random.Random, _depth: int) -> Schema:
    values: list[Any] = [*rng.sample(WORDS, 3), rng.randint(-9, 9), None, True, 2.5, {"k": [1]}, []]
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def _const(rng: random.Random, _depth: int) -> Schema:
    return {"const": rng.choice([*WORDS, 0, -1.5, False, None, {"a": "b", "c": [1, 2]}])}


def _integer(rng: random.Random, _depth: int) -> Schema:
    low = rng.randint(-50, 50)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + rng.randint(7, 1000)}
    if rng.random() < 0.3:
        schema["multipleOf"] = rng.randint(2, 7)
    return schema


def _number(rng: random.Random, _depth: int) -> Schema:
    low = rng.randint(-40, 40) / 4
    schema: Schema = {"type": "number", "exclusiveMinimum": low, "maximum": low + rng.randint(4, 80) / 4}
    if rng.random() < 0.9:  # the others have digits for as long as the model likes
        schema["multipleOf"] = 0.25
    return schema


def _simple(rng: random.Random, _depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _any(rng, depth - 1),
        "minItems": low,
        "maxItems": low + rng.randint(0, 2),
    }


def _tuple(rng: random.Random, depth: int) -> Schema:
    items = [_any(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": rng.randint(0, len(items))}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["id", "name", "tags", "größe", "is ok", "a.b", "$x", "n"], rng.randint(1, 4))
    return {
        **_OBJECT,
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
    }


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


_FLAT: list[Maker] = [_string, _pattern, _format, _enum, _const, _integer, _number, _simple]
_MAKERS: list[Maker] = [*_FLAT, _array, _tuple, _object, _any_of, _object, _object]
