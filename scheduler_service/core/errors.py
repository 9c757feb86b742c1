"""Owns the core's exceptions: misuse and broken promises, never the ordinary fate of a request."""

from __future__ import annotations


class ConfigError(ValueError):
    """An option has a value that is not allowed."""

    def __init__(self, option: str, value: object, allowed: str) -> None:
        super().__init__(f"{option} is {value!r}; allowed: {allowed}")
        self.option = option
        self.value = value
        self.allowed = allowed


class UnknownWorkerError(KeyError):
    """No worker of that name is connected."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(worker_id)
        self.worker_id = worker_id

    def __str__(self) -> str:
        return f"no worker named {self.worker_id!r} is connected"


class DuplicateWorkerError(ValueError):
    """A worker of that name is connected already."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(f"a worker named {worker_id!r} is connected already; remove it first")
        self.worker_id = worker_id


class ProtocolViolation(Exception):
    """A worker's result does not answer the plan that it should. Nothing was applied; drop the worker."""


class InvariantError(AssertionError):
    """The core's own state contradicts itself. The message lists every contradiction found."""

    def __init__(self, violations: list[str]) -> None:
        super().__init__("; ".join(violations))
        self.violations = violations
