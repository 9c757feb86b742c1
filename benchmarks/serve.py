"""Measures a served model from outside: output tokens/s, time to first token, time between tokens.

Owns the arithmetic. It is a closed loop: each of a workload's streams sends its next request when the last
one has ended. End-of-text is ignored and temperature is 0, so that every request gives just the tokens that
were asked for. Compare figures of one run only: machines are noisy.

    python benchmarks/serve.py                      # starts the demo model itself
    python benchmarks/serve.py --address HOST:PORT  # measures a server that runs
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.workloads import WORKLOADS, Request, alike
from tidegate_client import AsyncClient, TidegateError
from tidegate_client.cli.demo_model import DEMO, find_model
from tidegate_client.cli.failures import Failure, describe
from tidegate_client.cli.load_screen import LoadScreen
from tidegate_client.cli.local_cluster import ClusterOptions, LocalCluster
from tidegate_client.cli.serve import named_flags, stop_on_signals


@dataclass(frozen=True, slots=True)
class Trace:
    """When the tokens of one request came, in seconds on one clock."""

    started_s: float
    arrivals_s: list[float]
    """For each delta."""
    counts: list[int]
    """Tokens in each delta."""

    def time_to_first_token_s(self) -> float:
        """Returns the time from the request to its first token."""
        return self.arrivals_s[0] - self.started_s

    def gaps_s(self) -> list[float]:
        """Returns the time before each token after the first delta; a delta's tokens share its gap evenly."""
        gaps: list[float] = []
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], self.counts[1:], strict=False)
        for before, after, count in pairs:
            gaps += [(after - before) / count] * count
        return gaps


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles, in milliseconds."""

    mean_ms: float
    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, seconds: list[float]) -> Spread:
        """Summarizes times. No times at all, as between the tokens of one-token answers, are zeros."""
        values_ms = np.array(seconds or [0.0]) * 1000
        p50_ms, p99_ms = np.percentile(values_ms, [50, 99])
        return cls(float(values_ms.mean()), float(p50_ms), float(p99_ms))


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one workload with one seed."""

    workload: str
    seed: int
    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    duration_s: float
    output_tokens_per_s: float
    time_to_first_token: Spread
    inter_token: Spread


async def _run_request(client: AsyncClient, request: Request) -> tuple[Trace, int]:
    started_s = time.perf_counter()
    arrivals_s: list[float] = []
    counts: list[int] = []
    stream = client.generate(
        request.prompt, max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True
    )
    async for delta in stream:
        if delta.token_ids:
            arrivals_s.append(time.perf_counter())
            counts.append(len(delta.token_ids))
    if sum(counts) != request.output_tokens or stream.finished is None:
        raise Failure(f"a request gave {sum(counts)} tokens where {request.output_tokens} were asked for")
    return Trace(started_s, arrivals_s, counts), stream.finished.usage.cached_tokens


async def _run_closed_loop(
    client: AsyncClient, requests: list[Request], concurrency: int
) -> list[tuple[Trace, int]]:
    waiting = iter(requests)
    done: list[tuple[Trace, int]] = []

    async def stream() -> None:
        for request in waiting:  # shared by all streams
            result = await _run_request(client, request)
            done.append(result)

    await asyncio.gather(*(stream() for _ in range(concurrency)))
    return done


async def measure(client: AsyncClient, name: str, seed: int, vocab_size: int) -> Result:
    """Runs one workload once, after a warm-up with other prompts."""
    workload = WORKLOADS[name]
    rng = random.Random(f"{name}/{seed}")
    warm_up = alike(workload.concurrency, 64, 8)(rng, vocab_size)
    requests = workload.build(rng, vocab_size)
    await _run_closed_loop(client, warm_up, workload.concurrency)
    started_s = time.perf_counter()
    done = await _run_closed_loop(client, requests, workload.concurrency)
    duration_s = time.perf_counter() - started_s
    output_tokens = sum(request.output_tokens for request in requests)
    return Result(
        workload=name,
        seed=seed,
        concurrency=workload.concurrency,
        requests=len(requests),
        prompt_tokens=sum(len(request.prompt) for request in requests),
        output_tokens=output_tokens,
        cached_tokens=sum(cached_tokens for _, cached_tokens in done),
        duration_s=duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        time_to_first_token=Spread.of([trace.time_to_first_token_s() for trace, _ in done]),
        inter_token=Spread.of([gap for trace, _ in done for gap in trace.gaps_s()]),
    )


