"""Owns the checks of what names a model and of prompts, before they are tokenized.

Nothing is copied or walked through before its size is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from scheduler_service.core.step import Int32
from scheduler_service.errors import (
    ServiceError,
    Violation,
    Violations,
    context_too_long,
    invalid_request,
    model_not_found,
    no_worker,
    shown,
)
from scheduler_service.served_model import ServedModel
from tidegate.inference.v1 import inference_pb2 as pb

MAX_MESSAGES = 10_000
MAX_DETOKENIZE_IDS = 1 << 20
# Tokens can only be counted when the text is tokenized. No language has so many characters a token.
MAX_CHARACTERS_PER_TOKEN = 64
MIN_PROMPT_CHARACTERS_LIMIT = 65_536
MAX_PROMPT_CHARACTERS_LIMIT = 8 << 20


def find_model(name: str, models: Mapping[str, ServedModel]) -> ServedModel:
    """The model of that name, or the only one. Raises ServiceError."""
    if not models:
        raise no_worker()
    if name:
        if name not in models:
            raise model_not_found(name, sorted(models))
        return models[name]
    if len(models) > 1:
        names = ", ".join(map(shown, sorted(models)))
        raise invalid_request([Violation("model", f"empty, but {len(models)} models are served: {names}")])
    return next(iter(models.values()))


def check_tokenize(request: pb.TokenizeRequest, models: Mapping[str, ServedModel]) -> ServedModel:
    """Checks every field; an empty text is allowed. Raises ServiceError with all that is wrong."""
    model, lookup_error = find_or_unknown(request.model, models)
    wrong = Violations()
    _check_text_prompt(request, model, wrong)
    wrong.raise_any()
    if lookup_error is not None:
        raise lookup_error
    return model


def check_detokenize(request: pb.DetokenizeRequest, models: Mapping[str, ServedModel]) -> ServedModel:
    """Checks every field; an empty list is allowed. Raises ServiceError with all that is wrong."""
    model, lookup_error = find_or_unknown(request.model, models)
    wrong = Violations()
    count = len(request.token_ids)
    if count > MAX_DETOKENIZE_IDS:
        wrong.note("token_ids", f"{count} ids; allowed: 0 to {MAX_DETOKENIZE_IDS}")
    else:
        check_ids(request.token_ids, model.vocab_size, "token_ids", wrong)
    check_has_tokenizer(model, "model", wrong)
    wrong.raise_any()
    if lookup_error is not None:
        raise lookup_error
    return model


def find_or_unknown(name: str, models: Mapping[str, ServedModel]) -> tuple[ServedModel, ServiceError | None]:
    """The model; or one without limits, and the error to raise once all other fields are checked."""
    try:
        return find_model(name, models), None
    except ServiceError as error:
        return _UNKNOWN_MODEL, error


def check_prompt(request: pb.GenerateRequest, model: ServedModel, wrong: Violations) -> Int32 | None:
    """The prompt's token ids, if it was given as such. Raises ServiceError if they cannot fit the model."""
    if request.WhichOneof("prompt") != "token_ids":
        _check_text_prompt(request, model, wrong)
        if request.WhichOneof("prompt") == "text" and not request.text:
            wrong.note("text", "the prompt is empty; allowed: at least 1 token")
        return None
    count = len(request.token_ids.ids)
    if count == 0:
        wrong.note("token_ids.ids", "the prompt is empty; allowed: at least 1 token")
        return None
    if count >= model.max_model_len:
        raise context_too_long(count, 1, model.max_model_len)
    return check_ids(request.token_ids.ids, model.vocab_size, "token_ids.ids", wrong)


def _check_text_prompt(
    request: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel, wrong: Violations
) -> None:
    kind = request.WhichOneof("prompt")
    if kind is None:
        wrong.note("prompt", "the prompt is not set; set exactly one of its fields")
        return
    check_has_tokenizer(model, kind, wrong)
    if kind == "text":
        _check_length(len(request.text), "text", model, wrong)
        return
    messages = request.chat.messages
    if not 1 <= len(messages) <= MAX_MESSAGES:
        wrong.note("chat.messages", f"{len(messages)} messages; allowed: 1 to {MAX_MESSAGES}")
        return
    if not model.chat_template:
        wrong.note("chat", f"model {shown(model.name)} has no chat template; use text or token_ids")
    length = 0
    for i, message in enumerate(messages):
        length += len(message.role) + len(message.content)
        if not message.role:
            wrong.note(f"chat.messages[{i}].role", "role is empty; name who speaks")
    _check_length(length, "chat.messages", model, wrong)


def _check_length(length: int, field: str, model: ServedModel, wrong: Violations) -> None:
    by_context = max(MIN_PROMPT_CHARACTERS_LIMIT, MAX_CHARACTERS_PER_TOKEN * model.max_model_len)
    limit = min(by_context, MAX_PROMPT_CHARACTERS_LIMIT)
    if length > limit:
        context = f"for a context of {model.max_model_len} tokens"
        wrong.note(field, f"{length} characters; allowed: at most {limit} {context}")


def check_has_tokenizer(model: ServedModel, field: str, wrong: Violations) -> None:
    """Notes `field` if the model takes and gives token ids only."""
    if not model.tokenizer_json:
        name = shown(model.name)
        wrong.note(field, f"model {name} has no tokenizer; send token_ids and set output.text to false")


def check_ids(ids: Sequence[int], vocab_size: int, field: str, wrong: Violations) -> Int32:
    """The ids as a column; the first one outside the vocabulary is noted."""
    column = np.fromiter(ids, np.int64, len(ids))
    if len(column) and int(column.max()) >= vocab_size:
        position = int(np.argmax(column >= vocab_size))
        wrong.note(f"{field}[{position}]", f"id is {column[position]}; allowed: 0 to {vocab_size - 1}")
    return column.astype(np.int32)


_UNKNOWN_MODEL = ServedModel(
    name="",
    fingerprint="",
    max_model_len=1 << 31,
    vocab_size=1 << 32,
    eos_token_ids=frozenset(),
    tokenizer_json=b"?",
    chat_template="?",
    structured_output=True,
)
