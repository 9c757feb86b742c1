"""Owns the form that a request's output must have, as its client wrote it, and its first checks."""

from __future__ import annotations

import json
from dataclasses import dataclass

from scheduler_service.errors import Violations, shown
from scheduler_service.prompt_validation import check_has_tokenizer
from scheduler_service.served_model import ServedModel
from tidegate.inference.v1 import inference_pb2 as pb

MAX_FORM_BYTES = 65_536
MAX_CHOICES = 1024

_SYNTAXES = {pb.GRAMMAR_SYNTAX_LARK: "lark", pb.GRAMMAR_SYNTAX_EBNF: "ebnf"}


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What each output must match."""

    kind: str  # "json_schema", "regex", "choice", "lark" or "ebnf"
    text: str  # of choices: a JSON list

    @property
    def field(self) -> str:
        """The request's field that has it."""
        name = "grammar.text" if self.kind in _SYNTAXES.values() else self.kind
        return f"structured_output.{name}"


def check_output_form(
    request: pb.GenerateRequest, model: ServedModel, wrong: Violations
) -> OutputForm | None:
    """The form that a request asks for; None: any output will do. Notes what is wrong with it."""
    if not request.HasField("structured_output"):
        return None
    asked = request.structured_output
    kind = asked.WhichOneof("form")
    if kind is None:
        wrong.note("structured_output", "no form is set; set exactly one of its fields")
        return None
    _check_context(request, model, wrong)
    if kind == "choice":
        return _check_choice(asked.choice, wrong)
    text = asked.grammar.text if kind == "grammar" else getattr(asked, kind)
    if kind == "grammar":
        kind = _SYNTAXES.get(asked.grammar.syntax, "")
        if not kind:
            names = ", ".join(pb.GrammarSyntax.Name(syntax) for syntax in _SYNTAXES)
            wrong.note("structured_output.grammar.syntax", f"{asked.grammar.syntax}; allowed: {names}")
            return None
    form = OutputForm(kind, text)
    _check_size(len(text.encode()), form.field, wrong)
    return form


def _check_context(request: pb.GenerateRequest, model: ServedModel, wrong: Violations) -> None:
    check_has_tokenizer(model, "structured_output", wrong)
    if model.tokenizer_json and not model.structured_output:
        wrong.note(
            "structured_output",
            f"the workers of model {shown(model.name)} hold outputs to no form: the model has no end-of-text "
            "token, or a tokenizer that can't be read for that; leave it unset",
        )
    if request.stopping.ignore_eos:
        why = (
            "an output with a form ends at an end-of-text token; leave ignore_eos or structured_output unset"
        )
        wrong.note("stopping.ignore_eos", why)


def _check_choice(choice: pb.Choice, wrong: Violations) -> OutputForm:
    values = list(choice.values)
    form = OutputForm("choice", json.dumps(values))
    if not 1 <= len(values) <= MAX_CHOICES:
        wrong.note(f"{form.field}.values", f"{len(values)} texts; allowed: 1 to {MAX_CHOICES}")
    if "" in values:
        wrong.note(
            f"{form.field}.values[{values.index('')}]", "the text is empty; allowed: 1 character or more"
        )
    if len(set(values)) < len(values):
        wrong.note(f"{form.field}.values", f"{len(values) - len(set(values))} texts are there twice")
    _check_size(sum(len(value.encode()) for value in values), form.field, wrong)
    return form


def _check_size(num_bytes: int, field: str, wrong: Violations) -> None:
    if not 1 <= num_bytes <= MAX_FORM_BYTES:
        wrong.note(field, f"{num_bytes:,} bytes; allowed: 1 to {MAX_FORM_BYTES:,}")
