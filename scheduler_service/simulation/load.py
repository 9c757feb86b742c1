"""Owns what a simulation is given to do: requests that come, whatever else happens, and workers to do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scheduler_service.core.request import RequestSpec
from scheduler_service.core.worker import WorkerSpec
from scheduler_service.simulation.modelled_worker import ModelledWorker, StepTime

MODEL = "simulated"
"""Name of the model of loads that are drawn."""


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that is done to the scheduler from outside, besides requests that come."""

    at_s: float
    call: str  # "add_worker", "remove_worker", "drain_worker" or "cancel"
    name: str  # of the worker or request
    index: int | None = None  # candidate
    worker: WorkerSpec | None = None  # that is added


class Load(Protocol):
    """What a simulation is given to do."""

    @property
    def arrivals(self) -> Sequence[float] | NDArray[np.float64]:
        """Seconds at which requests come, ascending."""

    @property
    def happenings(self) -> Sequence[Happening]:
        """What else comes, by time."""

    def request(self, index: int, max_tokens: int) -> RequestSpec:
        """The request that comes then. `max_tokens`: what it asks for at least."""

    def worker(self, spec: WorkerSpec, step_time: StepTime) -> ModelledWorker:
        """A worker whose outputs are those of this load."""
