"""A full queue turns requests away before their prompts are looked at, wherever the frontend is."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from engine_harness import FakeLink, spec
from fake_engine import FakeConfig, FakeEngine, served_model
from google.rpc import code_pb2
from test_frontends_link import FakeOutput

from scheduler_service.core.admission import (
    DrainRate,
    Newcomer,
    QueueLoad,
    RefusalReason,
    Refused,
    refuse_newcomer,
)
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.engine import Engine
from scheduler_service.errors import Reason, ServiceError
from scheduler_service.frontend import Frontend
from scheduler_service.frontend_engine import LocalEngine
from scheduler_service.remote_engine import RemoteEngine
from scheduler_service.remote_frontend import RemoteFrontend
from scheduler_service.workers import WorkerRegistry
from tidegate.inference.v1 import inference_pb2 as pb

LIMIT = 4
NOTHING = QueueLoad(0, 0)


def newcomer(request_id: str = "new", num: int = 1, **fields) -> Newcomer:
    return Newcomer(request_id, fields.pop("tenant", "default"), num, **fields)


@pytest.mark.parametrize(
    ("load", "limits", "asks", "reason"),
    [
        (QueueLoad(3, 90), {"max_num_queued_reqs": 4}, newcomer(), None),
        (QueueLoad(3, 90), {"max_num_queued_reqs": 4}, newcomer(num=2), RefusalReason.QUEUE_FULL_REQUESTS),
        (QueueLoad(3, 90), {"max_num_queued_reqs": 4}, newcomer(ahead=1), RefusalReason.QUEUE_FULL_REQUESTS),
        (QueueLoad(3, 90), {"max_num_queued_tokens": 91}, newcomer(), None),
        (QueueLoad(3, 91), {"max_num_queued_tokens": 91}, newcomer(), RefusalReason.QUEUE_FULL_TOKENS),
        (NOTHING, {"max_num_queued_tokens": 1}, newcomer(num=5), None),  # alone, a request is let in
        (
            NOTHING,
            {"max_num_queued_reqs_per_tenant": 2},
            newcomer(ahead=9, ahead_of_tenant=2),
            RefusalReason.TENANT_QUEUE_FULL_REQUESTS,
        ),
        (NOTHING, {"max_num_queued_reqs_per_tenant": 2}, newcomer(ahead=9, ahead_of_tenant=1), None),
        (QueueLoad(9, 9), {}, newcomer(num=64, ahead=1000), None),
    ],
)
def test_what_is_certain_without_the_prompt(load, limits, asks, reason):
    drain = DrainRate()
    refused = refuse_newcomer(asks, load, NOTHING, SchedulerConfig(**limits), drain, 0.0)
    assert (refused and refused.reason) == reason


def test_times_to_wait_are_told_in_tenths_of_a_second():
    drain = DrainRate()
    for second in range(20):
        drain.note(float(second))
    limits = SchedulerConfig(max_num_queued_reqs=0)
    refused = refuse_newcomer(newcomer(num=7), NOTHING, NOTHING, limits, drain, 20.0)
    exact_s = drain.retry_after_s(7, 20.0)
    assert exact_s <= refused.retry_after_s < exact_s + 0.1
    assert round(refused.retry_after_s * 10) == pytest.approx(refused.retry_after_s * 10)


class Texts:
    """Keeps whoever asks for a model's text until it is let go."""

    def __init__(self, frontend: Frontend) -> None:
        self._get, self.asked, self.go = frontend._texts.get, 0, asyncio.Event()

    async def get(self, model):
        self.asked += 1
        await self.go.wait()
        return await self._get(model)


def chat(**fields) -> pb.GenerateRequest:
    message = pb.ChatMessage(role="user", content="hello")
    return pb.GenerateRequest(chat=pb.ChatMessages(messages=[message]), **fields)


async def test_what_is_being_tokenized_takes_up_room():
    engine = FakeEngine(served_model())
    frontend = Frontend(engine, FakeConfig())
    texts = frontend._texts = Texts(frontend)
    requests = [chat(n=3, tenant="a"), chat(tenant="b"), chat(tenant="a")]
    tasks = [asyncio.create_task(frontend.generate(each, None)) for each in requests]
    await asyncio.sleep(0)
    seen = [(each.num, each.ahead, each.ahead_of_tenant) for each in engine.newcomers]
    assert seen == [(3, 0, 0), (1, 3, 0), (1, 4, 3)]
    tasks[1].cancel()
    texts.go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    await frontend.generate(chat(tenant="a"), None)
    assert (engine.newcomers[-1].ahead, engine.newcomers[-1].ahead_of_tenant) == (0, 0)


