"""Owns the worker's own exceptions. Their messages are for operators and schedulers, never for clients."""

from __future__ import annotations


class PlanError(Exception):
    """A plan broke a rule of the step protocol: the stream ends with INVALID_ARGUMENT, the process lives."""

    def __init__(self, seq: int, column: str, value: object, why: str) -> None:
        super().__init__(f"plan {seq}: {column} = {value}: {why}")
        self.seq = seq
        self.column = column
        self.value = value


class UnsupportedModelError(Exception):
    """The model cannot be served rightly: the worker refuses to start."""


class NotCapturableError(Exception):
    """The model's decodes can't become CUDA graphs: they run as other steps do."""


class KvMemoryError(Exception):
    """The KV memory is too small for what the configuration promises: the worker refuses to start."""
