"""Owns the exchange with workers: a round of plans when one is due, and the results that come back.

All submits, results and cancels of one turn of the event loop are followed by one round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from scheduler_service.connected_workers import ConnectedWorkers
from scheduler_service.core.errors import ProtocolViolation
from scheduler_service.core.explain import Explanation
from scheduler_service.core.step import StepResult
from scheduler_service.core_guard import CoreGuard
from scheduler_service.delivery import Delivery
from scheduler_service.logs import EventLog
from scheduler_service.plan_codec import StepTimings
from scheduler_service.telemetry import Telemetry

_STEPS_PER_TARGET_CHECK = 256

_log = EventLog("engine")


class StepExchange:
    """Plans out, results in."""

    def __init__(
        self,
        guard: CoreGuard,
        workers: ConnectedWorkers,
        delivery: Delivery,
        telemetry: Telemetry,
        clock: Callable[[], float],
        on_round: Callable[[], None],
    ) -> None:
        """`on_round` is called after each round."""
        self._guard = guard
        self._workers = workers
        self._delivery = delivery
        self._telemetry = telemetry
        self._clock = clock
        self._on_round = on_round
        self._round_due = False

    def wake(self) -> None:
        """Makes a round of planning due in this turn of the event loop."""
        if not self._round_due:
            self._round_due = True
            asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        self._round_due = False
        now = self._clock()
        worker_ids = self._by_load(now)
        while worker_ids:
            worker_ids = [worker_id for worker_id in worker_ids if self._plan(worker_id, now)]
        self._delivery.deliver(self._guard.core.drain_events())
        self._telemetry.look_at_queue(self._explain, now)
        self._on_round()

    def _by_load(self, now: float) -> list[str]:
        """Workers, the emptiest first, since the first to plan takes the head of the queue."""
        links = self._workers.links
        if len(links) < 2:
            return list(links)
        states = [state for state in self._guard.core.state(now).workers if state.worker_id in links]
        states.sort(key=lambda state: state.running_requests / state.num_slots)
        return [state.worker_id for state in states]

    def _plan(self, worker_id: str, now: float) -> bool:
        """Sends a worker its next plan. False: it has no credit, or there is nothing to do."""
        link = self._workers.links.get(worker_id)
        if link is None:
            return False
        core = self._guard.core
        prefill_tokens = core.counters.prefill_tokens
        try:
            plan = core.plan(worker_id, now)
            if plan is None:
                return False
            prefill_tokens = core.counters.prefill_tokens - prefill_tokens
            self._workers.steps.sent(worker_id, plan, prefill_tokens, core.budget_tokens(worker_id))
            link.send(plan, self._telemetry.plan_sent(worker_id, plan, prefill_tokens, now))
        except Exception:
            self._guard.contain_worker(worker_id)
            return False
        return True

    def take(self, worker_id: str, result: StepResult, timings: StepTimings) -> None:
        """A result came, of a worker that is connected.

        Raises:
            ProtocolViolation: it answers no plan. Nothing of it was applied; the worker's stream must end.
        """
        core, now = self._guard.core, self._clock()
        outputs = core.counters.output_tokens
        try:
            events = core.apply(worker_id, result, now)
        except ProtocolViolation:
            raise
        except Exception:
            self._guard.contain_worker(worker_id)
            return
        step = self._workers.steps.answered(worker_id, timings.computing_s, now)
        outputs = core.counters.output_tokens - outputs
        self._workers.latencies.step(worker_id, step, outputs, core.take_first_tokens())
        if core.config.target_itl_ms is not None and result.seq % _STEPS_PER_TARGET_CHECK == 0:
            self._check_target(worker_id, core.config.target_itl_ms)
        # Planning comes before the work that the events cause.
        self.wake()
        self._telemetry.step_done(worker_id, result.seq, timings, now)
        self._delivery.deliver(events)

    def _check_target(self, worker_id: str, target_ms: float) -> None:
        """Says so where a worker can't keep the target even without prompts."""
        least_ms = self._guard.core.least_step_ms(worker_id)
        if least_ms is not None and least_ms > target_ms:
            _log.repeated(
                "target_itl_too_low",
                worker_id,
                worker_id=worker_id,
                target_itl_ms=target_ms,
                allowed=f"above {least_ms:.1f}, which is what a step with one decode takes there",
            )

    def _explain(self, request_id: str) -> list[Explanation]:
        return self._guard.core.explain(request_id, self._clock())
