"""Owns the command `python -m scheduler_service`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from scheduler_service import logs
from scheduler_service.config import ConfigError, ServiceConfig, load_config
from scheduler_service.server import serve

_EXIT_GUARD_S = 5.0


def main() -> int:
    """Runs the service. Returns the exit status: 2 for options that cannot be used."""
    try:
        config = load_config(sys.argv[1:])
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    logs.setup(config.log_level, config.log_format)
    try:
        _run(config)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _run(config: ServiceConfig) -> None:
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):  # not every platform has it
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(serve(config))
        _guard_exit()


def _guard_exit() -> None:
    """Ends the process although something, such as a thread of a library, should keep it from ending."""

    def end() -> None:
        time.sleep(_EXIT_GUARD_S)
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
