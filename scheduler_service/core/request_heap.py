"""Owns a heap of candidates with lazy deletion: finished ones stay until they surface or are too many."""

from __future__ import annotations

import heapq

from scheduler_service.core.request import Request

Key = tuple[float, ...]


class RequestHeap:
    """Candidates by key, lowest first. The cost of every operation is O(log n), amortised."""

    def __init__(self) -> None:
        self._entries: list[tuple[Key, Request]] = []
        self._num_dead = 0

    def push(self, key: Key, request: Request) -> None:
        """Adds an entry. No two entries may have the same key."""
        heapq.heappush(self._entries, (key, request))

    def put_back(self, key: Key, request: Request) -> None:
        """Returns an entry that was taken out a moment ago."""
        self.push(key, request)

    def head(self) -> tuple[Key, Request] | None:
        """The lowest entry of a live candidate."""
        entries = self._entries
        while entries and entries[0][1].finished:
            heapq.heappop(entries)
            self._num_dead = max(0, self._num_dead - 1)
        return entries[0] if entries else None

    def peek(self) -> tuple[Key, Request] | None:
        """The lowest entry of a live candidate, found without a change that could ever be noticed."""
        return self.head()

    def pop(self) -> tuple[Key, Request] | None:
        """Takes out the lowest entry of a live candidate."""
        return heapq.heappop(self._entries) if self.head() else None

    def note_finished(self, request: Request) -> None:
        """Tells that an entry's candidate has finished; now and then drops all such entries."""
        self._num_dead += 1
        if self._num_dead > 64 and self._num_dead * 2 > len(self._entries):
            self._entries = [entry for entry in self._entries if not entry[1].finished]
            heapq.heapify(self._entries)
            self._num_dead = 0

    def before(self, request: Request) -> list[Request]:
        """Live candidates with a lower key than `request` has, lowest first. Empty if it is not here."""
        own = next((key for key, each in self._entries if each is request), ())
        return [each for key, each in sorted(self._entries) if key < own and not each.finished]

    def live(self) -> list[Request]:
        """Every live candidate, in no order."""
        return [request for _, request in self._entries if not request.finished]
