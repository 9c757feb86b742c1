"""Measures what it costs that scheduler and worker are two processes with gRPC between them.

The same core and the same executor serve the same load in two ways, by turns: in one process, in one loop of
plan, execute, apply; and as a real scheduler service and a real worker service, with a client that streams
every token. Prints the throughput of both, and for each pipeline depth how long the worker had nothing to do
between two steps. Compare figures of one run only: machines are noisy.

    python benchmarks/separation.py --threads 1 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks import one_process
from benchmarks.one_process import MAX_DEPTH, Run, Setup
from benchmarks.one_worker import worker_process
from scheduler_service.config import ServiceConfig
from scheduler_service.plan_codec import StepTimings
from scheduler_service.server import Service
from scheduler_service.telemetry import Telemetry
from tidegate_client import AsyncClient
from tidegate_client.bench.prompts import TokenIds
from tidegate_client.bench.workload import Request, alike
from tidegate_client.cli.demo_model import DEMO, find_model

_PROCESSES = multiprocessing.get_context("spawn")
_ONE = "one process"
_WAYS = (_ONE, *(f"two, depth {depth}" for depth in range(1, MAX_DEPTH + 1)))
_PROMPT_TOKENS = _OUTPUT_TOKENS = 64


class Recorder(Telemetry):
    """Keeps what a worker tells of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[StepTimings] = []

    def step_done(self, worker_id: str, seq: int, timings: StepTimings, now: float) -> None:
        """Notes a step."""
        self.seen.append(timings)


def _run_scheduler(connection: Connection, setup: Setup, worker: str, depth: int) -> None:
    """A process's life: the scheduler service. Answers each word with its steps since and its CPU seconds."""
    options: dict[str, Any] = {
        "port": 0,
        "worker": (worker,),
        "drain_window": 0.0,
        "max_num_seqs": setup.seats,
        "max_num_batched_tokens": setup.budget_tokens,
        "pipeline_depth": depth,
    }

    async def serve() -> None:
        recorder = Recorder()
        service = Service(ServiceConfig(**options), recorder)
        await service.start()
        connection.send(service.port)
        while await asyncio.to_thread(connection.recv) is not None:
            seen, recorder.seen = recorder.seen, []
            connection.send((seen, time.process_time()))
        await service.stop(grace_s=0.0)

    uvloop.run(serve())


class TwoProcesses:
    """A scheduler process in front of a worker process that is there already."""

    def __init__(self, setup: Setup, worker: str, depth: int) -> None:
        self._connection, child = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(
            target=_run_scheduler, args=(child, setup, worker, depth), daemon=True
        )
        self._process.start()
        self._address = f"127.0.0.1:{self._connection.recv()}"

    async def run(self, requests: Sequence[Request], warm_up: Sequence[Request]) -> Run:
        """Serves the load, after a warm-up."""
        async with AsyncClient(self._address, retry=None) as client:
            while not await client.list_models():  # noqa: ASYNC110 - until the worker is connected
                await asyncio.sleep(0.05)
            await asyncio.gather(*(_stream(client, request) for request in warm_up))
            _, cpu_before_s = self._steps()
            started_s, client_cpu_s = time.monotonic(), time.process_time()
            counts = await asyncio.gather(*(_stream(client, request) for request in requests))
            duration_s = time.monotonic() - started_s
            client_cpu_s = time.process_time() - client_cpu_s
            steps, cpu_s = self._steps()
        return Run(
            sum(counts) / duration_s,
            duration_s,
            [step.gap_s for step in steps[1:]],
            [step.prepare_s + step.forward_s + step.sampling_s for step in steps[1:]],
            cpu_s - cpu_before_s,
            client_cpu_s,
        )

    def _steps(self) -> tuple[list[StepTimings], float]:
        self._connection.send("steps")
        steps: tuple[list[StepTimings], float] = self._connection.recv()
        return steps

    def close(self) -> None:
        """Ends the scheduler. The worker waits for the next one."""
        self._connection.send(None)
        self._process.join()


def _alike(rng: random.Random, count: int, prompt_tokens: int, output_tokens: int) -> list[Request]:
    sessions = alike(count, prompt_tokens, output_tokens)(rng, TokenIds(49_000))
    return [request for session in sessions for request in session]


async def _stream(client: AsyncClient, request: Request) -> int:
    stream = client.generate(
        request.prompt, max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True, text=False
    )
    return sum([len(delta.token_ids) async for delta in stream])


@contextlib.contextmanager
def _one_process(setup: Setup) -> Iterator[Connection]:
    """A process that runs loads by itself."""
    connection, child = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=one_process.serve, args=(child, setup), daemon=True)
    process.start()
    connection.recv()
    try:
        yield connection
    finally:
        process.kill()


def measure(
    setup: Setup, streams: Sequence[int], rounds: int, console: Console
) -> dict[tuple[int, str], list[Run]]:
    """All runs by number of streams and way. The ways take turns, in another order each time."""
    runs: dict[tuple[int, str], list[Run]] = {}
    with worker_process(**setup.worker_options()) as worker, _one_process(setup) as single:
        for turn in range(rounds * len(streams)):
            num_streams = streams[turn % len(streams)]
            rng = random.Random(turn)
            requests = _alike(rng, num_streams, _PROMPT_TOKENS, _OUTPUT_TOKENS)
            warm_up = _alike(rng, 4, 16, 8)
            for way in rng.sample(_WAYS, len(_WAYS)):
                if way == _ONE:
                    for load in (warm_up, requests):
                        single.send(load)
                        run: Run = single.recv()
                else:
                    two = TwoProcesses(setup, worker.address, depth=int(way[-1]))
                    run = uvloop.run(two.run(requests, warm_up))
                    two.close()
                runs.setdefault((num_streams, way), []).append(run)
                console.print(f"{num_streams} streams, {way}: {run.tokens_per_s:.1f} tokens/s")
    return runs


def table(runs: dict[tuple[int, str], list[Run]]) -> Table:
    """Returns medians over rounds; CPU as shares of one core."""
    columns = ["streams", "way", "tokens/s", "ratio", "step ms", "gap ms", "gap", "scheduler", "client"]
    rows = Table(*columns, title="Medians over rounds")
    for (num_streams, way), measured in sorted(runs.items()):
        alone = runs[num_streams, _ONE]
        ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(measured, alone, strict=True)]
        step_ms = statistics.median(run.step_ms for run in measured)
        gap_ms = statistics.median(run.gap_ms for run in measured)
        rows.add_row(
            str(num_streams),
            way,
            f"{statistics.median(run.tokens_per_s for run in measured):.1f}",
            f"{statistics.median(ratios):.3f}",
            f"{step_ms:.2f}",
            f"{gap_ms:.3f}",
            f"{gap_ms / step_ms:.2%}",
            f"{statistics.median(run.scheduler_cpu_s / run.duration_s for run in measured):.1%}",
            f"{statistics.median(run.client_cpu_s / run.duration_s for run in measured):.1%}",
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare one process with scheduler and worker apart.")
    parser.add_argument("--model", default=DEMO, help="model to serve (default: demo)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the forward (default: 1)")
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64], help="requests at once")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way (default: 3)")
    options = parser.parse_args(arguments)
    setup = Setup(find_model(options.model), options.threads, max(options.streams))
    Console().print(table(measure(setup, options.streams, options.rounds, Console(stderr=True))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
