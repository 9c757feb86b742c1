"""The step stream over gRPC: hellos, order, how streams end, and that the worker outlives all of them."""

import asyncio
import threading

import grpc
import numpy as np
import pytest
from fake_scheduler import FakeScheduler, int32

from tidegate.worker.v1 import worker_pb2 as pb
from tidegate.worker.v1 import worker_pb2_grpc
from worker_service.config import WorkerConfig
from worker_service.plan_stream_api import PlanStream
from worker_service.step_thread import StepThread
from worker_service.worker import Engine, Phase, Worker
from worker_service.worker_api import WorkerApi

PROMPT = [7, 8, 9, 10, 11]
Code = grpc.StatusCode


class FakeGate:
    """Holds up an executor's launches until it is opened, and can make one fail."""

    def __init__(self, executor) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.reached = threading.Event()
        self.failure: Exception | None = None
        self._launch = executor.launch
        executor.launch = self.launch

    def launch(self, plan):
        self.reached.set()
        assert self.opened.wait(30)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return self._launch(plan)


class Running:
    """A worker that serves, and what a test needs to drive it."""

    def __init__(self, executor) -> None:
        self.executor = executor
        self.gate = FakeGate(executor)
        self.worker = Worker(WorkerConfig(model="tiny", max_in_flight=2))
        steps = StepThread(executor, num_threads=1)
        self.worker.engine = Engine(executor.model, executor.limits, 512, steps)
        self.worker.phase = Phase.READY
        self.api = WorkerApi(self.worker)
        self.epoch = 0

    def scheduler(self) -> FakeScheduler:
        scheduler = FakeScheduler(self.executor)
        scheduler.add("r", PROMPT)
        return scheduler

    async def open(self, **hello):
        """A stream and the worker's answer to its hello."""
        self.epoch += 1
        call = self.stub.Execute()
        fields = {"protocol_version": 1, "scheduler_epoch": self.epoch, **hello}
        await call.write(pb.ExecuteRequest(hello=pb.SchedulerHello(**fields)))
        return call, await call.read()


