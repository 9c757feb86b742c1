"""Owns the order in which streams that have something to write get the event loop.

A message to a client costs more time than anything else here, and often hundreds of streams have one at once.
Between turns the loop looks at its sockets, so more urgent work, such as the result of a worker's step, waits
for a few messages only. What a stream gains while it waits goes into the same message.
"""

from __future__ import annotations

import asyncio
from collections import deque

# They take about a millisecond.
_PER_TURN = 16


class Turnstile:
    """Lets a few through in each turn of the event loop, in the order in which they came."""

    def __init__(self, per_turn: int = _PER_TURN) -> None:
        self._per_turn = self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    def enter(self, waiter: asyncio.Future[None]) -> None:
        """Sets the waiter's result once it is its turn, which may be now."""
        self._waiting.append(waiter)
        self._let_in()
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._left = self._per_turn
        self._turning = bool(self._waiting)
        if self._turning:
            self._let_in()
            asyncio.get_running_loop().call_soon(self._turn)

    def _let_in(self) -> None:
        while self._left and self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():  # or else whoever waited has gone
                waiter.set_result(None)
                self._left -= 1
