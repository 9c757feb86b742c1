"""Owns the values on the link between the engine and a frontend in another process, and their bytes.

Both ends are of one installation and trust each other. Tokens, of which there are many, are columns of
numbers; everything else comes a few times in a request's life and is JSON (docs/adr/0011-frontend-link.md).
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import numpy as np

from scheduler_service.candidate_output import LogprobColumns
from scheduler_service.core.admission import DrainRate, QueueLoad, RefusalReason, Refused
from scheduler_service.core.events import Finished, FinishReason, Timings, Usage
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.sampling import SamplingParams, StoppingParams
from scheduler_service.core.step import Int32, TokenLogprobs
from scheduler_service.errors import Reason, ServiceError
from scheduler_service.held_output import Origin
from scheduler_service.presentation import Presentation
from scheduler_service.served_model import ServedModel

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


# Requests. Fields go by their order in the class, so that none is forgotten when there are more of them.

_SPEC_FIELDS = [
    each.name
    for each in fields(RequestSpec)
    if each.name not in ("prompt_token_ids", "sampling", "stopping", "sink")
]
_SAMPLING_FIELDS = [each.name for each in fields(SamplingParams)]
_STOPPING_FIELDS = [each.name for each in fields(StoppingParams)]
_spec_values = attrgetter(*_SPEC_FIELDS)
_sampling_values = attrgetter(*_SAMPLING_FIELDS)
_stopping_values = attrgetter(*_STOPPING_FIELDS)


def encode_spec(spec: RequestSpec) -> list[Any]:
    """All of a request but its prompt, of which only the length is there, and its sink."""
    return [
        len(spec.prompt_token_ids),
        _spec_values(spec),
        _sampling_values(spec.sampling),
        [list(value) if isinstance(value, frozenset) else value for value in _stopping_values(spec.stopping)],
    ]


def decode_spec(values: Sequence[Any], prompt: Int32, sink: object) -> RequestSpec:
    """The request."""
    _, own, sampling, stopping = values
    options = dict(zip(_SAMPLING_FIELDS, sampling, strict=True))
    options["logit_bias"] = tuple((token_id, bias) for token_id, bias in options["logit_bias"])
    ends = dict(zip(_STOPPING_FIELDS, stopping, strict=True))
    for name in ("eos_token_ids", "stop_token_ids"):
        ends[name] = frozenset(ends[name])
    return RequestSpec(
        **dict(zip(_SPEC_FIELDS, own, strict=True)),
        prompt_token_ids=prompt,
        sampling=SamplingParams(**options),
        stopping=StoppingParams(**ends),
        sink=sink,
    )


_presentation_values = attrgetter(*(each.name for each in fields(Presentation)))


def encode_presentation(presentation: Presentation) -> list[Any]:
    """How a client wants the output."""
    return list(_presentation_values(presentation))


def decode_presentation(values: Sequence[Any]) -> Presentation:
    """How a client wants the output."""
    text, token_ids, skip_special_tokens, stop = values
    return Presentation(text, token_ids, skip_special_tokens, tuple(stop))


def encode_origin(origin: Origin) -> list[Any]:
    """What to know of a request that a client attaches to."""
    *values, presentation = _origin_values(origin)
    return [*values, encode_presentation(presentation)]


def decode_origin(values: Sequence[Any]) -> Origin:
    """What to know of a request that a client attaches to."""
    request_id, model, n, prompt_tokens, queue_timeout_s, presentation = values
    return Origin(request_id, model, n, prompt_tokens, queue_timeout_s, decode_presentation(presentation))


def encode_error(error: ServiceError) -> list[Any]:
    """What a client is to be told, of failures that have no fields and no quotas."""
    return [error.reason.value, error.message, error.metadata, error.retry_after_s]


def decode_error(values: Sequence[Any]) -> ServiceError:
    """What a client is to be told."""
    reason, message, numbers, retry_after_s = values
    return ServiceError(Reason(reason), message, numbers=numbers, retry_after_s=retry_after_s)


_origin_values = attrgetter(*(each.name for each in fields(Origin)))
_REFUSED_FIELDS = [each.name for each in fields(Refused)]
_refused_values = attrgetter(*_REFUSED_FIELDS)


def encode_refused(refused: Refused) -> list[Any]:
    """A refusal."""
    return [value.value if isinstance(value, RefusalReason) else value for value in _refused_values(refused)]


def decode_refused(values: Iterable[Any]) -> Refused:
    """The refusal."""
    given = dict(zip(_REFUSED_FIELDS, values, strict=True))
    return Refused(**{**given, "reason": RefusalReason(given["reason"])})


_usage_values = attrgetter(*(each.name for each in fields(Usage)))
_timings_values = attrgetter(*(each.name for each in fields(Timings)))


def encode_finished(event: Finished) -> list[Any]:
    """A candidate's end."""
    usage, timings = _usage_values(event.usage), _timings_values(event.timings)
    return [event.reason.value, event.stop_token_id, usage, timings, event.detail]


def decode_finished(request_id: str, index: int, values: Sequence[Any]) -> Finished:
    """The end of candidate `index`."""
    reason, stop_token_id, usage, timings, detail = values
    return Finished(
        request_id, index, FinishReason(reason), stop_token_id, Usage(*usage), Timings(*timings), detail
    )


# Models. Their tokenizers are megabytes, so they are sent only when they are new.

_MODEL_FIELDS = [each.name for each in fields(ServedModel) if each.name != "tokenizer_json"]
_model_values = attrgetter(*_MODEL_FIELDS)


def encode_models(
    models: dict[str, ServedModel], sent: dict[str, ServedModel]
) -> tuple[list[Any], list[bytes]]:
    """All models, for a reader who has `sent`; and the tokenizers that are new."""
    rows: list[Any] = []
    files: list[bytes] = []
    for name, model in models.items():
        known = sent.get(name)
        is_new = known is None or known.tokenizer_json != model.tokenizer_json
        values = [_plain(value) for value in _model_values(model)]
        rows.append([len(model.tokenizer_json) if is_new else None, values])
        if is_new:
            files.append(model.tokenizer_json)
    return rows, files


def decode_models(
    rows: Iterable[Any], files: bytes, known: dict[str, ServedModel]
) -> Iterator[tuple[str, ServedModel]]:
    """Names and models. `known` is what the last ones were."""
    start = 0
    for num_bytes, values in rows:
        given = dict(zip(_MODEL_FIELDS, values, strict=True))
        given["eos_token_ids"] = frozenset(given["eos_token_ids"])
        name = given["name"]
        if num_bytes is None:
            tokenizer_json = known[name].tokenizer_json
        else:
            tokenizer_json = files[start : start + num_bytes]
            start += num_bytes
        yield name, ServedModel(**given, tokenizer_json=tokenizer_json)


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    return dict(value) if hasattr(value, "items") else value
