"""Owns the one timer for deadlines and queue timeouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# The resolution of event loops' timers.
_SHORTEST_S = 0.001


class ExpiryTimer:
    """Calls back once at the earliest time that it was set to. Later times wait for the next set()."""

    def __init__(self, clock: Callable[[], float], on_due: Callable[[], None]) -> None:
        self._clock = clock
        self._on_due = on_due
        self._handle: asyncio.TimerHandle | None = None
        self._due_at = 0.0

    def set(self, due_at: float | None) -> None:
        """Has the callback come at `due_at`, in seconds of the clock, unless it is due earlier already."""
        if due_at is None or (self._handle is not None and self._due_at <= due_at):
            return
        if self._handle is not None:
            self._handle.cancel()
        self._due_at = due_at
        delay_s = max(_SHORTEST_S, due_at - self._clock())
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._handle = None
        self._on_due()