@pytest.fixture
async def running(make_executor):
    made = Running(make_executor("llama", 8))
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(made.api, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        made.stub = worker_pb2_grpc.WorkerServiceStub(channel)
        yield made
    made.gate.opened.set()
    await server.stop(None)
    made.worker.engine.steps.close().result(30)


async def send(call, plan: pb.StepPlan) -> None:
    await call.write(pb.ExecuteRequest(plan=plan))


async def ended(call, code: grpc.StatusCode, *parts: str) -> str:
    """Asserts that the stream has nothing more and ends with this status; returns its message."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            assert await call.read() is not grpc.aio.EOF
    assert caught.value.code() is code
    for part in parts:
        assert part in caught.value.details()
    return caught.value.details()


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 30)


async def test_the_hello_tells_what_the_worker_has(running):
    call, answer = await running.open()
    hello = answer.hello
    limits, model = running.executor.limits, running.executor.model
    assert (hello.protocol_version, hello.scheduler_epoch, hello.incarnation) == (
        1,
        1,
        running.worker.incarnation,
    )
    assert (hello.block_size, hello.num_blocks, hello.num_slots) == (8, limits.num_blocks, limits.num_slots)
    assert (hello.max_batched_tokens, hello.max_in_flight) == (limits.max_batched_tokens, 2)
    assert (hello.model.fingerprint, hello.model.dtype) == (model.fingerprint, "float32")
    assert list(hello.model.eos_token_ids) == [2]
    assert (hello.model.vocab_size, hello.model.max_model_len) == (limits.vocab_size, limits.max_model_len)
    assert hello.model.kv_bytes_per_token == 512
    call.cancel()


async def test_plans_are_answered_in_order_with_the_models_tokens(running, generate):
    call, _ = await running.open()
    scheduler = running.scheduler()
    plans = [scheduler.plan([("r", 5)])] + [scheduler.plan([("r", 1)]) for _ in range(5)]
    tokens = []
    await send(call, plans[0])
    for seq in range(1, 7):
        if seq < 6:
            await send(call, plans[seq])  # one ahead of the result
        result = (await call.read()).result
        assert result.seq == seq
        tokens += np.frombuffer(result.token_ids, "<i4").tolist()
    assert tokens == generate("llama", tuple(PROMPT), 6)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is Code.OK


async def test_status_in_each_phase(running):
    running.worker.phase, running.worker.progress, running.worker.detail = (
        Phase.LOADING,
        0.25,
        "loading weights",
    )
    engine, running.worker.engine = running.worker.engine, None
    status = await running.stub.GetStatus(pb.GetStatusRequest())
    assert (status.phase, status.progress, status.detail) == (
        pb.WORKER_PHASE_LOADING,
        0.25,
        "loading weights",
    )
    assert (status.num_blocks, status.HasField("model")) == (0, False)
    running.worker.phase, running.worker.engine = Phase.READY, engine
    status = await running.stub.GetStatus(pb.GetStatusRequest())
    assert (status.phase, status.num_blocks, status.steps) == (pb.WORKER_PHASE_READY, 80, 0)
    assert status.model.fingerprint == running.executor.model.fingerprint
    assert not status.model.HasField("tokenizer")
    call, _ = await running.open()
    assert (await running.stub.GetStatus(pb.GetStatusRequest())).phase == pb.WORKER_PHASE_SERVING
    call.cancel()


async def test_the_first_message_must_be_a_hello(running):
    call = running.stub.Execute()
    await send(call, pb.StepPlan(seq=1))
    await ended(call, Code.INVALID_ARGUMENT, "hello")
    call = running.stub.Execute()
    await call.done_writing()
    await ended(call, Code.INVALID_ARGUMENT, "hello")


@pytest.mark.parametrize(
    ("hello", "parts"),
    [
        ({"protocol_version": 2}, ("2", "speaks 1")),
        ({"model_fingerprint": "other"}, ("other",)),
    ],
)
async def test_a_hello_that_does_not_match_is_refused(hello, parts, running):
    call = running.stub.Execute()
    fields = {"protocol_version": 1, "scheduler_epoch": 9, **hello}
    await call.write(pb.ExecuteRequest(hello=pb.SchedulerHello(**fields)))
    await ended(call, Code.FAILED_PRECONDITION, *parts)
    # It did not count as the highest epoch.
    accepted, answer = await running.open(model_fingerprint=running.executor.model.fingerprint)
    assert answer.HasField("hello")
    accepted.cancel()


async def test_an_epoch_not_above_the_highest_is_refused_and_disturbs_nobody(running):
    call, _ = await running.open(scheduler_epoch=5)
    for epoch in (5, 4, 0):
        stale = running.stub.Execute()
        hello = pb.SchedulerHello(protocol_version=1, scheduler_epoch=epoch)
        await stale.write(pb.ExecuteRequest(hello=hello))
        await ended(stale, Code.FAILED_PRECONDITION, f"epoch {epoch}", "5 was seen")
    await send(call, running.scheduler().plan([("r", 5)]))
    assert (await call.read()).result.seq == 1
    call.cancel()


async def test_no_stream_while_loading_or_draining(running):
    for phase in (Phase.LOADING, Phase.WARMING_UP, Phase.DRAINING):
        running.worker.phase = phase
        call = running.stub.Execute()
        hello = pb.SchedulerHello(protocol_version=1, scheduler_epoch=1)
        await call.write(pb.ExecuteRequest(hello=hello))
        await ended(call, Code.UNAVAILABLE, phase.value)


async def test_a_newer_epoch_takes_over_and_drops_what_waits(running):
    old, _ = await running.open()
    scheduler = running.scheduler()
    running.gate.opened.clear()
    await send(old, scheduler.plan([("r", 5)]))
    await send(old, scheduler.plan([("r", 1)]))
    await until(running.gate.reached)
    opening = asyncio.create_task(running.open())
    await ended(old, Code.FAILED_PRECONDITION, "newer epoch 2")
    assert not opening.done()  # the step in progress must end before slots are emptied
    running.gate.opened.set()
    new, answer = await opening
    assert answer.hello.scheduler_epoch == 2
    await send(new, running.scheduler().plan([("r", 5)]))
    assert (await new.read()).result.seq == 1
    assert running.executor.steps == 2  # one of the old stream, one of the new
    new.cancel()


async def test_a_gap_in_seq_ends_the_stream_after_what_came_before(running):
    call, _ = await running.open()
    scheduler = running.scheduler()
    await send(call, scheduler.plan([("r", 5)]))
    await send(call, pb.StepPlan(seq=3))
    assert (await call.read()).result.seq == 1
    await ended(call, Code.INVALID_ARGUMENT, "plan 3", "seq", "2 comes next")
    again, _ = await running.open()
    await send(again, running.scheduler().plan([("r", 5)]))
    assert (await again.read()).result.seq == 1  # its slot was emptied
    again.cancel()


async def test_malformed_plans_end_their_stream_only(running):
    bad = [
        (pb.StepPlan(seq=1, slots=int32([99]), num_tokens=int32([1])), "slots"),
        (pb.StepPlan(seq=1, slots=b"123"), "slots"),
        (pb.StepPlan(seq=1, slots=int32([0]), num_tokens=int32([1])), "slot is free"),
        (pb.StepPlan(seq=1, released=int32([1])), "released"),
    ]
    for plan, part in bad:
        call, _ = await running.open()
        await send(call, plan)
        await ended(call, Code.INVALID_ARGUMENT, "plan 1", part)
    call, answer = await running.open()
    assert answer.HasField("hello")
    await call.write(pb.ExecuteRequest(hello=pb.SchedulerHello(protocol_version=1, scheduler_epoch=99)))
    await ended(call, Code.INVALID_ARGUMENT, "only plans")


async def test_more_plans_than_may_be_unanswered(running):
    call, _ = await running.open()
    running.gate.opened.clear()
    for seq in (1, 2, 3):
        await send(call, pb.StepPlan(seq=seq))
    await asyncio.sleep(0.3)  # until the worker has read the third
    running.gate.opened.set()
    assert [(await call.read()).result.seq for _ in range(2)] == [1, 2]
    await ended(call, Code.INVALID_ARGUMENT, "2 plans are unanswered")


async def test_a_forward_that_fails_is_internal_and_tells_no_secrets(running, caplog):
    call, _ = await running.open()
    running.gate.failure = RuntimeError("secret detail")
    await send(call, running.scheduler().plan([("r", 5)]))
    message = await ended(call, Code.INTERNAL, "incident")
    assert "secret" not in message
    (record,) = [r for r in caplog.records if r.message == "step failed"]
    assert record.fields["incident"] in message
    again, _ = await running.open()
    await send(again, running.scheduler().plan([("r", 5)]))
    assert (await again.read()).result.seq == 1
    again.cancel()


async def test_a_cancelled_stream_leaves_the_worker_ready(running):
    call, _ = await running.open()
    running.gate.opened.clear()
    await send(call, running.scheduler().plan([("r", 5)]))
    await until(running.gate.reached)
    call.cancel()
    running.gate.opened.set()
    again, _ = await running.open()
    await send(again, running.scheduler().plan([("r", 5)]))
    assert (await again.read()).result.seq == 1
    again.cancel()


async def test_a_stream_cancelled_before_its_hello_is_answered_leaves_the_worker_ready(running):
    call, _ = await running.open()
    running.gate.opened.clear()
    await send(call, running.scheduler().plan([("r", 5)]))
    await until(running.gate.reached)
    running.epoch += 1
    waiting = running.stub.Execute()  # for the step to end, so that slots can be emptied
    hello = pb.SchedulerHello(protocol_version=1, scheduler_epoch=running.epoch)
    await waiting.write(pb.ExecuteRequest(hello=hello))
    await ended(call, Code.FAILED_PRECONDITION, "newer epoch 2")
    waiting.cancel()
    await asyncio.sleep(0.1)  # until the worker has heard of it
    running.gate.opened.set()
    again, _ = await asyncio.wait_for(running.open(), 30)
    await send(again, running.scheduler().plan([("r", 5)]))
    assert (await again.read()).result.seq == 1
    again.cancel()


def test_a_step_that_outlives_the_event_loop_harms_nobody(make_executor):
    running = Running(make_executor("llama", 8))
    running.gate.opened.clear()
    steps = running.worker.engine.steps

    async def submit() -> None:
        stream = PlanStream(None, steps, running.executor.limits, max_in_flight=2)
        stream._submit(running.scheduler().plan([("r", 5)]), expected=1)

    asyncio.run(submit())
    running.gate.opened.set()
    steps.close().result(30)
    assert running.executor.steps == 1


async def test_closing_finishes_what_is_in_flight(running):
    call, _ = await running.open()
    running.gate.opened.clear()
    scheduler = running.scheduler()
    for plan in (scheduler.plan([("r", 5)]), scheduler.plan([("r", 1)])):
        await send(call, plan)
    await call.done_writing()
    running.gate.opened.set()
    assert [(await call.read()).result.seq for _ in range(2)] == [1, 2]
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is Code.OK


async def test_draining_finishes_what_is_in_flight_then_says_unavailable(running):
    call, _ = await running.open()
    running.gate.opened.clear()
    scheduler = running.scheduler()
    for plan in (scheduler.plan([("r", 5)]), scheduler.plan([("r", 1)])):
        await send(call, plan)
    await until(running.gate.reached)
    draining = asyncio.create_task(running.api.drain())
    await asyncio.sleep(0.05)
    assert not draining.done()
    running.gate.opened.set()
    assert (await call.read()).result.seq == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await call.read()
    assert caught.value.code() is Code.UNAVAILABLE
    await asyncio.wait_for(draining, 10)
    await running.api.drain()  # with no stream there is nothing to do


async def test_a_drain_that_takes_too_long_says_so_with_its_numbers_and_option(running, caplog):
    call, _ = await running.open()
    running.gate.opened.clear()
    scheduler = running.scheduler()
    for plan in (scheduler.plan([("r", 5)]), scheduler.plan([("r", 1)])):
        await send(call, plan)
    await until(running.gate.reached)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(running.api.drain(), 0.05)
    running.api.stop_draining(0.05)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is Code.UNAVAILABLE
    told = "its drain_timeout_s = 0.05 ran out with 2 plans unanswered; a higher --drain-timeout-s"
    assert told in caught.value.details()
    [event] = [each for each in caplog.records if each.message == "drain timed out"]
    assert (event.fields["timeout_s"], event.fields["plans_left"]) == (0.05, 2)
    running.gate.opened.set()
