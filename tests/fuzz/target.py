"""Owns what a fuzz target is, and what counts as a failure of one."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A decoder of bytes from outside."""

    name: str
    make: Callable[[random.Random], bytes]  # an input, valid or not
    read: Callable[[bytes], object]  # decodes it, and checks what must hold of what comes out
    refuses: tuple[type[Exception], ...]  # how it says that an input is wrong
    share: float = 1.0  # of the inputs, beside others; files take longer


class HangError(Exception):
    """An input took too long."""


@contextmanager
def no_longer_than(seconds: float):
    """Raises HangError in the block after that time of computing, which other processes do not lengthen. For
    the main thread."""

    def stop(*_: object) -> None:
        raise HangError(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def try_input(target: Target, data: bytes, time_limit_s: float) -> bool:
    """Whether the input was accepted. Raises what is a failure: anything that the target does not declare."""
    with no_longer_than(time_limit_s):
        try:
            target.read(data)
        except target.refuses:
            return False
    return True
