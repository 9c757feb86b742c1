"""What the scheduler costs per step and per request: processor time of its one thread, without a worker.

    python -m benchmarks.scheduler_step [--steps 400] [--submits 400] [--peer-python VLLM_ENV/bin/python]

With --peer-python, vLLM's own scheduler runs the same cases in a process of that environment, in turn with
ours: its step is schedule + update of its synchronous scheduler, the cheaper one, and encodes nothing.
benchmarks/peers/install.sh makes such an environment.

A step is plan + encode + apply of decodes that have about 1,000 tokens each, whose prompts had random
lengths, so that they cross block borders at different steps. The same is measured with 10,000 requests
waiting. A submit is one request of 1,000 prompt tokens with prefix caching, hashes included. The cases take
turns, so that what else the machine does meets all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.sampling import SamplingParams, StoppingParams
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.step import StepPlan, StepResult
from scheduler_service.core.worker import WorkerSpec
from scheduler_service.plan_codec import encode_plan
from tidegate_client.cli.demo_model import DEMO, find_model

VOCAB = 32_000
BLOCK_SIZE = 16
CONTEXT = 1000  # tokens, on average
CASES = [(256, 0), (256, 10_000), (1024, 0), (1024, 10_000)]
"""Decodes that run, and requests that wait."""
_TURNS = 8
_WARM_UP_STEPS = 10


def request(name: str, num_prompt: int, rng: np.random.Generator) -> RequestSpec:
    """A request that decodes on and on."""
    return RequestSpec(
        request_id=name,
        model="m",
        prompt_token_ids=rng.integers(0, VOCAB, num_prompt, dtype=np.int32),
        sampling=SamplingParams(),
        stopping=StoppingParams(max_tokens=4096, eos_token_ids=frozenset({VOCAB})),
    )


def scheduler(seats: int) -> Scheduler:
    """A scheduler with one worker that has memory enough for all."""
    made = Scheduler(SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=1 << 21))
    made.add_worker(
        WorkerSpec(
            worker_id="w",
            model="m",
            num_blocks=seats * 6144 // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            num_slots=seats,
            max_batched_tokens=1 << 21,
            max_in_flight=2,
            max_model_len=8192,
            vocab_size=VOCAB,
        ),
        0.0,
    )
    return made


def answer(plan: StepPlan, rng: np.random.Generator) -> StepResult:
    """A token for each row: every row of the plans here samples."""
    return StepResult(plan.seq, plan.slots, rng.integers(0, VOCAB, len(plan.slots), dtype=np.int32))


class Decodes:
    """One case: what runs is decoding, with one more plan always on its way."""

    def __init__(self, num_running: int, num_waiting: int) -> None:
        self.title = f"step, {num_running:,} decodes, {num_waiting:,} waiting"
        self.times_ms: list[float] = []
        self._rng = np.random.default_rng(0)
        self._scheduler = scheduler(num_running)
        self._num_running = num_running
        lengths = self._rng.integers(CONTEXT - 256, CONTEXT + 256, num_running).tolist()
        for i, length in enumerate([*lengths, *[32] * num_waiting]):
            self._scheduler.submit(request(f"r{i}", length, self._rng), 0.0)
        self._in_flight = self._plan()

    def _plan(self) -> StepPlan:
        plan = self._scheduler.plan("w", 0.0)
        if plan is None or len(plan.slots) != self._num_running:
            raise RuntimeError("the plan is not one of all decodes")
        return plan

    def step(self) -> float:
        """Milliseconds of one step."""
        result = answer(self._in_flight, self._rng)
        began = time.thread_time_ns()
        plan = self._plan()
        encode_plan(plan)
        self._scheduler.apply("w", result, 0.0)
        self._scheduler.drain_events()
        ended = time.thread_time_ns()
        self._in_flight = plan
        return (ended - began) / 1e6

    def run(self, num_steps: int) -> None:
        """One turn: a few steps to warm the caches, then those that count."""
        for _ in range(_WARM_UP_STEPS):
            self.step()
        self.times_ms += [self.step() for _ in range(num_steps)]


def measure_submits(num_submits: int) -> list[float]:
    """Milliseconds of each submit of CONTEXT tokens."""
    rng = np.random.default_rng(0)
    sched = scheduler(256)
    specs = [request(f"r{i}", CONTEXT, rng) for i in range(num_submits + 20)]
    times = []
    for spec in specs:
        began = time.thread_time_ns()
        sched.submit(spec, 0.0)
        times.append((time.thread_time_ns() - began) / 1e6)
    return times[20:]


class VllmScheduler:
    """vLLM's scheduler in a process of its own. What it answers are milliseconds."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.times_ms: list[list[float]] = []

    def add(self, num_running: int, num_waiting: int) -> None:
        """Builds a case."""
        self._ask("decodes", num_running, num_waiting)
        self.times_ms.append([])

    def run(self, case: int, num_steps: int) -> None:
        """One turn of a case, as Decodes.run."""
        self.times_ms[case] += self._ask("step", case, num_steps + _WARM_UP_STEPS)[_WARM_UP_STEPS:]

    def measure_submits(self, num_submits: int) -> list[float]:
        """Milliseconds of each submit of CONTEXT tokens."""
        return self._ask("submit", num_submits)

    def _ask(self, *words: str | int) -> list[float]:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("vLLM's scheduler has no pipes")
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("vLLM's scheduler has ended; its messages are above")
        times: list[float] = json.loads(line)
        return times


@contextlib.contextmanager
def vllm_scheduler(python: str | None) -> Iterator[VllmScheduler | None]:
    """Starts it. None: no environment was given."""
    if python is None:
        yield None
        return
    script = str(Path(__file__).with_name("vllm_scheduler.py"))
    command = [python, script, find_model(DEMO)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield VllmScheduler(process)
        finally:
            process.kill()


def show(title: str, ours: list[float], theirs: list[float] | None) -> None:
    """One row."""
    row = f"{title:<38}{statistics.median(ours):>10.3f}{statistics.fmean(ours):>10.3f}"
    if theirs is not None:
        ratio = statistics.median(theirs) / statistics.median(ours)
        row += f"{statistics.median(theirs):>10.3f}{statistics.fmean(theirs):>10.3f}{ratio:>8.1f}"
    print(row, flush=True)


def main() -> None:
    """Measures every case and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--submits", type=int, default=400)
    parser.add_argument("--peer-python", help="Python of an environment with vLLM")
    options = parser.parse_args()
    cases = [Decodes(num_running, num_waiting) for num_running, num_waiting in CASES]
    with vllm_scheduler(options.peer_python) as peer:
        if peer:
            for num_running, num_waiting in CASES:
                peer.add(num_running, num_waiting)
        gc.collect()
        gc.freeze()  # its pauses would be those of four schedulers
        for _ in range(_TURNS):
            for i, case in enumerate(cases):
                case.run(-(-options.steps // _TURNS))
                if peer:
                    peer.run(i, -(-options.steps // _TURNS))
        submits = measure_submits(options.submits)
        peer_submits = peer.measure_submits(options.submits) if peer else None
    columns = f"{'median':>10}{'mean':>10}" + (f"{'vLLM med.':>10}{'mean':>10}{'ratio':>8}" if peer else "")
    print(f"{'milliseconds of processor time':<38}{columns}")
    for i, case in enumerate(cases):
        show(case.title, case.times_ms, peer.times_ms[i] if peer else None)
    show(f"submit of {CONTEXT:,} tokens", submits, peer_submits)


if __name__ == "__main__":
    main()
