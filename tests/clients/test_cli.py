"""The commands that generate: what they print, and with which code they end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from fake_server import FakeInference, abort, failing, finished, hello
from google.rpc import code_pb2

from tidegate.inference.v1 import inference_pb2 as pb
from tidegate_client.cli import screen
from tidegate_client.cli.own_command import own_command

Run = Callable[..., tuple[int, str, str]]


def test_generate_prints_the_text_and_nothing_else(run: Run, server: FakeInference) -> None:
    options = ["--max-tokens=5", "--temperature=0", "--top-p=0.5", "--top-k=3", "--min-p=0.1", "--seed=7"]
    options += ["--stop=a", "--stop=b", "--priority=-1", "--model=fake", "--request-id=mine"]
    assert run("generate", "Once", *options) == (0, "Hello world\n", "")
    assert server.requests == [
        pb.GenerateRequest(
            text="Once",
            model="fake",
            request_id="mine",
            priority=-1,
            sampling=pb.SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=7),
            stopping=pb.StoppingParams(max_tokens=5, stop=["a", "b"]),
        )
    ]


def test_generate_reads_the_prompt_from_standard_input(run: Run, server: FakeInference) -> None:
    assert run("generate", "-", "--chat", stdin="Hi\n")[:2] == (0, "Hello world\n")
    assert server.requests[0].chat.messages[0].content == "Hi\n"


def test_generate_prints_events_as_json(run: Run) -> None:
    code, printed, _ = run("generate", "Once", "--json")
    events = [json.loads(line) for line in printed.splitlines()]
    assert code == 0
    assert [event["event"] for event in events] == ["admitted", "delta", "delta", "finished"]
    assert events[1] == {"event": "delta", "index": 0, "text": "Hello", "token_ids": [10], "logprobs": []}
    assert events[3]["usage"]["output_tokens"] == 2


def test_generate_prints_candidates_one_after_another(run: Run, server: FakeInference) -> None:
    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield from hello(request, context)
        yield pb.GenerateResponse(delta=pb.Delta(index=1, text="Bye"))
        yield finished(index=1)

    server.answer = answer
    assert run("generate", "Once", "-n", "2")[:2] == (0, "[0] Hello world\n[1] Bye\n")


def test_stats_go_to_stderr(run: Run) -> None:
    code, printed, told = run("generate", "Once", "--stats")
    assert (code, printed) == (0, "Hello world\n")
    assert told == (
        f"request: r1 ({own_command()} trace r1)\n"
        "usage: 5 prompt tokens (2 cached), 2 output tokens, ended by length, preempted 1 times\n"
        "timings: queue 5.0 ms, prefill 20 ms, decode 500 ms, time to first token 25 ms, 2.0 tokens/s\n"
    )


def refuse(code: int, **details: object) -> Callable[..., Iterator[pb.GenerateResponse]]:
    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        abort(context, code, "it can't be", **details)
        yield

    return answer


@pytest.mark.parametrize(
    ("code", "details", "exit_code", "told"),
    [
        (
            code_pb2.INVALID_ARGUMENT,
            {
                "reason": "CONTEXT_TOO_LONG",
                "metadata": {"tokens": "9", "limit": "8"},
                "violations": {"text": "9 > 8"},
            },
            2,
            "error: it can't be (CONTEXT_TOO_LONG, limit=8, tokens=9); text: 9 > 8\n",
        ),
        (
            code_pb2.RESOURCE_EXHAUSTED,
            {"reason": "QUEUE_FULL", "metadata": {"limit": "512"}, "retry_after_ms": 90_000},
            4,
            "error: it can't be (QUEUE_FULL, limit=512); try again in 90.0 s\n",
        ),
        (code_pb2.NOT_FOUND, {"reason": "MODEL_NOT_FOUND"}, 2, "error: it can't be (MODEL_NOT_FOUND)\n"),
        (code_pb2.DEADLINE_EXCEEDED, {"reason": "DEADLINE"}, 5, "error: it can't be (DEADLINE)\n"),
        (code_pb2.INTERNAL, {}, 1, "error: it can't be (INTERNAL)\n"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(
    run: Run, server: FakeInference, code: int, details: dict, exit_code: int, told: str
) -> None:
    server.answer = refuse(code, **details)
    assert run("generate", "Once") == (exit_code, "", told)


def test_nobody_at_the_address_says_what_to_do(run: Run) -> None:
    code, _, told = run("status", "--address", "127.0.0.1:1")
    assert code == 3
    assert told.startswith("error: no scheduler answers (")
    assert "tidegate serve MODEL" in told
    assert told.count("\n") == 1


def test_an_address_without_a_port_is_refused(run: Run) -> None:
    for address in ("localhost", "http://localhost:50051"):
        code, _, told = run("generate", "Once", "--address", address)
        assert code == 2
        assert told.startswith(f"error: '{address}' is not host:port, such as localhost:50051")


def test_a_server_that_hangs_up_may_want_tls(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        pool.submit(hang_up, listening)
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        code, _, told = run("status", "--address", address)
        listening.shutdown(socket.SHUT_RDWR)
    assert code == 3
    assert "it may want TLS: TIDEGATE_TLS_CA" in told


def hang_up(listening: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed in the end
        while True:
            listening.accept()[0].close()


def test_who_shows_no_token_is_told_where_it_goes(
    run: Run, server: FakeInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = refuse(code_pb2.UNAUTHENTICATED, reason="MISSING_TOKEN")
    code, _, told = run("generate", "Once")
    assert (code, told) == (
        2,
        "error: it can't be (MISSING_TOKEN); set TIDEGATE_TOKEN, or give --token before the command\n",
    )
    monkeypatch.setenv("TIDEGATE_TOKEN", "not-the-right-one")
    assert "set TIDEGATE_TOKEN" not in run("generate", "Once")[2]


def test_a_timeout_is_told_by_its_option(run: Run, server: FakeInference) -> None:
    server.answer = refuse(code_pb2.DEADLINE_EXCEEDED, reason="DEADLINE_EXCEEDED")
    code, _, told = run("generate", "Once", "--timeout", "7.5")
    assert (code, told) == (5, "error: no answer within 7.5 s (--timeout)\n")
    server.answer = refuse(code_pb2.DEADLINE_EXCEEDED, reason="QUEUE_TIMEOUT")
    assert run("generate", "Once", "--timeout", "7.5")[2] == "error: it can't be (QUEUE_TIMEOUT)\n"


@pytest.mark.parametrize("option", ["--json-schema", "--grammar"])
def test_a_missing_file_is_told_by_its_option(run: Run, option: str) -> None:
    code, _, told = run("generate", "Once", option, "nowhere.json")
    assert (code, told) == (2, f"error: {option} nowhere.json: No such file or directory\n")


def test_chat_keeps_the_conversation_until_it_is_cleared(run: Run, server: FakeInference) -> None:
    code, printed, told = run("chat", "--system", "Be brief.", stdin="Hi\nAnd?\n/stats\n/clear\nNew\n/what\n")
    assert code == 0
    assert printed == "Hello world\n" * 3  # who pipes questions in wants answers alone
    assert "time to first token 25 ms" in told
    turns = [[message.content for message in request.chat.messages] for request in server.requests]
    assert turns == [
        ["Be brief.", "Hi"],
        ["Be brief.", "Hi", "Hello world", "And?"],
        ["Be brief.", "New"],
    ]


def test_a_failed_answer_does_not_end_the_chat(run: Run, server: FakeInference) -> None:
    server.answer = failing(1, code_pb2.INVALID_ARGUMENT, reason="CONTEXT_TOO_LONG")
    code, printed, told = run("chat", stdin="Hi\nAgain\n")
    assert (code, printed) == (0, "Hello world\n")
    assert "error: not now (CONTEXT_TOO_LONG)" in told
    assert [message.content for message in server.requests[1].chat.messages] == ["Again"]


def start(server: FakeInference, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tidegate_client.cli", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"TIDEGATE_ADDRESS": server.address},
    )


def read(process: subprocess.Popen[str], text: str) -> None:
    printed = ""
    while text not in printed:
        character = process.stdout.read(1)
        assert character, f"it ended after {printed!r}"
        printed += character


def test_ctrl_c_ends_generate_and_cancels_the_request(server: FakeInference) -> None:
    server.answer = server.hang
    with start(server, "generate", "Once") as process:
        read(process, "Hello")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    assert server.call_ended.wait(timeout=10)


def test_ctrl_c_cancels_the_answer_and_not_the_chat(server: FakeInference) -> None:
    server.answer = server.hang
    with start(server, "chat") as process:
        process.stdin.write("Hi\n")
        process.stdin.flush()
        read(process, "Hello")
        process.send_signal(signal.SIGINT)
        assert server.call_ended.wait(timeout=10)
        server.answer = hello
        read(process, "\n")
        process.stdin.write("Again\n")
        process.stdin.flush()
        read(process, "Hello world")
        process.stdin.close()
        assert process.wait(timeout=30) == 0
    assert [message.content for message in server.requests[1].chat.messages] == ["Hi", "Hello", "Again"]


def test_pieces_are_not_broken() -> None:
    flow = screen.Flow(["queue 1.0 ms", "prefill 344 ms", "decode 9 ms"], ", ")
    assert [str(line) for line in flow.lines(29)] == ["queue 1.0 ms, prefill 344 ms,", "decode 9 ms"]
    assert [str(line) for line in flow.lines(None)] == ["queue 1.0 ms, prefill 344 ms, decode 9 ms"]


def test_the_command_is_named_as_it_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "own env" / "bin" / "tidegate"
    script.parent.mkdir(parents=True)
    script.touch(0o755)
    monkeypatch.setattr("sys.executable", str(script.with_name("python")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert own_command() == f"'{script}'"
    monkeypatch.chdir(tmp_path)
    assert own_command() == "'own env/bin/tidegate'"
    monkeypatch.setenv("PATH", str(script.parent))
    assert own_command() == "tidegate"
    script.unlink()
    assert own_command() == f"'{script.with_name('python')}' -m tidegate_client.cli"


def test_the_command_line_starts_without_torch() -> None:
    heavy = ["torch", "transformers", "numpy", "scheduler_service", "worker_service"]
    script = f"import sys, tidegate_client.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
