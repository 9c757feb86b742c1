"""Owns the counts of live candidates by queue: of one model, tenant and priority. Watchers read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from scheduler_service.core.request import Request, RequestSpec

Column = Literal["waiting", "preempted", "running"]


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
    version: int = 0  # of the tally, when this changed last

    @property
    def live(self) -> int:
        """All that are counted."""
        return self.waiting + self.preempted + self.running

    @property
    def empty(self) -> bool:
        """Whether nobody is counted."""
        return not self.live


def column_of(request: Request) -> Column:
    """Where a live candidate is counted."""
    if request.worker is not None:
        return "running"
    return "preempted" if request.was_admitted else "waiting"


class QueueTally:
    """Counts by key, of those keys that have live candidates."""

    def __init__(self) -> None:
        self.queues: dict[QueueKey, QueueCounts] = {}
        self.version = 0
        """Grows with each change."""

    def figures(self) -> dict[QueueKey, tuple[int, int, int, int]]:
        """All counts: waiting, preempted, running, and tokens."""
        return {
            key: (counts.waiting, counts.preempted, counts.running, counts.tokens)
            for key, counts in self.queues.items()
        }

    def change(self, spec: RequestSpec, column: Column, num: int, tokens: int = 0) -> None:
        """So many more candidates, and tokens that they are to compute, are in a column of their queue."""
        key = spec.model, spec.tenant, spec.priority  # equal to the QueueKey, and cheaper to make
        counts = self.queues.get(key)  # type: ignore[call-overload]
        if counts is None:
            counts = self.queues[QueueKey(*key)] = QueueCounts()
        setattr(counts, column, getattr(counts, column) + num)
        counts.tokens += tokens
        self.version += 1
        counts.version = self.version
        if counts.empty:
            del self.queues[QueueKey(*key)]
