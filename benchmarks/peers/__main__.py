"""Holds Tidegate against other engines on this machine, with one load generator and the same text prompts.

    benchmarks/peers/install.sh                    # once: environments and models of the peers
    python -m benchmarks.peers --rounds 3
    python -m benchmarks.peers --peers vllm --workloads w1,w2 --neighbour

All systems are started first and stay; only one of them is sent requests at a time. In each round they take
turns on each workload, in another order each time, with the prompts of that round. Tidegate is measured
whole: client, scheduler and worker, over gRPC; the peers over their OpenAI endpoints. Compare figures of one
run only: machines are noisy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
from rich.console import Console

from benchmarks.peers.report import Measured, table, write_json
from benchmarks.peers.systems import PEERS, TIDEGATE, Served, Setup, System
from tidegate_client.bench.errors import BenchError
from tidegate_client.bench.load import ClosedLoop
from tidegate_client.bench.prompts import Words
from tidegate_client.bench.run import Run, run
from tidegate_client.bench.workload import PRESETS, Workload
from tidegate_client.cli.demo_model import DEMO, find_model
from tidegate_client.cli.failures import Failure
from tidegate_client.cli.serve import stop_on_signals


class Running:
    """A started system and its processes."""

    def __init__(self, system: System, served: Served, roots: list[psutil.Process]) -> None:
        self.system = system
        self.served = served
        self._roots = roots

    def peak_rss_gib(self) -> float:
        """The sum of each process's peak."""
        return sum(map(_peak_rss_bytes, self._processes())) / 2**30

    def cpu_s(self) -> float:
        """Processor time so far."""
        total = 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _processes(self) -> list[psutil.Process]:
        return [each for root in self._roots for each in (root, *root.children(recursive=True))]

    async def measure(self, workload: Workload, seed: int, words: Words) -> Run:
        """Sends a workload, after a warm-up."""
        async with self.served.opened() as target:
            return await run(target, workload, ClosedLoop(workload.concurrency), seed, words)


def _peak_rss_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


@contextlib.contextmanager
def started(system: System, setup: Setup, console: Console) -> Iterator[Running]:
    """Starts a system."""
    before = set(psutil.Process().children())
    with system.start(setup) as served:
        console.print(f"{system.name} is ready after {served.start_s:.1f} s")
        yield Running(system, served, [p for p in psutil.Process().children() if p not in before])


@contextlib.contextmanager
def neighbour(wanted: bool) -> Iterator[None]:
    """Keeps one core busy."""
    if not wanted:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def measure(options: argparse.Namespace, setup: Setup, console: Console) -> list[Measured]:
    """Runs all rounds. Raises BenchError if all requests of a run fail, Failure if a system can't start."""
    words = Words.from_file(setup.model / "tokenizer.json")
    measured: list[Measured] = []
    with contextlib.ExitStack() as stack:
        systems = [*TIDEGATE, *(PEERS[name] for name in options.peers)]
        running = [stack.enter_context(started(system, setup, console)) for system in systems]
        stack.enter_context(neighbour(options.neighbour))
        for turn in range(options.rounds):
            for name in options.workloads:
                seed = options.seed + turn
                for one in random.Random(f"{name}/{seed}").sample(running, len(running)):
                    others = [other for other in running if other is not one]
                    before_s = sum(other.cpu_s() for other in others)
                    done = asyncio.run(one.measure(PRESETS[name], seed, words))
                    others_cpu_s = sum(other.cpu_s() for other in others) - before_s
                    found = Measured(
                        one.system, turn, done, one.peak_rss_gib(), one.served.start_s, others_cpu_s
                    )
                    measured.append(found)
                    rate = done.figures.output_tokens_per_s
                    console.print(f"round {turn + 1}, {name}, {one.system.name}: {rate:.1f} tokens/s")
    return measured


def _names(known: Mapping[str, object]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(known)}")
        return names

    return parse


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints. Returns the exit code."""
    options = _options(arguments)
    stop_on_signals()  # servers must not outlive us
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        setup = Setup(
            Path(find_model(DEMO)),
            options.environments,
            options.threads,
            logs,
            [f"--{flag}" for flag in options.worker_option],
            [f"--{flag}" for flag in options.scheduler_option],
        )
        try:
            measured = measure(options, setup, console)
        except (BenchError, Failure) as error:
            console.print(str(error), markup=False)
            return 1
    out = Console(width=140)
    for name in options.workloads:
        out.print(table(measured, name))
    if options.json:
        write_json(options.json, vars(options), measured)
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", type=_names(PRESETS), default=list(PRESETS), help="w1,w2,w3,w4")
    parser.add_argument("--peers", type=_names(PEERS), default=list(PEERS), help=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=3, help="each with its own prompts (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next ones follow")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each system's forward")
    parser.add_argument("--neighbour", action="store_true", help="keep one core busy meanwhile")
    parser.add_argument("--json", type=Path, help="file for every run's figures")
    parser.add_argument("--logs", type=Path, help="folder for the peers' logs, which are dropped otherwise")
    parser.add_argument(
        "--environments",
        type=Path,
        default=Path.home() / ".cache/tidegate/peers",
        help="where install.sh has put the peers (default: %(default)s)",
    )
    for service in ("worker", "scheduler"):
        text = f"further option of Tidegate's {service}; may be repeated"
        parser.add_argument(
            f"--{service}-option", action="append", default=[], metavar="NAME=VALUE", help=text
        )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
