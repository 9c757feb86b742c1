"""Owns the core's face: every call from outside, each of which leaves the state consistent.

Time comes in as `now`: seconds on any clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from scheduler_service.core.admission import Accepted, DrainRate, Newcomer, QueueLoad, Refused
from scheduler_service.core.block_map import BlockMap, block_map
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import DuplicateWorkerError, InvariantError, UnknownWorkerError
from scheduler_service.core.events import Event, FinishReason
from scheduler_service.core.explain import Explanation, explain
from scheduler_service.core.intake import Intake
from scheduler_service.core.invariants import find_violations
from scheduler_service.core.lifecycle import Lifecycle, next_expiry
from scheduler_service.core.model import Model
from scheduler_service.core.planner import Planner
from scheduler_service.core.policies import POLICIES
from scheduler_service.core.request import Request, RequestSpec
from scheduler_service.core.results import ResultReader
from scheduler_service.core.state import Counters, RequestState, SchedulerState, request_state, worker_state
from scheduler_service.core.step import StepPlan, StepResult
from scheduler_service.core.waiting import WaitingQueue
from scheduler_service.core.watch import Changes, Watch
from scheduler_service.core.worker import Worker, WorkerSpec


class Scheduler:
    """A deterministic state machine: the same calls give the same plans and events."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._policy = POLICIES[config.policy].from_config(config)
        self._lifecycle = Lifecycle(config.preemption_mode)
        self._intake = Intake(config, self._policy, self._lifecycle)
        self._planner = Planner(config, self._policy, self._lifecycle)
        self._results = ResultReader(self._lifecycle, config.enable_prefix_caching)
        self._workers: dict[str, Worker] = {}
        self._events: list[Event] = []

    # Workers

    def add_worker(self, spec: WorkerSpec, now: float) -> None:
        """A worker is connected, with empty slots and blocks. Its model is known from now on.

        Raises:
            DuplicateWorkerError: one of that name is connected.
        """
        if spec.worker_id in self._workers:
            raise DuplicateWorkerError(spec.worker_id)
        config = self.config
        worker = Worker(
            spec, config.max_num_seqs, config.max_num_batched_tokens, config.pipeline_depth, config.watermark
        )
        if config.admission == "predicted":
            worker.forecast = self._lifecycle.estimates
        models = self._lifecycle.models
        if spec.model not in models:
            models[spec.model] = Model(spec.model, WaitingQueue(self._policy))
        models[spec.model].add(worker)
        self._workers[spec.worker_id] = worker

    def remove_worker(self, worker_id: str, now: float) -> list[Event]:
        """A worker is lost, with all that was in flight. What ran there is queued again, or ends where it has
        lost too many workers without progress. Unknown: nothing."""
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return []
        self._lifecycle.models[worker.spec.model].remove(worker)
        self._lifecycle.lose(worker)
        most = self.config.max_moves_without_progress
        return [self._lifecycle.move_from_lost(r, worker, most, now) for r in worker.running]

    def drain_worker(self, worker_id: str, now: float) -> list[Event]:
        """Moves what runs on a worker back to the queue and plans nothing more there. Results of plans that
        it has are still applied. Idempotent.

        Raises:
            UnknownWorkerError: no such worker.
        """
        worker = self._worker(worker_id)
        worker.draining = True
        events: list[Event] = [self._lifecycle.preempt(r, worker, "drain", now) for r in worker.running]
        worker.compact()
        worker.host.drop_all()
        return events

    def _worker(self, worker_id: str) -> Worker:
        try:
            return self._workers[worker_id]
        except KeyError:
            raise UnknownWorkerError(worker_id) from None

    def budget_tokens(self, worker_id: str) -> int:
        """The most tokens in the worker's last plan: less than usual where a target between tokens says so.
        Raises UnknownWorkerError."""
        return self._worker(worker_id).step_budget

    def least_step_ms(self, worker_id: str) -> float | None:
        """Milliseconds of a step of the worker in which one candidate decodes, as far as that was measured.
        Raises UnknownWorkerError."""
        return self._worker(worker_id).step_time.least_ms

    def models(self) -> tuple[str, ...]:
        """Models that a worker has been connected for. Requests for others are refused."""
        return tuple(self._lifecycle.models)

    # Requests

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._intake.draining

    def start_draining(self) -> None:
        """Refuses new requests from now on. Those inside go on."""
        self._intake.draining = True

    def submit(self, spec: RequestSpec, now: float) -> Accepted | Refused:
        """Takes in all n candidates of a request, or none."""
        outcome = self._intake.submit(spec, now)
        if isinstance(outcome, Refused):
            self._lifecycle.counters.requests_refused += spec.n
        return outcome

    def turn_away(self, newcomer: Newcomer, now: float) -> Refused | None:
        """Refuses what submit() would refuse for a full queue whatever the prompt is. None: it may come."""
        refused = self._intake.turn_away(newcomer, now)
        if refused is not None:
            self.note_turned_away(newcomer.num)
        return refused

    def note_turned_away(self, num: int) -> None:
        """Counts candidates that were refused for what queue() says."""
        self._lifecycle.counters.requests_refused += num

    def queue(self) -> tuple[QueueLoad, DrainRate]:
        """What waits now, of all tenants, and how fast it leaves. The second one changes later."""
        return self._lifecycle.load, self._lifecycle.drain_rate

    def restore(
        self, spec: RequestSpec, outputs: Sequence[Sequence[int] | None], now: float
    ) -> Accepted | Refused:
        """Takes in a request that an earlier scheduler had: `outputs` are the tokens that each candidate had,
        None for one that has ended. It was let in before, so queue limits and draining do not apply.

        Raises:
            ValueError: `outputs` has another length than n, or as many tokens as max_tokens of a candidate.
        """
        return self._intake.restore(spec, outputs, now)

    def cancel(self, request_id: str, now: float, index: int | None = None) -> list[Event]:
        """Ends a request, or one candidate of it. Unknown or finished: nothing."""
        # Candidate 0 last, so that the others are not let into the queue first.
        chosen = [r for r in reversed(self._candidates(request_id)) if index is None or r.index == index]
        return self._finish_all(chosen, FinishReason.CANCELLED, now)

    def stop(self, request_id: str, index: int, num_tokens: int, now: float) -> list[Event]:
        """Ends a candidate in whose text a stop string was found: its first `num_tokens` tokens count as its
        output. Unknown or finished: nothing."""
        events: list[Event] = []
        for request in self._candidates(request_id):
            if request.index != index or request.finished:
                continue
            if not 0 <= num_tokens <= len(request.output_ids):
                raise ValueError(f"num_tokens is {num_tokens}; the candidate has {len(request.output_ids)}")
            worker = request.worker
            events.append(self._lifecycle.finish(request, FinishReason.STOP, now, num_outputs=num_tokens))
            if worker is not None:
                worker.compact()
        return events

    def _candidates(self, request_id: str) -> list[Request]:
        return self._lifecycle.requests.get(request_id, [])

    def _finish_all(self, requests: list[Request], reason: FinishReason, now: float) -> list[Event]:
        alive = [request for request in requests if not request.finished]
        workers = {request.worker for request in alive if request.worker is not None}
        events: list[Event] = [self._lifecycle.finish(request, reason, now) for request in alive]
        for worker in workers:
            worker.compact()
        return events

    # Steps

    def plan(self, worker_id: str, now: float) -> StepPlan | None:
        """The worker's next plan, which counts as sent. None: nothing to do, or no credit.

        Raises:
            UnknownWorkerError: no such worker.
        """
        worker = self._worker(worker_id)
        return self._planner.plan(worker, self._lifecycle.models[worker.spec.model], now, self._events)

    def apply(self, worker_id: str, result: StepResult, now: float) -> list[Event]:
        """Takes the result of the worker's oldest unanswered plan.

        Raises:
            ProtocolViolation: it does not answer that plan. Nothing was applied; remove the worker.
            UnknownWorkerError: no such worker.
        """
        return self._results.apply(self._worker(worker_id), result, now)

    def drain_events(self) -> list[Event]:
        """Events of plan() since the last call: admitted, resumed, preempted."""
        events, self._events = self._events, []
        return events

    def take_first_tokens(self) -> list[float]:
        """Seconds from arrival to the first token of those that have got it since the last call."""
        waited_s = self._lifecycle.first_tokens_s
        if not waited_s:
            return []
        taken = list(waited_s)
        waited_s.clear()
        return taken

    # Time

    def expire(self, now: float) -> list[Event]:
        """Ends what has run out of time."""
        events: list[Event] = []
        heap = self._lifecycle.expiries
        while (head := heap.head()) and head[0][0] <= now:
            heap.pop()
            request = head[1]
            expiry = next_expiry(request)
            if expiry is None:
                continue
            if expiry > now:
                heap.push((expiry, request.order), request)
                continue
            deadline = request.spec.deadline
            late = deadline is not None and deadline <= now
            reason = FinishReason.DEADLINE if late else FinishReason.QUEUE_TIMEOUT
            events += self._finish_all([request], reason, now)
        return events

    def next_expiry(self) -> float | None:
        """When to call expire() next, at the latest."""
        head = self._lifecycle.expiries.head()
        return head[0][0] if head else None

    # Looking in

    def reset_prefix_cache(self) -> int:
        """Forgets cached prefixes that no request uses; returns how many blocks that were."""
        return sum(worker.pool.reset_cache() for worker in self._workers.values())

    @property
    def counters(self) -> Counters:
        """Counts so far. They go on counting; do not change them."""
        return self._lifecycle.counters

    def state(self, now: float) -> SchedulerState:
        """Snapshot for operators and metrics."""
        return SchedulerState(
            draining=self.draining,
            workers=tuple(worker_state(worker) for worker in self._workers.values()),
            waiting_requests=self._lifecycle.load.num_waiting,
            running_requests=sum(worker.num_running for worker in self._workers.values()),
            waiting_tokens=self._lifecycle.load.num_tokens,
            counters=self._lifecycle.counters.copy(),
        )

    def requests(self, now: float, after: int = -1, limit: int = 100) -> list[RequestState]:
        """Live candidates by arrival: at most `limit`, from the first one whose order is above `after`."""
        groups = self._lifecycle.requests.values()
        alive = (r for group in groups for r in group if r.order > after and not r.finished)
        return [request_state(request, now) for request in islice(alive, limit)]

    def explain(self, request_id: str, now: float) -> list[Explanation]:
        """Why the candidates of a request do not run, or what became of them. Empty: it is not known,
        or ended too long ago. The time grows with the number of requests that wait."""
        return explain(request_id, self._lifecycle, self.config, now)

    def changes(self, watch: Watch, now: float) -> Changes:
        """What has changed since `watch` was last given here; everything, where it never was."""
        return watch.look(self._workers, self._lifecycle, self.config, now)

    def block_map(self, worker_id: str) -> BlockMap:
        """What each block of a worker holds, in time that grows with their number.

        Raises:
            UnknownWorkerError: no such worker.
        """
        return block_map(self._worker(worker_id))

    def check(self) -> None:
        """Verifies every invariant, in time that grows with all there is.

        Raises:
            InvariantError: naming all that do not hold.
        """
        violations = find_violations(self._workers, self._lifecycle)
        if violations:
            raise InvariantError(violations)
