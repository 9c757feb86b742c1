"""Calls of functions through the gateway: what the model is held to and told, and what its text becomes."""

import json
from typing import Any

import llguidance
import openai
import pydantic
import pytest
from fake_server import FakeInference, admitted, delta, finished
from running_gateway import RunningGateway

from openai_gateway.calls import CallsReader
from openai_gateway.requests import Function
from openai_gateway.tools import MAX_CALLS, Tools
from scheduler_service.grammar_process import FormError, compile_form, read_vocabulary
from tidegate.inference.v1 import inference_pb2 as pb

HI = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
IN_BONN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
VOCABULARY = read_vocabulary(json.dumps([300, {}, [299]]))

Told = tuple[str | None, list[tuple[str, str]], str]


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


def ask(client: openai.OpenAI, *, streams: bool, **options: Any) -> Told:
    """Text, calls as (name, arguments), and finish reason; the same whether it streams or not."""
    options = {"model": "fake", "messages": HI, "tools": [WEATHER, CLOCK], **options}
    if streams:
        with client.chat.completions.stream(**options) as stream:
            choice = stream.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**options).choices[0]
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    named = [(call.function.name, call.function.arguments) for call in calls]
    return choice.message.content, named, choice.finish_reason


def matches(request: pb.GenerateRequest, text: str) -> bool:
    """Whether the form that was asked for lets an output be this text and end there."""
    form = request.structured_output.grammar
    assert form.syntax == pb.GRAMMAR_SYNTAX_LARK
    matcher = llguidance.LLMatcher(VOCABULARY, compile_form("lark", form.text, VOCABULARY), log_level=0)
    return matcher.consume_tokens(VOCABULARY.tokenize_str(text)) and matcher.is_accepting()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_an_answer_may_be_text(
    openai_client: openai.OpenAI, server: FakeInference, streams: bool, choice: dict[str, str]
) -> None:
    answers(server, "Is 1 <", " 2 <tool", "s>? ", "Yes.\n")
    told = ask(openai_client, streams=streams, **choice)
    assert told == ("Is 1 < 2 <tools>? Yes.\n", [], "stop")
    assert matches(server.requests[0], told[0])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_may_be_calls_behind_text(
    openai_client: openai.OpenAI, server: FakeInference, streams: bool, size: int
) -> None:
    text = f"Let me look. \n{IN_BONN}\n{TIME}"
    answers(server, *(text[i : i + size] for i in range(0, len(text), size)))
    content, calls, reason = ask(openai_client, streams=streams)
    assert (content, reason) == ("Let me look.", "tool_calls")
    assert calls == [("weather", '{"city": "Bonn"}'), ("clock", "{}")]
    assert matches(server.requests[0], text)


