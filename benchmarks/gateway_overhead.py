"""Measures what the OpenAI gateway costs: the same load over gRPC and over HTTP, by turns, on one deployment.

Both clients take bytes as they come and look into them at the end, so that what is measured is the gateway
and not what a client makes of JSON or of protobuf. Prints throughput and latency of both, the ratio of each
round, and the CPU time that the gateway and each client spent on a token. Compare figures of one run only:
hosts are noisy.

    python benchmarks/gateway_overhead.py --streams 16 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import grpc
import uvloop
from rich.console import Console
from rich.table import Table

from tidegate.inference.v1 import inference_pb2 as pb
from tidegate_client.cli.demo_model import DEMO, find_model
from tidegate_client.cli.local_cluster import ClusterOptions, LocalCluster

_FIRST_ORDINARY_TOKEN, _LAST_TOKEN = 256, 40_000
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_WAYS = ("gRPC", "HTTP")
_GENERATE = "/tidegate.inference.v1.InferenceService/Generate"


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked for."""

    streams: int
    requests: int
    prompt_tokens: int
    output_tokens: int

    def prompts(self, seed: object) -> list[list[int]]:
        """Random token ids, so that no two requests share a prefix."""
        ids = range(_FIRST_ORDINARY_TOKEN, _LAST_TOKEN)
        rng = random.Random(str(seed))
        return [rng.choices(ids, k=self.prompt_tokens) for _ in range(self.requests)]


@dataclass(frozen=True, slots=True)
class Round:
    """What one way took for the load."""

    tokens_per_s: float
    first_token_ms: float
    client_us: float
    """CPU time of the client for each token."""
    gateway_us: float
    """CPU time of the gateway for each token."""


Ask = Callable[[list[int], int], Awaitable[float]]
"""Sends a prompt and reads all of the answer; returns when its first token came, in seconds of the clock."""


async def run_round(load: Load, seed: object, ask: Ask, gateway_pid: int) -> Round:
    """Keeps `streams` requests open until all are done."""
    waiting = iter(load.prompts(seed))
    firsts: list[float] = []

    async def stream() -> None:
        for prompt in waiting:  # shared by all streams
            sent_s = time.perf_counter()
            firsts.append(await ask(prompt, load.output_tokens) - sent_s)

    cpu_s, gateway_cpu_s, started_s = time.process_time(), _cpu_s(gateway_pid), time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(load.streams)))
    tokens = load.requests * load.output_tokens
    return Round(
        tokens_per_s=tokens / (time.perf_counter() - started_s),
        first_token_ms=statistics.fmean(firsts) * 1e3,
        client_us=(time.process_time() - cpu_s) / tokens * 1e6,
        gateway_us=(_cpu_s(gateway_pid) - gateway_cpu_s) / tokens * 1e6,
    )


def grpc_way(channel: grpc.aio.Channel) -> Ask:
    """From the scheduler itself."""
    generate: grpc.aio.UnaryStreamMultiCallable[pb.GenerateRequest, bytes] = channel.unary_stream(
        _GENERATE, request_serializer=pb.GenerateRequest.SerializeToString
    )

    async def ask(prompt: list[int], max_tokens: int) -> float:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.SamplingParams(temperature=0.0),
            stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
            output=pb.OutputParams(token_ids=False),  # as the gateway asks
        )
        first_s = None
        parts = []
        async for part in generate(request):
            parts.append(part)
            if len(parts) == 2:  # behind what says that it was admitted
                first_s = time.perf_counter()
        _check(pb.GenerateResponse.FromString(parts[-1]).finished.usage.output_tokens, max_tokens)
        return first_s or time.perf_counter()

    return ask