async def measure_all(address: str, names: list[str], seeds: int, console: Console) -> list[Result]:
    """Runs each workload with each seed, in turn: all workloads with the first seed, then with the next."""
    results = []
    async with AsyncClient(address, retry=None) as client:
        models = await client.list_models()
        if len(models) != 1:
            raise Failure(f"{address} serves {len(models)} models; this measures one")
        for seed in range(seeds):
            for name in names:
                results.append(await measure(client, name, seed, models[0].vocab_size))
                rate = results[-1].output_tokens_per_s
                console.print(f"{name}, {WORKLOADS[name].title}, seed {seed}: {rate:.1f} tokens/s")
    return results


def table(results: list[Result]) -> Table:
    """Returns one row for each workload: medians over its seeds."""
    columns = ["workload", "streams", "tokens/s", "TTFT mean", "p50", "p99", "ITL mean", "p50", "p99"]
    rows = Table(*columns, title="Medians over seeds; times in ms")
    for name in dict.fromkeys(result.workload for result in results):
        of_workload = [result for result in results if result.workload == name]
        figures = [[result.output_tokens_per_s, *_times_ms(result)] for result in of_workload]
        medians = [f"{statistics.median(column):.1f}" for column in zip(*figures, strict=True)]
        rows.add_row(name, str(WORKLOADS[name].concurrency), *medians)
    return rows


def _times_ms(result: Result) -> list[float]:
    return [
        value
        for spread in (result.time_to_first_token, result.inter_token)
        for value in (spread.mean_ms, spread.p50_ms, spread.p99_ms)
    ]


@contextlib.contextmanager
def _served(options: argparse.Namespace) -> Iterator[str]:
    if options.address:
        yield options.address
        return
    cluster_options = ClusterOptions(
        model=find_model(options.model),
        num_workers=options.workers,
        port=0,
        device=options.device,
        scheduler_flags=named_flags(options.scheduler_option),
        worker_flags=named_flags(options.worker_option),
    )
    with LocalCluster(cluster_options) as cluster:
        with LoadScreen() as screen:
            cluster.wait_ready(screen.show)
        yield cluster.address


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure tokens/s, TTFT and ITL of a served model.")
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="W1 to W4 (default: W1 W2)")
    parser.add_argument("--address", help="host:port of a running scheduler (default: start one)")
    parser.add_argument("--model", default=DEMO, help="model to serve where it starts one (default: demo)")
    parser.add_argument("--workers", type=int, default=1, help="worker processes (default: 1)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("-S", "--scheduler-option", action="append", metavar="NAME=VALUE")
    parser.add_argument("-W", "--worker-option", action="append", metavar="NAME=VALUE")
    parser.add_argument("--seeds", type=int, default=1, help="repetitions with other prompts (default: 1)")
    parser.add_argument("--json", type=Path, help="file to write every result to")
    options = parser.parse_args(arguments)
    options.workloads = options.workloads or ["W1", "W2"]
    unknown = [name for name in options.workloads if name not in WORKLOADS]
    if unknown:
        parser.error(f"there is no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints. Returns the exit code."""
    options = _parse(arguments)
    console = Console(stderr=True)
    try:
        with _served(options) as address:
            results = uvloop.run(measure_all(address, options.workloads, options.seeds, console))
    except (TidegateError, Failure) as error:
        console.print(f"error: {describe(error)}", style="red", markup=False)
        return 1
    Console().print(table(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    stop_on_signals()
    sys.exit(main())
