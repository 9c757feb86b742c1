"""`tidegate top`: what it shows of a scheduler, and what its keys do."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tidegate.admin.v1 import admin_pb2 as pb
from tidegate.admin.v1 import admin_pb2_grpc as pb_grpc
from tidegate_client.cli.app import app
from tidegate_client.cli.top_view import View
from tidegate_client.watched_state import WatchedState


def snapshot() -> pb.WatchStateResponse:
    """One request that decodes, one in its prompt, one that waits."""
    any_one = {"model": "m", "tenant": "t", "max_tokens": 100}
    running = {"status": pb.REQUEST_STATUS_RUNNING, "worker_id": "w1", **any_one}
    return pb.WatchStateResponse(
        sequence=1,
        snapshot=True,
        version="0.1.0",
        waiting_requests=1,
        running_requests=2,
        waiting_tokens=7,
        counters=pb.Counters(prefix_queried_tokens=200, prefix_hit_tokens=50, preemptions=3),
        workers=[
            pb.WorkerState(
                worker_id="w1",
                status=pb.WORKER_STATUS_READY,
                num_slots=2,
                running_requests=2,
                blocks_total=16,
                blocks_used=8,
                blocks_cached=4,
            )
        ],
        queues=[
            pb.QueueState(
                model="m", tenant="t", priority=2, waiting_requests=1, running_requests=2, waiting_tokens=7
            )
        ],
        heads=[pb.QueueHead(model="m", request_id="r2", blockers=[pb.Blocker(text="2 of at most 2 run")])],
        requests=[
            pb.RequestState(
                request_id="r0",
                key=0,
                prompt_tokens=5,
                computed_tokens=54,
                output_tokens=50,
                blocks=4,
                **running,
            ),
            pb.RequestState(
                request_id="r1", key=1, prompt_tokens=40, computed_tokens=10, blocks=10, **running
            ),
            pb.RequestState(request_id="r2", key=2, status=pb.REQUEST_STATUS_WAITING, **any_one),
        ],
    )


def latency() -> pb.GetLatencyResponse:
    first = pb.Quantiles(counts=[9], p50_ms=[110.2], p95_ms=[220], p99_ms=[330])
    recent = pb.Latencies(
        time_to_first_token=first,
        between_tokens=pb.Quantiles(counts=[0], p50_ms=[0], p95_ms=[0], p99_ms=[0]),
        output_tokens=[120],
        prefill_tokens=[600],
    )
    return pb.GetLatencyResponse(recent_seconds=60, recent=recent)


def lines(order: str = "arrival", height: int = 1000, width: int = 160, host_blocks: int = 0) -> list[str]:
    seen = WatchedState()
    update = snapshot()
    update.workers[0].host_blocks_total, update.workers[0].host_blocks_used = host_blocks, host_blocks // 2
    seen.apply(update)
    console = Console(width=width)
    with console.capture() as capture:
        console.print(View(seen, latency(), order).picture(width, height, keys=True))
    return capture.get().splitlines()


def line_of(word: str, shown: list[str]) -> str:
    (line,) = (line for line in shown if line.startswith(word))
    return line


def test_the_numbers_are_those_of_the_scheduler():
    shown = lines()
    assert "2 running   1 waiting (7 tokens to compute)" in shown[0]
    assert "first token  p50 110  p95 220  p99 330 ms   between tokens  -   (last 60 s)" in shown[1]
    assert "2.0 output and 10.0 prompt tokens/s   prefix hits 25%   3 preemptions" in shown[2]
    worker = line_of("w1", shown)
    assert worker.split()[:2] == ["w1", "ready"]
    assert (worker.count("█"), worker.count("▒"), worker.count("░")) == (8, 4, 4)
    assert line_of("t ", shown).split() == ["t", "2", "m", "1", "0", "2", "7"]
    assert line_of("next of m", shown) == "next of m is r2: 2 of at most 2 run"


def test_host_blocks_are_shown_where_there_are_some():
    assert "host used" in line_of("worker", lines(host_blocks=64))
    assert "32/64" in line_of("w1", lines(host_blocks=64)).split()
    assert "host" not in line_of("worker", lines())


def test_progress_is_of_the_prompt_then_of_the_output():
    shown = lines()
    assert line_of("r0", shown).count("█") == 8  # 50 of 100 tokens
    assert line_of("r1", shown).count("█") == 4  # 10 of 40 tokens
    assert line_of("r2", shown).count("█") == 0


def test_requests_are_sorted_and_fit():
    names = [line[:2] for line in lines("blocks") if line[:2] in ("r0", "r1", "r2")]
    assert names == ["r1", "r0", "r2"]
    seen = WatchedState()
    update = snapshot()
    update.requests.extend(pb.RequestState(request_id=f"x{i}", key=10 + i) for i in range(50))
    update.hidden_requests = 5
    seen.apply(update)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(View(seen, latency()).picture(160, 30, keys=True))
    shown = capture.get().splitlines()
    assert len(shown) <= 30
    num_shown = sum(line[:1] in ("r", "x") and line[1:2].isdigit() for line in shown)
    assert f"and {53 + 5 - num_shown} more" in capture.get()


def test_a_narrow_terminal_shows_whole_numbers_of_what_counts():
    shown = lines(width=80)
    assert max(map(len, shown)) <= 80
    assert shown[1].rstrip() == "first token  p50 110  p95 220  p99 330 ms   between tokens  -   (last 60 s)"
    assert (
        shown[2].rstrip() == "2.0 output and 10.0 prompt tokens/s   prefix hits 25%   3 preemptions   0 moved"
    )
    narrow = lines(width=40)
    assert line_of("w1", narrow).split() == ["w1", "ready", "8/16", "2/2", "0.0"]
    assert line_of("r1", narrow).split() == ["r1", "running", "40", "0"]


def test_the_error_of_a_lost_worker_is_a_line_and_the_picture_still_fits():
    seen = WatchedState()
    update = snapshot()
    update.workers[0].status, update.workers[0].last_error = pb.WORKER_STATUS_CONNECTING, "gone " * 99
    update.requests.extend(pb.RequestState(request_id=f"x{i}", key=10 + i) for i in range(50))
    seen.apply(update)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(View(seen, latency()).picture(80, 30, keys=True))
    shown = capture.get().splitlines()
    assert len(shown) <= 30
    worker, error = (line for line in shown if line.startswith("w1"))
    assert worker.split()[:2] == ["w1", "connecting"]
    assert error.startswith("w1: gone gone ")


class FakeAdmin(pb_grpc.AdminServiceServicer):
    def WatchState(self, request, context) -> Iterator[pb.WatchStateResponse]:
        yield snapshot()
        while context.is_active():
            time.sleep(0.05)

    def GetLatency(self, request, context) -> pb.GetLatencyResponse:
        return latency()


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_AdminServiceServicer_to_server(FakeAdmin(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_one_picture_is_printed_where_there_is_no_terminal(address):
    result = CliRunner().invoke(app, ["top", "--address", address])
    assert result.exit_code == 0, result.output
    assert "2 running   1 waiting" in result.output
    assert "q quit" not in result.output
    assert CliRunner().invoke(app, ["top", "--sort", "x", "--address", address]).exit_code == 2


def test_keys_sort_pause_and_quit(address):
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tidegate_client.cli", "top", "--address", address],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    )
    os.close(inside)
    try:
        until(terminal, "sort: arrival")
        os.write(terminal, b"s")
        until(terminal, "sort: status")
        os.write(terminal, b"p")
        until(terminal, "p go on")
        os.write(terminal, b"q")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def until(terminal: int, text: str) -> None:
    """Reads what the program draws until that is part of it."""
    drawn, end = "", time.monotonic() + 30
    while text not in drawn:
        assert time.monotonic() < end, drawn[-2000:]
        if select.select([terminal], [], [], 0.5)[0]:
            drawn += os.read(terminal, 65536).decode(errors="replace")
