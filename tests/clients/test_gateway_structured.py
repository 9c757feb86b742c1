"""Forms of answers through the gateway: what the scheduler is asked for."""

import json
from typing import Any

import openai
import pydantic
import pytest
from fake_server import FakeInference, abort, admitted, delta, finished
from google.rpc import code_pb2
from running_gateway import RunningGateway

from tidegate.inference.v1 import inference_pb2 as pb

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS},
}


@pytest.fixture
def server(shared_gateway: tuple[FakeInference, RunningGateway]) -> FakeInference:
    shared_gateway[0].reset()
    return shared_gateway[0]


@pytest.fixture
def gateway(shared_gateway: tuple[FakeInference, RunningGateway], server: FakeInference) -> RunningGateway:
    return shared_gateway[1]


def answers(server: FakeInference, *texts: str, reason: int = pb.FINISH_REASON_STOP) -> None:
    server.answer = lambda request, context: iter(
        [admitted(), *(delta(text, 1) for text in texts), finished(reason=reason)]
    )


def ask(client: openai.OpenAI, **options: Any) -> openai.types.chat.ChatCompletionMessage:
    return client.chat.completions.create(**{"model": "fake", "messages": HI, **options}).choices[0]


def test_a_json_schema_is_asked_for_as_it_is(openai_client: openai.OpenAI, server: FakeInference) -> None:
    ask(
        openai_client,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
        },
    )
    schema = server.requests[0].structured_output.json_schema
    assert schema == json.dumps(SCHEMA)  # with its members in order, which is that of the output


def test_a_pydantic_model_comes_back(openai_client: openai.OpenAI, server: FakeInference) -> None:
    class Point(pydantic.BaseModel):
        x: int
        y: int

    answers(server, '{"x": 1,', ' "y": 2}')
    answer = openai_client.chat.completions.parse(model="fake", messages=HI, response_format=Point)
    assert answer.choices[0].message.parsed == Point(x=1, y=2)
    assert json.loads(server.requests[0].structured_output.json_schema)["required"] == ["x", "y"]


def test_any_json_object_can_be_asked_for(openai_client: openai.OpenAI, server: FakeInference) -> None:
    ask(openai_client, response_format={"type": "json_object"})
    assert json.loads(server.requests[0].structured_output.json_schema) == {"type": "object"}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"regex": "a+"}, pb.StructuredOutput(regex="a+")),
        ({"choice": ["a", "b"]}, pb.StructuredOutput(choice=pb.Choice(values=["a", "b"]))),
        ({"json": {"type": "null"}}, pb.StructuredOutput(json_schema='{"type": "null"}')),
        ({"json": "{}"}, pb.StructuredOutput(json_schema="{}")),
        (
            {"grammar": "root ::= 'a'"},
            pb.StructuredOutput(grammar=pb.Grammar(syntax=pb.GRAMMAR_SYNTAX_EBNF, text="root ::= 'a'")),
        ),
        (
            {"grammar": "start: X", "grammar_syntax": "lark"},
            pb.StructuredOutput(grammar=pb.Grammar(syntax=pb.GRAMMAR_SYNTAX_LARK, text="start: X")),
        ),
    ],
)
def test_each_form_of_the_extension(
    openai_client: openai.OpenAI, server: FakeInference, form: dict[str, Any], expected: pb.StructuredOutput
) -> None:
    ask(openai_client, extra_body={"structured_outputs": form})
    openai_client.completions.create(model="fake", prompt="x", extra_body={"structured_outputs": form})
    assert [request.structured_output for request in server.requests] == [expected, expected]


def test_no_form_is_asked_for_unasked(openai_client: openai.OpenAI, server: FakeInference) -> None:
    ask(openai_client, response_format={"type": "text"}, tools=[WEATHER], tool_choice="none")
    assert not server.requests[0].HasField("structured_output")


JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("asked", "field", "name"),
    [
        ({"response_format": JSON_FORMAT}, "structured_output.json_schema", "response_format"),
        ({"response_format": JSON_FORMAT}, "structured_output", "response_format"),
        ({"tools": [WEATHER]}, "structured_output.grammar.text", "tools"),
        (
            {"tools": [WEATHER], "response_format": JSON_FORMAT},
            "structured_output.grammar.text",
            "tools and response_format",
        ),
        (
            {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
            "structured_output.json_schema",
            "structured_outputs.json",
        ),
        (
            {"extra_body": {"structured_outputs": {"grammar": "x"}}},
            "structured_output.grammar.text",
            "structured_outputs.grammar",
        ),
        (
            {"extra_body": {"structured_outputs": {"choice": ["a", ""]}}},
            "structured_output.choice.values[1]",
            "structured_outputs.choice",
        ),
        ({"max_completion_tokens": 9}, "stopping.max_tokens", "max_completion_tokens"),
        ({"max_tokens": 9}, "stopping.max_tokens", "max_tokens"),
        ({}, "chat.messages[0].content", "messages"),
    ],
)
def test_a_refusal_names_the_field_that_was_sent(
    openai_client: openai.OpenAI,
    server: FakeInference,
    asked: dict[str, Any],
    field: str,
    name: str,
    streams: bool,
) -> None:
    server.answer = lambda request, context: abort(
        context,
        code_pb2.INVALID_ARGUMENT,
        f"{field}: it can't be; {field}: really",
        reason="INVALID_REQUEST",
        violations={field: "it can't be"},
    )
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(model="fake", messages=HI, stream=streams, **asked)
    assert caught.value.param == name
    assert caught.value.body["message"] == f"{name}: it can't be; {name}: really"


def test_a_refusal_of_a_completion_names_the_field_that_was_sent(
    openai_client: openai.OpenAI, server: FakeInference
) -> None:
    server.answer = lambda request, context: abort(
        context,
        code_pb2.INVALID_ARGUMENT,
        "stopping.ignore_eos: leave ignore_eos or structured_output unset; text: the prompt is text: no",
        violations={"stopping.ignore_eos": "leave one unset", "text": "the prompt is text: no"},
    )
    with pytest.raises(openai.BadRequestError) as caught:
        extension = {"structured_outputs": {"regex": "a"}, "ignore_eos": True}
        openai_client.completions.create(model="fake", prompt="x", extra_body=extension)
    expected = "ignore_eos: leave ignore_eos or structured_outputs unset; prompt: the prompt is text: no"
    assert (caught.value.param, caught.value.body["message"]) == ("ignore_eos", expected)