def test_a_call_streams_as_it_is_written(openai_client: openai.OpenAI, server: FakeInference) -> None:
    answers(server, "Well: ", IN_BONN[: IN_BONN.index("Bonn")], "Bo", 'nn"', "}", "}\n</tool", "_call>")
    stream = openai_client.chat.completions.create(model="fake", messages=HI, tools=[WEATHER], stream=True)
    choices = [chunk.choices[0] for chunk in stream]
    deltas = [
        (
            each.delta.content,
            [
                (call.index, call.function.name, call.function.arguments)
                for call in each.delta.tool_calls or ()
            ],
        )
        for each in choices
    ]
    assert deltas == [
        ("Well:", []),
        (None, [(0, "weather", ""), (0, None, '{"city": "')]),
        (None, [(0, None, "Bo")]),
        (None, [(0, None, 'nn"')]),
        (None, [(0, None, "}")]),
        (None, []),
    ]
    assert choices[0].delta.role == "assistant"
    first = choices[1].delta.tool_calls[0]
    assert (first.type, first.id[:5]) == ("function", "call_")
    assert [each.finish_reason for each in choices] == [None] * 5 + ["tool_calls"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_can_be_required(openai_client: openai.OpenAI, server: FakeInference, streams: bool) -> None:
    answers(server, IN_BONN)
    told = ask(openai_client, streams=streams, tool_choice="required")
    assert told == (None, [("weather", '{"city": "Bonn"}')], "tool_calls")
    [request] = server.requests
    assert matches(request, IN_BONN)
    assert matches(request, f"{TIME}\n{IN_BONN}")
    assert not matches(request, "text")
    assert not matches(request, f"text {IN_BONN}")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_can_be_held_to_one(openai_client: openai.OpenAI, server: FakeInference, choice: str) -> None:
    ask(openai_client, streams=False, tool_choice=choice, parallel_tool_calls=False)
    [request] = server.requests
    assert matches(request, TIME)
    assert not matches(request, f"{TIME}\n{TIME}")


def test_calls_have_an_end(openai_client: openai.OpenAI, server: FakeInference) -> None:
    ask(openai_client, streams=False, parallel_tool_calls=True)
    [request] = server.requests
    assert matches(request, "\n".join([TIME] * MAX_CALLS))
    assert not matches(request, "\n".join([TIME] * (MAX_CALLS + 1)))


@pytest.mark.parametrize(
    "text",
    [
        IN_BONN.replace("weather", "whether"),
        IN_BONN.replace("Bonn", "Bo\nnn"),
        IN_BONN.replace('{"city": "Bonn"}', '{"town": "Bonn"}'),
        IN_BONN.replace('{"city": "Bonn"}', "[]"),
        IN_BONN[:-1],
        f"{IN_BONN} and more",
        "text <tool_call> text",
        TIME.replace("{}", '{"zone": 1}'),
    ],
)
def test_what_no_answer_can_be(openai_client: openai.OpenAI, server: FakeInference, text: str) -> None:
    ask(openai_client, streams=False)
    assert not matches(server.requests[0], text)


def test_schemas_of_pydantic_models_refer_to_their_own_parts(
    openai_client: openai.OpenAI, server: FakeInference
) -> None:
    class Place(pydantic.BaseModel):
        town: str

    class Trip(pydantic.BaseModel):
        """Plans a trip."""

        start: Place
        end: Place

    call = '{"name": "Trip", "arguments": {"start": {"town": "Ulm"}, "end": {"town": "Köln"}}}'
    answers(server, f"<tool_call>\n{call}\n</tool_call>")
    with openai_client.chat.completions.stream(
        model="fake", messages=HI, tools=[openai.pydantic_function_tool(Trip)]
    ) as stream:
        [called] = stream.get_final_completion().choices[0].message.tool_calls
    assert called.function.parsed_arguments == Trip(start=Place(town="Ulm"), end=Place(town="Köln"))
    assert matches(server.requests[0], f"<tool_call>\n{call}\n</tool_call>")
    assert not matches(server.requests[0], f"<tool_call>\n{call}\n</tool_call>".replace('"Ulm"', "1"))


def test_a_schema_of_answers_holds_where_nothing_is_called(
    openai_client: openai.OpenAI, server: FakeInference
) -> None:
    ask(openai_client, streams=False, response_format={"type": "json_object"})
    [request] = server.requests
    assert matches(request, '{"a": [1]}')
    assert matches(request, IN_BONN)
    assert not matches(request, "text")
    assert not matches(request, f"text {IN_BONN}")


def test_what_can_not_be_enforced_is_refused(openai_client: openai.OpenAI, server: FakeInference) -> None:
    odd = {"name": "odd", "parameters": {"properties": {"a": {"not": {"const": 1}}}}}
    ask(openai_client, streams=False, tools=[{"type": "function", "function": odd}])
    with pytest.raises(FormError, match="not"):
        matches(server.requests[0], "text")


@pytest.mark.parametrize("streams", [False, True])
def test_a_named_function_is_called_with_what_the_model_writes(
    openai_client: openai.OpenAI, server: FakeInference, streams: bool
) -> None:
    answers(server, '{"city":', ' "Bonn"}')
    told = ask(openai_client, streams=streams, tool_choice=NAMED)
    assert told == (None, [("weather", '{"city": "Bonn"}')], "stop")
    assert json.loads(server.requests[0].structured_output.json_schema) == PARAMETERS


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Wait <tool_", "Wait <tool_", []),
        (IN_BONN[:27], IN_BONN[:27], []),
        (IN_BONN[:-16], None, [("weather", '{"city": "Bonn')]),
        (IN_BONN[:-13], None, [("weather", '{"city": "Bonn"}}')]),
        (IN_BONN[:-5], None, [("weather", '{"city": "Bonn"}')]),
        (f"{TIME}\n<tool_call>\n{{", None, [("clock", "{}")]),
    ],
)
def test_an_answer_that_was_cut_short_has_what_was_written(
    openai_client: openai.OpenAI,
    server: FakeInference,
    streams: bool,
    text: str,
    content: str | None,
    calls: list[tuple[str, str]],
) -> None:
    answers(server, text, reason=pb.FINISH_REASON_LENGTH)
    options = {"model": "fake", "messages": HI, "tools": [WEATHER, CLOCK]}
    if streams:  # the stream helper raises for what is cut short
        chunks = list(openai_client.chat.completions.create(**options, stream=True))
        parts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks) or None
        names = [part.function.name for part in parts if part.function.name]
        pieces = ["".join(p.function.arguments for p in parts if p.index == i) for i in range(len(names))]
        found = list(zip(names, pieces, strict=True))
        reason = chunks[-1].choices[0].finish_reason
    else:
        told, found, reason = ask(openai_client, streams=False)
    assert (told, found, reason) == (content, calls, "length")


