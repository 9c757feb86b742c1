"""What the fake services share: they record their start and their orderly end in a file."""

import argparse
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


def refuse_options(service: str) -> None:
    """Ends the process as argparse does, where the test asks for that."""
    if os.environ.get("FAKE_REFUSES") == service:
        parser = argparse.ArgumentParser(prog=f"python -m {service}_service")
        for i in range(20):
            parser.add_argument(f"--option-{i}")
        parser.parse_args(["--foo=1"])


def started_workers() -> int:
    return _TRACE.read_text().count("started worker ")


def flag(name: str) -> str:
    """Value of a flag that is given as --name=value."""
    return next(argument for argument in sys.argv if argument.startswith(f"--{name}=")).partition("=")[2]
