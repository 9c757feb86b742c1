"""A frontend's way to an engine that is not in its event loop: both ends of the link, and a real engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from engine_harness import FakeLink, FakeSink, outputs_of, spec
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from scheduler_service.core.admission import RefusalReason
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.events import FinishReason
from scheduler_service.core.sampling import SamplingParams
from scheduler_service.core_guard import EngineFaultError
from scheduler_service.engine import Engine
from scheduler_service.errors import Reason, ServiceError
from scheduler_service.frontend_engine import LocalEngine
from scheduler_service.presentation import Presentation
from scheduler_service.remote_engine import RemoteEngine
from scheduler_service.remote_frontend import RemoteFrontend
from scheduler_service.telemetry import Telemetry
from scheduler_service.workers import WorkerRegistry
from tidegate_telemetry.exporting import Outlets


class FakeOutput(FakeSink):
    """A sink that can also lose its engine."""

    presentation = Presentation(stop=("x",))

    def __init__(self, request_id: str, **fields) -> None:
        super().__init__(**fields)
        self.request_id = request_id
        self.failure: ServiceError | None = None

    def fail(self, failure: ServiceError) -> None:
        assert self.failure is None
        self.failure = failure
        self.done.set()

    __hash__ = object.__hash__


class Pair:
    """An engine with one worker, and some frontends."""

    def __init__(self, telemetry: Telemetry | None = None) -> None:
        self.registry = WorkerRegistry()
        self.engine = Engine(SchedulerConfig(max_num_seqs=64), self.registry, telemetry)
        self.worker = FakeLink(self.engine, self.registry, num_blocks=2049)
        self.sides: list[tuple[RemoteFrontend, RemoteEngine]] = []

    async def add(self, **fields) -> RemoteEngine:
        ours, theirs = socket.socketpair()
        frontend, remote = RemoteFrontend(self.engine), RemoteEngine(**fields)
        self.sides.append((frontend, remote))
        frontend.send_status(self.engine.ready)
        await frontend.open(ours, '{"an": "option"}')
        await remote.open(theirs)
        assert await remote.setup == '{"an": "option"}'
        return remote

    async def close(self) -> None:
        for frontend, remote in self.sides:
            remote.close()
            await frontend.lost.wait()
            await remote.lost.wait()

    def at_rest(self) -> None:
        state = self.engine.state()
        assert (state.running_requests, state.waiting_requests, state.workers[0].blocks_used) == (0, 0, 0)
        assert self.engine.violations() == []
        assert self.worker.worker.violations == []


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    pair.worker.connect()
    yield pair
    await pair.close()


async def submit(remote: RemoteEngine | LocalEngine, request_id: str, **fields):
    output = FakeOutput(request_id, n=fields.get("n", 1), on_token=fields.pop("on_token", None))
    request = spec(request_id, output, **fields)
    return request, output, await remote.submit(request)


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.002)


async def test_requests_of_two_frontends_get_their_tokens(pair):
    remotes = [await pair.add(), await pair.add()]
    sent = [await submit(remotes[i % 2], f"r{i}", max_tokens=20, n=1 + i % 3) for i in range(8)]
    for request, output, refusal in sent:
        assert refusal is None
        await asyncio.wait_for(output.done.wait(), 10)
        for index in range(request.n):
            assert output.tokens[index] == outputs_of(request, index)
            end = output.finished[index]
            assert (end.request_id, end.reason) == (request.request_id, FinishReason.LENGTH)
            assert (end.usage.prompt_tokens, end.usage.output_tokens) == (10, 20)
            assert end.timings.time_to_first_token_s > 0
        assert output.kinds.count("Admitted") == request.n
    pair.at_rest()


async def test_logprobs_arrive_beside_their_tokens(pair):
    remote = await pair.add()
    plain = await submit(remote, "plain", max_tokens=4)
    request, output, _ = await submit(remote, "r", max_tokens=4, sampling=SamplingParams(seed=3, logprobs=2))
    await output.done.wait()
    await plain[1].done.wait()
    assert plain[1].logprobs == [None] * 4
    assert [each.sampled for each in output.logprobs] == [-0.5] * 4
    tokens = outputs_of(request)
    assert [each.top for each in output.logprobs] == [((t, -0.5), ((t + 1) % 1000, -1.5)) for t in tokens]


async def test_a_refusal_comes_back_with_its_numbers(pair):
    remote = await pair.add()
    _, _, refusal = await submit(remote, "long", max_tokens=600)
    assert (refusal.reason, refusal.requested, refusal.limit) == (RefusalReason.CONTEXT_TOO_LONG, 610, 512)
    _, _, refusal = await submit(remote, "other", model="other")
    assert refusal.reason is RefusalReason.UNKNOWN_MODEL


async def test_a_name_in_use_is_refused_from_any_frontend_and_its_owner_lives_on(pair):
    one, two = await pair.add(), await pair.add()
    pair.worker.held = True
    request, output, _ = await submit(one, "r", max_tokens=5)
    for remote in (one, two):
        _, loser, refusal = await submit(remote, "r")
        assert refusal.reason is RefusalReason.DUPLICATE_ID
        remote.abandon(loser)  # as its stream does when it is closed
    pair.worker.release()
    await output.done.wait()
    assert output.tokens[0] == outputs_of(request)


async def test_a_bug_of_the_engine_ends_one_request(pair, monkeypatch):
    remote = await pair.add()

    def broken(*_):
        raise RuntimeError

    monkeypatch.setattr(pair.engine._core, "submit", broken)
    with pytest.raises(EngineFaultError) as caught:
        await submit(remote, "r1")
    assert caught.value.incident_id
    monkeypatch.undo()
    request, output, _ = await submit(remote, "r2")
    await output.done.wait()
    assert output.tokens[0] == outputs_of(request)


async def test_a_request_that_nobody_wants_is_over_at_once(pair):
    remote = await pair.add()
    pair.worker.held = True
    _, output, _ = await submit(remote, "r", max_tokens=400)
    remote.abandon(output)
    await until(lambda: not pair.engine.state().running_requests)
    pair.worker.release()
    await until(lambda: pair.engine.state().workers[0].blocks_used == 0)
    assert (output.tokens, output.finished) == ({}, {})
    pair.at_rest()


@pytest.mark.parametrize("remote", [False, True])
async def test_closing_a_request_that_has_ended_spares_another_of_its_name(pair, remote):
    engine = await pair.add() if remote else LocalEngine(pair.engine)
    _, ended, _ = await submit(engine, "r", max_tokens=3)
    await ended.done.wait()
    request, output, _ = await submit(engine, "r", max_tokens=40)
    engine.abandon(ended)  # its client had not read all of it
    await asyncio.wait_for(output.done.wait(), 10)
    assert output.tokens[0] == outputs_of(request)
    assert output.reason is FinishReason.LENGTH


async def test_a_caller_that_goes_before_the_answer_leaves_nothing(pair):
    remote = await pair.add()
    output = FakeOutput("r")
    caller = asyncio.create_task(remote.submit(spec("r", output, max_tokens=400)))
    await asyncio.sleep(0)
    caller.cancel()
    remote.abandon(output)
    await until(lambda: pair.engine.state().counters.requests_cancelled == 1)
    await until(lambda: pair.engine.state().workers[0].blocks_used == 0)
    pair.at_rest()


async def test_a_stop_string_ends_the_candidate_where_it_was_found(pair):
    remote = await pair.add()

    def find(index, token_id):
        if len(output.tokens[index]) == 3:
            remote.stop(output, index, 3)

    output = FakeOutput("r", on_token=find)
    assert await remote.submit(spec("r", output, max_tokens=400)) is None
    await asyncio.wait_for(output.done.wait(), 10)
    assert (output.reason, output.finished[0].usage.output_tokens) == (FinishReason.STOP, 3)


@pytest.mark.parametrize(("tenant", "found"), [(None, True), ("mine", True), ("theirs", False)])
async def test_cancelling_by_name_works_from_any_frontend_for_the_right_tenant(pair, tenant, found):
    one, two = await pair.add(), await pair.add()
    _, output, _ = await submit(one, "r", max_tokens=400, tenant="mine")
    assert await two.cancel("r", tenant) is found
    if found:
        await output.done.wait()
        assert output.reason is FinishReason.CANCELLED
        assert await two.cancel("r", tenant) is False
    else:
        assert not output.finished


async def test_an_output_that_fails_ends_its_own_request_alone(pair):
    remote = await pair.add()

    def fail(*_):
        raise RuntimeError

    _, broken, _ = await submit(remote, "broken", max_tokens=400, on_token=fail)
    request, output, _ = await submit(remote, "r", max_tokens=20)
    await broken.done.wait()
    await output.done.wait()
    assert broken.failure.reason is Reason.INTERNAL
    assert output.tokens[0] == outputs_of(request)
    await until(lambda: pair.engine.state().workers[0].blocks_used == 0)


async def test_a_frontend_that_falls_behind_gets_everything_in_a_few_frames(pair):
    remote = await pair.add()
    quick = await pair.add()
    frames = []
    receive = remote._link._receive
    remote._link._receive = lambda parts: (frames.append(sum(map(len, parts))), receive(parts))
    slow = [await submit(remote, f"r{i}", max_tokens=400) for i in range(30)]
    other, other_output, _ = await submit(quick, "other", max_tokens=400)
    frontend = pair.sides[0][0]
    frontend.link.pause_writing()  # as the transport does when the socket and its buffer are full
    in_flight = len(frames) + 1
    await asyncio.wait_for(other_output.done.wait(), 20)
    await until(lambda: not pair.engine.state().running_requests)
    assert other_output.tokens[0] == outputs_of(other)
    assert len(frames) <= in_flight
    frames.clear()
    frontend.link.resume_writing()
    for request, output, _ in slow:
        await asyncio.wait_for(output.done.wait(), 10)
        assert output.tokens[0] == outputs_of(request)
        assert output.reason is FinishReason.LENGTH
    assert len(frames) == 1
    assert frames[0] < 30 * (400 * 12 + 500)  # 12 bytes a token, and what else there is to say of a request


async def test_a_socket_that_is_full_holds_the_sender_back(pair):
    """The real transport: its reader stops, and nothing is lost when it goes on."""
    remote = await pair.add()
    transport = pair.sides[0][0].link._transport
    transport.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDBUF, 1
    )  # the least there is
    transport.set_write_buffer_limits(high=1000)
    sent = [await submit(remote, f"r{i}", max_tokens=200, n=8) for i in range(4)]
    remote._link._transport.pause_reading()
    await until(lambda: pair.engine.state().counters.requests_finished == 32)
    assert transport.get_write_buffer_size() < 5000
    assert not any(output.finished for _, output, _ in sent)
    remote._link._transport.resume_reading()
    for request, output, _ in sent:
        await asyncio.wait_for(output.done.wait(), 20)
        for index in range(8):
            assert output.tokens[index] == outputs_of(request, index)


async def test_the_end_of_a_frontend_cancels_its_requests_and_no_others(pair):
    one, two = await pair.add(), await pair.add()
    pair.worker.held = True
    await submit(one, "gone", max_tokens=400, n=3)
    request, output, _ = await submit(two, "stays", max_tokens=30)
    one.close()
    await until(lambda: pair.engine.state().counters.requests_cancelled == 3)
    pair.worker.release()
    await asyncio.wait_for(output.done.wait(), 10)
    assert output.tokens[0] == outputs_of(request)
    pair.at_rest()


async def test_the_end_of_the_engine_fails_everything_that_waits_for_it(pair):
    remote = await pair.add()
    pair.worker.held = True
    _, output, _ = await submit(remote, "r", max_tokens=400)
    waiting = [
        asyncio.create_task(remote.submit(spec("late", FakeOutput("late")))),
        asyncio.create_task(remote.cancel("nobody", None)),
    ]
    await asyncio.sleep(0)
    pair.sides[0][0].link._transport.abort()
    await remote.lost.wait()
    assert output.failure.reason is Reason.ENGINE_LOST
    for call in waiting:
        with pytest.raises(ServiceError, match="the scheduler ended"):
            await call
    with pytest.raises(ServiceError, match="the scheduler ended"):
        await remote.cancel("r", None)
    with pytest.raises(ServiceError, match="the scheduler ended"):
        await submit(remote, "later")


async def test_models_readiness_and_draining_are_known_in_frontends():
    pair = Pair()
    remote = await pair.add()
    frontend = pair.sides[0][0]
    heard = []

    def hear() -> None:
        if heard[-1:] != [remote.ready]:
            heard.append(remote.ready)

    remote.on_status = hear
    pair.registry.on_change = lambda: frontend.send_status(pair.engine.ready)
    pair.engine.on_ready_change = frontend.send_status
    assert remote.models() == {}
    pair.worker.connect()
    await until(lambda: heard)
    assert (heard, remote.models()) == ([True], pair.engine.models())
    assert remote.models()["fake"].ready_workers == 1
    pair.engine.start_draining()
    await until(lambda: remote.draining)
    assert heard == [True, False]
    await pair.close()


async def test_a_trace_goes_on_in_the_engines_process():
    exporter = InMemorySpanExporter()
    pair = Pair(telemetry=Telemetry(Outlets(SimpleSpanProcessor(exporter))))
    pair.worker.connect()
    trace_id, rpc_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    traced = await pair.add(traceparent=lambda: f"00-{trace_id}-{rpc_id}-01")
    _, output, _ = await submit(traced, "r", max_tokens=3)
    await output.done.wait()
    (span,) = [span for span in exporter.get_finished_spans() if span.name.startswith("text_completion")]
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (trace_id, rpc_id)
    exporter.clear()
    untraced = await pair.add(traceparent=lambda: f"00-{trace_id}-{rpc_id}-00")
    _, output, _ = await submit(untraced, "r", max_tokens=3)
    await output.done.wait()
    assert exporter.get_finished_spans() == ()
    await pair.close()


async def test_nonsense_on_the_link_ends_it(pair):
    remote = await pair.add()
    remote._say("sing")
    await asyncio.wait_for(remote.lost.wait(), 5)
    again = await pair.add()
    request, output, _ = await submit(again, "r")
    await output.done.wait()
    assert output.tokens[0] == outputs_of(request)
