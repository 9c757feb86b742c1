"""What the fake services share: they record their start and their orderly end in a file."""

import os
import signal
import sys
import threading
from pathlib import Path

_TRACE = Path(os.environ["FAKE_SERVICES_TRACE"])


def record(*words: object) -> None:
    with _TRACE.open("a") as trace:
        trace.write(" ".join(map(str, words)) + "\n")


def run_until_terminated(name: str) -> None:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    record("started", name, os.getpid(), *sys.argv[1:])
    ended.wait()
    record("ended", name, os.getpid())


def started_workers() -> int:
    return _TRACE.read_text().count("started worker ")


def flag(name: str) -> str:
    """Value of a flag that is given as --name=value."""
    return next(argument for argument in sys.argv if argument.startswith(f"--{name}=")).partition("=")[2]
