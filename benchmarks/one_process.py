"""Serves a load in one process: the core and the executor in one loop of plan, execute, apply.

Owns what separation.py compares with: no gRPC, no frontend, no clients. Also what both sides share.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.sampling import SamplingParams, StoppingParams
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.worker import WorkerSpec
from scheduler_service.plan_codec import ResultLimits, decode_result, encode_plan
from tidegate_client.bench.workload import Request
from worker_service.config import WorkerConfig
from worker_service.plan import Result
from worker_service.plan_codec import decode_plan, encode_result
from worker_service.worker import Engine, Worker

MAX_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Setup:
    """What is the same on both sides."""

    model: str
    threads: int
    seats: int
    """Requests that run at once."""
    num_blocks: int = 2048
    budget_tokens: int = 1024

    def worker_options(self) -> dict[str, Any]:
        """Returns options of WorkerConfig."""
        return {
            "model": self.model,
            "device": "cpu",
            "dtype": "float32",
            "threads": self.threads,
            "num_blocks": self.num_blocks,
            "max_num_seqs": self.seats,
            "max_num_batched_tokens": self.budget_tokens,
            "max_in_flight": MAX_DEPTH,
        }


@dataclass(frozen=True, slots=True)
class Run:
    """One load, served once. CPU times are those of the processes that only the two sides have."""

    tokens_per_s: float
    duration_s: float
    gaps_s: list[float]
    """Between each step's end and the next one's start."""
    steps_s: list[float]
    scheduler_cpu_s: float = 0.0
    client_cpu_s: float = 0.0

    @property
    def gap_ms(self) -> float:
        """The median gap."""
        return 1000 * statistics.median(self.gaps_s)

    @property
    def step_ms(self) -> float:
        """The median step."""
        return 1000 * statistics.median(self.steps_s)


def serve(connection: Connection, setup: Setup) -> None:
    """A process's life: loads the model, says so, then answers each list of requests with a Run."""
    engine = Worker(WorkerConfig(port=0, **setup.worker_options())).load()
    torch.set_num_threads(setup.threads)
    connection.send("ready")
    while (requests := connection.recv()) is not None:
        connection.send(_run(engine, setup, requests))


def _run(engine: Engine, setup: Setup, requests: Sequence[Request]) -> Run:
    core = _core(engine, setup)
    limits, executor = engine.limits, engine.steps.executor
    result_limits = ResultLimits(limits.num_slots, limits.vocab_size)
    executor.reset()
    results: list[Result] = []
    started_s = time.monotonic()
    for i, request in enumerate(requests):
        core.submit(_spec(f"r{i}", engine.model.name, request), started_s)
    # Through the codec, but not over a wire: some 50 us a step that one process would not need.
    while (plan := core.plan("w", time.monotonic())) is not None:
        result = executor.execute(decode_plan(encode_plan(plan).plan, limits))
        core.drain_events()
        core.apply("w", decode_result(encode_result(result), result_limits), time.monotonic())
        results.append(result)
    duration_s = time.monotonic() - started_s
    tokens = core.state(time.monotonic()).counters.output_tokens
    timings = [result.timings for result in results[1:]]
    gaps_s = [t.gap_ns / 1e9 for t in timings]
    return Run(
        tokens / duration_s, duration_s, gaps_s, [(t.finished_ns - t.started_ns) / 1e9 for t in timings]
    )


def _core(engine: Engine, setup: Setup) -> Scheduler:
    core = Scheduler(
        SchedulerConfig(
            max_num_seqs=setup.seats, max_num_batched_tokens=setup.budget_tokens, pipeline_depth=1
        )
    )
    limits = engine.limits
    spec = WorkerSpec(
        worker_id="w",
        model=engine.model.name,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        num_slots=limits.num_slots,
        max_batched_tokens=limits.max_batched_tokens,
        max_in_flight=1,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
    )
    core.add_worker(spec, time.monotonic())
    return core


def _spec(name: str, model: str, request: Request) -> RequestSpec:
    return RequestSpec(
        request_id=name,
        model=model,
        prompt_token_ids=np.array(request.prompt, np.int32),
        sampling=SamplingParams(temperature=0.0),
        stopping=StoppingParams(max_tokens=request.output_tokens),
    )
