"""From OpenAI's messages to the turns that a chat template gets.

Owns roles and parts. What a template makes of the turns is the scheduler's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openai_gateway.errors import refused
from openai_gateway.requests import Message
from openai_gateway.tools import Tools, written


def turns_of(messages: Sequence[Message], tools: Tools | None) -> list[dict[str, str]]:
    """The conversation, with what the model must know of its tools in front. Raises HttpError."""
    turns = [
        {"role": _role(each), "content": _content(each, f"messages.{i}")} for i, each in enumerate(messages)
    ]
    if tools is None:
        return turns
    told = tools.instructions()
    if turns and turns[0]["role"] == "system":  # templates allow one
        told = f"{turns[0]['content']}\n\n{told}"
        turns = turns[1:]
    return [{"role": "system", "content": told}, *turns]


def _role(message: Message) -> str:
    # Newer clients say "developer" for what templates call "system".
    return "system" if message.role == "developer" else message.role


def _content(message: Message, path: str) -> str:
    if message.tool_calls and message.role != "assistant":
        raise refused(f"{path}.tool_calls: only an assistant calls tools", f"{path}.tool_calls")
    if isinstance(message.content, list):
        text = "".join(_text(part, f"{path}.content.{i}") for i, part in enumerate(message.content))
    else:
        text = message.content or ""
    if message.tool_calls:
        return "\n".join(filter(None, (text, written(message.tool_calls))))
    if message.content is None:
        raise refused(
            f"{path}.content: a message of the role {message.role} needs a content", f"{path}.content"
        )
    return text


def _text(part: dict[str, Any], path: str) -> str:
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        raise refused(f"{path}: this service takes parts of the type text only", path, "unsupported_value")
    return text
