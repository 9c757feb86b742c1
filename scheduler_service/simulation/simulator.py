"""Owns the loop of a simulation: arrivals and results in the order of their time, then a round of plans.

The rules by which workers are asked for plans are the engine's; time is a number.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from scheduler_service.core.admission import Refused
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.events import Admitted, Event, Finished, Preempted, Resumed, TokenBatch
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.sampling import SamplingParams, StoppingParams
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.step import StepResult
from scheduler_service.core.worker import WorkerSpec
from scheduler_service.simulation.modelled_worker import END, ModelledWorker, StepTime
from scheduler_service.simulation.workload import Workload

_STOPS = frozenset({END})
_MODEL = "simulated"


@dataclass(slots=True)
class Passage:
    """What became of one request. Times are seconds on the simulation's clock."""

    tenant: str
    arrival: float
    prompt_tokens: int
    first_token: float = 0.0
    last_token: float = 0.0
    end: float = 0.0
    output_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """The state at one moment."""

    at_s: float
    kv_used: float  # share of all blocks
    waiting: int
    running: int


@dataclass(slots=True)
class Outcome:
    """All that was seen."""

    finished: list[Passage] = field(default_factory=list)
    refused: int = 0
    gaps_s: array[float] = field(default_factory=lambda: array("f"))  # between the tokens of a request
    samples: list[Sample] = field(default_factory=list)
    end_s: float = 0.0
    steps: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    prefix_queried_tokens: int = 0
    busy: float = 0.0  # share of the workers' time in which they computed


