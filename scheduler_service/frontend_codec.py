"""Owns the values on the link between the engine and a frontend in another process, as lists of JSON's types.

Frames, in which they travel, are frontend_frames.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from scheduler_service.core.admission import RefusalReason, Refused
from scheduler_service.core.events import Finished, FinishReason, Timings, Usage
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.sampling import SamplingParams, StoppingParams
from scheduler_service.core.step import Int32
from scheduler_service.errors import Reason, ServiceError
from scheduler_service.held_output import Origin
from scheduler_service.presentation import Presentation
from scheduler_service.served_model import ServedModel

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
