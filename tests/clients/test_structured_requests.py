"""How a form of the output gets from Python values and from the command line into a request."""

import json

import pytest

from tidegate.inference.v1 import inference_pb2 as pb
from tidegate_client import Grammar, InvalidRequestError
from tidegate_client.requests import generate_request

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}


def form(**options) -> pb.StructuredOutput:
    return generate_request("Hi", options).structured_output


def test_a_schema_is_a_text_or_a_mapping():
    assert json.loads(form(json_schema=SCHEMA).json_schema) == SCHEMA
    assert form(json_schema='{"type": "null"}').json_schema == '{"type": "null"}'


def test_the_other_forms():
    assert form(regex="a+") == pb.StructuredOutput(regex="a+")
    assert list(form(choice=["yes", "no"]).choice.values) == ["yes", "no"]
    assert list(form(choice="only").choice.values) == ["only"]
    lark, ebnf = form(grammar="start: A").grammar, form(grammar=Grammar("root ::= A", "ebnf")).grammar
    assert (lark.text, lark.syntax) == ("start: A", pb.GRAMMAR_SYNTAX_LARK)
    assert (ebnf.text, ebnf.syntax) == ("root ::= A", pb.GRAMMAR_SYNTAX_EBNF)


def test_without_a_form_the_request_has_none():
    assert not generate_request("Hi", {"regex": None}).HasField("structured_output")
    assert form(choice=[]).WhichOneof("form") == "choice"  # which the server refuses


@pytest.mark.parametrize(
    "options",
    [
        {"regex": "a", "choice": ["b"]},
        {"regex": 5},
        {"choice": [5]},
        {"json_schema": "\ud800"},
        {"grammar": Grammar("a", "yacc")},
    ],
)
def test_what_no_message_can_hold_is_refused(options):
    with pytest.raises(InvalidRequestError) as caught:
        form(**options)
    assert caught.value.violations[0].field.startswith("structured_output")


@pytest.mark.parametrize(
    ("name", "syntax"), [("g.lark", pb.GRAMMAR_SYNTAX_LARK), ("g.ebnf", pb.GRAMMAR_SYNTAX_EBNF)]
)
def test_the_command_line_reads_grammars_from_files(run, server, tmp_path, name, syntax):
    path = tmp_path / name
    path.write_text("start: é", "utf-8")
    assert run("generate", "Hi", "--grammar", str(path))[0] == 0
    grammar = server.requests[0].structured_output.grammar
    assert (grammar.text, grammar.syntax) == ("start: é", syntax)


def test_the_command_line_takes_the_other_forms(run, server, tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps(SCHEMA))
    assert run("generate", "Hi", "--json-schema", str(path))[0] == 0
    assert run("generate", "Hi", "--regex", "a+")[0] == 0
    assert run("generate", "Hi", "--choice", "a", "--choice", "b")[0] == 0
    schema, regex, choice = (request.structured_output for request in server.requests)
    assert json.loads(schema.json_schema) == SCHEMA
    assert regex.regex == "a+"
    assert list(choice.choice.values) == ["a", "b"]


def test_a_file_that_is_not_there_is_named(run, tmp_path):
    code, _, errors = run("generate", "Hi", "--json-schema", str(tmp_path / "none.json"))
    assert code != 0
    assert "none.json" in errors.replace("\n", "")
