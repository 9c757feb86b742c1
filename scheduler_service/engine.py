"""Owns the engine's face: what frontends, links and operators ask of the core, and what follows from it.

It runs on one event loop, in one thread, without gRPC, and sleeps while there is nothing to do. The parts:
the workers (connected_workers.py), plans and results (step_exchange.py), faults (core_guard.py), events on
their way to sinks (delivery.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial

from scheduler_service.connected_workers import ConnectedWorkers, PlanLink
from scheduler_service.core.admission import Accepted, Newcomer, RefusalReason, Refused
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import ProtocolViolation
from scheduler_service.core.events import Event, Preempted
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.step import StepResult
from scheduler_service.core_guard import CoreGuard, EngineFaultError
from scheduler_service.core_view import CoreView
from scheduler_service.delivery import Delivery, EventSink
from scheduler_service.expiry_timer import ExpiryTimer
from scheduler_service.journal import Journal
from scheduler_service.journal_codec import SavedRequest
from scheduler_service.journaled_delivery import JournaledDelivery
from scheduler_service.logs import EventLog
from scheduler_service.plan_codec import StepTimings
from scheduler_service.served_model import ServedModel
from scheduler_service.step_exchange import StepExchange
from scheduler_service.telemetry import RequestTrace, Telemetry
from scheduler_service.workers import WorkerInfo, WorkerRegistry, WorkerStatus

_log = EventLog("engine")


class Engine(CoreView):
    """Drives the core for the frontend (submit, cancel, stop), the links and the operators."""

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
        self._registry = registry
        self._telemetry = telemetry or Telemetry()
        self._clock = clock
        self.on_closed: Callable[[str], None] = lambda request_id: None
        """Called, where there is a journal, when all that a request has was handed out."""
        self.reserved_ids: Container[str] = frozenset()
        """Names of requests that an earlier process had and that are still to be restored."""
        self._delivery = self._new_delivery(journal)
        self._workers = ConnectedWorkers(registry, self._telemetry, clock)
        guard = CoreGuard(
            new_core(config), new_core, self._workers, self._delivery, clock, self._fault_contained
        )
        super().__init__(guard, self._workers, clock)
        self._exchange = StepExchange(
            guard, self._workers, self._delivery, self._telemetry, clock, self._round_made
        )
        self._expiry_timer = ExpiryTimer(clock, self._expire)

    def _new_delivery(self, journal: Journal | None) -> Delivery:
        if journal is None:
            return Delivery(self._telemetry, self._clock, self._sink_failed)
        return JournaledDelivery(
            journal,
            self._registry.models,
            self._telemetry,
            self._clock,
            self._sink_failed,
            lambda request_id: self.on_closed(request_id),
        )

    def _sink_failed(self, request_id: str, incident_id: str) -> None:
        self._guard.fail([request_id], incident_id)

    # For the frontend

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
            self._note_refused(refused)
        return refused

    def _note_refused(self, refused: Refused) -> None:
        reason, numbers = refused.reason.value, {}
        if refused.limit:
            numbers = {"requested": refused.requested, "current": refused.current, "limit": refused.limit}
        _log.repeated("request_refused", reason, request_id=refused.request_id, reason=reason, **numbers)
        self._telemetry.request_refused(reason)

    def note_turned_away(self, num: int) -> None:
        """Counts candidates that a frontend has refused for what queue() says."""
        self._core.note_turned_away(num)
        self._telemetry.request_refused("turned_away_by_frontend", num)

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
            raise EngineFaultError(self._guard.contain_call(spec.request_id)) from None
        if isinstance(answer, Refused):
            self._note_refused(answer)
            if trace is not None:
                trace.refused(answer.reason.value, now)
            return answer
        note(spec, now, trace)
        self._exchange.wake()
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
        self._workers.add(worker_id, link)
        _log.info("worker_ready", **names, model=info.model.name, num_blocks=info.num_blocks)
        self._note_ready()
        self._exchange.wake()

    def worker_lost(self, worker_id: str, reason: str, *, expected: bool = False) -> None:
        """A worker's stream has ended, or could not be opened. Its requests are queued again."""
        if not self._workers.drop(worker_id, reason):
            return
        write = _log.info if expected else _log.warning
        write("worker_lost", worker_id=worker_id, reason=reason)
        self._change(lambda: self._core.remove_worker(worker_id, self.now()))
        self._note_ready()

    def step_done(self, worker_id: str, result: StepResult, timings: StepTimings) -> None:
        """A result came."""
        if worker_id not in self._workers.links:
            return
        try:
            self._exchange.take(worker_id, result, timings)
        except ProtocolViolation as error:
            self.worker_lost(worker_id, str(error))

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
        if worker_id not in self._workers.links:
            return 0
        _log.info("worker_draining", worker_id=worker_id)
        events = self._change(lambda: self._core.drain_worker(worker_id, self.now()))
        self._note_ready()
        return sum(isinstance(event, Preempted) for event in events)

    def reset_prefix_cache(self) -> int:
        """Forgets cached prefixes that no request uses. Returns how many blocks that were."""
        return self._core.reset_prefix_cache()

    # What follows

    def _change(self, change: Callable[[], list[Event]], request_id: str | None = None) -> list[Event]:
        """Makes a change in the core, delivers its events and has a round of planning follow."""
        try:
            events = change()
        except Exception:
            self._guard.contain_call(request_id, [] if request_id is None else [request_id])
            events = []
        self._exchange.wake()
        self._delivery.deliver(events)
        return events

    def _expire(self) -> None:
        self._change(lambda: self._core.expire(self.now()))

    def _round_made(self) -> None:
        self._expiry_timer.set(self._core.next_expiry())
        self.on_round()

    def _fault_contained(self) -> None:
        self._note_ready()
        self._exchange.wake()

    def _note_ready(self) -> None:
        ready = not self.draining and any(model.ready_workers for model in self.models().values())
        if ready != self.ready:
            self.ready = ready
            self.on_ready_change(ready)
