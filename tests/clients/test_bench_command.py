"""`tidegate bench` against fake servers: what is sent, what is counted, what is written."""

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_openai import FakeOpenAI
from fake_server import FakeInference, abort, admitted, delta, finished
from google.rpc import code_pb2
from tokenizers import Tokenizer, models, pre_tokenizers

from tidegate.inference.v1 import inference_pb2 as pb
from tidegate_client.cli import main, screen

Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `tidegate bench`: exit code, stdout, stderr."""
    for console in (screen.out, screen.err):
        monkeypatch.setattr(console, "width", 300)
    monkeypatch.setattr("tidegate_client.cli.bench.stop_on_signals", lambda: None)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["tidegate", "bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


@pytest.fixture
def bench(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> Bench:
    """Runs it and returns what it wrote as JSON."""

    def bench(*arguments: str) -> dict[str, Any]:
        code, _, printed = run(*arguments, "--json", str(tmp_path / "figures.json"))
        assert code == 0, printed
        written: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
        return written

    return bench


def in_pairs(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    yield admitted()
    for _ in range(request.stopping.max_tokens // 2):
        yield delta("ab", 1, 2)
    yield finished(output_tokens=request.stopping.max_tokens)


@pytest.fixture
def scheduler(server: FakeInference) -> FakeInference:
    server.models = ["a"]
    server.answer = in_pairs
    return server


def test_presets_run_in_turn_and_report_what_was_asked(scheduler: FakeInference, bench: Bench) -> None:
    written = bench("-w", "w1", "-w", "W4", "--address", scheduler.address, "--repeat", "2")
    runs = written["runs"]
    assert (written["target"], written["interrupted"]) == (scheduler.address, False)
    assert [(run["workload"], run["seed"]) for run in runs] == [("w1", 0), ("w4", 0), ("w1", 1), ("w4", 1)]
    shared = runs[1]
    assert (shared["streams"], shared["requests"], shared["errors"]) == (8, 48, {})
    assert shared["output_tokens"] == 48 * 32
    assert shared["cached_tokens"] == 48 * 2  # what the fake says of each
    assert shared["output_tokens_per_s"] == pytest.approx(48 * 32 / shared["duration_s"])
    assert shared["ttft"]["p50_ms"] <= shared["ttft"]["p90_ms"] <= shared["ttft"]["p99_ms"]
    sent = [len(request.token_ids.ids) for request in scheduler.requests]
    assert (sent.count(128), sent.count(832)) == (10, 96)
    assert all(request.stopping.ignore_eos for request in scheduler.requests)


def test_repetitions_have_prompts_of_their_own(scheduler: FakeInference, bench: Bench) -> None:
    arguments = ["--requests", "4", "--output-tokens", "2", "--repeat", "2", "--no-warm-up"]
    bench("--address", scheduler.address, *arguments)
    first = [tuple(request.token_ids.ids) for request in scheduler.requests]
    assert len(set(first)) == 8
    bench("--address", scheduler.address, *arguments)
    again = [tuple(request.token_ids.ids) for request in scheduler.requests[8:]]
    assert sorted(again) == sorted(first)


def test_each_turn_carries_all_that_was_said_before(scheduler: FakeInference, bench: Bench) -> None:
    shape = ["--requests", "1", "--turns", "3", "--prompt-tokens", "5", "--output-tokens", "2"]
    bench("--address", scheduler.address, *shape, "--prefix-tokens", "7", "--no-warm-up")
    first, second, third = [list(request.token_ids.ids) for request in scheduler.requests]
    assert len(first) == 12
    assert second[:14] == [*first, 1, 2]
    assert third[:21] == [*second, 1, 2]
    assert len(third) == 26


def test_rates_are_runs_of_their_own_with_goodput(
    scheduler: FakeInference, run: Callable[..., tuple[int, str, str]], bench: Bench
) -> None:
    shape = ["--requests", "6", "--output-tokens", "4", "--no-warm-up", "--address", scheduler.address]
    load = ["--rates", "50,200", "--burstiness", "0.5", "--slo", "ttft=60000", "--slo", "itl=60000"]
    runs = bench(*shape, *load)["runs"]
    assert [(run["rate_per_s"], run["burstiness"], run["streams"]) for run in runs] == [
        (50, 0.5, None),
        (200, 0.5, None),
    ]
    assert [run["good_share"] for run in runs] == [1.0, 1.0]
    _, table, _ = run(*shape, *load)
    assert "50/s, burstiness 0.5" in table
    assert "100%" in table


def test_refusals_are_counted_by_code_and_not_tried_again(scheduler: FakeInference, bench: Bench) -> None:
    def full(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if len(scheduler.requests) <= 3:
            abort(context, code_pb2.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL", retry_after_ms=10)
        yield from in_pairs(request, context)

    scheduler.answer = full
    shape = ["--requests", "10", "--output-tokens", "2", "--concurrency", "2", "--no-warm-up"]
    (figures,) = bench("--address", scheduler.address, *shape)["runs"]
    assert figures["errors"] == {"RESOURCE_EXHAUSTED": 3}
    assert (figures["requests"], figures["output_tokens"]) == (10, 14)
    assert len(scheduler.requests) == 10


def test_an_answer_without_the_tokens_that_were_asked_for_is_a_failure(
    scheduler: FakeInference, run: Callable[..., tuple[int, str, str]], bench: Bench
) -> None:
    def early(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield from (admitted(), delta("a", 1), finished(output_tokens=1))

    scheduler.answer = early
    arguments = ["--address", scheduler.address, "--output-tokens", "3", "--requests", "2"]
    code, _, printed = run(*arguments)
    assert code == 1
    assert "failed with SHORT: 1 tokens came where 3 were asked for" in printed
    (figures,) = bench(*arguments, "--respect-eos")["runs"]
    assert (figures["errors"], figures["output_tokens"]) == ({}, 2)


def test_pictures_are_drawn(scheduler: FakeInference, bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shape = ["--requests", "3", "--output-tokens", "4", "--concurrency", "1,2", "--no-warm-up"]
    bench("--address", scheduler.address, *shape, "--plots", str(tmp_path / "plots"))
    for name in ("latencies.png", "loads.png"):
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-w", "w9"], "there is no workload w9; there are w1, w2, w3, w4"),
        (["--prompt-tokens", "9:2"], "such as 100:900"),
        (["--output-tokens", "many"], "'many' is no number of tokens"),
        (["--rates", "1,0"], "--rates 1,0 is no list of numbers above 0"),
        (["--slo", "ttft"], "is not NAME=MILLISECONDS"),
        (["--openai", "http://127.0.0.1:9"], "need --tokenizer FILE"),
        (["--openai", "http://127.0.0.1:9", "--vocab-size", "900", "--chat"], "give --tokenizer FILE"),
        (["--chat"], "go with --openai URL"),
        (["--prompt-file", "nowhere.txt"], "--prompt-file nowhere.txt: No such file or directory"),
    ],
)
def test_what_makes_no_sense_is_refused(
    run: Callable[..., tuple[int, str, str]], arguments: list[str], words: str
) -> None:
    code, _, printed = run(*arguments)
    assert code == 2
    assert words in printed


@pytest.mark.parametrize("num_done", [0, 1])
def test_an_interrupted_sitting_says_what_it_has(
    scheduler: FakeInference,
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    num_done: int,
) -> None:
    def interrupt(
        request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        if next(calls) == 2 * num_done:
            os.kill(os.getpid(), signal.SIGINT)
            scheduler.call_ended.wait(30)
        yield from in_pairs(request, context)

    calls = itertools.count()
    scheduler.answer = interrupt
    file = tmp_path / "figures.json"
    shape = ["--requests", "2", "--output-tokens", "2", "--concurrency", "1,2", "--no-warm-up"]
    code, table, told = run("--address", scheduler.address, *shape, "--json", str(file))
    written = json.loads(file.read_text())
    assert code == 130
    assert f"interrupted: {num_done} of 2 settings measured\n" in told
    assert ("output tokens/s" in table) == bool(num_done)
    assert (written["interrupted"], written["planned_runs"]) == (True, 2)
    assert [each["streams"] for each in written["runs"]] == [1][:num_done]


def test_several_models_must_be_told_apart(
    server: FakeInference, run: Callable[..., tuple[int, str, str]], bench: Bench
) -> None:
    code, _, printed = run("--address", server.address)
    assert (code, "serves a, b; name one of them with --model" in printed) == (2, True)
    server.answer = in_pairs
    bench("--address", server.address, "--model", "b", "--requests", "1", "--output-tokens", "2")
    assert {request.model for request in server.requests} == {"b"}


@pytest.fixture
def openai() -> Iterator[FakeOpenAI]:
    pytest.importorskip("httpx")
    fake = FakeOpenAI()
    yield fake
    fake.stop()


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """One token a word."""
    vocabulary = {"<unk>": 0, "▁tide": 1, "▁gate": 2, "▁water": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def test_an_openai_endpoint_gets_text_of_exact_length(
    openai: FakeOpenAI, bench: Bench, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    shape = ["--requests", "3", "--prompt-tokens", "6", "--output-tokens", "4", "--no-warm-up"]
    (figures,) = bench("--openai", f"{openai.url}/v1", "--tokenizer", tokenizer, *shape)["runs"]
    assert (figures["prompt_tokens"], figures["cached_tokens"], figures["output_tokens"]) == (27, 12, 12)
    assert figures["errors"] == {}
    assert set(openai.paths) == {"/v1/completions"}
    assert set(openai.authorizations) == {"Bearer secret"}
    body = openai.bodies[0]
    assert len(body.pop("prompt").split()) == 6
    assert body == {
        "model": "fake",
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_an_openai_chat_goes_on_with_what_was_answered(
    openai: FakeOpenAI, bench: Bench, tokenizer: str
) -> None:
    shape = ["--requests", "1", "--turns", "2", "--prompt-tokens", "3", "--output-tokens", "2"]
    arguments = ["--openai", openai.url, "--chat", "--tokenizer", tokenizer, "--respect-eos", "--no-warm-up"]
    bench(*arguments, *shape)
    first, second = openai.bodies
    (message,) = second["messages"]
    assert message["role"] == "user"
    assert message["content"].startswith(first["messages"][0]["content"] + " w0 w1 ")
    assert "ignore_eos" not in first
    assert set(openai.paths) == {"/v1/chat/completions"}


def test_token_ids_go_where_only_the_vocabulary_is_known(openai: FakeOpenAI, bench: Bench) -> None:
    shape = ["--requests", "2", "--prompt-tokens", "8", "--output-tokens", "2", "--no-warm-up"]
    bench("--openai", openai.url, "--vocab-size", "500", "--model", "x", *shape)
    assert [len(body["prompt"]) for body in openai.bodies] == [8, 8]
    assert {body["model"] for body in openai.bodies} == {"x"}


def test_prompts_of_a_file_go_as_they_are(openai: FakeOpenAI, bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("One\nTwo\n")
    arguments = ["--prompt-file", str(tmp_path / "p.txt"), "--output-tokens", "2"]
    bench("--openai", openai.url, *arguments)
    assert sorted(body["prompt"] for body in openai.bodies) == ["One", "Two"]


def test_failures_of_an_openai_endpoint_are_counted_by_kind(
    openai: FakeOpenAI, run: Callable[..., tuple[int, str, str]], bench: Bench, tokenizer: str
) -> None:
    arguments = ["--openai", openai.url, "--tokenizer", tokenizer, "--requests", "5", "--no-warm-up"]
    openai.refusals = 2
    (figures,) = bench(*arguments)["runs"]
    assert figures["errors"] == {"HTTP 429": 2}
    openai.breaks = True
    code, _, printed = run(*arguments)
    assert code == 1
    assert "no request was answered; the first failed with STREAM" in printed


def test_an_endpoint_that_is_not_there_is_unreachable(
    openai: FakeOpenAI, run: Callable[..., tuple[int, str, str]]
) -> None:
    openai.models = ["a", "b"]
    code, _, printed = run("--openai", openai.url, "--vocab-size", "900")
    assert (code, "models a, b are served; name one" in printed) == (2, True)
    code, _, printed = run("--openai", "http://127.0.0.1:9", "--vocab-size", "900")
    assert (code, "http://127.0.0.1:9/v1/models can't be read" in printed) == (3, True)


def test_our_own_gateway_is_measured_like_any_other(
    scheduler: FakeInference, bench: Bench, tokenizer: str
) -> None:
    pytest.importorskip("openai_gateway")
    from running_gateway import RunningGateway

    gateway = RunningGateway(scheduler.address)
    try:
        shape = ["--requests", "4", "--prompt-tokens", "6", "--output-tokens", "4", "--concurrency", "2"]
        text = bench("--openai", gateway.url, "--tokenizer", tokenizer, *shape, "--no-warm-up")
        ids = bench("--openai", gateway.url, "--vocab-size", "900", *shape, "--no-warm-up")
    finally:
        gateway.stop()
    for written in (text, ids):
        (figures,) = written["runs"]
        assert (figures["errors"], figures["output_tokens"], figures["prompt_tokens"]) == ({}, 16, 4 * 5)
    assert [len(request.text.split()) for request in scheduler.requests[:4]] == [6] * 4
    assert [len(request.token_ids.ids) for request in scheduler.requests[4:]] == [6] * 4
    assert all(request.stopping.ignore_eos for request in scheduler.requests)
