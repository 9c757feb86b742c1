"""Owns a plan as a whole: running candidates, then waiting ones, then the counters and the columns."""

from __future__ import annotations

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.displacement import Displacement
from scheduler_service.core.draft import Draft
from scheduler_service.core.events import Event
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.model import Model
from scheduler_service.core.policy import Policy
from scheduler_service.core.request import Request
from scheduler_service.core.running_pass import RunningPass
from scheduler_service.core.step import NONE, Int32, StepPlan
from scheduler_service.core.step_budget import prompt_cap
from scheduler_service.core.step_time import StepSize
from scheduler_service.core.waiting_pass import WaitingPass
from scheduler_service.core.worker import FIRST, PARENT, Bool, Int64, StepInFlight, Worker


class Planner:
    """Builds the plans of every worker."""

    def __init__(self, config: SchedulerConfig, policy: Policy, lifecycle: Lifecycle) -> None:
        self._config = config
        self._policy = policy
        self._lifecycle = lifecycle
        self._displacement = Displacement(config, policy)
        self._running = RunningPass(config, policy, lifecycle)
        self._waiting = WaitingPass(config, policy, lifecycle)

    def plan(self, worker: Worker, model: Model, now: float, events: list[Event]) -> StepPlan | None:
        """The worker's next plan, counted as sent. None: it has no credit left, or nothing to compute."""
        if len(worker.in_flight) >= worker.depth:
            return None
        self._make_room(worker, model, now, events)
        cap = prompt_cap(worker, self._config, self._lifecycle.load.num_waiting)
        draft = self._running.draft(worker, cap, now, events)
        num_running_rows = len(draft.requests)
        sampled = self._advance(worker, draft.rows, draft.grants, draft.requests, now)
        if not draft.preempted and not worker.draining:
            self._waiting.admit(worker, model, draft, now, events)
        if not draft.requests and not draft.admitted:
            return None
        draft.close()
        if draft.admitted:
            rows, grants = draft.rows[num_running_rows:], draft.grants[num_running_rows:]
            sampled = np.concatenate((sampled, self._advance(worker, rows, grants, draft.admitted, now)))
        return self._send(worker, draft, sampled, now)

    def _make_room(self, worker: Worker, model: Model, now: float, events: list[Event]) -> None:
        for victim in self._displacement.choose(worker, model):
            reason = "slots" if worker.num_running >= worker.seats else "blocks"
            events.append(self._lifecycle.preempt(victim, worker, reason, now))
        worker.compact()

    def _advance(
        self, worker: Worker, rows: Int64, grants: Int64, requests: list[Request], now: float
    ) -> Bool:
        """Counts the granted tokens as computed. A row that thereby reaches its last token samples one more,
        which is counted as in flight: the row can be planned again before its id is known."""
        before, total, flags = worker.computed[rows], worker.total[rows], worker.flags[rows]
        after = before + grants
        worker.computed[rows] = after
        sampled: Bool = after == total
        num_tokens = int(grants.sum())
        if num_tokens > len(rows) or flags.any():
            # With a token in flight, what is computed is that token.
            decodes = (total - before == 1) & ((flags & FIRST == 0) | (worker.pending[rows] > 0))
            self._lifecycle.counters.prefill_tokens += num_tokens - int(np.count_nonzero(decodes))
            history, worker_id, seq = self._lifecycle.history, worker.spec.worker_id, worker.seq + 1
            for row in np.flatnonzero(~decodes).tolist():
                history.chunk(requests[row], worker_id, seq, int(grants[row]), now)
            if self._config.enable_prefix_caching:
                worker.register_full(rows, requests, total - worker.pending[rows])
        if sampled.all():
            worker.total[rows] = total + 1
            worker.pending[rows] += 1
        else:
            worker.total[rows[sampled]] += 1
            worker.pending[rows[sampled]] += 1
        return sampled

    def _send(self, worker: Worker, draft: Draft, sampled: Bool, now: float) -> StepPlan:
        size = _size(worker, draft)
        worker.seq += 1
        self._lifecycle.counters.steps += 1
        self._note_prompts(worker, draft)
        requests, slots = draft.requests, draft.rows
        if not sampled.all():
            slots = slots[sampled]
            requests = [requests[row] for row in np.flatnonzero(sampled).tolist()]
        if self._policy.counts_service:
            self._policy.note_sampled(worker, slots)
        stays = worker.stay[slots]
        worker.in_flight.append(StepInFlight(worker.seq, requests, slots, stays, size, now))
        released = _column(worker.released)
        worker.released = []
        swapped_out, swapped_out_to = worker.host.take_copies()
        self._lifecycle.counters.swapped_out_blocks += len(swapped_out)
        self._lifecycle.counters.swapped_in_blocks += len(draft.swap_in_blocks)
        return StepPlan(
            seq=worker.seq,
            released=released,
            admitted=tuple(draft.admissions),
            copy_sources=_column(draft.copy_sources),
            copy_destinations=_column(draft.copy_destinations),
            slots=draft.rows32,
            num_tokens=draft.grants.astype(np.int32),
            block_rows=_column(draft.block_rows),
            block_ids=_column(draft.block_ids),
            swap_out_blocks=_column(swapped_out),
            swap_out_host_blocks=_column(swapped_out_to),
            swap_in_host_blocks=_column(draft.swap_in_host_blocks),
            swap_in_blocks=_column(draft.swap_in_blocks),
        )

    def _note_prompts(self, worker: Worker, draft: Draft) -> None:
        """Lets the siblings of candidates whose whole prompt is planned into the queue."""
        for row in np.flatnonzero(worker.flags[draft.rows] & PARENT).tolist():
            parent = draft.requests[row]
            if worker.computed[parent.slot] >= parent.num_prompt:
                parent.prompt_planned = True
                worker.flags[parent.slot] &= ~PARENT
                self._lifecycle.unpark(parent)


def _size(worker: Worker, draft: Draft) -> StepSize:
    """Size of a plan whose grants are counted as computed."""
    grants, ends = draft.grants, worker.computed[draft.rows]
    return StepSize(int(grants.sum()), int(ends.sum()), int((grants - 1).dot(2 * ends - grants)) >> 1)


def _column(values: list[int]) -> Int32:
    return np.array(values, np.int32) if values else NONE
