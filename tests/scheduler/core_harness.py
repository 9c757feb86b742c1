"""Drives the core against fake workers, and checks what clients would see."""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from core_fake_worker import VOCAB, FakeWorker, digest, fake_token
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
from scheduler_service.core.step import StepPlan
from scheduler_service.core.worker import WorkerSpec

settings.register_profile(
    "core",
    max_examples=int(os.environ.get("TIDEGATE_TEST_EXAMPLES", "50")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
MACHINE = settings.get_profile("core")
"""For the state machines of the core. TIDEGATE_TEST_EXAMPLES makes a run longer than the usual one."""

EOS = 1
MODEL = "fake"


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
            "num_host_blocks": 0,
            "block_copy_ms": 0.0,
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
