"""Owns a worker that is a formula: it keeps a real one's counters by slot and computes nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from scheduler_service.core.step import Admission, Int32, StepPlan, StepResult
from scheduler_service.core.worker import Int64, WorkerSpec

END = 1
"""Token with which an output ends."""
_ORDINARY = 2
SCRIPT_END = (1 << 31) - 2
"""The same for scripts, whose tokens are a recording's."""
SCRIPT_GOES_ON = SCRIPT_END - 1
"""Any other token that no recording has."""

Candidate = tuple[str, int]
"""Name of a request, and index."""

Size = tuple[int, int, int]
"""Of a step: tokens, tokens with KV that its rows end with, and pairs of tokens in chunks beyond those."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: `base + per_token * tokens + per_kv_token * tokens with KV + per_pair * pairs`."""

    base_s: float
    per_token_s: float
    per_kv_token_s: float
    per_pair_s: float = 0.0

    def of(self, num_tokens: int, num_kv_tokens: int, num_pairs: int = 0) -> float:
        """Seconds of a step of that size."""
        by_size = self.per_token_s * num_tokens + self.per_kv_token_s * num_kv_tokens
        return self.base_s + by_size + self.per_pair_s * num_pairs


class StepSizes:
    """Follows a worker's plans, to tell how large each is."""

    def __init__(self, num_slots: int) -> None:
        self._computed = np.zeros(num_slots, np.int64)

    def admit(self, admission: Admission) -> None:
        """A candidate enters a slot."""
        self._computed[admission.slot] = admission.num_computed_tokens

    def advance(self, plan: StepPlan) -> tuple[Size, Int32]:
        """A step's size, and the computed tokens of its rows after it. All that it admits was told before."""
        slots, grants = plan.slots, plan.num_tokens
        computed = self._computed[slots] + grants
        self._computed[slots] = computed
        num_tokens, num_kv = int(grants.sum()), int(computed.sum())
        num_pairs = 0
        if num_tokens > len(slots):
            num_pairs = int(grants.dot(2 * computed + 1 - grants) >> 1) - num_kv
        return (num_tokens, num_kv, num_pairs), computed


def copies_s(plan: StepPlan, spec: WorkerSpec) -> float:
    """Seconds that a plan's copies between device and host memory take."""
    return (len(plan.swap_out_blocks) + len(plan.swap_in_blocks)) * spec.block_copy_ms / 1e3


class ModelledWorker:
    """Executes plans in order. `outputs` tells how long each request's output will be, by its number."""

    def __init__(self, spec: WorkerSpec, step_time: StepTime, outputs: Int64) -> None:
        self.spec = spec
        self.num_in_flight = 0
        self.num_running = 0
        self.gone = False
        self.free_at = 0.0
        self.busy_s = 0.0
        self._step_time = step_time
        self._outputs = outputs
        self._sizes = StepSizes(spec.num_slots)
        self._total = np.zeros(spec.num_slots, np.int64)  # known tokens
        self._to_come = np.zeros(spec.num_slots, np.int64)  # output tokens

    def execute(self, plan: StepPlan, now: float) -> tuple[float, StepResult]:
        """When the step ends, and its result."""
        for admission in plan.admitted:
            self._sizes.admit(admission)
            self._total[admission.slot] = len(admission.token_ids)
            self._admit(admission, len(admission.token_ids) - admission.num_prompt_tokens)
        size, computed = self._sizes.advance(plan)
        sampling: Int32 = plan.slots[computed == self._total[plan.slots]]
        self._total[sampling] += 1
        duration = self._duration_s(size) + copies_s(plan, self.spec)
        self.free_at = max(self.free_at, now) + duration
        self.busy_s += duration
        return self.free_at, StepResult(plan.seq, sampling, self._sample(sampling), compute_ms=1e3 * duration)

    def _duration_s(self, size: Size) -> float:
        return self._step_time.of(*size)

    def _admit(self, admission: Admission, num_given: int) -> None:
        self._to_come[admission.slot] = self._outputs[int(admission.request_id)] - num_given

    def _sample(self, slots: Int32) -> Int32:
        to_come = self._to_come[slots] - 1
        self._to_come[slots] = to_come
        return np.where(to_come == 0, END, _ORDINARY).astype(np.int32)


class ScriptedWorker(ModelledWorker):
    """Gives each candidate the tokens of its script, and then ordinary ones for as long as it is asked. Each
    step takes one of `ratios` times what the formula says, if there are any."""

    def __init__(
        self,
        spec: WorkerSpec,
        step_time: StepTime,
        scripts: Mapping[Candidate, list[int]],
        ratios: Sequence[float] = (),
    ) -> None:
        super().__init__(spec, step_time, np.zeros(0, np.int64))
        self._scripts = scripts
        self._ratios = ratios
        self._random = Random(spec.worker_id)  # runs must agree
        self._script: list[list[int]] = [[]] * spec.num_slots
        self._given = [0] * spec.num_slots

    def _duration_s(self, size: Size) -> float:
        ratio = self._random.choice(self._ratios) if self._ratios else 1.0
        return super()._duration_s(size) * ratio

    def _admit(self, admission: Admission, num_given: int) -> None:
        self._script[admission.slot] = self._scripts[admission.request_id, admission.index]
        self._given[admission.slot] = num_given

    def _sample(self, slots: Int32) -> Int32:
        tokens = []
        for slot in slots.tolist():
            script, given = self._script[slot], self._given[slot]
            self._given[slot] = given + 1
            tokens.append(script[given] if given < len(script) else SCRIPT_GOES_ON)
        return np.array(tokens, np.int32)
