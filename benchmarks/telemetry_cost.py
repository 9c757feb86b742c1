"""Measures what telemetry costs: one load with it off, with metrics, and with 1 % or 100 % traced, by turns.

Owns the arithmetic. Each setting has a scheduler and a worker of its own, and they send to one receiver, a
process that throws away what it gets; metrics are scraped every five seconds. Turns are short and follow each
other in a changing order. A figure is the median over rounds of a turn's ratio to the turn without telemetry
in the same round, since other work on the machine comes and goes. The receiver and the client share this
machine's cores with what is measured.

    python benchmarks/telemetry_cost.py                   # a worker whose steps take 10 ms, 64 streams
    python benchmarks/telemetry_cost.py --step-ms 0       # as fast as the scheduler goes
    python benchmarks/telemetry_cost.py --model MODEL --max-tokens 16 --turn-s 15    # real workers
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import uvloop

from benchmarks.journal_cost import Load, Turn
from benchmarks.processes import first_line, instant_worker, python_process, scheduler_process

_OFF = "off"
_SETTINGS = {_OFF: None, "metrics": 0.0, "metrics, 1 %": 0.01, "metrics, 100 %": 1.0}
"""Share of requests that is traced; None: no metrics either."""


def receive() -> None:
    """Answers every export with success, and prints its port."""

    class Everything(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")

    server = grpc.server(ThreadPoolExecutor(4), handlers=[Everything()])
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    server.wait_for_termination()


@contextlib.contextmanager
def _worker(arguments: argparse.Namespace, flags: list[str], environment: dict[str, str]) -> Iterator[str]:
    """A worker: its address."""
    if arguments.model is None:
        with instant_worker(arguments.step_ms) as address:
            yield address
        return
    options = ("--model", arguments.model, "--port", "0", "--threads", "1", "--max-num-seqs", "64")
    quiet = ("--log-level", "warning", "--log-format", "json")
    with python_process("-m", "worker_service", *options, *quiet, *flags, environment=environment) as process:
        yield json.loads(first_line(process))["address"]


@contextlib.contextmanager
def _deployment(
    arguments: argparse.Namespace, share: float | None, receiver_port: str
) -> Iterator[tuple[Load, int]]:
    """A scheduler and its worker, and the port of its metrics."""
    environment = {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}
    environment = dict.fromkeys(environment, "")
    flags: list[str] = []
    if share is not None:
        flags = ["--metrics-port", "0"]
    if share:
        environment |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{receiver_port}",
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": str(share),
        }
    common = ("--journal-off", "--log-level", "warning")
    with (
        _worker(arguments, flags, environment) as address,
        scheduler_process(address, *common, *flags, environment=environment) as scheduler,
    ):
        load = Load(scheduler.port, scheduler.pid)
        if arguments.model is not None:  # whose steps are long: most of them should be decodes
            load.prompt_tokens, load.settle_s = 8, 4.0
        yield load, scheduler.metrics_port


async def _scrape(port: int) -> None:
    """Reads metrics every five seconds, which is often for Prometheus."""
    url = f"http://127.0.0.1:{port}/metrics"
    while port:
        await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read())
        await asyncio.sleep(5.0)


async def _measure(arguments: argparse.Namespace) -> None:
    rounds: list[dict[str, Turn]] = []
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(python_process("benchmarks/telemetry_cost.py", "--receive"))
        receiver_port = first_line(receiver)
        deployments = {
            name: stack.enter_context(_deployment(arguments, share, receiver_port))
            for name, share in _SETTINGS.items()
        }
        await asyncio.sleep(1.0)
        order = list(deployments)
        for number in range(-1, arguments.rounds):
            turns: dict[str, Turn] = {}
            for name in order:
                load, metrics_port = deployments[name]
                scraping = asyncio.create_task(_scrape(metrics_port))
                turns[name] = await load.turn(arguments.streams, arguments.max_tokens, arguments.turn_s)
                scraping.cancel()
                await asyncio.gather(scraping, return_exceptions=True)
            order = order[1:] + order[:1] if number % 2 else order[::-1]
            if number >= 0:  # the first round warms up
                rounds.append(turns)
    _report(rounds)


def _report(rounds: list[dict[str, Turn]]) -> None:
    print(f"{'':16} {'tokens/s':>10} {'ratio':>7} {'CPU us/token':>13} {'ratio':>7}")
    for name in _SETTINGS:
        figures = []
        for field in ("tokens_per_s", "cpu_us_per_token"):
            values = [getattr(turns[name], field) for turns in rounds]
            ratios = [getattr(turns[name], field) / getattr(turns[_OFF], field) for turns in rounds]
            figures += [statistics.median(values), statistics.median(ratios)]
        print("{:16} {:10.0f} {:7.4f} {:13.2f} {:7.4f}".format(name, *figures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure what telemetry costs.")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", help="model of real workers (default: a worker without a model)")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="tokens of a request, on average (default: 128)"
    )
    parser.add_argument("--step-ms", type=float, default=10.0, help="time that a step takes (default: 10)")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each setting (default: 8)")
    parser.add_argument("--turn-s", type=float, default=5.0, help="seconds of a turn (default: 5)")
    chosen = parser.parse_args()
    if chosen.receive:
        receive()
    else:
        uvloop.run(_measure(chosen))
