"""The form that an answer must have, by any of the ways to ask for one.

Owns response_format, the extension structured_outputs, and tools, of which only one can hold; but an answer
that may call functions can have a schema for where it calls none.
"""

from __future__ import annotations

import json
from typing import Any

from openai_gateway.errors import refused
from openai_gateway.requests import ChatRequest, CommonFields, ResponseFormat, StructuredOutputs
from openai_gateway.tools import Tools
from tidegate_client import Grammar


def structured_options(request: CommonFields, tools: Tools | None = None) -> dict[str, Any]:
    """The options that hold the output to its form; none where it has none. Raises HttpError."""
    forms = {}
    if request.structured_outputs is not None:
        forms["structured_outputs"] = _extension(request.structured_outputs)
    if isinstance(request, ChatRequest) and request.response_format is not None:
        forms["response_format"] = _response_format(request.response_format)
    forms = {name: form for name, form in forms.items() if form}
    if tools is not None:
        # Where nothing must be called, a schema holds for the answer that calls nothing.
        schema = None if tools.is_required else forms.pop("response_format", {}).get("json_schema")
        forms["tools"] = tools.form(schema)
    if len(forms) > 1:
        names = " and ".join(forms)
        raise refused(f"{names}: an answer has one form; leave out one of them", next(iter(forms)))
    return next(iter(forms.values()), {})


def _response_format(wanted: ResponseFormat) -> dict[str, Any]:
    match wanted.type:
        case "text":
            return {}
        case "json_object":
            return {"json_schema": '{"type": "object"}'}
        case "json_schema":
            if wanted.json_schema is None or wanted.json_schema.schema_ is None:
                path = "response_format.json_schema"
                raise refused(f"{path}: a schema is missing", path)
            return {"json_schema": json.dumps(wanted.json_schema.schema_)}


def _extension(wanted: StructuredOutputs) -> dict[str, Any]:
    forms: dict[str, Any] = {}
    if wanted.json_ is not None:
        schema = wanted.json_
        forms["json_schema"] = schema if isinstance(schema, str) else json.dumps(schema)
    if wanted.regex is not None:
        forms["regex"] = wanted.regex
    if wanted.choice is not None:
        forms["choice"] = wanted.choice
    if wanted.grammar is not None:
        forms["grammar"] = Grammar(wanted.grammar, wanted.grammar_syntax or "ebnf")
    if len(forms) != 1:
        message = "structured_outputs: exactly one of json, regex, choice and grammar must be given"
        raise refused(message, "structured_outputs")
    if wanted.grammar is None and wanted.grammar_syntax is not None:
        raise refused("structured_outputs.grammar_syntax: there is no grammar", "structured_outputs")
    return forms
