"""Owns `Worker`: what this process is, from loading its model to its end, whoever asks. Imports no torch."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from worker_service.config import WorkerConfig
from worker_service.plan import Limits

if TYPE_CHECKING:
    from worker_service.model import Model
    from worker_service.step_thread import StepThread


class Phase(Enum):
    """What the worker is doing."""

    LOADING = "loading"
    WARMING_UP = "warming_up"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """All that is there once the worker is ready."""

    model: Model
    limits: Limits
    kv_bytes_per_token: int
    steps: StepThread
    block_copy_ns: int = 0  # to host memory or back; 0: there is none


class Worker:
    """The process's state. `load` runs on a thread of its own; others read the attributes that it sets."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.incarnation = secrets.token_hex(8)
        self.phase = Phase.LOADING
        self.progress = 0.0  # of the phase, 0 to 1
        self.detail = "starting"
        self.engine: Engine | None = None

    def load(self) -> Engine:
        """Loads the model and allocates KV memory. Raises UnsupportedModelError, KvMemoryError, OSError."""
        self._report(Phase.LOADING, 0.0, "importing libraries")
        from worker_service.start import start_engine  # torch: seconds to import

        self.engine = start_engine(self.config, self._report)
        return self.engine

    def _report(self, phase: Phase, progress: float, detail: str) -> None:
        if self.phase is not Phase.DRAINING:
            self.phase, self.progress, self.detail = phase, progress, detail
