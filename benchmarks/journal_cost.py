"""Measures what the journal costs: the same load on two schedulers, one of which keeps one, by turns.

Owns the arithmetic. Each scheduler has a worker of its own whose steps take a fixed time and give random
tokens. Requests follow each other on every stream, so that accepting and finishing count.
The turns are short and alternate, and the figure is the median over pairs of turns, since other work on the
machine comes and goes.

    python benchmarks/journal_cost.py                  # steps of 10 ms, 64 streams
    python benchmarks/journal_cost.py --step-ms 0      # as fast as the scheduler goes: its CPU is the limit
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import uvloop

from benchmarks.processes import cpu_time_s, instant_worker, scheduler_process
from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc


@dataclass(frozen=True, slots=True)
class Turn:
    """What one scheduler did in a turn."""

    tokens_per_s: float
    cpu_us_per_token: float  # of its process, the journal's thread included
    first_token_s: float  # median


@dataclass(slots=True)
class Load:
    """Streams that read from one scheduler while it is its turn."""

    port: int
    pid: int
    prompt_tokens: int = 101
    settle_s: float = 0.5
    """Of each turn, before counting."""
    tokens: int = 0
    first_tokens_s: list[float] | None = None

    async def turn(self, streams: int, max_tokens: int, seconds: float) -> Turn:
        """Loads the scheduler for a while."""
        self.first_tokens_s = []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            stub = pb_grpc.InferenceServiceStub(channel)
            tasks = [asyncio.create_task(self._stream(stub, seed, max_tokens)) for seed in range(streams)]
            await asyncio.sleep(self.settle_s)
            tokens, cpu_s, began = self.tokens, cpu_time_s(self.pid), time.perf_counter()
            await asyncio.sleep(seconds)
            tokens, cpu_s = self.tokens - tokens, cpu_time_s(self.pid) - cpu_s
            elapsed_s = time.perf_counter() - began
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [end for end in ends if not isinstance(end, asyncio.CancelledError)]
        if failures:
            raise SystemExit(f"{len(failures)} streams ended: {failures[0]!r}")
        return Turn(tokens / elapsed_s, 1e6 * cpu_s / tokens, statistics.median(self.first_tokens_s))

    async def _stream(self, stub: pb_grpc.InferenceServiceStub, seed: int, max_tokens: int) -> None:
        lengths = random.Random(seed)  # of many lengths, so that streams do not end together
        while True:
            length = lengths.randint(max_tokens // 2, max_tokens + max_tokens // 2)
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[seed % 200, *range(self.prompt_tokens - 1)]),
                sampling=pb.SamplingParams(seed=seed),
                stopping=pb.StoppingParams(max_tokens=length, ignore_eos=True),
            )
            began, waiting = time.perf_counter(), True
            call = stub.Generate(request, wait_for_ready=True)
            while (response := await call.read()) is not grpc.aio.EOF:
                num_tokens = len(response.delta.token_ids)
                self.tokens += num_tokens
                if num_tokens and waiting and self.first_tokens_s is not None:
                    self.first_tokens_s.append(time.perf_counter() - began)
                    waiting = False


@contextlib.contextmanager
def _scheduler(step_ms: float, *flags: str) -> Iterator[Load]:
    """A scheduler and its worker."""
    with (
        instant_worker(step_ms) as worker,
        scheduler_process(worker, "--log-level", "warning", *flags) as scheduler,
    ):
        yield Load(scheduler.port, scheduler.pid)


async def _measure(arguments: argparse.Namespace) -> None:
    pairs: list[tuple[Turn, Turn]] = []
    folder = arguments.folder or tempfile.mkdtemp(prefix="journal-cost-")
    journal = Path(folder) / f"journal-{os.getpid()}.sqlite3"
    with (
        _scheduler(arguments.step_ms, "--journal-off") as without,
        _scheduler(arguments.step_ms, "--journal", str(journal)) as with_journal,
    ):
        await asyncio.sleep(1.0)
        for number in range(-1, arguments.pairs):
            order = (without, with_journal) if number % 2 else (with_journal, without)
            turns = {
                id(load): await load.turn(arguments.streams, arguments.max_tokens, arguments.turn_s)
                for load in order
            }
            if number >= 0:  # the first pair warms up
                pairs.append((turns[id(without)], turns[id(with_journal)]))
    _report(pairs, journal)


def _report(pairs: list[tuple[Turn, Turn]], journal: Path) -> None:
    for name, unit in (("tokens_per_s", ""), ("cpu_us_per_token", " us"), ("first_token_s", " s")):
        without = [getattr(off, name) for off, _ in pairs]
        kept = [getattr(on, name) for _, on in pairs]
        ratio = statistics.median(b / a for a, b in zip(without, kept, strict=True))
        off, on = statistics.median(without), statistics.median(kept)
        print(f"{name:18} without {off:10.4f}{unit}, with {on:10.4f}{unit}, ratio {ratio:.4f}")
    size_mib = sum(part.stat().st_size for part in journal.parent.glob(f"{journal.name}*")) / 2**20
    print(f"the journal takes {size_mib:.1f} MiB at {journal}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure what the journal costs.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="tokens of a request, on average (default: 128)"
    )
    parser.add_argument("--step-ms", type=float, default=10.0, help="time that a step takes (default: 10)")
    parser.add_argument("--pairs", type=int, default=10, help="turns of each scheduler (default: 10)")
    parser.add_argument("--turn-s", type=float, default=2.0, help="seconds of a turn (default: 2)")
    parser.add_argument("--folder", help="where the journal is (default: the folder for temporary files)")
    uvloop.run(_measure(parser.parse_args()))
