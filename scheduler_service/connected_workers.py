"""Owns the workers that the core knows: the link to each, and what is kept of each while it is connected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from scheduler_service.core.step import StepPlan
from scheduler_service.latency_log import LatencyLog
from scheduler_service.span_notice import SpanNotice
from scheduler_service.step_log import StepLog
from scheduler_service.telemetry import Telemetry
from scheduler_service.workers import WorkerRegistry


class PlanLink(Protocol):
    """The engine's view of a worker's stream."""

    def send(self, plan: StepPlan, traceparent: str = "") -> None:
        """Sends a plan, in order, without waiting. The header is its span's; empty: it has none."""

    def send_notice(self, notice: SpanNotice) -> None:
        """Has the worker record spans."""

    def abort(self, reason: str) -> None:
        """Ends the stream. A new one is opened later."""


class ConnectedWorkers:
    """Links by worker, and the logs of their steps."""

    def __init__(self, registry: WorkerRegistry, telemetry: Telemetry, clock: Callable[[], float]) -> None:
        self.links: dict[str, PlanLink] = {}
        self.steps = StepLog()
        """The last steps of each worker."""
        self.latencies = LatencyLog(clock())
        """How long tokens took over the last hour."""
        self._registry = registry
        self._telemetry = telemetry
        self._clock = clock

    def add(self, worker_id: str, link: PlanLink) -> None:
        """The core has the worker."""
        self.links[worker_id] = link
        self._telemetry.worker_ready(worker_id, link.send_notice)

    def drop(self, worker_id: str, reason: str) -> bool:
        """A worker's stream has ended, or is to end, or could not be opened. Whether the worker was here."""
        self._registry.lost(worker_id, reason)
        self.steps.forget(worker_id)
        self.latencies.forget(worker_id)
        link = self.links.pop(worker_id, None)
        if link is None:
            return False
        link.abort(reason)
        self._telemetry.worker_lost(worker_id, self._clock())
        return True
