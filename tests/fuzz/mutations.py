"""Owns how valid inputs are made wrong: as bytes, as columns, and field by field as messages."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INTS = (
    0,
    1,
    2,
    3,
    7,
    63,
    64,
    65,
    127,
    128,
    255,
    256,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    -1,
    -2,
)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, 1e38, -1e38, math.inf, -math.inf, math.nan, 100.0, -100.5)
_TEXTS = (
    "",
    "a",
    "0",
    "none",
    "\0",
    "é",
    "\U0001f600",
    "x" * 65,
    "x" * 300,
    "../..",
    "127.0.0.1:1",
    "[::1]:1",
    ":",
)
_LIMITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """One to four changes: bits, numbers, pieces left out, doubled, moved or put in, a cut."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        _change_bytes(rng, changed)
    return bytes(changed)


def _change_bytes(rng: random.Random, data: bytearray) -> None:
    kind = rng.randrange(7)
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice((1, 2, 4, 8, 64)))
    if kind == 0 and data:
        data[start - 1] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[start:end] = rng.randbytes(end - start)
    elif kind == 2:
        del data[start:end]
    elif kind == 3:
        data[start:start] = data[start:end] * rng.choice((1, 2, 100))
    elif kind == 4:
        number = rng.choice(_INTS) & 0xFFFFFFFF
        data[start : start + 4] = struct.pack(rng.choice("<>") + "I", number)
    elif kind == 5:
        del data[start:]
    else:
        data[start:start] = rng.randbytes(rng.randrange(1, 9))


def mutate_column(rng: random.Random, data: bytes) -> bytes:
    """A change that leaves whole 4-byte items, most often."""
    if rng.random() < 0.1:
        return mutate_bytes(rng, data)
    count = len(data) // 4
    items = list(struct.unpack(f"<{count}i", data[: 4 * count]))
    kind = rng.randrange(5)
    at = rng.randrange(count + 1)
    if kind == 0 and items:
        items[at - 1] = _signed(rng.choice(_INTS))
    elif kind == 1 and items:
        items[at - 1] = _signed(items[at - 1] + rng.choice((-1, 1)))
    elif kind == 2:
        items.insert(at, _signed(rng.choice(_INTS)))
    elif kind == 3:
        del items[at : at + 1]
    else:
        items = items[at:] + items[:at] * rng.choice((1, 2))
    return struct.pack(f"<{len(items)}i", *items)


def _signed(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def mutate_message(rng: random.Random, message: Message) -> None:
    """Changes one field, set or not, at any depth."""
    field = rng.choice(message.DESCRIPTOR.fields)
    if field.message_type is not None and not _is_map(field):
        _mutate_child(rng, message, field)
    elif _is_map(field):
        _mutate_map(rng, message, field)
    elif field.is_repeated:
        _mutate_list(rng, getattr(message, field.name), field)
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(rng, field, getattr(message, field.name)))


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _mutate_child(rng: random.Random, message: Message, field: FieldDescriptor) -> None:
    if not field.is_repeated:
        child = getattr(message, field.name)
        child.SetInParent()
        mutate_message(rng, child)
        return
    children = getattr(message, field.name)
    kind = rng.randrange(4)
    if kind == 0 or not children:
        children.add()
    elif kind == 1:
        children.add().CopyFrom(rng.choice(children))
    elif kind == 2:
        del children[rng.randrange(len(children))]
    else:
        mutate_message(rng, rng.choice(children))


def _mutate_map(rng: random.Random, message: Message, field: FieldDescriptor) -> None:
    values, entry = getattr(message, field.name), field.message_type.fields_by_name
    for _ in range(rng.choice((1, 2, 1025 if rng.random() < 0.02 else 3))):
        values[_value(rng, entry["key"], None)] = _value(rng, entry["value"], None)


def _mutate_list(rng: random.Random, values: Any, field: FieldDescriptor) -> None:
    kind = rng.randrange(4)
    if kind == 0 and values:
        del values[rng.randrange(len(values))]
    elif kind == 1 and values:
        values.extend(list(values)[:100] * rng.choice((1, 2)))
    else:
        at = rng.randrange(len(values) + 1)
        kept = list(values)
        kept.insert(at, _value(rng, field, None))
        del values[:]
        values.extend(kept)


def _value(rng: random.Random, field: FieldDescriptor, old: Any) -> Any:
    kind = field.cpp_type
    if kind in _LIMITS:
        low, high = _LIMITS[kind]
        near = (old or 0) + rng.choice((-1, 1)) if rng.random() < 0.3 else rng.choice(_INTS)
        return min(max(near, low), high)
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(_FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.randrange(-1, 6)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return mutate_column(rng, old or b"\1\0\0\0")
    return rng.choice(_TEXTS) if rng.random() < 0.7 else mutate_text(rng, old or "")


def mutate_text(rng: random.Random, text: str) -> str:
    """A change that leaves a string."""
    return mutate_bytes(rng, text.encode()).decode(errors="replace")


def mutate_json(rng: random.Random, value: Any) -> Any:
    """The value with one part of it, at any depth, replaced, left out or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {each: value[each] for each in value if each != key}
        return {**value, key: mutate_json(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.random() < 0.15:
            return value[:at] + value[at + 1 :]
        return [*value[:at], mutate_json(rng, value[at]), *value[at + 1 :]]
    others = (
        None,
        True,
        [],
        {},
        "",
        "x",
        rng.choice(_INTS),
        1 << 70,
        rng.choice(_FLOATS),
        [[1, 2]],
        {"a": 1},
    )
    return rng.choice(others)


def message_maker(seeds: list[Message]) -> Callable[[random.Random], bytes]:
    """Makes the bytes of a seed, of one with changed fields, or of one whose bytes were changed, too."""

    def make(rng: random.Random) -> bytes:
        seed = rng.choice(seeds)
        message = type(seed)()
        message.CopyFrom(seed)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            mutate_message(rng, message)
        data: bytes = message.SerializeToString()
        if rng.random() < 0.25:
            data = mutate_bytes(rng, data)
        return data if rng.random() < 0.98 else rng.randbytes(rng.randrange(64))

    return make
