"""Owns the loop of a simulation: arrivals and results in the order of their time, then a round of plans.

The rules by which workers are asked for plans are the engine's; time is a number.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from scheduler_service.core.admission import Refused
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.events import (
    Admitted,
    Event,
    Finished,
    FinishReason,
    Preempted,
    Resumed,
    TokenBatch,
)
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.step import StepResult
from scheduler_service.core.worker import WorkerSpec
from scheduler_service.simulation.load import MODEL, Happening, Load
from scheduler_service.simulation.modelled_worker import ModelledWorker, StepTime
from scheduler_service.simulation.outcome import Outcome, Passage, Sampler

_PROGRESS_EVERY = 200  # requests


class Simulation:
    """One run. The same arguments give the same outcome."""

    def __init__(
        self,
        config: SchedulerConfig,
        workers: list[WorkerSpec],
        step_time: StepTime,
        workload: Load,
        max_tokens: int | None = None,
        sample_every_s: float = 1.0,
        link_s: float = 0.0,
    ) -> None:
        """max_tokens: what requests ask for. None: exactly what they get. link_s: how long a plan takes from
        the scheduler to a worker, and a result back."""
        self._core = Scheduler(config)
        self._config = config
        self._load = workload
        self._step_time = step_time
        self._link_s = link_s
        self._max_tokens = max_tokens or 0
        self._workers: dict[str, ModelledWorker] = {}
        self._every_worker: list[ModelledWorker] = []
        for spec in workers:
            self._add_worker(spec, 0.0)
        self._results: list[tuple[float, int, ModelledWorker, StepResult]] = []  # a heap by time
        self._num_waiting = 0
        self._outcome = Outcome()
        self._sampler = Sampler(self._core, self._outcome, sample_every_s)

    def _add_worker(self, spec: WorkerSpec, now: float) -> None:
        self._core.add_worker(spec, now)
        worker = self._load.worker(spec, self._step_time)
        self._workers[spec.worker_id] = worker
        self._every_worker.append(worker)

    def run(self, on_progress: Callable[[int], None] = lambda done: None) -> Outcome:
        """Runs until nothing is going to happen. `on_progress` is told of how many requests have ended."""
        arrivals, happenings, results = self._load.arrivals, self._load.happenings, self._results
        num_arrived, num_happened, reported, now = 0, 0, 0, 0.0
        while True:
            due = [
                results[0][0] if results else np.inf,
                arrivals[num_arrived] if num_arrived < len(arrivals) else np.inf,
                happenings[num_happened].at_s if num_happened < len(happenings) else np.inf,
            ]
            if min(due) == np.inf and not self._num_waiting:
                break
            expiry = self._core.next_expiry()
            if expiry is not None:
                due.append(expiry)
            if min(due) == np.inf:
                break
            now = max(now, float(min(due)))
            changed: set[ModelledWorker] = set()
            while num_arrived < len(arrivals) and arrivals[num_arrived] <= now:
                self._arrive(num_arrived, now)
                num_arrived += 1
            while num_happened < len(happenings) and happenings[num_happened].at_s <= now:
                self._happen(happenings[num_happened], now)
                num_happened += 1
                changed.update(self._workers.values())
            if expiry is not None and expiry <= now:
                self._note(self._core.expire(now), now)
                changed.update(self._workers.values())
            self._take_results(now, changed)
            self._plan(changed, now)
            self._sampler.look(now)
            done = len(self._outcome.finished) + self._outcome.refused + self._outcome.failed
            if done >= reported + _PROGRESS_EVERY:
                on_progress(done)
                reported = done
        on_progress(len(arrivals))
        return self._close(now)

    def _arrive(self, index: int, now: float) -> None:
        spec = self._load.request(index, self._max_tokens)
        prompt_tokens, name = len(spec.prompt_token_ids), spec.request_id
        passages = [Passage(spec.tenant, now, prompt_tokens, candidate=(name, i)) for i in range(spec.n)]
        if isinstance(self._core.submit(replace(spec, sink=passages), now), Refused):
            self._outcome.refused += spec.n
        else:
            self._num_waiting += spec.n

    def _happen(self, happening: Happening, now: float) -> None:
        name = happening.name
        if happening.call == "add_worker" and happening.worker is not None:
            self._add_worker(happening.worker, now)
        elif happening.call == "remove_worker":
            worker = self._workers.pop(name, None)
            if worker is not None:
                worker.gone = True
            self._note(self._core.remove_worker(name, now), now)
        elif happening.call == "drain_worker" and name in self._workers:
            self._note(self._core.drain_worker(name, now), now)
        elif happening.call == "cancel":
            self._note(self._core.cancel(name, now, happening.index), now)

    def _take_results(self, now: float, changed: set[ModelledWorker]) -> None:
        results = self._results
        while results and results[0][0] <= now:
            _, _, worker, result = heapq.heappop(results)
            if worker.gone:
                continue
            changed.add(worker)
            worker.num_in_flight -= 1
            self._note(self._core.apply(worker.spec.worker_id, result, now), now)

    def _plan(self, changed: set[ModelledWorker], now: float) -> None:
        """Asks whoever may have something to do until nobody has. An idle worker has something to do only if
        somebody waits, a busy one also after its own result."""
        most = self._config.pipeline_depth
        asked = list(self._workers.values()) if self._num_waiting else [w for w in changed if not w.gone]
        while asked:
            asked = [w for w in asked if w.num_in_flight < min(most, w.spec.max_in_flight)]
            asked.sort(key=lambda worker: (worker.num_running, worker.spec.worker_id))  # the emptiest first
            asked = [worker for worker in asked if self._plan_one(worker, now)]

    def _plan_one(self, worker: ModelledWorker, now: float) -> bool:
        plan = self._core.plan(worker.spec.worker_id, now)
        self._note(self._core.drain_events(), now)
        if plan is None:
            return False
        end, result = worker.execute(plan, now + self._link_s)
        worker.num_in_flight += 1
        self._outcome.steps += 1
        self._sampler.note_plan(plan)
        heapq.heappush(self._results, (end + self._link_s, self._outcome.steps, worker, result))
        return True

    def _note(self, events: list[Event], now: float) -> None:
        for event in events:
            if isinstance(event, TokenBatch):
                gaps = self._outcome.gaps_s
                for candidate in event.candidates:
                    candidate.sink[candidate.index].note_token(now, gaps)  # type: ignore[index]  # we gave it
                continue
            passage: Passage = event.sink[event.index]  # type: ignore[index]  # we gave it
            if isinstance(event, Finished):
                self._note_end(event, passage, now)
            elif isinstance(event, Admitted | Resumed):
                self._num_waiting -= 1
                passage.worker = self._workers[event.worker_id]
                passage.worker.num_running += 1
            elif isinstance(event, Preempted):
                self._num_waiting += 1
                passage.note_preempted(event)
                self._leave(passage)

    def _leave(self, passage: Passage) -> None:
        if passage.worker is None:
            self._num_waiting -= 1
        else:
            passage.worker.num_running -= 1
            passage.worker = None

    def _note_end(self, event: Finished, passage: Passage, now: float) -> None:
        self._leave(passage)
        passage.end = now
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._outcome.finished.append(passage)
        else:
            self._outcome.failed += 1

    def _close(self, now: float) -> Outcome:
        if self._num_waiting and not self._load.happenings:
            raise AssertionError(f"{self._num_waiting} requests wait, and nothing is going to happen")
        self._outcome.failed += self._num_waiting
        self._sampler.close(now)
        busy = sum(worker.busy_s for worker in self._every_worker)
        self._outcome.busy = busy / (now * max(1, len(self._workers))) if now else 0.0
        return self._outcome


def fleet(count: int, model: str = MODEL, **limits: Any) -> list[WorkerSpec]:
    """So many workers of a model, alike. `limits` are the fields of WorkerSpec."""
    return [WorkerSpec(worker_id=f"w{i}", model=model, **limits) for i in range(count)]
