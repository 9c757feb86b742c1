"""Whole answers: the bodies of requests that do not stream.

Owns their JSON. What is in a choice is the same as in the events of a stream.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tidegate_client
from openai_gateway.calls import Call
from openai_gateway.generation import Usage
from openai_gateway.logprobs import chat_logprobs, completion_logprobs
from openai_gateway.tools import Tools
from tidegate_client import Finished, FinishReason


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer begins with."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str

    def fields(self, kind: str) -> dict[str, Any]:
        """The first members of an object."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(frozen=True, slots=True)
class ChatForm:
    """How a chat's answers are given."""

    tools: Tools | None
    num_top_logprobs: int | None
    """None: no log-probabilities."""


def chat_body(
    head: Head, choices: Sequence[tidegate_client.Generation], form: ChatForm, usage: Usage
) -> dict[str, Any]:
    """The answer to a chat."""
    return head.fields("chat.completion") | {
        "choices": [_chat_choice(i, choice, form) for i, choice in enumerate(choices)],
        "usage": usage_body(usage),
        "system_fingerprint": None,
    }


def completion_body(
    head: Head,
    choices: Sequence[tidegate_client.Generation],
    echoes: Sequence[str],
    usage: Usage,
    *,
    has_logprobs: bool,
) -> dict[str, Any]:
    """The answer to a completion. echoes: what each choice's text begins with."""
    return head.fields("text_completion") | {
        "choices": [
            {
                "index": i,
                "text": echo + choice.text,
                "logprobs": completion_logprobs(choice.logprobs, len(echo)) if has_logprobs else None,
                "finish_reason": finish_reason(choice.finished),
            }
            for i, (choice, echo) in enumerate(zip(choices, echoes, strict=True))
        ],
        "usage": usage_body(usage),
        "system_fingerprint": None,
    }


def usage_body(usage: Usage) -> dict[str, Any]:
    """Counts of tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def finish_reason(finished: Finished, *, has_called: bool = False) -> str:
    """Why a choice ended, in OpenAI's words."""
    if finished.reason is not FinishReason.STOP:
        return "length" if finished.reason is FinishReason.LENGTH else finished.reason.value
    return "tool_calls" if has_called else "stop"


def call_body(name: str, arguments: str) -> dict[str, Any]:
    """A call in an answer."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _chat_choice(index: int, choice: tidegate_client.Generation, form: ChatForm) -> dict[str, Any]:
    text, calls, has_called = choice.text, list[Call](), False
    if form.tools is not None:
        reader = form.tools.reader()
        text, calls = reader.read_all(text)
        has_called = reader.has_called
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        bodies = [call_body(call.name, call.arguments) for call in calls]
        message |= {"content": text or None, "tool_calls": bodies}
    num_top = form.num_top_logprobs
    return {
        "index": index,
        "message": message,
        "logprobs": None if num_top is None else chat_logprobs(choice.logprobs, num_top),
        "finish_reason": finish_reason(choice.finished, has_called=has_called),
    }
