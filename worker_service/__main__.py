"""Runs a worker: `python -m worker_service --model PATH`. Sets the environment before torch reads it.

It looks for the model before that, since importing torch takes seconds.
"""

from __future__ import annotations

import gc
import os
import sys

# Threads that spin at a barrier take time slices from the scheduler and from other workers on the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TQDM_DISABLE", "1")  # progress is told by GetStatus and the log
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what fails is told by our own lines

from pydantic import ValidationError

from worker_service.cache import place_compiled_code
from worker_service.config import WorkerConfig, load_config
from worker_service.errors import UnsupportedModelError
from worker_service.model_files import DEMO, find_local


def main() -> int:
    """Runs until the worker is told to stop: 0. Bad options: 2. Cannot start: 1."""
    # A start makes a million objects that stay: to look through them again and again takes half a second.
    gc.disable()
    try:
        config = load_config()
        place_compiled_code()
        config = _with_model(config)
    except ValidationError as error:
        for problem in error.errors():
            name = "-".join(str(part) for part in problem["loc"]).replace("_", "-")
            where = f"--{name}: " if name else ""  # no name: several options do not go together
            print(f"worker_service: {where}{problem['msg']}", file=sys.stderr)  # noqa: T201
        print("worker_service: see --help", file=sys.stderr)  # noqa: T201
        return 2
    except (OSError, ValueError, UnsupportedModelError) as error:
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


def _with_model(config: WorkerConfig) -> WorkerConfig:
    """The options with the demo model's folder, where they name that. Raises for what is no model."""
    if config.model != DEMO:
        find_local(config.model)
        return config
    from worker_service.demo_model import DemoModelError, prepare

    try:
        return config.model_copy(update={"model": str(prepare())})
    except DemoModelError as error:
        raise FileNotFoundError(str(error)) from None


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread may still be inside torch, which must not meet a dying interpreter.
    os._exit(status)
