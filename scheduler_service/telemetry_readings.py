"""Owns what gauges and counters read from the scheduler's state: values with their labels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from scheduler_service.call_counts import Row
from scheduler_service.core.state import SchedulerState
from tidegate_telemetry import names
from tidegate_telemetry.observing import Values

Reading = Callable[[SchedulerState], Values]

WORKER_STATES = ("connecting", "ready", "draining")
_FRESH_S = 0.1  # one collection reads the same state for all its instruments


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


def host_kv_blocks(state: SchedulerState) -> Values:
    """Host blocks by state, of each worker that has some."""
    return [
        (blocks, {names.WORKER_ID: worker.worker_id, names.STATE: kind})
        for worker in state.workers
        if worker.host_blocks_total
        for kind, blocks in (
            ("used", worker.host_blocks_used),
            ("free", worker.host_blocks_total - worker.host_blocks_used),
        )
    ]


def outcomes(state: SchedulerState) -> Values:
    """Requests by what became of them."""
    kinds = ("accepted", "refused", "finished", "cancelled", "failed")
    return [(getattr(state.counters, f"requests_{kind}"), {names.OUTCOME: kind}) for kind in kinds]


def worker_states(states: Mapping[str, str]) -> Values:
    """1 for the state that each worker is in, 0 for the others."""
    return [
        (int(state == current), {names.WORKER_ID: worker_id, names.STATE: state})
        for worker_id, current in states.items()
        for state in WORKER_STATES
    ]


def rpcs(rows: Iterable[Row]) -> Values:
    """RPCs that have ended by method and status."""
    return [(num, {names.RPC_METHOD: method, names.RPC_STATUS_CODE: code}) for method, code, num in rows]


class Snapshots:
    """The state, read once for all instruments of a collection. No values where it cannot be read."""

    def __init__(self, read: Callable[[], SchedulerState]) -> None:
        self._read = read
        self._state: SchedulerState | None = None
        self._read_at = float("-inf")

    def get(self) -> SchedulerState | None:
        """The state of at most 0.1 s ago."""
        now = time.monotonic()
        if now - self._read_at > _FRESH_S:
            try:
                self._state = self._read()
            except (TimeoutError, RuntimeError):  # the event loop is busy, or has ended
                self._state = None
            self._read_at = time.monotonic()
        return self._state
