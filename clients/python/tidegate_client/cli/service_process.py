"""One process that runs a service of ours, and its log.

Owns starting, asking and ending it, so that none outlives the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate_client.cli.failures import BAD_REQUEST, Failure

_PR_SET_PDEATHSIG = 1
_LOG_LINES_SHOWN = 12
_SHOWN_FIRST = ("time", "level", "logger", "event")
_BAD_OPTIONS = 2  # status of our services for options that they can't use


@dataclass(slots=True)
class ServiceProcess:
    """A process that was started, and where it can be reached."""

    name: str
    """For people, such as "worker 0"."""
    address: str
    """host:port. Empty: not known yet."""
    process: subprocess.Popen[bytes]
    log: Path | None
    """None: it logs to our stderr."""
    module: str = ""
    """What runs in it, for `python -m`; empty: none of ours."""

    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    def check_alive(self) -> None:
        """Raises Failure, with the end of its log, if it has ended."""
        if self.is_alive():
            return
        status = self.process.returncode
        tail = self._log_tail()
        if status == _BAD_OPTIONS and self.module:
            raise Failure(f"the {self.name} refuses its options: {self._complaint(tail)}", BAD_REQUEST)
        raise Failure(f"the {self.name} ended with status {status}" + (tail and f":\n{tail}"))

    def _complaint(self, tail: str) -> str:
        """What a service of ours says of its options, in one line."""
        told = [line.removeprefix(f"python -m {self.module}: error: ") for line in tail.splitlines()]
        told = [line.removeprefix(f"{self.module}: ") for line in told]
        see = f"`{shlex.quote(sys.executable)} -m {self.module} --help` lists them"
        return "; ".join([line for line in told if line != "see --help"] + [see])

    def _log_tail(self) -> str:
        if self.log is None:
            return ""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(readable(lines)[-_LOG_LINES_SHOWN:])


def readable(lines: Sequence[str]) -> list[str]:
    """Log lines for people: JSON ones as level, event and fields, and argparse's usage left out."""
    shown = []
    in_usage = False
    for line in lines:
        in_usage = line.startswith("usage: ") or (in_usage and line.startswith(" "))
        if not in_usage:
            shown.append(_plain(line))
    return shown


def _plain(line: str) -> str:
    try:
        content = json.loads(line)
    except ValueError:
        return line
    if not isinstance(content, dict) or "event" not in content:
        return line
    *_, cause = ["", *str(content.pop("exception", "")).splitlines()]
    fields = [f"{name}={value}" for name, value in content.items() if name not in _SHOWN_FIRST]
    return " ".join([f"{content.get('level', '')}: {content['event']}", *fields, cause]).rstrip()


def start(
    name: str,
    module: str,
    flags: Sequence[str],
    *,
    address: str,
    log: Path | None,
    environment: Mapping[str, str],
) -> ServiceProcess:
    """Starts `python -m module flags`, before any gRPC channel is opened: fork and gRPC do not mix."""
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(log.open("wb")) if log else sys.stderr
        process = subprocess.Popen(  # noqa: S603 - our own modules
            [sys.executable, "-m", module, *flags],
            stdin=subprocess.DEVNULL,
            stdout=target,
            stderr=target,
            env={**os.environ, **environment},
            process_group=0,  # Ctrl-C reaches only us, and we end them in order
            preexec_fn=_die_with_parent,
        )
    return ServiceProcess(name, address, process, log, module)


def terminate(services: Sequence[ServiceProcess], grace_s: float) -> None:
    """Asks processes to end, and waits for at most the grace."""
    for service in services:
        if service.is_alive():
            service.process.terminate()
    deadline = time.monotonic() + grace_s
    for service in services:
        with contextlib.suppress(subprocess.TimeoutExpired):
            service.process.wait(timeout=max(0.0, deadline - time.monotonic()))


def kill(services: Sequence[ServiceProcess]) -> None:
    """Ends what still runs."""
    for service in services:
        if service.is_alive():
            service.process.kill()
            service.process.wait()


try:
    _LIBC: ctypes.CDLL | None = ctypes.CDLL(None)
except OSError:
    _LIBC = None


def _die_with_parent() -> None:
    # Linux tells the child when we are killed without a chance to end it; elsewhere this does nothing.
    if sys.platform == "linux" and _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
