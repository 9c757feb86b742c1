"""Seconds from a worker's start to its being ready, and the most memory that it takes on the way.

    python benchmarks/startup.py [--model PATH] [--rounds 3] [-- --dtype bfloat16 --quantization int8]

Files are in the page cache and kernels are compiled: a first start, which is not counted, sees to it. `cpu`
is the worker's processor time until it was ready, which a busy machine disturbs less. Libraries are what a
process holds that has imported the worker and nothing else. KV memory is given page by page as it is written,
so that a worker that has just started holds none. Options after `--` go to the worker.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from worker_service import demo_model

LIBRARIES = "import worker_service.server, worker_service.start, worker_service.recorded_model, resource;" + (
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
)


@dataclass(frozen=True)
class Start:
    """One start of a worker."""

    listening_s: float
    ready_s: float
    cpu_s: float
    peak_bytes: int


def peak_bytes(pid: int) -> int:
    """The most memory that a process has held so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def start(model: str, options: list[str]) -> Start:
    """Starts a worker, waits until it is ready, and ends it."""
    command = [sys.executable, "-m", "worker_service", "--model", model, "--port", "0", *options]
    began = time.monotonic()
    with subprocess.Popen(
        [*command, "--log-format", "json"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as worker:
        seen: dict[str, float] = {}
        lines: list[str] = []
        for line in worker.stdout or ():
            lines.append(line)
            event = json.loads(line).get("event", "") if line.startswith("{") else ""
            seen.setdefault(event, time.monotonic() - began)
            if event == "worker ready":
                break
        else:
            raise SystemExit("the worker did not become ready:\n" + "".join(lines[-20:]))
        times = psutil.Process(worker.pid).cpu_times()
        result = Start(
            seen["listening"], seen["worker ready"], times.user + times.system, peak_bytes(worker.pid)
        )
        worker.terminate()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder (default: the demo model)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("worker", nargs="*", help="options of the worker, after --")
    options = parser.parse_args()
    folder = Path(options.model or demo_model.prepare())
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    told = subprocess.run(
        [sys.executable, "-c", LIBRARIES], env=environment, capture_output=True, text=True, check=True
    )
    libraries = int(told.stdout)
    start(str(folder), options.worker)
    starts = [start(str(folder), options.worker) for _ in range(options.rounds)]
    print("| start | listening s | ready s | cpu s | peak MB |\n|---|---|---|---|---|")
    for index, one in enumerate(starts):
        cells = (f"{one.listening_s:.1f}", f"{one.ready_s:.1f}", f"{one.cpu_s:.1f}")
        print(f"| {index + 1} | {' | '.join(cells)} | {one.peak_bytes / 1e6:.0f} |")
    own = statistics.median(one.peak_bytes for one in starts) - libraries
    print(
        f"\nmedian {statistics.median(one.ready_s for one in starts):.1f} s; weights {weights / 1e6:.0f} MB, "
        f"libraries {libraries / 1e6:.0f} MB, the peak beyond those {own / 1e6:.0f} MB: "
        f"{own / weights:.2f} of the weights"
    )


if __name__ == "__main__":
    main()