async def test_a_request_that_is_turned_away_is_not_looked_at():
    engine = FakeEngine(served_model())
    engine.door = lambda asks: Refused(asks.request_id, RefusalReason.QUEUE_FULL_REQUESTS, 1, 4, 4, 0.5)
    frontend = Frontend(engine, FakeConfig())
    texts = frontend._texts = Texts(frontend)
    with pytest.raises(ServiceError) as caught:
        await frontend.generate(chat(request_id="not valid!"), None)
    assert (caught.value.reason, caught.value.retry_after_s) == (Reason.QUEUE_FULL, 0.5)
    assert caught.value.code == code_pb2.RESOURCE_EXHAUSTED
    assert texts.asked == 0


class Queue:
    """An engine whose worker takes one request, and a queue with little room."""

    def __init__(self) -> None:
        self.registry = WorkerRegistry()
        config = SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=LIMIT)
        self.engine = Engine(config, self.registry)
        self.worker = FakeLink(self.engine, self.registry)
        self.frontends: list[RemoteFrontend] = []
        self.remotes: list[RemoteEngine] = []
        self.engine.on_round = self._tell

    def _tell(self) -> None:
        for frontend in self.frontends:
            frontend.note_queue(self.engine.queue()[0], QueueLoad(1, 1 << 62))

    async def frontend(self) -> RemoteEngine:
        ours, theirs = socket.socketpair()
        frontend, remote = RemoteFrontend(self.engine), RemoteEngine()
        self.frontends.append(frontend)
        self.remotes.append(remote)
        await frontend.open(ours, "")
        await remote.open(theirs)
        await remote.setup
        remote.limits = self.engine._core.config
        return remote

    @property
    def num_refused(self) -> int:
        return self.engine.state().counters.requests_refused

    async def until(self, condition) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.002)


@pytest.fixture
async def queue() -> AsyncIterator[Queue]:
    queue = Queue()
    queue.worker.connect()
    queue.worker.held = True
    yield queue
    for remote in queue.remotes:
        remote.close()
        await remote.lost.wait()


async def fill(queue: Queue, engine) -> list[FakeOutput]:
    """One request runs, and LIMIT wait."""
    outputs = [FakeOutput(f"r{i}") for i in range(LIMIT + 1)]
    for output in outputs:
        assert await engine.submit(spec(output.request_id, output, max_tokens=3)) is None
        await queue.until(lambda: queue.engine.state().running_requests == 1)
    return outputs


async def test_the_engine_turns_away_what_it_would_refuse(queue):
    local = LocalEngine(queue.engine)
    await fill(queue, local)
    refused = local.turn_away(newcomer(num=2))
    assert (refused.reason, refused.requested, refused.current, refused.limit) == (
        RefusalReason.QUEUE_FULL_REQUESTS,
        2,
        LIMIT,
        LIMIT,
    )
    assert queue.num_refused == 2
    # That a name is in use is said rather than that the queue is full.
    assert local.turn_away(newcomer("r3")) is None
    answer = await local.submit(spec("r3", FakeOutput("r3")))
    assert answer.reason is RefusalReason.DUPLICATE_ID


async def test_a_frontend_of_another_process_knows_when_the_queue_is_full_and_when_not(queue):
    one, other = await queue.frontend(), await queue.frontend()
    outputs = await fill(queue, one)
    await queue.until(lambda: other.turn_away(newcomer()) is not None)  # it has sent nothing itself
    assert one.turn_away(newcomer(num=3)).reason is RefusalReason.QUEUE_FULL_REQUESTS
    await queue.until(lambda: queue.num_refused == 1 + 3)
    queue.worker.release()
    await asyncio.gather(*(output.done.wait() for output in outputs))
    await queue.until(lambda: other._load == NOTHING)
    assert other.turn_away(newcomer(num=LIMIT)) is None
    assert other.turn_away(newcomer(num=LIMIT + 1)) is not None


async def test_what_was_submitted_takes_up_room_before_it_is_answered(queue):
    remote = await queue.frontend()
    tasks = [asyncio.create_task(remote.submit(spec(f"r{i}", FakeOutput(f"r{i}")))) for i in range(LIMIT)]
    await asyncio.sleep(0)
    assert remote.turn_away(newcomer()).current == LIMIT
    tasks[0].cancel()  # its answer comes nevertheless
    await asyncio.gather(*tasks, return_exceptions=True)
    await queue.until(lambda: remote._unanswered.num == 0)
    await queue.until(lambda: remote._load.num_waiting == LIMIT - 1)
    assert remote.turn_away(newcomer()) is None
