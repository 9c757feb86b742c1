"""Seconds from a worker's start to its being ready, and the most memory that it takes on the way.

    python benchmarks/startup.py [--model PATH] [--rounds 3] [-- --dtype bfloat16 --quantization int8]

Files are in the page cache, kernels are compiled and the model is on record: a first start, which is not
counted, sees to it. `cpu` is the worker's processor time until it was ready, which a busy machine disturbs
less. What weights cost is the peak beyond that of a worker whose model has next to none, but the same
vocabulary and tokenizer: that one holds the libraries, their compiled code and the grammars' view of the
vocabulary. KV memory is given page by page as it is written, so that a worker that has just started holds
none. Options after `--` go to the worker.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from worker_service import demo_model


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


def weight_bytes(folder: Path) -> int:
    """Bytes of a model's files of weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def make_tiny(folder: Path, target: Path) -> None:
    """A random model of the same kind, with one narrow layer and the same tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16, "num_hidden_layers": 1}
    config.update({**sizes, "num_attention_heads": 2, "num_key_value_heads": 1})
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)  # type: ignore[no-untyped-call]
    model.save_pretrained(target)
    for path in folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and not (target / path.name).exists():
            shutil.copy(path, target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder (default: the demo model)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("worker", nargs="*", help="options of the worker, after --")
    options = parser.parse_args()
    folder = Path(options.model or demo_model.prepare())
    with tempfile.TemporaryDirectory() as place:
        tiny = Path(place)
        make_tiny(folder, tiny)
        for model in (tiny, folder):
            start(str(model), options.worker)
        least = start(str(tiny), options.worker).peak_bytes
        weights = weight_bytes(folder) - weight_bytes(tiny)
        starts = [start(str(folder), options.worker) for _ in range(options.rounds)]
    print("| start | listening s | ready s | cpu s | peak MB |\n|---|---|---|---|---|")
    for index, one in enumerate(starts):
        cells = (f"{one.listening_s:.1f}", f"{one.ready_s:.1f}", f"{one.cpu_s:.1f}")
        print(f"| {index + 1} | {' | '.join(cells)} | {one.peak_bytes / 1e6:.0f} |")
    own = statistics.median(one.peak_bytes for one in starts) - least
    print(
        f"\nmedian {statistics.median(one.ready_s for one in starts):.1f} s; a worker without weights takes "
        f"{least / 1e6:.0f} MB, {weights / 1e6:.0f} MB of weights {own / 1e6:.0f} MB more: "
        f"{own / weights:.2f} of them"
    )


if __name__ == "__main__":
    main()
