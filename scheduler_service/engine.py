"""Owns the one loop: asks the core for plans, hands them to links, applies results, has events delivered.

It runs on one event loop, in one thread, without gRPC, and sleeps while there is nothing to do. All submits,
results and cancels of one turn of the event loop are followed by one round of planning.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from scheduler_service.core.admission import Accepted, DrainRate, Newcomer, QueueLoad, RefusalReason, Refused
from scheduler_service.core.block_map import BlockMap
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import InvariantError, ProtocolViolation
from scheduler_service.core.events import Event, Finished, FinishReason, Preempted
from scheduler_service.core.explain import Explanation
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.state import RequestState, SchedulerState
from scheduler_service.core.step import StepPlan, StepResult
from scheduler_service.core.watch import Changes, Watch
from scheduler_service.delivery import Delivery, EventSink
from scheduler_service.expiry_timer import ExpiryTimer
from scheduler_service.journal import Journal
from scheduler_service.journal_codec import SavedRequest
from scheduler_service.journaled_delivery import JournaledDelivery
from scheduler_service.latency_log import LatencyLog
from scheduler_service.logs import EventLog, new_incident_id
from scheduler_service.plan_codec import StepTimings
from scheduler_service.served_model import ServedModel
from scheduler_service.step_log import StepLog
from scheduler_service.telemetry import RequestTrace, Telemetry
from scheduler_service.workers import WorkerInfo, WorkerRegistry, WorkerStatus

__all__ = ["Accepted", "Engine", "EngineFaultError", "EventSink", "RefusalReason", "Refused", "ServedModel"]

_ALL = 1 << 62  # as a limit: no limit

_STEPS_PER_TARGET_CHECK = 256

_log = EventLog("engine")


class EngineFaultError(Exception):
    """A bug in the core met a call. What is known of it is in the log, under `incident_id`."""

    def __init__(self, incident_id: str) -> None:
        super().__init__(f"incident {incident_id}")
        self.incident_id = incident_id


class PlanLink(Protocol):
    """The engine's view of a worker's stream."""

    def send(self, plan: StepPlan, traceparent: str = "") -> None:
        """Sends a plan, in order, without waiting. The header is its span's; empty: it has none."""

    def send_notice(self, steps: Sequence[int], slot: int, admitted_seq: int) -> None:
        """Has the worker record the spans of steps, by seq, and of the sampled request that has left the slot
        which the plan `admitted_seq` gave it."""

    def abort(self, reason: str) -> None:
        """Ends the stream. A new one is opened later."""


