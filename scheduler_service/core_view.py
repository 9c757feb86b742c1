"""Owns what operators and watchers may see of the core and of its workers' steps. It changes nothing."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_service.connected_workers import ConnectedWorkers
from scheduler_service.core.admission import DrainRate, QueueLoad
from scheduler_service.core.block_map import BlockMap
from scheduler_service.core.errors import InvariantError
from scheduler_service.core.explain import Explanation
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.state import RequestState, SchedulerState
from scheduler_service.core.watch import Changes, Watch
from scheduler_service.core_guard import CoreGuard


class CoreView:
    """Reads the core of the moment, between two steps."""

    def __init__(self, guard: CoreGuard, workers: ConnectedWorkers, clock: Callable[[], float]) -> None:
        self._guard = guard
        self._clock = clock
        self.steps = workers.steps
        """The last steps of each worker."""
        self.latencies = workers.latencies
        """How long tokens took over the last hour."""

    @property
    def _core(self) -> Scheduler:
        return self._guard.core

    def now(self) -> float:
        """Seconds on the monotonic clock that deadlines use."""
        return self._clock()

    def queue(self) -> tuple[QueueLoad, DrainRate]:
        """What waits now, and how fast it leaves."""
        return self._core.queue()

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
