"""Owns what gauges and counters read from the scheduler's state: values with their attributes."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_service import telemetry_names as names
from scheduler_service.core.state import SchedulerState

Values = list[tuple[int, dict[str, str]]]
Reading = Callable[[SchedulerState], Values]


def running(state: SchedulerState) -> Values:
    """Requests on workers."""
    return [(state.running_requests, {})]


def waiting(state: SchedulerState) -> Values:
    """Requests that wait."""
    return [(state.waiting_requests, {})]


def kv_blocks(state: SchedulerState) -> Values:
    """Blocks of each worker by state."""
    return [
        (blocks, {names.WORKER_ID: worker.worker_id, names.STATE: kind})
        for worker in state.workers
        for kind, blocks in (
            ("used", worker.blocks_used),
            ("cached", worker.blocks_cached),
            ("free", worker.blocks_free),
        )
    ]


def outcomes(state: SchedulerState) -> Values:
    """Requests by what became of them."""
    counters = state.counters
    return [
        (counters.requests_accepted, {names.OUTCOME: "accepted"}),
        (counters.requests_refused, {names.OUTCOME: "refused"}),
        (counters.requests_finished, {names.OUTCOME: "finished"}),
        (counters.requests_cancelled, {names.OUTCOME: "cancelled"}),
        (counters.requests_failed, {names.OUTCOME: "failed"}),
    ]


def count_of(field: str) -> Reading:
    """One of the scheduler's counters."""
    return lambda state: [(getattr(state.counters, field), {})]
