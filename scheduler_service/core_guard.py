"""Owns the core, and what is done when a bug shows in it: who ends with an error, and when a new core begins.

Requests on the worker that was being served end, everything else goes on. If the core's invariants do not
hold after that, all requests end and a new core takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from scheduler_service.connected_workers import ConnectedWorkers
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.events import Finished, FinishReason
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.delivery import Delivery
from scheduler_service.logs import EventLog, new_incident_id

_ALL = 1 << 62  # as a limit: no limit

_log = EventLog("engine")


class EngineFaultError(Exception):
    """A bug in the core met a call. What is known of it is in the log, under `incident_id`."""

    def __init__(self, incident_id: str) -> None:
        super().__init__(f"incident {incident_id}")
        self.incident_id = incident_id


class CoreGuard:
    """The core of the moment, and the containment of its faults."""

    def __init__(
        self,
        core: Scheduler,
        new_core: Callable[[SchedulerConfig], Scheduler],
        workers: ConnectedWorkers,
        delivery: Delivery,
        clock: Callable[[], float],
        on_contained: Callable[[], None],
    ) -> None:
        """`on_contained` is called once a fault is dealt with: workers may be gone, and room be free."""
        self.core = core
        """Do not keep it: another one may take its place."""
        self._new_core = new_core
        self._workers = workers
        self._delivery = delivery
        self._clock = clock
        self._on_contained = on_contained

    def contain_call(self, request_id: str | None, doomed: Sequence[str] = ()) -> str:
        """A call has raised what is being handled: these requests end with an error. Returns the incident's
        id."""
        incident_id = self._report(request_id=request_id)
        self.fail(doomed, incident_id)
        return incident_id

    def contain_worker(self, worker_id: str) -> None:
        """A bug showed while a worker was served: its requests end with an error, its stream begins anew."""
        incident_id = self._report(worker_id=worker_id)
        self._workers.drop(worker_id, _reason(incident_id))
        core, now = self.core, self._clock()
        try:
            states = core.requests(now, limit=_ALL)
            doomed = [state.request_id for state in states if state.worker_id == worker_id]
            self._delivery.deliver(core.drain_events())
            self._delivery.deliver(core.remove_worker(worker_id, now))
        except Exception:
            self.start_over(incident_id)
            self._on_contained()
        else:
            self.fail(doomed, incident_id)

    def fail(self, request_ids: Sequence[str], incident_id: str) -> None:
        """Ends these requests with an error. If that does not leave a sound core, begins with a new one."""
        try:
            for request_id in request_ids:
                self._fail_one(request_id, incident_id)
            self.core.check()
        except Exception:
            self.start_over(incident_id)
        self._on_contained()

    def start_over(self, incident_id: str) -> None:
        """Ends all requests with an error, and all streams, and begins with a new core."""
        _log.error("core_replaced", incident_id=incident_id)
        for worker_id in list(self._workers.links):
            self._workers.drop(worker_id, _reason(incident_id))
        draining = self.core.draining
        self.core = self._new_core(self.core.config)
        if draining:
            self.core.start_draining()
        self._delivery.fail_all(incident_id)

    def _report(self, **names: str | None) -> str:
        incident_id = new_incident_id()
        _log.error("core_fault", incident_id=incident_id, **names)
        return incident_id

    def _fail_one(self, request_id: str, incident_id: str) -> None:
        ends = self.core.cancel(request_id, self._clock())
        detail = f"incident {incident_id}"
        self._delivery.deliver(
            replace(end, reason=FinishReason.ERROR, detail=detail) if isinstance(end, Finished) else end
            for end in ends
        )


def _reason(incident_id: str) -> str:
    return f"internal error, incident {incident_id}"
