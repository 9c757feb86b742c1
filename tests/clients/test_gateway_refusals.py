"""What the gateway can't do is refused with OpenAI's error body, and names the field; nothing is ignored."""

import json
from typing import Any

import httpx
import pytest
from fake_server import FakeInference
from running_gateway import RunningGateway

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "fake", "prompt": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def server(shared_gateway: tuple[FakeInference, RunningGateway]) -> FakeInference:
    shared_gateway[0].reset()
    return shared_gateway[0]


@pytest.fixture
def gateway(shared_gateway: tuple[FakeInference, RunningGateway], server: FakeInference) -> RunningGateway:
    return shared_gateway[1]


def refusal(gateway: RunningGateway, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    answer = httpx.post(f"{gateway.url}/v1/{path}", content=content)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"unheard_of": 1}, "unheard_of"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"n": 1.5}, "n"),
        ({"stop": [1]}, "stop.0"),
        ({"logit_bias": {"word": 1}}, "logit_bias.word"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"n": -1}, "n"),
        ({"n": 2**40}, "n"),
        ({"top_k": -1}, "top_k"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": 1e300}, "timeout_s"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities.1"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"store": True}, "store"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"tools": [TOOL], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"messages": [{"role": "user", "name": "Ann", "content": "hi"}]}, "messages.0.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar_syntax": "lark"}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages.0.name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages.0.content.0",
        ),
    ],
)
def test_a_chat_that_cant_be_served(
    gateway: RunningGateway, server: FakeInference, extra: dict[str, Any], param: str
) -> None:
    error = refusal(gateway, "chat/completions", CHAT | extra)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert param.rpartition(".")[2] in error["message"]
    assert server.requests == []


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_completion_that_cant_be_served(
    gateway: RunningGateway, server: FakeInference, extra: dict[str, Any], param: str
) -> None:
    assert refusal(gateway, "completions", COMPLETION | extra)["param"] == param
    assert server.requests == []


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "nonsense", b"\xff", '{"prompt": "\\ud800"}', '{"top_p": NaN}']
)
def test_a_body_that_is_no_request(gateway: RunningGateway, body: str | bytes) -> None:
    assert refusal(gateway, "completions", body)["type"] == "invalid_request_error"


def test_values_are_not_in_the_refusal_of_their_field(gateway: RunningGateway) -> None:
    body = CHAT | {"messages": [{"role": "user", "content": {"secret": "the plan"}}]}
    assert "plan" not in json.dumps(refusal(gateway, "chat/completions", body))


def test_a_body_that_is_too_large(server: FakeInference) -> None:
    gateway = RunningGateway(server.address, max_body_mib=1)
    try:
        error = refusal(gateway, "completions", COMPLETION | {"prompt": "x" * 2**20}, status=413)
        assert "max_body_mib = 1" in error["message"]
    finally:
        gateway.stop()


def test_paths_and_methods_that_are_not_there(gateway: RunningGateway) -> None:
    assert refusal(gateway, "embeddings", {}, status=404)["code"] == "unknown_url"
    answer = httpx.get(f"{gateway.url}/v1/completions")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "unknown_url")


def test_fields_that_ask_for_nothing_are_taken(gateway: RunningGateway, server: FakeInference) -> None:
    nothing = {
        "user": "alice",
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "stream": True,
        "stream_options": {"continuous_usage_stats": True, "include_obfuscation": False},
    }
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=CHAT | nothing)
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")
    assert server.requests[0].tenant == ""
