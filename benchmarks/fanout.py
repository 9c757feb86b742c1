"""Measures how many tokens the scheduler service can hand to clients, and what each costs.

Owns the arithmetic. A worker that answers at once feeds the service with random tokens, which it sends as
text and ids to many streams of one client process. All processes share this machine's cores with each other:
where those are few, the figures are of all of it together. A message carries more than one token where who
writes or reads it is behind.

    python benchmarks/fanout.py                     # 0, 1 and 2 frontends, as fast as it goes
    python benchmarks/fanout.py --step-ms 12.5      # a step each 12.5 ms: 256 streams of 80 tokens/s
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.table import Table

from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc

_ROOT = Path(__file__).parents[1]
_CHANNELS = 32  # connections, which the kernel hands out among frontends
_MAX_TOKENS = 60_000
_WARM_UP_S = 4.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Received:
    """What all streams have got so far."""

    tokens: int = 0
    messages: int = 0
    characters: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one setting."""

    frontends: int
    tokens_per_s: float
    messages_per_s: float
    engine_cpu: float
    """Share of one core that the engine's process used."""
    frontends_cpu: float
    """The same of all frontend processes together."""
    client_cpu: float

    @property
    def cpu_us_per_token(self) -> float:
        """Of the service."""
        return 1e6 * (self.engine_cpu + self.frontends_cpu) / self.tokens_per_s

    @property
    def cpu_us_per_message(self) -> float:
        """Of the service."""
        return 1e6 * (self.engine_cpu + self.frontends_cpu) / self.messages_per_s


@contextlib.contextmanager
def _process(*arguments: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, *arguments], cwd=_ROOT, text=True, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


@contextlib.contextmanager
def service(num_frontends: int, step_ms: float) -> Iterator[tuple[int, int]]:
    """A worker and a scheduler service. Gives the public port and the process id of the engine."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _process("benchmarks/instant_worker.py", "--step-ms", str(step_ms), stdout=subprocess.PIPE) as worker,
    ):
        assert worker.stdout is not None  # noqa: S101 - it is a pipe
        ready_file = Path(folder) / "ready.json"
        flags = {
            "--port": "0",
            "--admin-port": "0",
            "--frontends": str(num_frontends),
            "--worker": f"127.0.0.1:{worker.stdout.readline().strip()}",
            "--max-num-seqs": "1024",
            "--ready-file": str(ready_file),
            "--log-level": "warning",
            "--drain-window": "0",
            "--drain-timeout": "1",
        }
        spelt = [word for flag in flags.items() for word in flag]
        with _process("-m", "scheduler_service", *spelt) as scheduler:
            while not ready_file.exists():
                if scheduler.poll() is not None:
                    raise SystemExit("the scheduler did not start")
                time.sleep(0.05)
            yield json.loads(ready_file.read_text())["port"], scheduler.pid


async def _read_stream(stub: pb_grpc.InferenceServiceStub, seed: int, received: Received) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[seed % 200, 1, 2, 3]),
        sampling=pb.SamplingParams(seed=seed),
        stopping=pb.StoppingParams(max_tokens=_MAX_TOKENS, ignore_eos=True),
    )
    call = stub.Generate(request, wait_for_ready=True)
    while (response := await call.read()) is not grpc.aio.EOF:
        delta = response.delta
        received.tokens += len(delta.token_ids)
        received.characters += len(delta.text)
        received.messages += 1


async def _until_ready(port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watched = health_pb2.HealthCheckRequest(service="tidegate.inference.v1.InferenceService")
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its types leave streams out
        async for answer in stub.Watch(watched):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return


@contextlib.asynccontextmanager
async def _streams(port: int, count: int, received: Received) -> AsyncIterator[None]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(min(_CHANNELS, count))]
    stubs = [pb_grpc.InferenceServiceStub(channel) for channel in channels]
    tasks = [
        asyncio.create_task(_read_stream(stubs[seed % len(stubs)], seed, received)) for seed in range(count)
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in channels))
    failures = [end for end in ends if not isinstance(end, asyncio.CancelledError)]
    if failures:
        raise SystemExit(f"{len(failures)} streams ended: {failures[0]!r}")


async def measure(num_frontends: int, streams: int, step_ms: float, duration_s: float) -> Result:
    """Starts a service, and counts what all streams get in a while."""
    received = Received()
    with service(num_frontends, step_ms) as (port, engine_pid):
        frontend_pids = _children(engine_pid)
        await _until_ready(port)
        async with _streams(port, streams, received):
            await asyncio.sleep(_WARM_UP_S)
            before = _snapshot(received, engine_pid, frontend_pids)
            await asyncio.sleep(duration_s)
            after = _snapshot(received, engine_pid, frontend_pids)
    seconds, tokens, messages, engine, frontends, client = (b - a for a, b in zip(before, after, strict=True))
    return Result(
        num_frontends,
        tokens / seconds,
        messages / seconds,
        engine / seconds,
        frontends / seconds,
        client / seconds,
    )


def _snapshot(received: Received, engine_pid: int, frontend_pids: list[int]) -> tuple[float, ...]:
    return (
        time.perf_counter(),
        received.tokens,
        received.messages,
        _cpu_s(engine_pid),
        sum(map(_cpu_s, frontend_pids)),
        time.process_time(),
    )


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def table(results: list[Result], streams: int) -> Table:
    """Returns one row for each setting."""
    columns = [
        *("frontends", "tokens/s", "messages/s", "tokens a message"),
        *("us CPU a token", "us CPU a message", "engine CPU", "frontends CPU", "client CPU"),
    ]
    rows = Table(*columns, title=f"{streams} streams; CPU of the service, then shares of one core")
    for result in results:
        rows.add_row(
            str(result.frontends),
            f"{result.tokens_per_s:,.0f}",
            f"{result.messages_per_s:,.0f}",
            f"{result.tokens_per_s / result.messages_per_s:.2f}",
            f"{result.cpu_us_per_token:.1f}",
            f"{result.cpu_us_per_message:.1f}",
            *(f"{share:.0%}" for share in (result.engine_cpu, result.frontends_cpu, result.client_cpu)),
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure tokens/s to many streams, and CPU for each.")
    parser.add_argument("frontends", nargs="*", type=int, help="numbers of frontends (default: 0 1 2)")
    parser.add_argument("--streams", type=int, default=256, help="client streams (default: 256)")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time of a step (default: none)")
    parser.add_argument("--duration-s", type=float, default=5.0, help="time to measure (default: 5)")
    options = parser.parse_args(arguments)
    results = [
        uvloop.run(measure(count, options.streams, options.step_ms, options.duration_s))
        for count in options.frontends or [0, 1, 2]
    ]
    Console(width=160).print(table(results, options.streams))
    return 0


if __name__ == "__main__":
    sys.exit(main())
