"""Owns the command `python -m scheduler_service`."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our own lines tell what fails; read on import

from scheduler_service import logs
from scheduler_service.config import load_config
from scheduler_service.event_loop import run_loop
from scheduler_service.option_sources import ConfigError
from scheduler_service.server import serve


def main() -> int:
    """Runs the service. Returns the exit status: 2 for options that cannot be used."""
    try:
        config = load_config(sys.argv[1:])
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    logs.setup(config.log_level, config.log_format)
    try:
        run_loop(serve(config))
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