def http_way(url: str) -> Ask:
    """Through the gateway, over a connection for each request."""
    host, port = urlsplit(url).hostname, urlsplit(url).port

    async def ask(prompt: list[int], max_tokens: int) -> float:
        fields = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps(fields | {"stream": True, "stream_options": {"include_usage": True}}).encode()
        reader, writer = await asyncio.open_connection(host, port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        first_s = None
        parts = []
        while part := await reader.read(65_536):
            if first_s is None and b"data: " in part:
                first_s = time.perf_counter()
            parts.append(part)
        writer.close()
        counts = re.findall(rb'"completion_tokens": (\d+)', b"".join(parts))
        _check(int(counts[-1]) if counts else 0, max_tokens)
        return first_s or time.perf_counter()

    return ask


@contextlib.contextmanager
def running_gateway(address: str) -> Iterator[tuple[str, int]]:
    """Starts a gateway; gives its URL and its process's id."""
    command = [sys.executable, "-m", "openai_gateway", "--port=0", f"--address={address}", "--drain-window=0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None  # noqa: S101 - it is a pipe
        for line in process.stderr:
            if found := re.search(r"running on (http://\S+)", line):
                yield found.group(1), process.pid
                return
        raise SystemExit("the gateway did not start")
    finally:
        process.terminate()
        process.wait()


async def measure(
    address: str, url: str, pid: int, load: Load, rounds: int, console: Console
) -> dict[str, list[Round]]:
    """Both ways by turns, after a warm-up of each. Prints each round when it is over."""
    results: dict[str, list[Round]] = {way: [] for way in _WAYS}
    async with grpc.aio.insecure_channel(address) as channel:
        asks = {"gRPC": grpc_way(channel), "HTTP": http_way(url)}
        warm_up = Load(load.streams, load.streams, load.prompt_tokens, 8)
        for way in _WAYS:
            await run_round(warm_up, f"warm-up {way}", asks[way], pid)
        for number in range(rounds):
            # Who goes first changes, as machines warm up and throttle.
            for way in _WAYS if number % 2 == 0 else reversed(_WAYS):
                done = await run_round(load, f"{number} {way}", asks[way], pid)
                results[way].append(done)
                console.print(f"round {number + 1}, {way}: {done.tokens_per_s:.0f} tokens/s")
    return results


def report(results: dict[str, list[Round]], console: Console) -> None:
    """Medians, and how the rounds compare."""
    table = Table("way", "tokens/s", "TTFT ms", "client CPU us/token", "gateway CPU us/token")
    for way, rounds in results.items():
        columns = zip(
            *((r.tokens_per_s, r.first_token_ms, r.client_us, r.gateway_us) for r in rounds), strict=True
        )
        table.add_row(way, *(f"{statistics.median(column):.0f}" for column in columns))
    console.print(table)
    pairs = zip(results["HTTP"], results["gRPC"], strict=True)
    ratios = [http.tokens_per_s / grpc.tokens_per_s for http, grpc in pairs]
    cost = 1 - statistics.median(ratios)
    console.print(f"HTTP / gRPC by round: {', '.join(f'{ratio:.3f}' for ratio in ratios)}; cost: {cost:.1%}")
    # Throughput of a busy host varies more than what is to be seen; CPU time varies less.
    grpc_us, http_us = (
        statistics.median(r.client_us + r.gateway_us for r in results[way]) for way in ("gRPC", "HTTP")
    )
    tokens_per_s = statistics.median(r.tokens_per_s for r in results["HTTP"])
    share = (http_us - grpc_us) / 1e6 * tokens_per_s / (os.cpu_count() or 1)
    console.print(
        f"more CPU time by HTTP: {http_us - grpc_us:.0f} us/token, {share:.2%} of the machine at this speed"
    )


def main(argv: Sequence[str]) -> None:
    """Runs the comparison as the flags say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=DEMO, help="folder, GGUF file, hub id, or demo")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    load = Load(options.streams, options.requests, options.prompt_tokens, options.output_tokens)
    console = Console()
    cluster_options = ClusterOptions(model=find_model(options.model), port=0)
    with LocalCluster(cluster_options) as cluster:
        cluster.wait_ready(lambda _: None)
        with running_gateway(cluster.address) as (url, pid):
            results = uvloop.run(measure(cluster.address, url, pid, load, options.rounds, console))
    report(results, console)


def _cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:  # noqa: PTH123 - not a file to be found
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _check(output_tokens: int, wanted: int) -> None:
    if output_tokens != wanted:
        raise SystemExit(f"an answer had {output_tokens} tokens, and {wanted} were asked for")


if __name__ == "__main__":
    main(sys.argv[1:])
