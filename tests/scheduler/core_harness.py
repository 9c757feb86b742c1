"""Drives the core against fake workers that keep real block tables, and checks what clients would see.

FakeWorker does what the step protocol says a worker does, on symbols in place of tensors: each KV cell holds
a digest of all tokens up to its position, so a block that is shared, copied, reused or read wrongly shows.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict, deque
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, settings

from scheduler_service.core.admission import Accepted, Refused
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.events import (
    Event,
    Finished,
    FinishReason,
    TokenBatch,
)
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.sampling import SamplingParams, StoppingParams, candidate_seed
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.step import Admission, StepPlan, StepResult
from scheduler_service.core.worker import WorkerSpec

settings.register_profile(
    "core",
    max_examples=int(os.environ.get("TIDEGATE_TEST_EXAMPLES", "50")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
MACHINE = settings.get_profile("core")
"""For the state machines of the core. TIDEGATE_TEST_EXAMPLES makes a run longer than the usual one."""

VOCAB = 64
EOS = 1
MODEL = "fake"


def digest(before: int, token: int) -> int:
    """State of the fake model after one more token."""
    return zlib.crc32(int(token).to_bytes(4, "little"), before)


def fake_token(seed: int, state: int) -> int:
    """What the fake model says after the tokens that led to `state`."""
    return zlib.crc32(seed.to_bytes(8, "little"), state) % VOCAB


def expected_outputs(spec: RequestSpec, index: int) -> tuple[list[int], FinishReason]:
    """What a candidate must get when nothing but its own stop rules ends it."""
    state = 0
    for token in spec.prompt_token_ids:
        state = digest(state, token)
    seed, stopping = candidate_seed(spec.sampling.seed, index), spec.stopping
    outputs: list[int] = []
    while True:
        token = fake_token(seed, state)
        outputs.append(token)
        state = digest(state, token)
        stops = stopping.eos_token_ids | stopping.stop_token_ids
        if token in stops and len(outputs) >= stopping.min_tokens:
            return outputs, FinishReason.STOP
        if len(outputs) == stopping.max_tokens:
            return outputs, FinishReason.LENGTH


@dataclass
class FakeSlot:
    """A request on board of a fake worker."""

    admission: Admission
    tokens: list[int]
    blocks: list[int]
    computed: int


class FakeWorker:
    """A worker that executes plans in order, whenever it is told to."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.slots: dict[int, FakeSlot] = {}
        self.cells: dict[tuple[int, int], int] = {}  # (block, offset) -> digest of the prefix that it ends
        self.inbox: deque[StepPlan] = deque()
        self.seq = 0
        self.fail: set[tuple[str, int]] = set()  # candidates whose next token is not finite

    def execute(self) -> StepResult:
        plan = self.inbox.popleft()
        self.seq += 1
        assert plan.seq == self.seq
        for slot in plan.released.tolist():
            del self.slots[slot]
        self._copy(plan)
        for admission in plan.admitted:
            self._admit(admission)
        slots = plan.slots.tolist()
        assert len(set(slots)) == len(slots) and slots, "rows must be distinct, and some"
        assert int(plan.num_tokens.min()) >= 1
        assert int(plan.num_tokens.sum()) <= self.spec.max_batched_tokens
        assert plan.block_rows.tolist() == sorted(plan.block_rows.tolist())
        for row, block in zip(plan.block_rows.tolist(), plan.block_ids.tolist(), strict=True):
            self.slots[slots[row]].blocks.append(block)
        return self._forward(plan)

    def _copy(self, plan: StepPlan) -> None:
        size = self.spec.block_size
        pairs = list(zip(plan.copy_sources.tolist(), plan.copy_destinations.tolist(), strict=True))
        read = {(dst, i): self.cells.get((src, i)) for src, dst in pairs for i in range(size)}
        for cell, value in read.items():
            if value is None:
                self.cells.pop(cell, None)
            else:
                self.cells[cell] = value

    def _admit(self, admission: Admission) -> None:
        assert admission.slot not in self.slots, "the slot is taken"
        assert 0 <= admission.slot < self.spec.num_slots
        assert admission.token_ids.dtype == np.int32 and admission.block_ids.dtype == np.int32
        tokens, blocks = admission.token_ids.tolist(), admission.block_ids.tolist()
        assert 0 <= admission.num_computed_tokens < len(tokens)
        self.slots[admission.slot] = FakeSlot(admission, tokens, blocks, admission.num_computed_tokens)

    def _forward(self, plan: StepPlan) -> StepResult:
        rows = [
            (self.slots[s], n) for s, n in zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True)
        ]
        written: set[tuple[int, int]] = set()
        for slot, num in rows:  # every write of a layer before any read
            state = self._state(slot.tokens, slot.computed)
            for position in range(slot.computed, slot.computed + num):
                state = digest(state, slot.tokens[position])
                cell = self._cell(slot, position)
                assert cell not in written, "two rows write one cell"
                written.add(cell)
                self.cells[cell] = state
            slot.computed += num
        result_slots, result_tokens, failed = [], [], set()
        for slot, _ in rows:
            self._check_reads(slot)
            if slot.computed == len(slot.tokens):
                if (slot.admission.request_id, slot.admission.index) in self.fail:
                    failed.add(len(result_slots))
                token = fake_token(slot.admission.sampling.seed, self._state(slot.tokens, slot.computed))
                slot.tokens.append(token)
                result_slots.append(slot.admission.slot)
                result_tokens.append(token)
        as_column = lambda values: np.array(values, np.int32)  # noqa: E731
        return StepResult(plan.seq, as_column(result_slots), as_column(result_tokens), frozenset(failed))

    def _state(self, tokens: list[int], count: int) -> int:
        state = 0
        for token in tokens[:count]:
            state = digest(state, token)
        return state

    def _cell(self, slot: FakeSlot, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.spec.block_size)
        assert 0 < slot.blocks[block] < self.spec.num_blocks, "the null block is never written"
        return slot.blocks[block], offset

    def _check_reads(self, slot: FakeSlot) -> None:
        state = 0
        for position in range(slot.computed):
            state = digest(state, slot.tokens[position])
            assert self.cells.get(self._cell(slot, position)) == state, "a row reads KV of another prefix"


