"""Builds the protocol's requests from Python values.

Owns the names of options and where each goes in a message. Ranges are checked by the server, which knows the
model; here only what a message can't hold is refused.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from tidegate.inference.v1 import inference_pb2 as pb
from tidegate_client.errors import invalid_field
from tidegate_client.types import ChatMessage, Grammar, Model, TokenizedPrompt

Messages = Sequence[ChatMessage | Mapping[str, str]]
"""A conversation, oldest message first; a mapping has the keys "role" and "content"."""


class GenerateOptions(TypedDict, total=False):
    """Options of generate() and chat(). What is left out takes the server's default."""

    model: str
    request_id: str
    # How tokens are chosen.
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    # When a candidate ends.
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    # What the output must match; one of these.
    json_schema: str | Mapping[str, Any]
    regex: str
    choice: Sequence[str]
    grammar: str | Grammar
    # What the stream carries.
    text: bool
    token_ids: bool
    logprobs: int
    skip_special_tokens: bool
    # How the request is treated.
    n: int
    priority: int
    queue_timeout_s: float
    tenant: str
    cache_salt: str
    adapter: str


_FORMS = ("json_schema", "regex", "choice", "grammar")
_SYNTAXES: dict[str, pb.GrammarSyntax] = {
    "lark": pb.GRAMMAR_SYNTAX_LARK,
    "ebnf": pb.GRAMMAR_SYNTAX_EBNF,
}
_PENALTIES = ["presence_penalty", "frequency_penalty", "repetition_penalty"]
_SAMPLING = frozenset(["temperature", "top_k", "top_p", "min_p", "seed", *_PENALTIES])
_STOPPING = frozenset(["max_tokens", "min_tokens", "ignore_eos"])
_OUTPUT = frozenset(["text", "token_ids", "logprobs", "skip_special_tokens"])
_REQUEST = frozenset(["model", "request_id", "n", "priority", "tenant", "cache_salt", "adapter"])


def generate_request(prompt: str | Sequence[int], options: GenerateOptions) -> pb.GenerateRequest:
    """Builds the request for a text or for token ids. Raises InvalidRequestError, TypeError."""
    request = pb.GenerateRequest()
    if isinstance(prompt, str):
        _set(request, "text", prompt)
    else:
        _extend(request.token_ids.ids, "token_ids.ids", prompt)
        request.token_ids.SetInParent()
    _apply_options(request, options)
    return request


def chat_request(
    messages: str | Messages, options: GenerateOptions, *, add_generation_prompt: bool | None = None
) -> pb.GenerateRequest:
    """Builds the request for a conversation; a plain text is one user message. Raises as generate_request."""
    request = pb.GenerateRequest(chat=_chat(messages))
    if add_generation_prompt is not None:
        request.chat.add_generation_prompt = add_generation_prompt
    _apply_options(request, options)
    return request


def _apply_options(request: pb.GenerateRequest, options: GenerateOptions) -> None:
    forms = [name for name in _FORMS if options.get(name) is not None]
    if len(forms) > 1:
        raise invalid_field("structured_output", forms, "an output has one form; give one of these")
    for name, value in options.items():
        if value is None:
            continue
        if name in _REQUEST:
            _set(request, name, value)
        elif name in _SAMPLING:
            _set(request.sampling, name, value, "sampling.")
        elif name in _STOPPING:
            _set(request.stopping, name, value, "stopping.")
        elif name in _OUTPUT:
            _set(request.output, name, value, "output.")
        else:
            _apply_special(request, name, value)


