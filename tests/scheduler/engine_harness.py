"""Requests, sinks and an engine with real links, for tests of the engine side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from fake_worker import FakeWorker, expected_tokens

from scheduler_service.core.admission import Accepted
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.events import Event, Finished, FinishReason
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.sampling import SamplingParams, StoppingParams, candidate_seed
from scheduler_service.core.step import StepPlan, TokenLogprobs
from scheduler_service.engine import Engine
from scheduler_service.fleet import Fleet
from scheduler_service.plan_codec import ResultLimits, decode_result, decode_timings, encode_plan
from scheduler_service.span_notice import SpanNotice
from scheduler_service.telemetry import Telemetry
from scheduler_service.worker_link import LinkOptions
from scheduler_service.workers import WorkerInfo, WorkerRegistry, WorkerStatus

VOCAB = 1000


@dataclass
class FakeSink:
    """Keeps what the engine pushes. `on_token` may call the engine, or raise."""

    n: int = 1
    on_token: Callable[[int, int], None] | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    finished: dict[int, Finished] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def push_tokens(self, index: int, token_id: int, logprobs: TokenLogprobs | None) -> None:
        assert index not in self.finished
        self.tokens.setdefault(index, []).append(token_id)
        self.logprobs.append(logprobs)
        if self.on_token is not None:
            self.on_token(index, token_id)

    def push(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Finished):
            assert event.index not in self.finished
            self.finished[event.index] = event
            if len(self.finished) == self.n:
                self.done.set()

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]

    @property
    def reason(self) -> FinishReason:
        return self.finished[0].reason


def spec(request_id: str, sink: object, prompt: int = 10, max_tokens: int = 8, **fields) -> RequestSpec:
    """A request with `prompt` tokens of its own, whose seed is the hash of its name."""
    seed = seed_of(request_id)
    defaults = {
        "request_id": request_id,
        "model": "fake",
        "prompt_token_ids": np.random.default_rng(seed).integers(0, VOCAB, prompt, dtype=np.int32),
        "sampling": SamplingParams(seed=seed),
        "stopping": StoppingParams(max_tokens=max_tokens),
        "sink": sink,
    }
    return RequestSpec(**{**defaults, **fields})


def seed_of(request_id: str) -> int:
    return int.from_bytes(request_id.encode()[-6:], "little")


def outputs_of(request: RequestSpec, index: int = 0) -> list[int]:
    """What a request without stop tokens must give, whatever happens to workers."""
    seed = candidate_seed(request.sampling.seed, index)
    return expected_tokens(seed, len(request.prompt_token_ids), request.stopping.max_tokens, VOCAB)


class Cluster:
    """An engine and a fleet that dials fake workers."""

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        options: LinkOptions | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.registry = WorkerRegistry()
        self.engine = Engine(config or SchedulerConfig(max_num_seqs=64), self.registry, telemetry)
        self.fleet = Fleet(self.engine, self.registry, options or LinkOptions(max_backoff_s=0.2))
        self.workers: list[FakeWorker] = []
        self.requests: list[tuple[RequestSpec, FakeSink]] = []

    async def add(self, worker: FakeWorker, *, ready: bool = True) -> FakeWorker:
        """Starts a worker and registers it."""
        self.workers.append(worker)
        await self.fleet.register(await worker.start())
        if ready:
            await self.until(lambda: self.status(worker) is WorkerStatus.READY)
        return worker

    def status(self, worker: FakeWorker) -> WorkerStatus:
        return self.record(worker).status

    def record(self, worker: FakeWorker):
        record = self.registry.by_address(worker.address)
        assert record is not None
        return record

    def submit(self, request_id: str, **fields) -> FakeSink:
        sink = fields.pop("sink", None) or FakeSink(n=fields.get("n", 1))
        request = spec(request_id, sink, **fields)
        answer = self.engine.submit(request)
        assert type(answer).__name__ == "Accepted", answer
        self.requests.append((request, sink))
        return sink

    async def finish(self) -> None:
        """Waits for all requests, and checks every token of every candidate, and every invariant."""
        async with asyncio.timeout(20):
            await asyncio.gather(*(sink.done.wait() for _, sink in self.requests))
        for request, sink in self.requests:
            for index in range(request.n):
                assert sink.finished[index].reason is FinishReason.LENGTH, request.request_id
                assert sink.tokens[index] == outputs_of(request, index), request.request_id
        self.check()

    def check(self) -> None:
        """No worker saw a broken rule, and the core is sound and empty."""
        assert [violation for worker in self.workers for violation in worker.violations] == []
        assert self.engine.violations() == []
        state = self.engine.state()
        assert (state.running_requests, state.waiting_requests, state.waiting_tokens) == (0, 0, 0)
        assert [worker.blocks_used for worker in state.workers] == [0] * len(state.workers)

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits until a condition holds."""
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        await self.fleet.close()
        await asyncio.gather(*(worker.stop() for worker in self.workers))


class FakeLink:
    """A worker in the same process, without gRPC: plans and results still go through the codec."""

    def __init__(self, engine: Engine, registry: WorkerRegistry, worker_id: str = "w1", **worker) -> None:
        self.engine = engine
        self.worker_id = worker_id
        self.worker = FakeWorker(**worker)
        self.plans: list[StepPlan] = []
        self.traceparents: list[str] = []  # of the plans
        self.notices: list[SpanNotice] = []
        self.aborted: list[str] = []
        self.held = False  # keeps results back
        self._kept: list[Callable[[], None]] = []
        if registry.get(worker_id) is None:
            registry.add(worker_id, f"{worker_id}:1")

    def connect(self) -> None:
        """Says hello."""
        from scheduler_service.hello_codec import decode_hello
        from tidegate.worker.v1 import worker_pb2

        message = worker_pb2.ExecuteResponse(hello=self.worker._hello(1))
        info: WorkerInfo = decode_hello(message, 1)
        self.engine.worker_ready(self.worker_id, info, self)

    def send(self, plan: StepPlan, traceparent: str = "") -> None:
        self.plans.append(plan)
        self.traceparents.append(traceparent)
        message = self.worker._step(encode_plan(plan).plan)
        result = decode_result(message, ResultLimits(self.worker.num_slots, self.worker.vocab_size))
        timings = decode_timings(message.timings)

        def answer() -> None:
            self.engine.step_done(self.worker_id, result, timings)

        if self.held:
            self._kept.append(answer)
        else:
            asyncio.get_running_loop().call_soon(answer)

    def release(self) -> None:
        """Gives the results that were kept back."""
        self.held = False
        kept, self._kept = self._kept, []
        for answer in kept:
            answer()

    def send_notice(self, notice: SpanNotice) -> None:
        self.notices.append(notice)

    def abort(self, reason: str) -> None:
        self.aborted.append(reason)


def submit(engine: Engine, request_id: str, **fields) -> tuple[FakeSink, list[int]]:
    sink = fields.pop("sink", None) or FakeSink(n=fields.get("n", 1))
    request = spec(request_id, sink, **fields)
    assert isinstance(engine.submit(request), Accepted)
    return sink, outputs_of(request)


async def done(*sinks: FakeSink) -> None:
    async with asyncio.timeout(5):
        await asyncio.gather(*(sink.done.wait() for sink in sinks))


def submit_many(cluster: Cluster, number: int = 12, max_tokens: int = 12) -> list[FakeSink]:
    return [cluster.submit(f"r{i}", prompt=5 + 3 * i, max_tokens=max_tokens) for i in range(number)]
