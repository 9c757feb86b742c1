"""Calling functions by structured output: what answers may or must call, their form, what models are told.

Owns the fields tools, tool_choice and parallel_tool_calls. How calls look in text is in calls.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openai_gateway.calls import (
    AFTER_NAME,
    BEFORE_NAME,
    CLOSE,
    OPEN,
    AnswerReader,
    ArgumentsReader,
    CallsReader,
    form_of_call,
    json_text,
)
from openai_gateway.errors import refused
from openai_gateway.requests import ChatRequest, Function
from tidegate_client import Grammar

MAX_CALLS = 32  # in one answer: a model that goes on calling for ever ends there
# What the scheduler does to JSON Schemas: few blanks, and what can't be enforced is refused.
_JSON_DEFAULTS: dict[str, Any] = {"whitespace_pattern": "[ ]?"}
_JSON_OVERRIDES: dict[str, Any] = {"lenient": False, "coerce_one_of": False}

_NAMED = """Answer with the arguments for the function {name}, as JSON and nothing else."""
_CALLS = """You can call functions. A call looks like this:
{form}
{when}
What functions return comes back to you within <tool_response></tool_response>."""
_REQUIRED = "Answer with {count}, and nothing else."
_OPTIONAL = "Where functions help, end your answer with {count}. Else just answer, without any call."
_FUNCTIONS = """The functions, with the JSON Schemas of their arguments:
<tools>
{functions}
</tools>"""


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions that an answer may or must call."""

    functions: Sequence[Function]
    is_named: bool = False
    """Whether the caller named the function, so that only its arguments are written."""
    is_required: bool = True
    is_parallel: bool = False
    """Whether one answer may have several calls."""

    def form(self, answer_schema: str | None = None) -> dict[str, Any]:
        """The option that holds the output to text or calls. answer_schema: JSON that text must be."""
        if self.is_named:
            return {"json_schema": json.dumps(_parameters(self.functions[0]))}
        calls = f"call (more call){{0,{MAX_CALLS - 1}}}" if self.is_parallel else "call"
        rules = [
            f"calls: {calls}",
            f"more: {json.dumps(chr(10) + OPEN)}",
            f"call: {json.dumps(BEFORE_NAME)} ({_any_of('call', self.functions)}) {json.dumps(CLOSE)}",
        ]
        for i, each in enumerate(self.functions):
            rules.append(f"call_{i}: {json.dumps(each.name + AFTER_NAME)} arguments_{i}")
            rules.append(f"arguments_{i}: %json {_guided(_parameters(each))}")
        return {"grammar": Grammar("\n".join([*self._start(answer_schema), *rules]), "lark")}

    def instructions(self) -> str:
        """What the model is told, in the notation that its calls must have."""
        lines = [
            json_text({"name": f.name, "description": f.description or "", "parameters": _parameters(f)})
            for f in self.functions
        ]
        functions = _FUNCTIONS.format(functions="\n".join(lines))
        if self.is_named:
            return f"{_NAMED.format(name=self.functions[0].name)}\n{functions}"
        when = _REQUIRED if self.is_required else _OPTIONAL
        when = when.format(count="one or more calls, one after the other" if self.is_parallel else "one call")
        form = form_of_call("FUNCTION", "{...}")
        return f"{_CALLS.format(form=form, when=when)}\n{functions}"

    def reader(self) -> AnswerReader:
        """Reads one answer."""
        return ArgumentsReader(self.functions[0].name) if self.is_named else CallsReader()

    def _start(self, answer_schema: str | None) -> list[str]:
        """The rules for what is before the first call, or instead of it."""
        mark = json.dumps(OPEN)
        if self.is_required:
            return [f"start: {mark} calls"]
        if answer_schema is not None:
            schema = _guided(json.loads(answer_schema))
            return [f"start: answer | {mark} calls", f"answer: %json {schema}"]
        return [
            "start: TEXT | before calls",
            f"before[lazy]: /(?s:.)*{OPEN}/",
            f"TEXT: /(?s:.)*/ & ~/(?s:.)*{OPEN}(?s:.)*/",
        ]


def tools_of(request: ChatRequest) -> Tools | None:
    """The functions that the answer may or must call. None: the answer is text. Raises HttpError."""
    functions = [tool.function for tool in request.tools or ()]
    choice = request.tool_choice
    if choice is None:
        choice = "auto" if functions else "none"
    if choice == "none":
        return None
    if not functions:
        raise refused("tool_choice: there are no tools to choose from", "tool_choice")
    if choice == "auto":
        return Tools(functions, is_required=False, is_parallel=request.parallel_tool_calls is not False)
    if request.response_format is not None and request.response_format.type != "text":
        raise refused(
            "response_format: an answer that must call a function has no other form", "response_format"
        )
    if choice == "required":
        return Tools(functions, is_parallel=request.parallel_tool_calls is not False)
    named = [each for each in functions if each.name == choice.function.name]
    if not named:
        raise refused(f"tool_choice: no tool is called {choice.function.name!r}", "tool_choice")
    return Tools(named[:1], is_named=True)


def _parameters(function: Function) -> dict[str, Any]:
    if not function.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object"} | function.parameters


def _guided(schema: dict[str, Any]) -> str:
    own = schema.get("x-guidance")
    wanted = own if isinstance(own, dict) else {}
    return json.dumps({**schema, "x-guidance": {**_JSON_DEFAULTS, **wanted, **_JSON_OVERRIDES}})


def _any_of(rule: str, functions: Sequence[Function]) -> str:
    return " | ".join(f"{rule}_{i}" for i in range(len(functions)))
