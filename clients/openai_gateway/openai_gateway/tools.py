"""Calling functions by structured output: the form of a call, what the model is told, and reading calls back.

Owns tools in requests, in conversations and in answers. The model writes one call as JSON.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openai_gateway.errors import refused
from openai_gateway.requests import ChatRequest, Function, ToolCall

_TOLD = """You can call functions. Answer with one call, as JSON and nothing else: {form}
The functions, with the JSON Schemas of their arguments:
{functions}"""


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions of which an answer must call one."""

    functions: Sequence[Function]
    is_named: bool
    """Whether the caller named the function, so that only its arguments are written."""

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of what the model writes."""
        if self.is_named:
            return _parameters(self.functions[0])
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": each.name}, "arguments": _parameters(each)},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for each in self.functions
        ]
        return calls[0] if len(calls) == 1 else {"anyOf": calls}

    def instructions(self) -> str:
        """What the model is told, since chat templates get no tools."""
        form = '{"name": FUNCTION, "arguments": {...}}'
        if self.is_named:
            form = f"the arguments of {self.functions[0].name}"
        lines = [
            json.dumps({"name": f.name, "description": f.description or "", "parameters": _parameters(f)})
            for f in self.functions
        ]
        return _TOLD.format(form=form, functions="\n".join(lines))

    def read(self, text: str) -> tuple[str, str] | None:
        """The name and the arguments, as JSON, of a call. None: it was cut short before it was one."""
        if self.is_named:
            return self.functions[0].name, text
        try:
            call = json.loads(text)
            return call["name"], json.dumps(call["arguments"], ensure_ascii=False)
        except (ValueError, KeyError, TypeError):
            return None

    @property
    def finish_reason(self) -> str:
        """What OpenAI says of an answer that ended where it should."""
        return "stop" if self.is_named else "tool_calls"


def tools_of(request: ChatRequest) -> Tools | None:
    """The functions of which one must be called. None: the answer is text. Raises HttpError."""
    functions = [tool.function for tool in request.tools or ()]
    choice = request.tool_choice
    if choice is None:
        choice = "auto" if functions else "none"
    if choice == "none":
        return None
    if not functions:
        raise refused("tool_choice: there are no tools to choose from", "tool_choice")
    if choice == "auto":
        message = "tool_choice: auto is not supported; use required, none, or a function"
        raise refused(message, "tool_choice", "unsupported_value")
    if request.response_format is not None and request.response_format.type != "text":
        raise refused(
            "response_format: an answer that must call a function has no other form", "response_format"
        )
    if choice == "required":
        return Tools(functions, is_named=False)
    named = [each for each in functions if each.name == choice.function.name]
    if not named:
        raise refused(f"tool_choice: no tool is called {choice.function.name!r}", "tool_choice")
    return Tools(named[:1], is_named=True)


def written(calls: Sequence[ToolCall]) -> str:
    """Calls of an earlier turn, as the model would have written them."""
    return "\n".join(
        f'{{"name": {json.dumps(call.function.name)}, "arguments": {call.function.arguments}}}'
        for call in calls
    )


def call_body(name: str, arguments: str) -> dict[str, Any]:
    """A call in an answer."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _parameters(function: Function) -> dict[str, Any]:
    return function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