def test_candidates_are_read_apart(openai_client: openai.OpenAI, server: FakeInference) -> None:
    halves = (IN_BONN[:40], IN_BONN[40:])
    parts = [delta(halves[0], 1), delta("No", 1, index=1), delta(halves[1], 1), delta(" call.", 1, index=1)]
    ends = [finished(i, pb.FINISH_REASON_STOP) for i in range(2)]
    server.answer = lambda request, context: iter([admitted(), *parts, *ends])
    with openai_client.chat.completions.stream(model="fake", messages=HI, tools=[WEATHER], n=2) as stream:
        first, second = stream.get_final_completion().choices
    assert first.message.tool_calls[0].function.arguments == '{"city": "Bonn"}'
    assert (second.message.content, second.message.tool_calls) == ("No call.", None)
    assert (first.finish_reason, second.finish_reason) == ("tool_calls", "stop")


def test_the_model_is_told_of_the_functions(openai_client: openai.OpenAI, server: FakeInference) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    for choice in ("auto", "required", NAMED):
        ask(openai_client, streams=False, messages=messages, tools=[WEATHER], tool_choice=choice)
    for request in server.requests:
        system, user = request.chat.messages
        assert system.role == "system"
        assert system.content.startswith("Be brief.\n\n")
        assert '"weather"' in system.content
        assert '"city"' in system.content
        assert (user.role, user.content) == ("user", "hi")
    told = [request.chat.messages[0].content for request in server.requests]
    assert ["<tool_call>" in each for each in told] == [True, True, False]
    assert len(set(told)) == 3


def test_an_agent_gets_its_results_back_to_the_model(
    openai_client: openai.OpenAI, server: FakeInference
) -> None:
    messages: list[Any] = list(HI)
    results = {"weather": "rain", "clock": "noon"}
    answers(server, f"One moment.\n{IN_BONN}\n{TIME}")
    message = (
        openai_client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER, CLOCK])
        .choices[0]
        .message
    )
    messages.append(message)
    for call in reversed(message.tool_calls):  # in any order, as results come
        name = call.function.name
        messages.append({"role": "tool", "tool_call_id": call.id, "content": results[name], "name": name})
    answers(server, "Rain at noon.")
    assert ask(openai_client, streams=True, messages=messages) == ("Rain at noon.", [], "stop")
    assert [(turn.role, turn.content) for turn in server.requests[1].chat.messages[1:]] == [
        ("user", "hi"),
        ("assistant", f"One moment.\n{IN_BONN}\n{TIME}"),
        ("user", "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"),
    ]


@pytest.mark.parametrize("size", [1, 2, 5, 11])
@pytest.mark.parametrize(
    "text", ["a } b < c\n\n", f"a\n{IN_BONN}", f"{TIME}\n{IN_BONN}\n{TIME}", "<tool_call>\n", " \n "]
)
def test_how_text_is_cut_into_pieces_changes_nothing(text: str, size: int) -> None:
    reader = CallsReader()
    parts = [reader.read(text[i : i + size]) for i in range(0, len(text), size)]
    parts.append(reader.read("", is_end=True))
    calls = [call for part in parts for call in part.calls]
    names = [call.name for call in calls if call.name]
    arguments = ["".join(c.arguments for c in calls if c.index == i) for i in range(len(names))]
    whole_text, whole = CallsReader().read_all(text)
    assert "".join(part.text for part in parts) == whole_text
    assert list(zip(names, arguments, strict=True)) == [(call.name, call.arguments) for call in whole]


def test_many_functions_make_one_form() -> None:
    functions = [Function(name=f"f_{i}", parameters=PARAMETERS) for i in range(64)]
    text = Tools(functions, is_required=False, is_parallel=True).form()["grammar"].text
    matcher = llguidance.LLMatcher(VOCABULARY, compile_form("lark", text, VOCABULARY), log_level=0)
    call = IN_BONN.replace("weather", "f_63")
    assert matcher.consume_tokens(VOCABULARY.tokenize_str(f"{call}\n{call}"))
    assert matcher.is_accepting()
