"""Owns the last steps of each worker: what was in them and how long they took. No gRPC, decides nothing."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_service.core.step import StepPlan

_KEPT = 512
_RATE_WINDOW_S = 5.0


class Step(NamedTuple):
    """One step that was answered."""

    number: int  # of all workers' steps, from 1
    seq: int
    ended: float  # when its result came, on the engine's clock
    duration_s: float
    prefill_tokens: int
    decode_tokens: int
    budget_tokens: int
    requests: int


class _Sent(NamedTuple):
    seq: int
    prefill_tokens: int
    decode_tokens: int
    budget_tokens: int
    requests: int


@dataclass(slots=True)
class _Worker:
    sent: deque[_Sent] = field(default_factory=deque)
    answered: deque[Step] = field(default_factory=lambda: deque(maxlen=_KEPT))


class StepLog:
    """Rings of steps by worker, of those that are connected."""

    def __init__(self) -> None:
        self.num_answered = 0
        """Steps of all workers so far: the number of the last one."""
        self._workers: dict[str, _Worker] = {}

    def sent(self, worker_id: str, plan: StepPlan, prefill_tokens: int, budget_tokens: int) -> None:
        """A plan is on its way. `prefill_tokens`: those of its tokens that are no decodes."""
        decodes = int(plan.num_tokens.sum()) - prefill_tokens
        step = _Sent(plan.seq, prefill_tokens, decodes, budget_tokens, len(plan.slots))
        self._workers.setdefault(worker_id, _Worker()).sent.append(step)

    def answered(self, worker_id: str, duration_s: float, now: float) -> Step:
        """The result of a worker's oldest unanswered plan came."""
        worker = self._workers[worker_id]
        seq, *counts = worker.sent.popleft()
        self.num_answered += 1
        step = Step(self.num_answered, seq, now, duration_s, *counts)
        worker.answered.append(step)
        return step

    def forget(self, worker_id: str) -> None:
        """A worker is gone, or its stream begins anew."""
        self._workers.pop(worker_id, None)

    def since(self, worker_id: str, number: int) -> list[Step]:
        """Steps of a worker after that number which are still kept, the oldest first."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return []
        steps = worker.answered
        first = bisect_right(steps, number, key=lambda step: step.number)
        return [steps[i] for i in range(first, len(steps))]

    def rate(self, worker_id: str, now: float) -> float:
        """Steps a second of a worker, over the last seconds."""
        worker = self._workers.get(worker_id)
        if worker is None or not worker.answered:
            return 0.0
        steps = worker.answered
        count = len(steps) - bisect_left(steps, now - _RATE_WINDOW_S, key=lambda step: step.ended)
        full = count == _KEPT and now > steps[0].ended  # more than are kept may have been in the window
        return count / (now - steps[0].ended if full else _RATE_WINDOW_S)