class Engine:
    """Drives the core for the frontend (submit, cancel, stop), the links and the operators.

    Bugs in the core are contained: requests on the worker that was being served end with an error, everything
    else goes on. If the core's invariants do not hold after that, all requests end so and a new core begins.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        registry: WorkerRegistry,
        telemetry: Telemetry | None = None,
        clock: Callable[[], float] = time.monotonic,
        journal: Journal | None = None,
        new_core: Callable[[SchedulerConfig], Scheduler] = Scheduler,
    ) -> None:
        """Requests outlive this process if there is a journal."""
        self.draining = False
        """Whether new requests are refused. See start_draining()."""
        self.on_ready_change: Callable[[bool], None] = lambda ready: None
        self.on_round: Callable[[], None] = lambda: None
        """Called after each round of planning."""
        self.ready = False
        self._config = config
        self._registry = registry
        self._telemetry = telemetry or Telemetry()
        self._clock = clock
        self._new_core = new_core
        self._core = new_core(config)
        self.on_closed: Callable[[str], None] = lambda request_id: None
        """Called, where there is a journal, when all that a request has was handed out."""
        self.reserved_ids: Container[str] = frozenset()
        """Names of requests that an earlier process had and that are still to be restored."""
        self._delivery = self._new_delivery(journal)
        self.steps = StepLog()
        """The last steps of each worker."""
        self.latencies = LatencyLog(clock())
        """How long tokens took over the last hour."""
        self._links: dict[str, PlanLink] = {}  # of workers that the core knows
        self._round_due = False
        self._expiry_timer = ExpiryTimer(clock, self._expire)

    def _new_delivery(self, journal: Journal | None) -> Delivery:
        if journal is None:
            return Delivery(self._telemetry, self._clock, self._fail_request)
        return JournaledDelivery(
            journal,
            self._registry.models,
            self._telemetry,
            self._clock,
            self._fail_request,
            lambda request_id: self.on_closed(request_id),
        )

    # For the frontend

    def now(self) -> float:
        """Seconds on the monotonic clock that deadlines use."""
        return self._clock()

    def models(self) -> dict[str, ServedModel]:
        """Models that workers serve or have served, by name. Do not change it."""
        return self._registry.models()

    def submit(self, spec: RequestSpec) -> Accepted | Refused:
        """Queues a request, or says why not. Events go to `spec.sink`, an EventSink, from later turns on.

        Raises:
            EngineFaultError: a bug. The request is not queued.
        """
        return self._take_in(spec, self._core.submit, self._delivery.open)

    def turn_away(self, newcomer: Newcomer) -> Refused | None:
        """Refuses what submit() would refuse for a full queue whatever the prompt is. None: it may come."""
        if self._is_in_use(newcomer.request_id):
            return None  # submit() says that
        refused = self._core.turn_away(newcomer, self.now())
        if refused is not None:
            _log.repeated("request_refused", refused.reason.value, request_id=refused.request_id)
            self._telemetry.request_refused(refused.reason.value)
        return refused

    def note_turned_away(self, num: int) -> None:
        """Counts candidates that a frontend has refused for what queue() says."""
        self._core.note_turned_away(num)
        self._telemetry.request_refused("turned_away_by_frontend", num)

    def queue(self) -> tuple[QueueLoad, DrainRate]:
        """What waits now, and how fast it leaves."""
        return self._core.queue()

    def restore(self, saved: SavedRequest, sink: EventSink) -> Accepted | Refused:
        """Queues a request that an earlier process had not finished. Its sink is not told of what it had.

        Raises:
            EngineFaultError: a bug. The request is not queued.
        """
        delivery = self._delivery
        if not isinstance(delivery, JournaledDelivery):
            raise TypeError("an engine without a journal has nothing to restore")
        outputs = [None if each.end is not None else each.token_ids for each in saved.candidates]
        return self._take_in(
            saved.spec(self.now(), sink),
            lambda spec, now: self._core.restore(spec, outputs, now),
            partial(delivery.reopen, saved),
        )

    def _take_in(
        self,
        spec: RequestSpec,
        ask: Callable[[RequestSpec, float], Accepted | Refused],
        note: Callable[[RequestSpec, float, RequestTrace | None], None],
    ) -> Accepted | Refused:
        if self._is_in_use(spec.request_id):
            return Refused(spec.request_id, RefusalReason.DUPLICATE_ID)
        now = self.now()
        trace = self._telemetry.request(spec, now)
        if trace is not None:
            spec = replace(spec, traceparent=trace.traceparent)
        try:
            answer = ask(spec, now)
        except Exception:
            incident_id = self._report("core_fault", request_id=spec.request_id)
            self._recover(incident_id, [])
            raise EngineFaultError(incident_id) from None
        if isinstance(answer, Refused):
            _log.repeated("request_refused", answer.reason.value, request_id=spec.request_id)
            self._telemetry.request_refused(answer.reason.value)
            if trace is not None:
                trace.refused(answer.reason.value, now)
            return answer
        note(spec, now, trace)
        self._wake()
        return answer

    def _is_in_use(self, request_id: str) -> bool:
        # A request may have ended, and not have been told of it.
        return self._delivery.is_open(request_id) or request_id in self.reserved_ids

    def is_live(self, request_id: str, sink: EventSink) -> bool:
        """Whether the request with that name and sink has not ended."""
        return self._delivery.is_open(request_id, sink=sink)

    def cancel(
        self,
        request_id: str,
        index: int | None = None,
        *,
        sink: EventSink | None = None,
        tenant: str | None = None,
    ) -> bool:
        """Ends a request, or one candidate of it, if its sink and tenant are those that are given. Whether it
        was live."""
        if not self._delivery.is_open(request_id, index, sink=sink, tenant=tenant):
            return False
        if sink is not None:
            self._delivery.abandon(request_id)
        self._change(lambda: self._core.cancel(request_id, self.now(), index), request_id)
        return True

    def stop(self, request_id: str, index: int, num_tokens: int, *, sink: EventSink | None = None) -> None:
        """Ends a candidate since a stop string was found in its first `num_tokens` tokens."""
        if self._delivery.is_open(request_id, index, sink=sink):
            self._change(lambda: self._core.stop(request_id, index, num_tokens, self.now()), request_id)

    # For links

    def worker_ready(self, worker_id: str, info: WorkerInfo, link: PlanLink) -> None:
        """A worker's hello came. Raises WorkerRefusedError."""
        spec = info.to_core(worker_id)
        record = self._registry.accept(worker_id, info, self._delivery.uses_model(info.model.name))
        names = {"worker_id": worker_id, "address": record.address, "incarnation": info.incarnation}
        if record.status is WorkerStatus.DRAINING:
            _log.info("worker_draining", **names)
            return
        self._core.add_worker(spec, self.now())
        self._links[worker_id] = link
        self._telemetry.worker_ready(worker_id, link.send_notice)
        _log.info("worker_ready", **names, model=info.model.name, num_blocks=info.num_blocks)
        self._note_ready()
        self._wake()

    def worker_lost(self, worker_id: str, reason: str, *, expected: bool = False) -> None:
        """A worker's stream has ended, or could not be opened. Its requests are queued again."""
        self._registry.lost(worker_id, reason)
        self._forget_steps(worker_id)
        link = self._links.pop(worker_id, None)
        if link is None:
            return
        write = _log.info if expected else _log.warning
        write("worker_lost", worker_id=worker_id, reason=reason)
        link.abort(reason)
        self._telemetry.worker_lost(worker_id, self.now())
        self._change(lambda: self._core.remove_worker(worker_id, self.now()))
        self._note_ready()

    def step_done(self, worker_id: str, result: StepResult, timings: StepTimings) -> None:
        """A result came."""
        if worker_id not in self._links:
            return
        now = self.now()
        counters = self._core.counters
        outputs = counters.output_tokens
        try:
            events = self._core.apply(worker_id, result, now)
        except ProtocolViolation as error:
            self.worker_lost(worker_id, str(error))
            return
        except Exception:
            self._contain(worker_id)
            return
        step = self.steps.answered(worker_id, timings.computing_s, now)
        outputs = counters.output_tokens - outputs
        self.latencies.step(worker_id, step, outputs, self._core.take_first_tokens())
        if self._config.target_itl_ms is not None and result.seq % _STEPS_PER_TARGET_CHECK == 0:
            self._check_target(worker_id, self._config.target_itl_ms)
        # Planning comes before the work that the events cause.
        self._wake()
        self._telemetry.step_done(worker_id, result.seq, timings, now)
        self._delivery.deliver(events)

    def _check_target(self, worker_id: str, target_ms: float) -> None:
        """Says so where a worker can't keep the target even without prompts."""
        least_ms = self._core.least_step_ms(worker_id)
        if least_ms is not None and least_ms > target_ms:
            _log.repeated(
                "target_itl_too_low",
                worker_id,
                worker_id=worker_id,
                target_itl_ms=target_ms,
                allowed=f"above {least_ms:.1f}, which is what a step with one decode takes there",
            )

    def _forget_steps(self, worker_id: str) -> None:
        self.steps.forget(worker_id)
        self.latencies.forget(worker_id)

    # For operators

    def start_draining(self) -> None:
        """Refuses new requests from now on."""
        self.draining = True
        self._core.start_draining()
        self._note_ready()

    async def wait_idle(self) -> None:
        """Returns once no request is live."""
        await self._delivery.idle.wait()

    def drain_worker(self, worker_id: str) -> int:
        """Moves a worker's requests to others and gives it nothing new. Returns how many. Raises KeyError."""
        self._registry.drain(worker_id)
        if worker_id not in self._links:
            return 0
        _log.info("worker_draining", worker_id=worker_id)
        events = self._change(lambda: self._core.drain_worker(worker_id, self.now()))
        self._note_ready()
        return sum(isinstance(event, Preempted) for event in events)

    def reset_prefix_cache(self) -> int:
        """Forgets cached prefixes that no request uses. Returns how many blocks that were."""
        return self._core.reset_prefix_cache()

    def state(self) -> SchedulerState:
        """A snapshot between two steps."""
        return self._core.state(self.now())

    def requests(self, after: int, limit: int) -> list[RequestState]:
        """Live candidates in order of arrival, from the first one whose order is above `after`."""
        return self._core.requests(self.now(), after, limit)

    def explain(self, request_id: str) -> list[Explanation]:
        """Why the candidates of a request do not run, or what became of them. Empty: it is not known."""
        return self._core.explain(request_id, self.now())

    def changes(self, watch: Watch) -> Changes:
        """What has changed since `watch` was last given here; everything, where it never was."""
        return self._core.changes(watch, self.now())

    def block_map(self, worker_id: str) -> BlockMap:
        """What each block of a worker holds. Raises UnknownWorkerError: it is not connected."""
        return self._core.block_map(worker_id)

    def violations(self) -> list[str]:
        """Invariants of the core that do not hold."""
        try:
            self._core.check()
        except InvariantError as error:
            return error.violations
        return []

    # The loop

    def _wake(self) -> None:
        """Makes a round of planning due in this turn of the event loop."""
        if not self._round_due:
            self._round_due = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        self._round_due = False
        now = self.now()
        worker_ids = self._by_load()
        while worker_ids:
            worker_ids = [worker_id for worker_id in worker_ids if self._plan(worker_id, now)]
        self._delivery.deliver(self._core.drain_events())
        self._telemetry.look_at_queue(self.explain, now)
        self._expiry_timer.set(self._core.next_expiry())
        self.on_round()

    def _by_load(self) -> list[str]:
        """Workers, the emptiest first, since the first to plan takes the head of the queue."""
        if len(self._links) < 2:
            return list(self._links)
        states = [state for state in self.state().workers if state.worker_id in self._links]
        states.sort(key=lambda state: state.running_requests / state.num_slots)
        return [state.worker_id for state in states]

    def _plan(self, worker_id: str, now: float) -> bool:
        """Sends a worker its next plan. False: it has no credit, or there is nothing to do."""
        link = self._links.get(worker_id)
        if link is None:
            return False
        core = self._core
        prefill_tokens = core.counters.prefill_tokens
        try:
            plan = core.plan(worker_id, now)
            if plan is None:
                return False
            prefill_tokens = core.counters.prefill_tokens - prefill_tokens
            self.steps.sent(worker_id, plan, prefill_tokens, core.budget_tokens(worker_id))
            link.send(plan, self._telemetry.plan_sent(worker_id, plan, prefill_tokens, now))
        except Exception:
            self._contain(worker_id)
            return False
        return True

    def _expire(self) -> None:
        self._change(lambda: self._core.expire(self.now()))

    def _change(self, change: Callable[[], list[Event]], request_id: str | None = None) -> list[Event]:
        """Makes a change in the core, delivers its events and has a round of planning follow."""
        try:
            events = change()
        except Exception:
            incident_id = self._report("core_fault", request_id=request_id)
            self._recover(incident_id, [] if request_id is None else [request_id])
            events = []
        self._wake()
        self._delivery.deliver(events)
        return events

    def _note_ready(self) -> None:
        ready = not self.draining and any(model.ready_workers for model in self.models().values())
        if ready != self.ready:
            self.ready = ready
            self.on_ready_change(ready)

    # Faults

    def _report(self, event: str, **fields: str | None) -> str:
        incident_id = new_incident_id()
        _log.error(event, incident_id=incident_id, **fields)
        return incident_id

    def _contain(self, worker_id: str) -> None:
        """A bug showed while a worker was served: its requests end with an error, its stream begins anew."""
        incident_id = self._report("core_fault", worker_id=worker_id)
        reason = f"internal error, incident {incident_id}"
        link = self._links.pop(worker_id, None)
        if link is not None:
            link.abort(reason)
        self._registry.lost(worker_id, reason)
        self._forget_steps(worker_id)
        self._telemetry.worker_lost(worker_id, self.now())
        try:
            states = self._core.requests(self.now(), limit=_ALL)
            doomed = [state.request_id for state in states if state.worker_id == worker_id]
            self._delivery.deliver(self._core.drain_events())
            self._delivery.deliver(self._core.remove_worker(worker_id, self.now()))
        except Exception:
            self._start_over(incident_id)
        else:
            self._recover(incident_id, doomed)
        self._note_ready()

    def _recover(self, incident_id: str, request_ids: list[str]) -> None:
        """Ends these requests with an error. If that does not leave a sound core, begins with a new one."""
        try:
            for request_id in request_ids:
                self._fail(request_id, incident_id)
            self._core.check()
        except Exception:
            self._start_over(incident_id)
        self._wake()

    def _fail_request(self, request_id: str, incident_id: str) -> None:
        """Ends a request whose sink failed."""
        self._recover(incident_id, [request_id])

    def _fail(self, request_id: str, incident_id: str) -> None:
        ends = self._core.cancel(request_id, self.now())
        detail = f"incident {incident_id}"
        self._delivery.deliver(
            replace(end, reason=FinishReason.ERROR, detail=detail) if isinstance(end, Finished) else end
            for end in ends
        )

    def _start_over(self, incident_id: str) -> None:
        _log.error("core_replaced", incident_id=incident_id)
        reason = f"internal error, incident {incident_id}"
        for worker_id, link in self._links.items():
            link.abort(reason)
            self._registry.lost(worker_id, reason)
            self._forget_steps(worker_id)
            self._telemetry.worker_lost(worker_id, self.now())
        self._links.clear()
        self._core = self._new_core(self._config)
        if self.draining:
            self._core.start_draining()
        self._delivery.fail_all(incident_id)
        self._note_ready()
