"""Owns the candidates of one model that wait, in the policy's order. Decides nothing about them."""

from __future__ import annotations

from scheduler_service.core.policy import Policy
from scheduler_service.core.request import Request


class WaitingQueue:
    """One queue for all workers of a model, so that a request is bound to a worker as late as can be."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap = policy.heap()

    def push(self, request: Request) -> None:
        """Queues a candidate at the place that the policy gives it now."""
        self._heap.push(self._policy.waiting_key(request), request)

    def head(self) -> Request | None:
        """The first one."""
        entry = self._heap.head()
        return entry[1] if entry else None

    def peek(self) -> Request | None:
        """The first one, for who only looks: the queue stays as it is, to its last detail."""
        entry = self._heap.peek()
        return entry[1] if entry else None

    def take(self) -> tuple[tuple[float, ...], Request] | None:
        """Takes out the first one, with its place."""
        return self._heap.pop()

    def put_back(self, skipped: list[tuple[tuple[float, ...], Request]]) -> None:
        """Returns those that were taken out and not admitted to their places."""
        for key, request in skipped:
            self._heap.put_back(key, request)

    def note_finished(self, request: Request) -> None:
        """Tells that a queued candidate has finished."""
        self._heap.note_finished(request)

    def ahead_of(self, request: Request) -> list[Request]:
        """All that come before a candidate that waits here, in their order."""
        return self._heap.before(request)

    def live(self) -> list[Request]:
        """All that wait, in no order."""
        return self._heap.live()
