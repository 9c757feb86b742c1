"""Owns the event loop of a process, from its first coroutine to the process's end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

_EXIT_GUARD_S = 5.0


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine on the fastest loop that there is. Once it is done the process ends within seconds."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):  # not every platform has it
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main)
        _guard_exit()


def _guard_exit() -> None:
    """Ends the process although something, such as a thread of a library, should keep it from ending."""

    def end() -> None:
        time.sleep(_EXIT_GUARD_S)
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()
