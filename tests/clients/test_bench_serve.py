"""The serving benchmark: exact workloads, right arithmetic, honest totals."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fake_server import FakeInference, admitted, delta, finished

from benchmarks import serve
from benchmarks.workloads import WORKLOADS
from tidegate.inference.v1 import inference_pb2 as pb


def shapes(name: str) -> Counter[tuple[int, int]]:
    requests = WORKLOADS[name].build(random.Random(1), 49152)
    return Counter((len(request.prompt), request.output_tokens) for request in requests)


def test_workloads_have_exact_counts() -> None:
    assert shapes("W1") == {(128, 128): 5}
    assert shapes("W2") == {(64, 64): 64}
    assert shapes("W3") == {(1000, 32): 24, (32, 128): 24}
    assert shapes("W4") == {(832, 32): 48}
    assert [workload.concurrency for workload in WORKLOADS.values()] == [1, 16, 16, 8]


def test_only_the_prefix_of_w4_is_shared() -> None:
    requests = WORKLOADS["W4"].build(random.Random(1), 49152)
    assert len({tuple(request.prompt[:802]) for request in requests}) == 1
    assert len({tuple(request.prompt[802:]) for request in requests}) == 48
    others = WORKLOADS["W2"].build(random.Random(1), 49152)
    assert len({tuple(request.prompt[:4]) for request in others}) == 64


def test_prompts_avoid_special_tokens_and_stay_in_the_vocabulary() -> None:
    (small,) = WORKLOADS["W1"].build(random.Random(1), 300)[:1]
    assert set(small.prompt) <= set(range(150, 300))


def test_tokens_of_one_delta_share_its_gap() -> None:
    trace = serve.Trace(started_s=1.0, arrivals_s=[1.5, 1.75, 2.25], counts=[1, 1, 2])
    assert trace.time_to_first_token_s() == 0.5
    assert trace.gaps_s() == [0.25, 0.25, 0.25]


def test_spread_is_in_milliseconds() -> None:
    assert serve.Spread.of([0.001, 0.002, 0.006]) == serve.Spread(3.0, 2.0, pytest.approx(5.92))


def answer_in_pairs(
    request: pb.GenerateRequest, context: grpc.ServicerContext
) -> Iterator[pb.GenerateResponse]:
    yield admitted()
    for _ in range(request.stopping.max_tokens // 2):
        yield delta("ab", 1, 2)
    yield finished(output_tokens=request.stopping.max_tokens)


def test_a_run_reports_totals_of_what_was_asked(
    server: FakeInference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models = ["a"]
    server.answer = answer_in_pairs
    arguments = ["W1", "W4", "--address", server.address, "--seeds", "2", "--json", str(tmp_path / "results")]
    assert serve.main(arguments) == 0
    results = json.loads((tmp_path / "results").read_text())
    assert [(result["workload"], result["seed"]) for result in results] == [
        ("W1", 0),
        ("W4", 0),
        ("W1", 1),
        ("W4", 1),
    ]
    shared = results[1]
    assert (shared["requests"], shared["prompt_tokens"], shared["output_tokens"]) == (48, 48 * 832, 48 * 32)
    assert shared["cached_tokens"] == 48 * 2  # what the fake says of each
    assert shared["output_tokens_per_s"] == pytest.approx(48 * 32 / shared["duration_s"])
    assert all(
        request.stopping.ignore_eos and request.sampling.temperature == 0 for request in server.requests
    )
    printed = capsys.readouterr()
    assert [line.split()[1:4:2] for line in printed.out.splitlines() if "│ W" in line] == [
        ["W1", "1"],
        ["W4", "8"],
    ]
    assert printed.err.count("W4, shared prefix") == 2


def test_a_request_that_gives_too_little_ends_the_run(
    server: FakeInference, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models = ["a"]
    assert serve.main(["W1", "--address", server.address]) == 1
    assert "gave 2 tokens where 8 were asked for" in capsys.readouterr().err


def test_an_unknown_workload_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(["W9"])
    assert "there is no workload W9" in capsys.readouterr().err