@dataclass
class Seen:
    """What the client of one candidate has seen."""

    tokens: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


class Harness:
    """A scheduler, its fake workers and everyone's clients, with a clock that moves when told."""

    def __init__(self, *, workers: int = 1, depth: int = 1, check: bool = True, **options: object) -> None:
        self.now = 0.0
        self.worker_options = {
            "num_blocks": 65,
            "block_size": 4,
            "num_slots": 16,
            "max_batched_tokens": 4096,
            "max_in_flight": 4,
            "max_model_len": 4096,
        }
        for name in self.worker_options:
            if name in options:
                self.worker_options[name] = options.pop(name)
        defaults: dict[str, object] = {"watermark": 0.0, "hash_key": b"key", "max_num_seqs": 16}
        self.config = SchedulerConfig(pipeline_depth=depth, **{**defaults, **options})
        self.scheduler = Scheduler(self.config)
        self.core = self.scheduler
        self.workers: dict[str, FakeWorker] = {}
        self.seen: dict[tuple[str, int], Seen] = defaultdict(Seen)
        self.specs: dict[str, RequestSpec] = {}
        self.plans: list[StepPlan] = []
        self._check = check
        for i in range(workers):
            self.add_worker(f"w{i}")

    # Workers

    def add_worker(self, worker_id: str = "w0", **options: object) -> FakeWorker:
        values = {"model": MODEL, "vocab_size": VOCAB, **self.worker_options, **options}
        worker = FakeWorker(WorkerSpec(worker_id=worker_id, **values))
        self.core.add_worker(worker.spec, self.now)
        self.workers[worker_id] = worker
        return worker

    def lose(self, worker_id: str = "w0") -> list[Event]:
        self.workers.pop(worker_id, None)
        return self.note(self.core.remove_worker(worker_id, self.now))

    # Requests

    def spec(
        self, request_id: str, prompt: int | list[int], max_tokens: int = 4, **options: object
    ) -> RequestSpec:
        """A request whose prompt is given, or has the given length and is its own."""
        if isinstance(prompt, int):
            base = zlib.crc32(request_id.encode())
            prompt = [(base + 7 * i * i + i) % VOCAB for i in range(prompt)]
        sampling = SamplingParams(seed=options.pop("seed", zlib.crc32(request_id.encode())))
        names = ("min_tokens", "eos_token_ids", "stop_token_ids")
        stopping = StoppingParams(
            max_tokens, **{name: options.pop(name) for name in names if name in options}
        )
        values = {"request_id": request_id, "model": MODEL, "sampling": sampling, "stopping": stopping}
        return RequestSpec(prompt_token_ids=np.array(prompt, np.int32), **{**values, **options})

    def submit(self, request_id: str, prompt: int | list[int], max_tokens: int = 4, **options: object):
        spec = self.spec(request_id, prompt, max_tokens, **options)
        outcome = self.core.submit(spec, self.now)
        if isinstance(outcome, Accepted):
            self.specs[request_id] = spec
        return self.checked(outcome)

    def accept(self, request_id: str, prompt: int | list[int], max_tokens: int = 4, **options: object):
        outcome = self.submit(request_id, prompt, max_tokens, **options)
        assert not isinstance(outcome, Refused), outcome
        return outcome.candidates[0]

    def cancel(self, request_id: str, index: int | None = None) -> list[Event]:
        return self.note(self.core.cancel(request_id, self.now, index))

    # Steps

    def plan(self, worker_id: str = "w0") -> StepPlan | None:
        plan = self.core.plan(worker_id, self.now)
        self.note(self.core.drain_events())
        if plan is not None:
            self.workers[worker_id].inbox.append(plan)
            self.plans.append(plan)
        return plan

    def answer(self, worker_id: str = "w0") -> list[Event]:
        return self.note(self.core.apply(worker_id, self.workers[worker_id].execute(), self.now))

    def step(self, worker_id: str = "w0") -> StepPlan | None:
        plan = self.plan(worker_id)
        if plan is not None:
            self.answer(worker_id)
        return plan

    def run(self, most: int = 2000) -> int:
        """Steps every worker at full depth until nothing is left to do; returns the number of rounds."""
        for rounds in range(most):
            busy = False
            for worker_id, worker in self.workers.items():
                while self.plan(worker_id) is not None:
                    busy = True
                if worker.inbox:
                    busy = True
                    self.answer(worker_id)
            if not busy:
                return rounds
        raise AssertionError(f"not done after {most} rounds")

    # Looking

    def checked(self, value):
        if self._check:
            self.core.check()
        return value

    def note(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, TokenBatch):
                for candidate, token in zip(event.candidates, event.token_ids, strict=True):
                    seen = self.seen[candidate.request_id, candidate.index]
                    assert seen.finished is None, "a token after the end"
                    seen.tokens.append(token)
                continue
            seen = self.seen[event.request_id, event.index]
            assert seen.finished is None, "an event after the end"
            seen.events.append(event)
            if isinstance(event, Finished):
                seen.finished = event
        return self.checked(events)

    def grants(self, plan: StepPlan | None, worker_id: str = "w0") -> dict[str, int]:
        """Tokens of each request in a plan that was just made and not yet executed."""
        assert plan is not None
        names = {r.slot: _name(r) for r in self.core._workers[worker_id].running}
        return dict(zip([names[s] for s in plan.slots.tolist()], plan.num_tokens.tolist(), strict=True))

    def running(self, worker_id: str = "w0") -> list[str]:
        return [_name(request) for request in self.core._workers[worker_id].running]

    def free_blocks(self, worker_id: str = "w0") -> int:
        return self.core._workers[worker_id].pool.num_free

    def assert_right(self, request_id: str, index: int = 0) -> Finished:
        """The candidate ended by its own stop rules, with exactly the tokens of the model."""
        seen = self.seen[request_id, index]
        tokens, reason = expected_outputs(self.specs[request_id], index)
        assert seen.finished is not None, f"{request_id}/{index} has not finished"
        assert (seen.tokens, seen.finished.reason) == (tokens, reason)
        assert seen.finished.usage.output_tokens == len(tokens)
        return seen.finished

    def assert_all_right(self) -> None:
        for request_id, spec in self.specs.items():
            for index in range(spec.n):
                self.assert_right(request_id, index)

    def assert_empty(self) -> None:
        """Nothing is left of any request."""
        self.core.check()
        state = self.core.state(self.now)
        assert (state.waiting_requests, state.running_requests, state.waiting_tokens) == (0, 0, 0)
        assert all(worker.blocks_used == 0 for worker in state.workers)
        assert self.core.requests(self.now) == []


def _name(request) -> str:
    return request.request_id if len(request.siblings) == 1 else f"{request.request_id}/{request.index}"
