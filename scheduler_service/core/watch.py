"""Owns what has changed since a watcher looked last: candidates, queues, and why the heads of queues wait.

A look passes once over the oldest live candidates and compares a number of each; values are made of what has
changed alone. The rest is in the counts of its queues. It moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.explain import Blocker, head_blockers
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.queue_tally import QueueCounts, QueueKey, QueueTally
from scheduler_service.core.request import Request
from scheduler_service.core.state import RequestState, request_state
from scheduler_service.core.worker import Worker

MOST_SHOWN = 2_048
"""How many candidates are shown one by one: the oldest. The rest is in the counts of their queues."""


@dataclass(frozen=True, slots=True)
class Head:
    """The first candidate of a model's queue, and what workers lack for it. No name: the queue is empty."""

    model: str
    request_id: str = ""
    index: int = 0
    blockers: tuple[Blocker, ...] = ()


@dataclass(slots=True)
class Progress:
    """How far running candidates are, as columns."""

    orders: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    computed_tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Changes:
    """Between two looks. Candidates are named by their order of arrival."""

    from_nothing: bool  # whether this is all there is
    requests: list[RequestState] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    queues: dict[QueueKey, QueueCounts] = field(default_factory=dict)
    heads: list[Head] = field(default_factory=list)
    hidden: int = 0


class Watch:
    """What one watcher knows."""

    def __init__(self) -> None:
        self._lifecycle: Lifecycle | None = None
        self._forget()

    def _forget(self) -> None:
        self._marks: dict[int, int] = {}  # of those that are shown, by order of arrival
        self._queues: set[QueueKey] = set()
        self._tally_version = 0
        self._steps: dict[str, tuple[int, int]] = {}  # of workers: plans made, and unanswered
        self._heads: dict[str, Head] = {}

    def look(
        self, workers: Mapping[str, Worker], lifecycle: Lifecycle, config: SchedulerConfig, now: float
    ) -> Changes:
        """What has changed; everything, where these are another core's parts than at the last look."""
        fresh = self._lifecycle is not lifecycle
        if fresh:
            self._lifecycle = lifecycle
            self._forget()
        changes = Changes(fresh)
        self._look_at_requests(lifecycle, changes, now)
        self._look_at_queues(lifecycle.tally, changes)
        for worker in workers.values():
            self._look_at_worker(worker, changes)
        self._look_at_heads(lifecycle, config, changes, now)
        return changes

    def _look_at_requests(self, lifecycle: Lifecycle, changes: Changes, now: float) -> None:
        """Compares a mark of each of the oldest candidates. Who was shown stays among them until the end."""
        before, marks = self._marks, {}
        alive = (r for group in lifecycle.requests.values() for r in group if not r.finished)
        for request in islice(alive, MOST_SHOWN):
            mark = marks[request.order] = _mark(request)
            if before.get(request.order) != mark:
                changes.requests.append(request_state(request, now))
        changes.ended = [order for order in before if order not in marks]
        self._marks = marks

    def _look_at_queues(self, tally: QueueTally, changes: Changes) -> None:
        """Reads the counts that have changed since, and those that are gone."""
        since, self._tally_version = self._tally_version, tally.version
        changes.queues = {key: counts for key, counts in tally.queues.items() if counts.version > since}
        changes.queues |= {key: QueueCounts() for key in self._queues - tally.queues.keys()}
        self._queues = set(tally.queues)
        changes.hidden = sum(map(attrgetter("live"), tally.queues.values())) - len(self._marks)

    def _look_at_worker(self, worker: Worker, changes: Changes) -> None:
        """Reads the columns of a worker that has planned or answered since."""
        steps = (worker.seq, len(worker.in_flight))
        name = worker.spec.worker_id
        if self._steps.get(name) == steps:
            return
        self._steps[name] = steps
        rows, running, progress, marks = worker.rows, worker.running, changes.progress, self._marks
        columns = zip(running, worker.computed[rows].tolist(), worker.held[rows].tolist(), strict=True)
        for request, computed, held in columns:
            if request.order in marks:
                progress.orders.append(request.order)
                progress.output_tokens.append(len(request.output_ids))
                progress.computed_tokens.append(computed)
                progress.blocks.append(held)

    def _look_at_heads(
        self, lifecycle: Lifecycle, config: SchedulerConfig, changes: Changes, now: float
    ) -> None:
        for name, model in lifecycle.models.items():
            first = model.queue.peek()
            head = Head(name)
            if first is not None:
                blockers = head_blockers(first, model, lifecycle, config, now)
                head = Head(name, first.request_id, first.index, blockers)
            if self._heads.get(name) != head:
                self._heads[name] = head
                changes.heads.append(head)


def _mark(request: Request) -> int:
    """A number that changes wherever a candidate moves, or gains a token while it does not run."""
    here = 1 if request.worker is not None else len(request.output_ids) << 1
    return request.num_preemptions << 33 | here
