"""Owns what the page gets: the admin API's messages as JSON, rows of requests as columns. Decides nothing."""

from __future__ import annotations

import base64
import json
from typing import Any

from google.protobuf.message import Message

from tidegate.admin.v1 import admin_pb2 as pb

_REQUEST_FIELDS = [field.name for field in pb.RequestState.DESCRIPTOR.fields]


def update_json(update: pb.WatchStateResponse) -> bytes:
    """One update, in one line. Its requests are columns by the names of their fields."""
    plain = to_plain(update, leave_out=("requests",))
    requests = update.requests
    plain["requests"] = {name: [getattr(row, name) for row in requests] for name in _REQUEST_FIELDS}
    return to_json(plain)


def to_json(plain: Any) -> bytes:
    """Compact JSON, without line breaks."""
    return json.dumps(plain, separators=(",", ":")).encode()


def to_plain(message: Message, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """All fields by their names, numbers as numbers; bytes in base64. None: not set."""
    plain: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.name in leave_out:
            continue
        value = getattr(message, field.name)
        if field.has_presence and not message.HasField(field.name):
            plain[field.name] = None
        elif field.is_repeated:
            plain[field.name] = [to_plain(each) for each in value] if field.message_type else list(value)
        elif field.message_type:
            plain[field.name] = to_plain(value)
        elif isinstance(value, bytes):
            plain[field.name] = base64.b64encode(value).decode()
        else:
            plain[field.name] = value
    return plain
