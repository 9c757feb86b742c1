"""Owns what one frame on the link between the engine and a frontend in another process holds, and its bytes.

Both ends are of one installation and trust each other. Tokens, of which there are many, are columns of
numbers; everything else comes a few times in a request's life and is JSON (docs/adr/0011-frontend-link.md).
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scheduler_service.candidate_output import LogprobColumns
from scheduler_service.core.admission import DrainRate, QueueLoad
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.step import Int32, TokenLogprobs
from scheduler_service.frontend_codec import decode_spec, encode_presentation, encode_spec
from scheduler_service.presentation import Presentation

Message = list[Any]
"""A kind and its values, all of JSON's types."""

Buffer = bytes | bytearray | memoryview

# Tokens name a candidate by its request's number, which is never used again, and in the last bits its index.
INDEX_BITS = 6  # a request has up to 64 candidates
INDEX_MASK = (1 << INDEX_BITS) - 1
_NO_MESSAGES = b""
_QUEUE = struct.Struct("<qqdd")  # waiting candidates, their tokens, the rate of those that leave, its time


class ToFrontend:
    """What waits to be sent to a frontend. One frame carries all of it, however much there is.

    A frame is read in the order `before`, tokens, `after`. So each candidate's events stay in order: it is
    admitted once, then has tokens, then ends.
    """

    __slots__ = ("after", "before", "candidates", "files", "logprob_rows", "logprobs", "queue", "token_ids")

    def __init__(self) -> None:
        self.before: list[Message] = []
        self.candidates = array("q")
        self.token_ids = array("i")
        self.logprob_rows = array("I")  # the rows of token_ids that have log-probabilities
        self.logprobs = LogprobColumns()
        self.after: list[Message] = []
        self.files: list[bytes] = []  # of the one status that `before` may hold
        self.queue: tuple[QueueLoad, DrainRate] | None = None  # when the frame goes out

    def add_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Those of the token that was added last."""
        self.logprob_rows.append(len(self.token_ids) - 1)
        self.logprobs.append(logprobs)

    def encode(self) -> list[Buffer]:
        """The parts of the frame."""
        return [
            b"" if self.queue is None else _encode_queue(*self.queue),
            _encode_messages(self.before),
            b"".join(self.files),
            self.candidates.tobytes(),
            self.token_ids.tobytes(),
            self.logprob_rows.tobytes(),
            *self.logprobs.encode(),
            _encode_messages(self.after),
        ]


@dataclass(frozen=True, slots=True)
class FromEngine:
    """A frame as a frontend reads it."""

    queue: tuple[QueueLoad, DrainRate] | None
    before: list[Message]
    files: bytes
    candidates: memoryview
    token_ids: memoryview
    logprobs: dict[int, TokenLogprobs]  # by row of the two columns
    after: list[Message]

    @classmethod
    def decode(cls, parts: Sequence[memoryview]) -> FromEngine:
        """Reads the parts of a frame. Raises ValueError."""
        queue, before, files, candidates, token_ids, rows, sampled, counts, ids, values, after = parts
        logprobs: dict[int, TokenLogprobs] = {}
        if rows:
            columns = LogprobColumns.decode(sampled, counts, ids, values)
            row_numbers = rows.cast("I")
            logprobs = dict(zip(row_numbers, columns.take(len(row_numbers)), strict=True))
        return cls(
            _decode_queue(queue) if queue else None,
            _decode_messages(before),
            bytes(files),
            candidates.cast("q"),
            token_ids.cast("i"),
            logprobs,
            _decode_messages(after),
        )


@dataclass(slots=True)
class ToEngine:
    """What waits to be sent to the engine."""

    messages: list[Message] = field(default_factory=list)
    prompts: list[Int32] = field(default_factory=list)  # of the submits in `messages`

    def submit(self, number: int, spec: RequestSpec, presentation: Presentation) -> None:
        """Adds a request."""
        self.messages.append(["submit", number, encode_presentation(presentation), *encode_spec(spec)])
        self.prompts.append(spec.prompt_token_ids)

    def encode(self) -> list[Buffer]:
        """The parts of the frame."""
        return [
            _encode_messages(self.messages),
            b"".join(prompt.tobytes() for prompt in self.prompts),
        ]


class FromFrontend:
    """A frame as the engine reads it."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        """Raises ValueError."""
        messages, prompts = parts
        self.messages = _decode_messages(messages)
        self._prompts = np.frombuffer(prompts, np.int32)

    def spec(self, values: Sequence[Any], sink: object) -> RequestSpec:
        """The request of the next submit, from its values behind the number."""
        num_tokens = values[0]
        prompt, self._prompts = self._prompts[:num_tokens], self._prompts[num_tokens:]
        return decode_spec(values, prompt.copy(), sink)  # a copy does not keep the whole frame


def _encode_queue(load: QueueLoad, drain: DrainRate) -> bytes:
    return _QUEUE.pack(load.num_waiting, load.num_tokens, *drain.values)


def _decode_queue(part: memoryview) -> tuple[QueueLoad, DrainRate]:
    try:
        num_waiting, num_tokens, rate, noted_at = _QUEUE.unpack(part)
    except struct.error as error:
        raise ValueError(str(error)) from None
    return QueueLoad(num_waiting, num_tokens), DrainRate(rate, noted_at)


def _encode_messages(messages: list[Message]) -> bytes:
    return json.dumps(messages, separators=(",", ":")).encode() if messages else _NO_MESSAGES


def _decode_messages(part: memoryview) -> list[Message]:
    return json.loads(bytes(part)) if part else []
