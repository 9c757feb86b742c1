"""The gateway's connections: who may come, who goes away, and how they end when the process does."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from certificates import Authority
from fake_server import FakeInference, admitted, delta, finished, hello
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from running_gateway import DEADLINE_S, RunningGateway, eventually

from openai_gateway import connection
from openai_gateway.config import ConfigError, GatewayConfig, load_config
from openai_gateway.errors import HttpError
from openai_gateway.keys import FileKeys, ForwardedKeys
from openai_gateway.server import serve
from openai_gateway.upstream import is_protected

COMPLETION = {"model": "fake", "prompt": "hi"}
KEY = "a-key-of-20-characters"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@contextlib.contextmanager
def running(server: FakeInference, **options: object) -> Iterator[RunningGateway]:
    gateway = RunningGateway(server.address, **options)
    try:
        yield gateway
    finally:
        server.call_ended.set()
        gateway.stop()


def counts(gateway: RunningGateway) -> dict[str, float]:
    lines = httpx.get(f"{gateway.url}/metrics").text.splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def requests_with(gateway: RunningGateway, status: int) -> float:
    name = f'tidegate_gateway_requests_total{{route="/v1/completions",status="{status}"}}'
    return counts(gateway).get(name, 0)


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_away_cancels_its_request(
    gateway: RunningGateway, server: FakeInference, streams: bool
) -> None:
    server.answer = server.hang
    body = json.dumps(COMPLETION | {"stream": streams}).encode()
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        assert server.call_started.wait(DEADLINE_S)
        if streams:
            received = b""
            while b"Hello" not in received:
                received += client.recv(4096)
        assert not server.call_ended.is_set()
    assert server.call_ended.wait(DEADLINE_S)
    eventually(lambda: requests_with(gateway, 499) == 1)
    # The request for the metrics is the only one that is open.
    assert counts(gateway)["tidegate_gateway_open_requests"] == 1


def test_a_client_that_goes_away_cancels_each_of_its_prompts(
    gateway: RunningGateway, server: FakeInference
) -> None:
    running_calls: set[str] = set()

    def hang(request, context):
        running_calls.add(request.request_id)
        context.add_callback(lambda: running_calls.discard(request.request_id))
        yield from server.hang(request, context)

    server.answer = hang
    body = COMPLETION | {"prompt": ["a", "b", "c"], "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=DEADLINE_S) as answer:
        texts = answer.iter_text()  # held, since the connection would end with it
        assert "Hello" in next(texts)
        eventually(lambda: len(running_calls) == 3)
        server.call_ended.clear()
    eventually(lambda: not running_calls)


def test_who_waits_long_is_told_that_the_connection_lives(
    gateway: RunningGateway, server: FakeInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", 0.02)

    def late(request, context):
        server.call_ended.wait(0.2)
        server.call_ended.clear()
        yield from hello(request, context)

    server.answer = late
    answer = httpx.post(f"{gateway.url}/v1/completions", json=COMPLETION | {"stream": True})
    events = answer.text.split("\n\n")
    assert events[0] == ": waiting"
    assert [e for e in events if "Hello" in e]
    assert events[-2:] == ["data: [DONE]", ""]


def test_a_failure_after_a_long_wait_is_an_event(
    gateway: RunningGateway, server: FakeInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", 0.02)

    def late(request, context):
        server.call_ended.wait(0.2)
        raise ValueError("a bug")
        yield

    server.answer = late
    answer = httpx.post(f"{gateway.url}/v1/completions", json=COMPLETION | {"stream": True})
    assert answer.status_code == 200
    [last] = [event for event in answer.text.split("\n\n") if event.startswith("data: ")]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"


def test_a_client_that_goes_away_before_it_has_asked(gateway: RunningGateway, server: FakeInference) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    eventually(lambda: requests_with(gateway, 499) == 1)
    assert server.requests == []


@pytest.mark.parametrize("function", ["completion_options", "completion_body"])
def test_a_bug_is_told_without_its_text(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the secret of the gateway")

    monkeypatch.setattr(f"openai_gateway.endpoints.{function}", broken)
    answer = httpx.post(f"{gateway.url}/v1/completions", json=COMPLETION)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in answer.text
    assert "the secret of the gateway" in caplog.text


def test_a_scheduler_that_cant_be_reached(server: FakeInference) -> None:
    with running(server) as gateway:
        server.stop()
        answer = httpx.post(f"{gateway.url}/v1/completions", json=COMPLETION, timeout=DEADLINE_S)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "the scheduler can't be reached; try again later"
        assert httpx.get(f"{gateway.url}/health").status_code == 503


def test_trace_context_is_passed_on(gateway: RunningGateway, server: FakeInference) -> None:
    headers = {"traceparent": TRACEPARENT, "tracestate": "a=b"}
    httpx.post(f"{gateway.url}/v1/completions", json=COMPLETION, headers=headers)
    assert server.metadata[-1].items() >= headers.items()
    httpx.post(f"{gateway.url}/v1/completions", json=COMPLETION, headers={"traceparent": "rubbish"})
    assert "traceparent" not in server.metadata[-1]


def test_a_key_is_the_callers_token_at_the_scheduler(gateway: RunningGateway, server: FakeInference) -> None:
    httpx.post(f"{gateway.url}/v1/completions", json=COMPLETION, headers={"authorization": "bearer abc"})
    httpx.get(f"{gateway.url}/v1/models", headers={"authorization": "Bearer def"})
    httpx.post(f"{gateway.url}/v1/completions", json=COMPLETION)
    assert [m.get("authorization") for m in server.metadata] == [
        "Bearer abc",
        "Bearer def",
        "Bearer def",
        None,
    ]


def test_keys_of_a_file_are_asked_for_and_stay_here(
    server: FakeInference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_TOKEN", "the-gateways-own-token")
    file = tmp_path / "keys"
    file.write_text(f"{KEY}  # alice\n")
    with running(server, api_keys=file) as gateway:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}):
            answer = httpx.post(f"{gateway.url}/v1/completions", json=COMPLETION, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        headers = {"authorization": f"Bearer {KEY}"}
        answer = httpx.post(f"{gateway.url}/v1/completions", json=COMPLETION, headers=headers)
        assert answer.status_code == 200
        assert httpx.get(f"{gateway.url}/v1/models").status_code == 401
    assert server.metadata[0]["authorization"] == "Bearer the-gateways-own-token"
    assert len(server.requests) == 1


def test_a_file_of_keys_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text(f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}\n")
    keys = FileKeys(file)
    assert keys.admit(f"Bearer {KEY}") == ()
    file.write_text("another-key-of-27-characters")
    assert keys.admit("Bearer another-key-of-27-characters") == ()
    with pytest.raises(HttpError, match="not known"):
        keys.admit(f"Bearer {KEY}")
    file.write_text("short")
    assert keys.admit("Bearer another-key-of-27-characters") == ()
    assert "line 1: the key has 5 characters" in caplog.text


@pytest.mark.parametrize("text", ["", "# none\n", "short", f"{KEY} alice", "sha256:12"])
def test_a_file_of_keys_that_cant_be_used(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ValueError, match="keys"):
        FileKeys(file)


def test_keys_dont_leave_the_machine_unencrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_protected("localhost:50051")
    assert not is_protected("gpu0:50051")
    monkeypatch.setenv("TIDEGATE_TLS", "1")
    assert is_protected("gpu0:50051")
    assert ForwardedKeys(is_protected=False).admit(f"Bearer {KEY}") == ()


def test_https_is_served_with_a_certificate(server: FakeInference, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "public")
    certificate = authority.issue("gateway")
    with running(server, tls_cert=certificate.cert, tls_key=certificate.key) as gateway:
        verify = ssl.create_default_context(cafile=str(authority.ca))
        url = f"https://localhost:{gateway.port}/v1/completions"
        answer = httpx.post(url, json=COMPLETION | {"stream": True}, verify=verify)
        assert answer.text.endswith("data: [DONE]\n\n")


def test_a_certificate_that_cant_be_read(server: FakeInference, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls_cert, tls_key: .*No such file"):
        RunningGateway(server.address, tls_cert=tmp_path / "none", tls_key=tmp_path / "none")


async def test_a_taken_port_is_told_with_what_to_do(server: FakeInference) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: it is in use; choose another --port"):
            await serve(GatewayConfig(address=server.address, port=port))


def test_a_user_can_be_a_tenant(server: FakeInference) -> None:
    with running(server, user_as_tenant=True) as gateway:
        httpx.post(f"{gateway.url}/v1/completions", json=COMPLETION | {"user": "alice"})
        httpx.post(f"{gateway.url}/v1/completions", json=COMPLETION | {"user": "alice", "tenant": "t"})
    assert [request.tenant for request in server.requests] == ["alice", "t"]


def test_health_is_that_of_the_scheduler(server: FakeInference) -> None:
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server._server)
    with running(server, drain_window=60.0) as gateway:
        states = health_pb2.HealthCheckResponse
        for state, status in [(states.NOT_SERVING, 503), (states.SERVING, 200)]:
            servicer.set("tidegate.inference.v1.InferenceService", state)
            assert httpx.get(f"{gateway.url}/health").status_code == status
        gateway.begin_drain()
        eventually(lambda: httpx.get(f"{gateway.url}/health").status_code == 503)
        # It still takes requests, for those who have not asked for its health yet.
        assert httpx.post(f"{gateway.url}/v1/completions", json=COMPLETION).status_code == 200
        gateway.begin_drain()  # a second signal doesn't wait


@pytest.mark.parametrize("streams", [False, True])
def test_a_drain_lets_answers_finish(server: FakeInference, streams: bool) -> None:
    gateway = RunningGateway(server.address, drain_timeout=DEADLINE_S)

    def slow(request, context):
        yield admitted()
        yield delta("Hello", 1)
        gateway.begin_drain()
        server.call_ended.wait(0.5)
        yield delta(" world", 2)
        yield finished()

    server.answer = slow
    answer = httpx.post(f"{gateway.url}/v1/completions", json=COMPLETION | {"stream": streams})
    assert "world" in answer.text
    gateway.stop()


@pytest.mark.parametrize("streams", [False, True])
def test_a_drain_that_takes_too_long_ends_answers_with_an_error(server: FakeInference, streams: bool) -> None:
    gateway = RunningGateway(server.address, drain_timeout=0.2)

    def hang(request, context):
        gateway.begin_drain()
        yield from server.hang(request, context)

    server.answer = hang
    answer = httpx.post(f"{gateway.url}/v1/completions", json=COMPLETION | {"stream": streams})
    assert answer.status_code == (200 if streams else 503)
    last = answer.text.removesuffix("\n\n").rpartition("\n\n")[2].removeprefix("data: ")
    error = json.loads(last)["error"]
    assert error["code"] == "draining"
    assert "within its drain_timeout of 0.2 s" in error["message"]
    assert server.call_ended.wait(DEADLINE_S)
    gateway.stop()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--host", "0.0.0.0"], "not a loopback address"),
        (["--tls-cert", "x"], "belong together"),
        (["--port", "70000"], "port"),
    ],
)
def test_options_that_cant_be_used(flags: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(flags)


def test_a_token_without_keys_would_be_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_TOKEN", "x")
    with pytest.raises(ConfigError, match="whoever reaches the gateway"):
        load_config([])
    assert load_config(["--api-keys", "f"]).api_keys == Path("f")


def test_options_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_GATEWAY_PORT", "81")
    assert GatewayConfig().port == 81
    assert load_config(["--port", "82"]).port == 82


@pytest.fixture(params=["openai_gateway", "tidegate_client.cli"])
def process(
    server: FakeInference, request: pytest.FixtureRequest
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    module = [request.param, "gateway"] if request.param == "tidegate_client.cli" else [request.param]
    command = [sys.executable, "-m", *module, "--port", "0", "--address", server.address]
    process = subprocess.Popen(
        [*command, "--drain-window", "0", "--drain-timeout", "10"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    lines = ""
    while (found := re.search(r"running on (http://\S+)", lines)) is None:
        line = process.stderr.readline()
        assert line, lines
        lines += line
    yield process, found.group(1)
    server.call_ended.set()
    process.kill()
    process.wait(DEADLINE_S)
    process.stderr.close()


def test_the_process_finishes_its_streams_after_sigterm(
    process: tuple[subprocess.Popen[str], str], server: FakeInference
) -> None:
    gateway, url = process

    def slow(request, context):
        yield admitted()
        yield delta("Hello", 1)
        gateway.send_signal(signal.SIGTERM)
        server.call_ended.wait(0.5)
        yield delta(" world", 2)
        yield finished()

    server.answer = slow
    answer = httpx.post(f"{url}/v1/completions", json=COMPLETION | {"stream": True}, timeout=DEADLINE_S)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert gateway.wait(DEADLINE_S) == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_streams_events_as_they_come(
    process: tuple[subprocess.Popen[str], str], server: FakeInference
) -> None:
    _, url = process
    body = json.dumps({"model": "fake", "stream": True, "messages": [{"role": "user", "content": "hi"}]})
    command = ["curl", "-sNi", f"{url}/v1/chat/completions", "-H", "content-type: application/json"]
    output = subprocess.run([*command, "-d", body], capture_output=True, text=True, timeout=DEADLINE_S).stdout
    head, *events = output.replace("\r", "").strip().split("\n\n")
    assert head.startswith("HTTP/1.1 200 OK")
    assert "content-type: text/event-stream; charset=utf-8" in head
    assert f"x-request-id: {server.requests[0].request_id}" in head
    assert events[-1] == "data: [DONE]"
    texts = [json.loads(e.removeprefix("data: "))["choices"][0]["delta"].get("content") for e in events[:-1]]
    assert texts == ["Hello", " world", None]
