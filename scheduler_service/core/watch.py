"""Owns what has changed since a watcher looked last: candidates, queues, and why the heads of queues wait.

A look passes once over the live candidates and compares a number of each; values are made of what has changed
alone. It moves nothing, and costs nothing while nobody looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.explain import Blocker, head_blockers
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.request import Request
from scheduler_service.core.state import RequestState, request_state
from scheduler_service.core.worker import Worker

MOST_SHOWN = 2_048
"""How many candidates are shown one by one: the oldest. The rest is in the counts of their queues."""


class QueueKey(NamedTuple):
    """Whose candidates are counted together."""

    model: str
    tenant: str
    priority: int


@dataclass(slots=True)
class QueueCounts:
    """Candidates of one key."""

    waiting: int = 0  # have not run yet
    preempted: int = 0  # have, and wait
    running: int = 0
    tokens: int = 0  # that those who wait are to compute

    @property
    def empty(self) -> bool:
        """Whether nobody is counted."""
        return not (self.waiting or self.preempted or self.running)


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


@dataclass(slots=True)
class _Row:
    """What the watcher knows of a candidate."""

    key: QueueKey
    mark: int = -1  # another one wherever the candidate has moved
    seen_in: int = 0  # number of the look
    shown: bool = False
    column: str = ""  # of QueueCounts, where it is counted
    tokens: int = 0  # that it is counted with


class Watch:
    """What one watcher knows."""

    def __init__(self) -> None:
        self._lifecycle: Lifecycle | None = None
        self._looks = 0
        self._forget()

    def _forget(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._queues: dict[QueueKey, QueueCounts] = {}
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
        self._looks += 1
        changes = Changes(fresh)
        self._look_at_requests(lifecycle, changes, now)
        for worker in workers.values():
            self._look_at_worker(worker, changes)
        self._look_at_heads(lifecycle, config, changes, now)
        return changes

    def _look_at_requests(self, lifecycle: Lifecycle, changes: Changes, now: float) -> None:
        rows, looks, num_live = self._rows, self._looks, 0
        for group in lifecycle.requests.values():
            for request in group:
                if request.finished:
                    continue
                row = rows.get(request.order)
                if row is None:
                    spec = request.spec
                    row = rows[request.order] = _Row(QueueKey(spec.model, spec.tenant, spec.priority))
                mark = _mark(request)
                if row.mark != mark or (not row.shown and num_live < MOST_SHOWN):
                    row.shown = num_live < MOST_SHOWN
                    self._move(row, mark, request, changes)
                    if row.shown:
                        changes.requests.append(request_state(request, now))
                row.seen_in = looks
                num_live += 1
        if len(rows) > num_live:
            self._drop_ended(changes)
        changes.hidden = max(0, num_live - MOST_SHOWN)

    def _move(self, row: _Row, mark: int, request: Request, changes: Changes) -> None:
        column = "running" if request.worker else "preempted" if request.was_admitted else "waiting"
        tokens = 0 if request.worker else request.queue_charge
        self._count(row, changes, -1)
        row.mark, row.column, row.tokens = mark, column, tokens
        self._count(row, changes, 1)

    def _count(self, row: _Row, changes: Changes, num: int) -> None:
        if not row.column:
            return
        counts = self._queues.setdefault(row.key, QueueCounts())
        setattr(counts, row.column, getattr(counts, row.column) + num)
        counts.tokens += num * row.tokens
        changes.queues[row.key] = counts

    def _drop_ended(self, changes: Changes) -> None:
        ended = [(order, row) for order, row in self._rows.items() if row.seen_in != self._looks]
        for order, row in ended:
            del self._rows[order]
            self._count(row, changes, -1)
            if self._queues[row.key].empty:
                del self._queues[row.key]
            if row.shown:
                changes.ended.append(order)

    def _look_at_worker(self, worker: Worker, changes: Changes) -> None:
        """Reads the columns of a worker that has planned or answered since."""
        steps = (worker.seq, len(worker.in_flight))
        name = worker.spec.worker_id
        if self._steps.get(name) == steps:
            return
        self._steps[name] = steps
        rows, running, progress = worker.rows, worker.running, changes.progress
        columns = zip(running, worker.computed[rows].tolist(), worker.held[rows].tolist(), strict=True)
        for request, computed, held in columns:
            if self._rows[request.order].shown:
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
