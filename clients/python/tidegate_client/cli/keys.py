"""Owns single keys from a terminal: no Enter, no echo, while its `with` block runs."""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

with contextlib.suppress(ImportError):  # Windows has neither
    import termios
    import tty


class Keys:
    """Reads keys where stdin is a terminal; elsewhere there are none."""

    def __init__(self) -> None:
        self.enabled = sys.stdin.isatty() and "termios" in globals()
        self._restore: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        if self.enabled:
            file = sys.stdin.fileno()
            before = termios.tcgetattr(file)
            self._restore = lambda: termios.tcsetattr(file, termios.TCSADRAIN, before)
            tty.setcbreak(file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def next(self, timeout_s: float) -> str:
        """The next key; empty if there is none in time."""
        if not self.enabled:
            time.sleep(timeout_s)
            return ""
        ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
        return sys.stdin.read(1) if ready else ""
