"""From OpenAI's messages to the turns that a chat template gets.

Owns roles and parts. What a template makes of the turns is the scheduler's affair. Calls and what they
returned are text in turns of roles that all templates know, in the notation that the model is told to use.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from openai_gateway.calls import results, written
from openai_gateway.errors import refused
from openai_gateway.requests import Message
from openai_gateway.tools import Tools


def turns_of(messages: Sequence[Message], tools: Tools | None) -> list[dict[str, str]]:
    """The conversation, with what the model must know of its tools in front. Raises HttpError."""
    said = [(message, _content(message, f"messages.{i}")) for i, message in enumerate(messages)]
    turns: list[dict[str, str]] = []
    calls: dict[str, int] = {}  # of the last assistant: id to place
    for is_result, group in groupby(said, lambda pair: pair[0].role == "tool"):
        if is_result:  # of one round of calls, in their order: that's all that tells whose results they are
            ordered = sorted(group, key=lambda pair: calls.get(pair[0].tool_call_id or "", len(calls)))
            turns.append({"role": "user", "content": results([content for _, content in ordered])})
            continue
        for message, content in group:
            turns.append({"role": _role(message), "content": content})
            calls = {call.id: place for place, call in enumerate(message.tool_calls or ())}
    return turns if tools is None else _with_tools(turns, tools)


def _with_tools(turns: list[dict[str, str]], tools: Tools) -> list[dict[str, str]]:
    told = tools.instructions()
    if turns and turns[0]["role"] == "system":  # templates allow one
        told = f"{turns[0]['content']}\n\n{told}"
        turns = turns[1:]
    return [{"role": "system", "content": told}, *turns]


def _role(message: Message) -> str:
    # Newer clients say "developer" for what templates call "system".
    return "system" if message.role == "developer" else message.role


def _content(message: Message, path: str) -> str:
    if message.name is not None and message.role != "tool":
        why = "templates know no names of who speaks; put it into the content"
        raise refused(f"{path}.name: {why}", f"{path}.name", "unsupported_value")
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
