"""Forms of answers through the gateway: what the scheduler is asked for, and calls of functions."""

import json
from typing import Any

import openai
import pydantic
import pytest
from fake_server import FakeInference, admitted, delta, finished
from running_gateway import RunningGateway

from tidegate.inference.v1 import inference_pb2 as pb

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}


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


def call_of_stream(chunks: Any) -> tuple[str | None, str, list[str], str | None]:
    """Name, arguments, ids and finish reason."""
    choices = [chunk.choices[0] for chunk in chunks]
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert {call.index for call in calls} <= {0}
    name = next((call.function.name for call in calls if call.function.name), None)
    arguments = "".join(call.function.arguments for call in calls)
    return name, arguments, [call.id for call in calls if call.id], choices[-1].finish_reason


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


@pytest.mark.parametrize("streams", [False, True])
def test_a_named_function_is_called_with_what_the_model_writes(
    openai_client: openai.OpenAI, server: FakeInference, streams: bool
) -> None:
    answers(server, '{"city":', ' "Bonn"}')
    options = {"tools": [CLOCK, WEATHER], "tool_choice": NAMED}
    if streams:
        chunks = openai_client.chat.completions.create(model="fake", messages=HI, stream=True, **options)
        name, arguments, ids, reason = call_of_stream(chunks)
    else:
        choice = ask(openai_client, **options)
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        name, arguments, ids, reason = (
            call.function.name,
            call.function.arguments,
            [call.id],
            choice.finish_reason,
        )
    assert (name, arguments, reason) == ("weather", '{"city": "Bonn"}', "stop")
    assert len(ids) == 1
    assert json.loads(server.requests[0].structured_output.json_schema) == PARAMETERS


@pytest.mark.parametrize("streams", [False, True])
def test_the_model_chooses_one_of_the_functions(
    openai_client: openai.OpenAI, server: FakeInference, streams: bool
) -> None:
    answers(server, '{"name": "wea', 'ther", "arguments": {"city": "Köln"}}')
    options = {"tools": [WEATHER, CLOCK], "tool_choice": "required"}
    if streams:
        chunks = openai_client.chat.completions.create(model="fake", messages=HI, stream=True, **options)
        name, arguments, _, reason = call_of_stream(chunks)
    else:
        choice = ask(openai_client, **options)
        [call] = choice.message.tool_calls
        name, arguments, reason = call.function.name, call.function.arguments, choice.finish_reason
    assert (name, json.loads(arguments), reason) == ("weather", {"city": "Köln"}, "tool_calls")
    schemas = json.loads(server.requests[0].structured_output.json_schema)["anyOf"]
    assert [schema["properties"]["name"] for schema in schemas] == [{"const": "weather"}, {"const": "clock"}]
    assert schemas[0]["properties"]["arguments"] == PARAMETERS


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_was_cut_short_is_text(
    openai_client: openai.OpenAI, server: FakeInference, streams: bool
) -> None:
    answers(server, '{"name": "wea', reason=pb.FINISH_REASON_LENGTH)
    options = {"tools": [WEATHER], "tool_choice": "required"}
    if streams:
        stream = openai_client.chat.completions.create(model="fake", messages=HI, stream=True, **options)
        choices = [chunk.choices[0] for chunk in stream]
        assert [c.delta.tool_calls for c in choices] == [None] * len(choices)
        text = "".join(c.delta.content or "" for c in choices)
        reason = choices[-1].finish_reason
    else:
        choice = ask(openai_client, **options)
        assert choice.message.tool_calls is None
        text, reason = choice.message.content, choice.finish_reason
    assert (text, reason) == ('{"name": "wea', "length")


def test_the_model_is_told_of_the_functions(openai_client: openai.OpenAI, server: FakeInference) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    ask(openai_client, messages=messages, tools=[WEATHER], tool_choice="required")
    system, user = server.requests[0].chat.messages
    assert system.role == "system"
    assert system.content.startswith("Be brief.\n\n")
    assert '"weather"' in system.content
    assert '"city"' in system.content
    assert (user.role, user.content) == ("user", "hi")


def test_calls_and_results_of_earlier_turns_stay_in_the_conversation(
    openai_client: openai.OpenAI, server: FakeInference
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    ask(openai_client, messages=messages)
    assert [(turn.role, turn.content) for turn in server.requests[0].chat.messages[1:]] == [
        ("assistant", '{"name": "weather", "arguments": {"city": "Bonn"}}'),
        ("tool", "rain"),
    ]
