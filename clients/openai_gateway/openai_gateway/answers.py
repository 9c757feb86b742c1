"""Whole answers: the bodies of requests that do not stream.

Owns their JSON. What is in a choice is the same as in the events of a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tidegate_client
from openai_gateway.generation import Usage
from openai_gateway.logprobs import chat_logprobs, completion_logprobs
from openai_gateway.tools import Tools, call_body
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


def finish_reason(finished: Finished, tools: Tools | None = None) -> str:
    """Why a choice ended, in OpenAI's words."""
    if finished.reason is not FinishReason.STOP:
        return "length" if finished.reason is FinishReason.LENGTH else finished.reason.value
    return "stop" if tools is None else tools.finish_reason


def _chat_choice(index: int, choice: tidegate_client.Generation, form: ChatForm) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    call = form.tools.read(choice.text) if form.tools else None
    if call is not None:
        message |= {"content": None, "tool_calls": [call_body(*call)]}
    num_top = form.num_top_logprobs
    return {
        "index": index,
        "message": message,
        "logprobs": None if num_top is None else chat_logprobs(choice.logprobs, num_top),
        "finish_reason": finish_reason(choice.finished, form.tools if call else None),
    }
