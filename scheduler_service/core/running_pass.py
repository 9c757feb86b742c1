"""Owns the first half of a plan: what each RUNNING candidate computes, and who makes room.

Running candidates come first and never pay the watermark. A prefill never lacks blocks, since all blocks of
the known tokens were taken at admission; a decode takes one block when it crosses a block's border, and sends
a victim back to the queue if there is none.
"""

from __future__ import annotations

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.draft import Draft
from scheduler_service.core.events import Event
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.policy import Policy
from scheduler_service.core.request import Request
from scheduler_service.core.step_budget import StepBudget, new_budget, share
from scheduler_service.core.worker import Int64, Worker


class RunningPass:
    """Plans the running candidates of a worker."""

    def __init__(self, config: SchedulerConfig, policy: Policy, lifecycle: Lifecycle) -> None:
        self._config = config
        self._policy = policy
        self._lifecycle = lifecycle

    def draft(self, worker: Worker, cap: int, now: float, events: list[Event]) -> Draft:
        """Grants tokens under the budget, to decodes first; `cap` limits each."""
        want = wanted(worker, cap)
        grants, budget = share(worker, want, self._config.target_itl_ms)
        worker.step_budget = budget.whole
        draft = Draft(worker.rows, worker.rows32, worker.running, grants, [], [], budget)
        if not grants.all():
            _keep_granted(draft, np.flatnonzero(grants))
        short = _rows_short_of_a_block(worker, draft)
        if len(short) > worker.pool.num_free:
            return self._draft_with_preemption(worker, want, now, events)
        draft.block_rows = short.tolist()
        draft.block_ids = worker.allocate(len(short))
        for row, block in zip(draft.block_rows, draft.block_ids, strict=True):
            draft.requests[row].block_ids.append(block)
        worker.held[draft.rows[short]] += 1
        return draft

    def _draft_with_preemption(self, worker: Worker, want: Int64, now: float, events: list[Event]) -> Draft:
        """The same one by one, where a decode that finds no block sends a victim back to the queue. What the
        victim was granted in this step is free for others again."""
        budget = new_budget(worker, want, self._config.target_itl_ms)
        grants: dict[Request, int] = {}
        new_blocks: dict[Request, int] = {}
        for request, most in sorted(zip(worker.running, want.tolist(), strict=True), key=_is_prompt):
            if request.worker is None or not most or not budget.tokens:
                continue
            slot = request.slot
            num_computed = int(worker.computed[slot])
            grant = min(most, budget.most(num_computed)) if most > 1 else 1
            if not grant:
                continue
            if num_computed + grant > worker.held[slot] << worker.shift:
                budget.tokens += self._free_a_block(worker, request, grants, now, events)
                if request.worker is None:
                    continue
                new_blocks[request] = worker.allocate(1)[0]
                request.block_ids.append(new_blocks[request])
                worker.held[slot] += 1
            grants[request] = grant
            if most > 1:
                budget.take(grant, num_computed)
            else:
                budget.tokens -= 1
        worker.compact()
        return _assemble(grants, new_blocks, budget)

    def _free_a_block(
        self, worker: Worker, asker: Request, grants: dict[Request, int], now: float, events: list[Event]
    ) -> int:
        """Preempts until a block is free or the asker itself had to go; returns the tokens given back."""
        given_back = 0
        while worker.pool.num_free == 0 and asker.worker is not None:
            alive = [request for request in worker.running if request.worker is worker]
            unpinned = [r for r in alive if r.num_preemptions < self._config.max_preemptions]
            victim = self._policy.victim(unpinned or alive)
            given_back += grants.pop(victim, 0)
            events.append(self._lifecycle.preempt(victim, worker, "blocks", now))
        return given_back


def wanted(worker: Worker, cap: int) -> Int64:
    """Tokens that each running candidate could compute now, at most `cap`."""
    rows = worker.rows
    want = np.minimum(worker.total[rows], worker.last[rows]) - worker.computed[rows]
    return np.minimum(want, cap, out=want)


def _is_prompt(row: tuple[Request, int]) -> bool:
    return row[1] > 1


def _keep_granted(draft: Draft, granted: Int64) -> None:
    draft.rows = draft.rows[granted]
    draft.rows32 = draft.rows32[granted]
    draft.grants = draft.grants[granted]
    requests = draft.requests
    draft.requests = [requests[row] for row in granted.tolist()]


def _rows_short_of_a_block(worker: Worker, draft: Draft) -> Int64:
    rows = draft.rows
    return np.flatnonzero(worker.computed[rows] + draft.grants > worker.held[rows] << worker.shift)


def _assemble(grants: dict[Request, int], new_blocks: dict[Request, int], budget: StepBudget) -> Draft:
    requests = list(grants)
    rows = np.array([request.slot for request in requests], np.int64)
    block_rows = [row for row, request in enumerate(requests) if request in new_blocks]
    return Draft(
        rows=rows,
        rows32=rows.astype(np.int32),
        requests=requests,
        grants=np.array(list(grants.values()), np.int64),
        block_rows=block_rows,
        block_ids=[new_blocks[requests[row]] for row in block_rows],
        budget=budget,
        preempted=True,
    )
