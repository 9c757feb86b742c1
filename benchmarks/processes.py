"""Processes that benchmarks measure from outside: a scheduler, and a worker without a model.

Owns their beginning and end, and what the system says of them. Loads and figures are the benchmarks' own.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class SchedulerProcess:
    """Where a scheduler can be found."""

    pid: int
    port: int
    metrics_port: int
    """0: it has no metrics."""


@contextlib.contextmanager
def python_process(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process of this Python, in the repository's root. It is told to end, and waited for."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=_ROOT,
        text=True,
        stdout=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def first_line(process: subprocess.Popen[str]) -> str:
    """What a process prints once it is there; waits for it."""
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    return process.stdout.readline().strip()


@contextlib.contextmanager
def instant_worker(step_ms: float) -> Iterator[str]:
    """The address of a worker whose steps take that long and give random tokens."""
    with python_process("benchmarks/instant_worker.py", "--step-ms", str(step_ms)) as process:
        yield f"127.0.0.1:{first_line(process)}"


@contextlib.contextmanager
def scheduler_process(
    worker_address: str, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[SchedulerProcess]:
    """A scheduler that dials this worker, and ends without waiting. `flags`: more options of the service."""
    with tempfile.TemporaryDirectory() as folder:
        ready_file = Path(folder) / "ready.json"
        common = ["--port", "0", "--worker", worker_address, "--ready-file", str(ready_file)]
        common += ["--drain-window", "0", "--drain-timeout", "1"]
        with python_process("-m", "scheduler_service", *common, *flags, environment=environment) as process:
            while not ready_file.exists():
                if process.poll() is not None:
                    raise SystemExit("the scheduler did not start")
                time.sleep(0.05)
            ready = json.loads(ready_file.read_text())
            yield SchedulerProcess(process.pid, ready["port"], ready["metrics_port"])


def cpu_time_s(pid: int) -> float:
    """Processor time that a process has taken, all of its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
