"""Owns a heap of candidates in lanes, whose turns the policy `fair` counts. Decides nothing about turns."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from scheduler_service.core.request_heap import Key, RequestHeap

if TYPE_CHECKING:
    from scheduler_service.core.policies.fair import Fair
    from scheduler_service.core.request import Request

Lane = tuple[str, ...]


class TenantHeap(RequestHeap):
    """The first candidate of the lane that stands lowest. Costs O(log n) more than a plain heap, amortised:
    standings only rise, so a lane whose standing was noted too low sinks when it surfaces."""

    def __init__(self, policy: Fair) -> None:
        super().__init__()
        self._policy = policy
        self._lanes: dict[Lane, RequestHeap] = {}
        self._turns: list[tuple[float, Lane]] = []  # one for each lane, with a standing that it once had

    def push(self, key: Key, request: Request) -> None:
        """Adds an entry; a lane that was empty wakes."""
        lane = self._policy.lane(request)
        if lane not in self._lanes:
            self._policy.wake(lane)
        self.put_back(key, request)

    def put_back(self, key: Key, request: Request) -> None:
        """Returns an entry. Its lane stands where it stood."""
        lane = self._policy.lane(request)
        if lane not in self._lanes:
            self._lanes[lane] = RequestHeap()
            heapq.heappush(self._turns, (self._policy.standing(lane), lane))
        self._lanes[lane].push(key, request)

    def head(self) -> tuple[Key, Request] | None:
        """The first live entry of the lane whose turn it is."""
        lane = self._next_lane()
        return lane.head() if lane else None

    def peek(self) -> tuple[Key, Request] | None:
        """The same, in time that grows with the number of lanes: no lane is dropped, since one that is filled
        again after that wakes, which moves its turn."""
        live = (lane for lane, heap in self._lanes.items() if heap.head() is not None)
        lane = min(live, key=lambda lane: (self._policy.standing(lane), lane), default=None)
        return None if lane is None else self._lanes[lane].head()

    def pop(self) -> tuple[Key, Request] | None:
        """Takes it out."""
        lane = self._next_lane()
        return lane.pop() if lane else None

    def _next_lane(self) -> RequestHeap | None:
        turns = self._turns
        while turns:
            noted, lane = turns[0]
            if self._lanes[lane].head() is None:
                heapq.heappop(turns)
                del self._lanes[lane]
            elif (standing := self._policy.standing(lane)) > noted:
                heapq.heapreplace(turns, (standing, lane))
            else:
                return self._lanes[lane]
        return None

    def note_finished(self, request: Request) -> None:
        """Tells that an entry's candidate has finished."""
        lane = self._lanes.get(self._policy.lane(request))
        if lane:
            lane.note_finished(request)

    def live(self) -> list[Request]:
        """Every live candidate, in no order."""
        return [request for lane in self._lanes.values() for request in lane.live()]

    def before(self, request: Request) -> list[Request]:
        """Live candidates that come before `request` as the lanes stand now, though each admission moves
        its lane back."""
        own = self._policy.lane(request)
        lower = sorted((self._policy.standing(lane), lane) for lane in self._lanes)
        found: list[Request] = []
        for _, lane in lower:
            if lane == own:
                return found + self._lanes[lane].before(request)
            found += sorted(self._lanes[lane].live(), key=self._policy.waiting_key)
        return []
