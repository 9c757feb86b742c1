"""Owns a worker that is a formula: it keeps a real one's counters by slot and computes nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler_service.core.step import Int32, StepPlan, StepResult
from scheduler_service.core.worker import WorkerSpec

END = 1
"""Token with which an output ends."""
_ORDINARY = 2


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: `base + per_token * tokens computed + per_kv_token * tokens attended to`."""

    base_s: float
    per_token_s: float
    per_kv_token_s: float

    def of(self, num_tokens: int, num_kv_tokens: int) -> float:
        """Seconds of a step of so many tokens."""
        return self.base_s + self.per_token_s * num_tokens + self.per_kv_token_s * num_kv_tokens


class ModelledWorker:
    """Executes plans in order. `outputs` tells how long each request's output will be."""

    def __init__(self, spec: WorkerSpec, step_time: StepTime, outputs: dict[str, int]) -> None:
        self.spec = spec
        self.num_in_flight = 0
        self.num_running = 0
        self.free_at = 0.0
        self.busy_s = 0.0
        self._step_time = step_time
        self._outputs = outputs
        self._total = np.zeros(spec.num_slots, np.int64)  # known tokens
        self._computed = np.zeros(spec.num_slots, np.int64)
        self._to_come = np.zeros(spec.num_slots, np.int64)  # output tokens

    def execute(self, plan: StepPlan, now: float) -> tuple[float, StepResult]:
        """When the step ends, and its result."""
        for admission in plan.admitted:
            slot, known = admission.slot, len(admission.token_ids)
            self._total[slot] = known
            self._computed[slot] = admission.num_computed_tokens
            given = known - admission.num_prompt_tokens
            self._to_come[slot] = self._outputs[admission.request_id] - given
        slots, grants = plan.slots, plan.num_tokens
        computed = self._computed[slots] + grants
        self._computed[slots] = computed
        sampling: Int32 = slots[computed == self._total[slots]]
        self._total[sampling] += 1
        self._to_come[sampling] -= 1
        token_ids = np.where(self._to_come[sampling] == 0, END, _ORDINARY).astype(np.int32)
        duration = self._step_time.of(int(grants.sum()), int(computed.sum()))
        self.free_at = max(self.free_at, now) + duration
        self.busy_s += duration
        result = StepResult(plan.seq, sampling, token_ids, compute_ms=1e3 * duration)
        return self.free_at, result
