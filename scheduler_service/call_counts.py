"""Owns how many public RPCs have ended, and how many deltas were written, whichever process served them.

A frontend in a process of its own takes its counts every second and sends them to the engine's process, which
adds them to its own: metrics are read there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

Row = tuple[str, str, int]
"""A method, `package.Service/Method`, the name of a gRPC status, and how many RPCs ended so."""


class CallCounts:
    """Counts of one process, or of all."""

    def __init__(self) -> None:
        self.deltas = 0
        """Messages with tokens or text that were written to clients."""
        self._ended: Counter[tuple[str, str]] = Counter()

    def note_end(self, method: str, status: str) -> None:
        """An RPC has ended."""
        self._ended[method, status] += 1

    def rows(self) -> list[Row]:
        """RPCs that have ended, by method and status."""
        return [(method, status, num) for (method, status), num in list(self._ended.items())]

    def take(self) -> tuple[list[Row], int]:
        """All counts, which begin at zero again."""
        taken = self.rows(), self.deltas
        self._ended.clear()
        self.deltas = 0
        return taken

    def add(self, rows: Iterable[Row], deltas: int) -> None:
        """Adds the counts of another process."""
        for method, status, num in rows:
            self._ended[method, status] += num
        self.deltas += deltas
