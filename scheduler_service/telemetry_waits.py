"""Owns what kept requests in the queue: looks at sampled ones that wait, and reasons in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from scheduler_service.core.explain import Blocker, Explanation
from tidegate_telemetry import names
from tidegate_telemetry.spans import Attributes

if TYPE_CHECKING:
    from scheduler_service.telemetry_request import RequestTrace

_MOST_REASONS = 32
_MOST_LOOKS = 8  # of requests in one round of planning
_INTERVAL_S = 0.05


class Waits:
    """Reasons of one candidate. Looks that find the same one are told as one."""

    def __init__(self) -> None:
        self._reasons: list[_Reason] = []

    def note(self, explanation: Explanation, now: float) -> None:
        """What a look has found."""
        if not explanation.blockers:
            return
        reason = ",".join(sorted({blocker.kind.value for blocker in explanation.blockers}))
        if self._reasons and self._reasons[-1].reason == reason:
            self._reasons[-1].num_looks += 1
        elif len(self._reasons) < _MOST_REASONS:
            self._reasons.append(_Reason(now, reason, explanation.blockers, explanation.position))

    def moments(self) -> list[tuple[float, str, Attributes]]:
        """When each reason was first found, and its numbers then."""
        return [(reason.at, names.EVENT_WAITING, reason.attributes()) for reason in self._reasons]


class _Reason:
    def __init__(self, at: float, reason: str, blockers: tuple[Blocker, ...], position: int | None) -> None:
        self.at = at
        self.reason = reason
        self.num_looks = 1
        self._blockers = blockers
        self._ahead = 0 if position is None else position - 1

    def attributes(self) -> Attributes:
        first = self._blockers[0]
        return {
            names.WAIT_REASON: self.reason,
            names.WAIT_TEXT: "; ".join(blocker.text for blocker in self._blockers[:4]),
            names.WAIT_AHEAD: self._ahead,
            names.WAIT_LOOKS: self.num_looks,
            names.WAIT_NEEDED: first.needed,
            names.WAIT_RESERVE: first.reserve,
            names.WAIT_AVAILABLE: first.available,
            names.WAIT_LIMIT: first.limit,
        }


class QueueWatch:
    """Sampled requests that wait. A look costs time that grows with the queue, so there are few of them."""

    def __init__(self) -> None:
        self._fresh: deque[RequestTrace] = deque()
        self._known: deque[RequestTrace] = deque()
        self._next_look = 0.0

    def add(self, trace: RequestTrace) -> None:
        """A request is in the queue."""
        self._fresh.append(trace)

    def look(self, explain: Callable[[str], list[Explanation]], now: float) -> None:
        """Asks for the reasons of those that have come since the last look; of the others now and then."""
        looks = _MOST_LOOKS
        while self._fresh and looks:
            looks -= self._look_at(self._fresh.popleft(), explain, now)
        if self._known and now >= self._next_look:
            self._next_look = now + _INTERVAL_S
            for _ in range(min(looks, len(self._known))):
                self._look_at(self._known.popleft(), explain, now)

    def _look_at(self, trace: RequestTrace, explain: Callable[[str], list[Explanation]], now: float) -> bool:
        """Whether it still waits."""
        if not trace.is_waiting:
            return False
        trace.waits_for(explain(trace.request_id), now)
        self._known.append(trace)
        return True
