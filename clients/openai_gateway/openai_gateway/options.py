"""From the fields of a request to the options of a generation.

Owns which OpenAI field means which of Tidegate's, and OpenAI's own defaults where they differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai_gateway.errors import refused
from openai_gateway.field_names import FORM, FieldNames
from openai_gateway.requests import ChatRequest, CommonFields, CompletionRequest

_SEED_MASK = 2**64 - 1
_DEFAULT_COMPLETION_TOKENS = 16
_MAX_TIMEOUT_S = 86_400
_SAME_NAME = (
    "model",
    "n",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "max_tokens",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "skip_special_tokens",
    "priority",
    "tenant",
    "cache_salt",
    "queue_timeout_s",
    "timeout_s",
)

_EXTENSION = {
    FORM: "structured_outputs",
    f"{FORM}.json_schema": "structured_outputs.json",
    f"{FORM}.regex": "structured_outputs.regex",
    f"{FORM}.choice": "structured_outputs.choice",
    f"{FORM}.grammar.text": "structured_outputs.grammar",
    f"{FORM}.grammar.syntax": "structured_outputs.grammar_syntax",
}


def chat_options(request: ChatRequest) -> dict[str, Any]:
    """Options for a chat. Raises HttpError."""
    options = _common_options(request)
    if request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            message = (
                f"max_tokens = {request.max_tokens} and max_completion_tokens = "
                f"{request.max_completion_tokens} say the same in different ways; give one"
            )
            raise refused(message, "max_tokens")
        options["max_tokens"] = request.max_completion_tokens
    if request.top_logprobs is not None and not request.logprobs:
        raise refused("top_logprobs: it needs logprobs = true", "top_logprobs")
    if request.logprobs:
        options["logprobs"] = request.top_logprobs or 0
    return options


def completion_options(request: CompletionRequest) -> dict[str, Any]:
    """Options for a completion. Raises HttpError."""
    if request.best_of not in (None, request.n or 1):
        message = f"best_of = {request.best_of}: this service returns all that it generates; use n"
        raise refused(message, "best_of", "unsupported_value")
    if request.echo and request.logprobs is not None:
        message = "echo: there are no log-probabilities of prompts; leave out echo or logprobs"
        raise refused(message, "echo", "unsupported_value")
    options = _common_options(request)
    options.setdefault("max_tokens", _DEFAULT_COMPLETION_TOKENS)
    if request.logprobs is not None:
        options["logprobs"] = request.logprobs
    return options


def with_tenant(options: Mapping[str, Any], user: str | None) -> dict[str, Any]:
    """Counts the request for the user that it names, unless it names a tenant."""
    return {"tenant": user, **options} if user else dict(options)


def names_in(request: CommonFields, *, calls_tools: bool = False) -> FieldNames:
    """The names of fields for who sent this. calls_tools: whether the answer's form is made of its tools."""
    own: dict[str, str] = {}
    if request.structured_outputs is not None:
        own = dict(_EXTENSION)
    if isinstance(request, ChatRequest):
        has_format = request.response_format is not None and request.response_format.type != "text"
        forms = [
            name for name, is_there in (("tools", calls_tools), ("response_format", has_format)) if is_there
        ]
        if forms:
            own = {FORM: " and ".join(forms)}
        if request.max_completion_tokens is not None:
            own["max_tokens"] = "max_completion_tokens"
    return FieldNames(own)


def _common_options(request: CommonFields) -> dict[str, Any]:
    if request.stream_options is not None and not request.stream:
        raise refused("stream_options: it needs stream = true", "stream_options")
    if request.timeout_s is not None and not 0 < request.timeout_s <= _MAX_TIMEOUT_S:
        message = f"timeout_s = {request.timeout_s:g}: allowed: above 0 to {_MAX_TIMEOUT_S}"
        raise refused(message, "timeout_s")
    options = {
        name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None and value != ""
    }
    if request.seed is not None:
        options["seed"] = request.seed & _SEED_MASK  # OpenAI's may be negative
    options["token_ids"] = False
    return options
