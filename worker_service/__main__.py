"""Runs a worker: `python -m worker_service --model PATH`. Sets the environment before torch reads it."""

from __future__ import annotations

import gc
import os
import sys

# Threads that spin at a barrier take time slices from the scheduler and from other workers on the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TQDM_DISABLE", "1")  # progress is told by GetStatus and the log

from pydantic import ValidationError

from worker_service.config import load_config


def main() -> int:
    """Runs until the worker is told to stop: 0. Bad options: 2. Cannot start: 1."""
    # A start makes a million objects that stay: to look through them again and again takes half a second.
    gc.disable()
    try:
        config = load_config()
    except ValidationError as error:
        for problem in error.errors():
            name = "-".join(str(part) for part in problem["loc"]).replace("_", "-")
            where = f"--{name}: " if name else ""  # no name: several options do not go together
            print(f"worker_service: {where}{problem['msg']}", file=sys.stderr)  # noqa: T201
        print("worker_service: see --help", file=sys.stderr)  # noqa: T201
        return 2
    except (FileNotFoundError, ValueError) as error:
        print(f"worker_service: {error}", file=sys.stderr)  # noqa: T201
        return 2

    import logging

    import uvloop

    from worker_service.logs import setup_logging
    from worker_service.server import StartError, serve

    setup_logging(config.log_level, config.log_format)
    try:
        uvloop.run(serve(config))
    except StartError as error:
        logging.getLogger(__name__).error(str(error))
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread may still be inside torch, which must not meet a dying interpreter.
    os._exit(status)