def _apply_special(request: pb.GenerateRequest, name: str, value: Any) -> None:
    match name:
        case "stop":
            texts = [value] if isinstance(value, str) else value
            _extend(request.stopping.stop, "stopping.stop", texts)
        case "stop_token_ids":
            _extend(request.stopping.stop_token_ids, "stopping.stop_token_ids", value)
        case "logit_bias":
            _update(request.sampling.logit_bias, "sampling.logit_bias", value)
        case "json_schema":
            text = value if isinstance(value, str) else json.dumps(value)
            _set(request.structured_output, name, text, "structured_output.")
        case "regex":
            _set(request.structured_output, name, value, "structured_output.")
        case "choice":
            texts = [value] if isinstance(value, str) else value
            _extend(request.structured_output.choice.values, "structured_output.choice.values", texts)
            request.structured_output.choice.SetInParent()
        case "grammar":
            _set_grammar(request, Grammar(value) if isinstance(value, str) else value)
        case "queue_timeout_s":
            request.queue_timeout.CopyFrom(_duration("queue_timeout_s", value))
        case _:
            close = difflib.get_close_matches(name, GenerateOptions.__annotations__, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise TypeError(f"there is no option {name!r}{hint}")


def _set_grammar(request: pb.GenerateRequest, grammar: Grammar) -> None:
    syntax = _SYNTAXES.get(grammar.syntax)
    if syntax is None:
        why = f"must be one of {', '.join(_SYNTAXES)}"
        raise invalid_field("structured_output.grammar.syntax", grammar.syntax, why)
    _check_text("structured_output.grammar.text", grammar.text)
    request.structured_output.grammar.text = grammar.text
    request.structured_output.grammar.syntax = syntax


def _chat(messages: str | Messages) -> pb.ChatMessages:
    if isinstance(messages, str):
        messages = [ChatMessage("user", messages)]
    chat = pb.ChatMessages()
    for i, message in enumerate(messages):
        turn = message if isinstance(message, Mapping) else {"role": message.role, "content": message.content}
        if turn.keys() != {"role", "content"}:
            raise invalid_field(f"chat.messages[{i}]", dict(turn), "must have a role and a content, no more")
        for key, text in turn.items():
            _check_text(f"chat.messages[{i}].{key}", text)
        chat.messages.add(role=turn["role"], content=turn["content"])
    return chat


def _set(message: Message, name: str, value: object, path: str = "") -> None:
    try:
        setattr(message, name, value)
    except (ValueError, TypeError) as error:
        raise invalid_field(path + name, value, str(error)) from None


def _extend(field: Any, path: str, values: Iterable[object]) -> None:
    try:
        field.extend(values)
    except (ValueError, TypeError) as error:
        raise invalid_field(path, values, str(error)) from None


def _update(field: Any, path: str, values: Mapping[int, float]) -> None:
    try:
        for key, value in values.items():
            field[key] = value
    except (ValueError, TypeError, AttributeError) as error:
        raise invalid_field(path, values, str(error)) from None


def _check_text(path: str, text: object) -> None:
    if not isinstance(text, str):
        raise invalid_field(path, text, "must be a str")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid_field(path, text, "has a lone surrogate, which UTF-8 can't carry") from None


def _duration(path: str, seconds: float) -> Duration:
    duration = Duration()
    try:
        duration.FromNanoseconds(round(seconds * 1e9))
    except (ValueError, TypeError, OverflowError) as error:
        raise invalid_field(path, seconds, str(error)) from None
    return duration


ResponseT = TypeVar("ResponseT", bound=Message)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class UnaryCall(Generic[ResponseT, ResultT]):
    """One request with one answer: what sync and async clients do alike, short of sending it."""

    method: str
    """Name of the RPC."""
    request: Message
    parse: Callable[[ResponseT], ResultT]
    """Makes the client's value from the answer."""


def tokenize_call(
    prompt: str | Messages, model: str, add_special_tokens: bool | None
) -> UnaryCall[pb.TokenizeResponse, TokenizedPrompt]:
    """Tokenize: a text, or a conversation rendered with the model's chat template."""
    request = pb.TokenizeRequest(model=model)
    if isinstance(prompt, str):
        _set(request, "text", prompt)
    else:
        request.chat.CopyFrom(_chat(prompt))
    if add_special_tokens is not None:
        request.add_special_tokens = add_special_tokens
    return UnaryCall(
        "Tokenize", request, lambda answer: TokenizedPrompt(tuple(answer.token_ids), answer.max_model_len)
    )


def detokenize_call(
    token_ids: Sequence[int], model: str, skip_special_tokens: bool | None
) -> UnaryCall[pb.DetokenizeResponse, str]:
    """Detokenize."""
    request = pb.DetokenizeRequest(model=model)
    _extend(request.token_ids, "token_ids", token_ids)
    if skip_special_tokens is not None:
        request.skip_special_tokens = skip_special_tokens
    return UnaryCall("Detokenize", request, lambda answer: answer.text)


def list_models_call(page_token: str) -> UnaryCall[pb.ListModelsResponse, tuple[list[Model], str]]:
    """ListModels: one page, and the token of the next."""
    return UnaryCall(
        "ListModels",
        pb.ListModelsRequest(page_size=1000, page_token=page_token),
        lambda answer: (list(map(Model.from_message, answer.models)), answer.next_page_token),
    )


def cancel_call(request_id: str) -> UnaryCall[pb.CancelResponse, bool]:
    """Cancel: whether a live request was found."""
    return UnaryCall("Cancel", pb.CancelRequest(request_id=request_id), lambda answer: answer.found)


def num_candidates(request: pb.GenerateRequest) -> int:
    """Returns how many candidates the request asks for. A number out of range is the server's to refuse."""
    return max(1, request.n) if request.HasField("n") else 1
