"""A scheduler for tests: does as it is told, keeps the books of slots and blocks, builds real plans."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from tidegate.worker.v1 import worker_pb2 as pb
from worker_service.executor import Executor
from worker_service.plan import Result
from worker_service.plan_codec import decode_plan


def int32(values) -> bytes:
    return np.array(values, "<i4").tobytes()


def greedy(**changes) -> pb.WorkerSampling:
    return pb.WorkerSampling(**{"top_p": 1.0, "repetition_penalty": 1.0, "logprobs": -1, **changes})


@dataclass
class FakeRequest:
    name: str
    prompt: list[int]
    sampling: pb.WorkerSampling
    outputs: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    slot: int | None = None
    computed: int = 0
    planned_outputs: int = 0  # sampled by plans so far, the results of some may still be out

    @property
    def known(self) -> int:
        return len(self.prompt) + self.planned_outputs


class FakeScheduler:
    """Makes plans of whatever rows a test wants, with blocks in a random order."""

    def __init__(self, executor: Executor, seed: int = 0) -> None:
        self.executor = executor
        self.limits = executor.limits
        self.random = random.Random(seed)
        self.free_blocks = list(range(1, self.limits.num_blocks))
        self.random.shuffle(self.free_blocks)
        self.free_slots = list(range(self.limits.num_slots))
        self.random.shuffle(self.free_slots)
        self.requests: dict[str, FakeRequest] = {}
        self.seq = 0
        self._released: list[int] = []
        self._copies: list[tuple[int, int]] = []
        self._freed: list[int] = []

    def add(self, name: str, prompt: list[int], sampling: pb.WorkerSampling | None = None) -> None:
        self.requests[name] = FakeRequest(name, list(prompt), sampling or greedy())

    def share_prefix(self, name: str, source: str, tokens: int) -> None:
        """`name` starts with `tokens` that `source` has computed: full blocks shared, partial copied."""
        size = self.limits.block_size
        request, other = self.requests[name], self.requests[source]
        assert request.slot is None
        assert tokens < request.known
        assert tokens <= other.computed
        request.blocks = other.blocks[: tokens // size]
        if tokens % size:
            copy = self.free_blocks.pop()
            self._copies.append((other.blocks[tokens // size], copy))
            request.blocks.append(copy)
        request.computed = tokens

    def preempt(self, name: str) -> None:
        request = self.requests[name]
        self._released.append(request.slot)
        self._freed += request.blocks
        request.slot, request.blocks, request.computed = None, [], 0

    def plan(self, rows: list[tuple[str, int]]) -> pb.StepPlan:
        """A plan for rows of (request, tokens); new and resumed requests are admitted on the way."""
        self.seq += 1
        admitted, slots, counts, block_rows, block_ids = [], [], [], [], []
        # Blocks and slots freed by this plan may be used in it already, but that hides mistakes less often.
        self.free_slots += self._released
        self.free_blocks += self._freed
        self.random.shuffle(self.free_blocks)
        released, self._released, self._freed = self._released, [], []
        copies, self._copies = self._copies, []
        for row, (name, count) in enumerate(rows):
            request = self.requests[name]
            needed = -(-(request.computed + count) // self.limits.block_size) - len(request.blocks)
            if request.slot is None:
                request.slot = self.free_slots.pop(0)
                # Some blocks come with the admission, the rest as appended ones.
                early = self.random.randint(0, max(needed, 0))
                request.blocks += [self.free_blocks.pop() for _ in range(early)]
                needed -= early
                admitted.append(self._admitted(request))
            appended = [self.free_blocks.pop() for _ in range(max(needed, 0))]
            request.blocks += appended
            block_rows += [row] * len(appended)
            block_ids += appended
            slots.append(request.slot)
            counts.append(count)
            request.computed += count
            if request.computed == request.known:
                request.planned_outputs += 1
        return pb.StepPlan(
            seq=self.seq,
            released=int32(released),
            admitted=admitted,
            copy_sources=int32([source for source, _ in copies]),
            copy_destinations=int32([destination for _, destination in copies]),
            slots=int32(slots),
            num_tokens=int32(counts),
            block_rows=int32(block_rows),
            block_ids=int32(block_ids),
        )

    def execute(self, plan: pb.StepPlan) -> Result:
        return self.executor.execute(decode_plan(plan, self.limits))

    def apply(self, plan: pb.StepPlan, result: Result) -> dict[str, int]:
        """Books a result; returns the new token of each request that sampled."""
        assert result.seq == plan.seq
        by_slot = {request.slot: request for request in self.requests.values() if request.slot is not None}
        tokens = {}
        for slot, token in zip(result.slots.tolist(), result.token_ids.tolist(), strict=True):
            by_slot[slot].outputs.append(token)
            tokens[by_slot[slot].name] = token
        return tokens

    def step(self, rows: list[tuple[str, int]]) -> dict[str, int]:
        plan = self.plan(rows)
        return self.apply(plan, self.execute(plan))

    def run(self, budget: int, max_new: int, order: list[str] | None = None) -> None:
        """Steps of at most `budget` tokens until every request has `max_new` outputs."""
        names = order or list(self.requests)
        while True:
            rows, left = [], budget
            for name in names:
                request = self.requests[name]
                count = min(request.known - request.computed, left)
                if len(request.outputs) < max_new and count > 0:
                    rows.append((name, count))
                    left -= count
            if not rows:
                return
            self.step(rows)

    def outputs(self) -> dict[str, list[int]]:
        return {name: request.outputs for name, request in self.requests.items()}

    def _admitted(self, request: FakeRequest) -> pb.AdmittedRequest:
        assert len(request.outputs) == request.planned_outputs, "resume only what has all its results"
        return pb.AdmittedRequest(
            slot=request.slot,
            request_id=request.name,
            token_ids=int32(request.prompt + request.outputs),
            num_prompt_tokens=len(request.prompt),
            num_computed_tokens=request.computed,
            block_ids=int32(request.blocks),
            sampling=request.sampling,
        )