class Simulation:
    """One run. The same arguments give the same outcome."""

    def __init__(
        self,
        config: SchedulerConfig,
        workers: list[WorkerSpec],
        step_time: StepTime,
        workload: Workload,
        max_tokens: int | None = None,
        sample_every_s: float = 1.0,
    ) -> None:
        """max_tokens: what requests ask for. None: exactly what they get."""
        self._core = Scheduler(config)
        self._workload = workload
        self._max_tokens = max_tokens
        self._outputs: dict[str, int] = {}
        self._workers = {spec.worker_id: ModelledWorker(spec, step_time, self._outputs) for spec in workers}
        for spec in workers:
            self._core.add_worker(spec, 0.0)
        self._depth = min(config.pipeline_depth, *(spec.max_in_flight for spec in workers))
        self._results: list[tuple[float, int, str, StepResult]] = []  # a heap by time
        self._num_waiting = 0
        self._outcome = Outcome()
        self._sample_every_s = sample_every_s
        self._next_sample = 0.0

    def run(self, on_progress: Callable[[int], None] = lambda done: None) -> Outcome:
        """Runs until every request has ended. `on_progress` is told of how many have."""
        next_request, reported, now = 0, 0, 0.0
        while next_request < len(self._workload) or self._results:
            now = self._next_time(next_request)
            while next_request < len(self._workload) and self._workload.arrivals[next_request] <= now:
                self._arrive(next_request, now)
                next_request += 1
            changed = set()
            while self._results and self._results[0][0] <= now:
                _, _, worker_id, result = heapq.heappop(self._results)
                changed.add(worker_id)
                self._workers[worker_id].num_in_flight -= 1
                self._note(self._core.apply(worker_id, result, now), now, worker_id)
            self._plan(changed, now)
            self._sample(now)
            done = len(self._outcome.finished) + self._outcome.refused
            if done >= reported + 200:
                on_progress(done)
                reported = done
        on_progress(len(self._workload))
        return self._close(now)

    def _next_time(self, next_request: int) -> float:
        result = self._results[0][0] if self._results else np.inf
        if next_request == len(self._workload):
            return result
        return min(result, float(self._workload.arrivals[next_request]))

    def _arrive(self, index: int, now: float) -> None:
        load = self._workload
        request_id = str(index)
        prompt, output = load.prompt(index), int(load.outputs[index])
        self._outputs[request_id] = output
        spec = RequestSpec(
            request_id=request_id,
            model=_MODEL,
            prompt_token_ids=prompt,
            sampling=SamplingParams(),
            stopping=StoppingParams(max(output, self._max_tokens or 0), eos_token_ids=_STOPS),
            tenant=load.tenants[index],
            sink=Passage(load.tenants[index], now, len(prompt)),
        )
        if isinstance(self._core.submit(spec, now), Refused):
            self._outcome.refused += 1
        else:
            self._num_waiting += 1

    def _plan(self, changed: set[str], now: float) -> None:
        """Asks whoever may have something to do until nobody has. An idle worker has something to do only if
        somebody waits, a busy one also after its own result."""
        while True:
            ids = self._workers if self._num_waiting else changed
            asked = [self._workers[i] for i in ids if self._workers[i].num_in_flight < self._depth]
            asked.sort(key=lambda worker: worker.num_running)  # the emptiest first
            if not sum([self._plan_one(worker, now) for worker in asked]):
                return

    def _plan_one(self, worker: ModelledWorker, now: float) -> bool:
        worker_id = worker.spec.worker_id
        plan = self._core.plan(worker_id, now)
        self._note(self._core.drain_events(), now, worker_id)
        if plan is None:
            return False
        end, result = worker.execute(plan, now)
        worker.num_in_flight += 1
        self._outcome.steps += 1
        heapq.heappush(self._results, (end, self._outcome.steps, worker_id, result))
        return True

    def _note(self, events: list[Event], now: float, worker_id: str) -> None:
        worker = self._workers[worker_id]
        for event in events:
            if isinstance(event, TokenBatch):
                self._note_tokens(event, now)
            elif isinstance(event, Admitted | Resumed):
                self._num_waiting -= 1
                worker.num_running += 1
            elif isinstance(event, Preempted):
                self._num_waiting += 1
                worker.num_running -= 1
            else:
                self._note_end(event, worker, now)

    def _note_tokens(self, batch: TokenBatch, now: float) -> None:
        gaps = self._outcome.gaps_s
        for candidate in batch.candidates:
            passage: Passage = candidate.sink  # type: ignore[assignment]  # we gave it
            if passage.output_tokens:
                gaps.append(now - passage.last_token)
            else:
                passage.first_token = now
            passage.last_token = now
            passage.output_tokens += 1

    def _note_end(self, event: Finished, worker: ModelledWorker, now: float) -> None:
        passage: Passage = event.sink  # type: ignore[assignment]  # we gave it
        passage.end = now
        passage.preemptions = event.usage.preemptions
        self._outcome.finished.append(passage)
        del self._outputs[event.request_id]
        worker.num_running -= 1

    def _sample(self, now: float) -> None:
        if now < self._next_sample:
            return
        self._next_sample = now + self._sample_every_s
        state = self._core.state(now)
        used = sum(worker.blocks_used for worker in state.workers)
        total = sum(worker.blocks_total for worker in state.workers)
        self._outcome.samples.append(
            Sample(now, used / total, state.waiting_requests, state.running_requests)
        )

    def _close(self, now: float) -> Outcome:
        if self._num_waiting:
            raise AssertionError(f"{self._num_waiting} requests wait, and nothing is going to happen")
        outcome, counters = self._outcome, self._core.state(now).counters
        outcome.end_s = now
        outcome.preemptions = counters.preemptions
        outcome.prefix_hit_tokens = counters.prefix_hit_tokens
        outcome.prefix_queried_tokens = counters.prefix_queried_tokens
        busy = sum(worker.busy_s for worker in self._workers.values())
        outcome.busy = busy / (now * len(self._workers)) if now else 0.0
        return outcome


def fleet(count: int, **limits: int) -> list[WorkerSpec]:
    """So many workers of the simulated model, alike. `limits` are the fields of WorkerSpec."""
    return [WorkerSpec(worker_id=f"w{i}", model=_MODEL, **limits) for i in range(count)]
