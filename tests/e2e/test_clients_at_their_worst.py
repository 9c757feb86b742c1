"""Clients that vanish, stall, give up, cancel or come all at once: the service lives on, and leaks nothing.

All tests share one scheduler and one worker, as bad clients do. After each, no block is held, every invariant
holds, and requests get their tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import pytest_asyncio
from e2e.chaos.cluster import Cluster, launch
from e2e.chaos.load import Case, mixed_cases, run_all, undisturbed
from e2e.chaos.proxy import FaultyProxy
from e2e.conftest import VOCAB_SIZE
from google.rpc import error_details_pb2, status_pb2

from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc
from tidegate_client import AsyncClient, TidegateError

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_QUEUED = 512
SCHEDULER = {"max_num_queued_reqs": MAX_QUEUED, "max_num_seqs": 32, "log_level": "error"}
WORKER = {"num_blocks": 1200, "max_num_seqs": 32, "max_num_batched_tokens": 1024}
OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)


@dataclass
class Served:
    """The service, and requests with known tokens."""

    cluster: Cluster
    cases: Sequence[Case]
    expected: Sequence[list[list[int]]]

    async def run_cases(self, client: AsyncClient | None = None, count: int = 8) -> None:
        """Requests give their tokens."""
        outputs = await run_all(client or self.cluster.client, self.cases[:count])
        assert outputs == self.expected[:count]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tiny_model, tmp_path_factory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("clients")
    cases = mixed_cases(32, VOCAB_SIZE, seed=4, max_tokens=(100, 300))
    async with launch(folder, tiny_model("llama"), 1, WORKER, SCHEDULER) as cluster:
        yield Served(cluster, *await undisturbed(cluster.client, cases))


@pytest_asyncio.fixture(loop_scope="module")
async def served(service) -> AsyncIterator[Served]:
    """The service, which must be well after the test."""
    yield service
    await service.cluster.check_empty()
    await service.run_cases()


@pytest_asyncio.fixture(loop_scope="module")
async def network(service) -> AsyncIterator[FaultyProxy]:
    """A bad network between clients and the scheduler."""
    proxy = FaultyProxy(int(service.cluster.scheduler.address.rpartition(":")[2]))
    await proxy.start()
    yield proxy
    await proxy.stop()


def request(max_tokens: int = 300, **output: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=range(3, 40)),
        sampling=pb.SamplingParams(temperature=0),
        stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        output=pb.OutputParams(**output),
    )


def own_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[OWN_CONNECTION])


async def tokens_of(call: Any) -> list[int]:
    """The rest of a stream's tokens; its end must be a good one."""
    tokens: list[int] = []
    finished = 0
    while (response := await call.read()) is not grpc.aio.EOF:
        tokens += response.delta.token_ids
        finished += response.HasField("finished")
    assert finished == 1
    return tokens


async def touch(address: str, sent: bytes = b"") -> None:
    """Connects, perhaps says something, and resets the connection."""
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    await asyncio.sleep(0.01)
    writer.transport.abort()


async def leave(address: str) -> None:
    """Begins a generation, and closes the channel after the first event, or before."""
    async with own_channel(address) as channel:
        call = pb_grpc.InferenceServiceStub(channel).Generate(request())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(call.read(), random.uniform(0.0, 0.2))


async def be_cut_off(address: str) -> grpc.StatusCode:
    """Begins a generation, and reads until the network ends it."""
    async with own_channel(address) as channel:
        call = pb_grpc.InferenceServiceStub(channel).Generate(request(400))
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        return await call.code()


MANNERS: tuple[Callable[[str], Awaitable[None]], ...] = (
    touch,
    lambda address: touch(address, b"GET / HTTP/1.1\r\nHost: tidegate\r\n\r\n"),
    lambda address: touch(address, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"),
    leave,
)


async def test_a_thousand_clients_connect_and_vanish(served, network):
    scheduler = served.cluster.scheduler
    files, memory_mib = scheduler.open_files(), scheduler.resident_mib()
    codes: Counter[grpc.StatusCode] = Counter()
    for _ in range(20):
        cut_off = asyncio.gather(*(be_cut_off(network.address) for _ in range(10)))
        await asyncio.gather(*(manner(scheduler.address) for manner in MANNERS for _ in range(10)))
        while not cut_off.done():  # more than once, since some may connect late
            network.cut()
            await asyncio.sleep(0.05)
        codes.update(cut_off.result())
    assert codes.keys() <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK}, codes
    assert codes[grpc.StatusCode.UNAVAILABLE] > 150  # the others were faster
    await served.cluster.check_empty()
    async with asyncio.timeout(30):
        while scheduler.open_files() > files + 4:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.05)
    assert scheduler.resident_mib() - memory_mib < 64


async def test_slow_readers_hold_no_blocks_and_slow_nobody_down(served):
    scheduler = served.cluster.scheduler
    memory_mib = scheduler.resident_mib()
    narrow = [OWN_CONNECTION, ("grpc.http2.bdp_probe", 0)]  # at most 64 KiB on their way
    async with grpc.aio.insecure_channel(scheduler.address, options=narrow) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        calls = [stub.Generate(request(400, logprobs=20, text=False)) for _ in range(24)]
        for call in calls:
            await call.initial_metadata()
        await served.run_cases(count=24)
        # All that nobody has read is with the scheduler, and no longer with the worker.
        await served.cluster.check_empty()
        assert scheduler.resident_mib() - memory_mib < 64
        first, *others = [await tokens_of(call) for call in calls]
        assert len(first) == 400
        assert all(tokens == first for tokens in others)


async def test_a_deadline_of_a_millisecond(served):
    async with AsyncClient(served.cluster.scheduler.address, retry=None, timeout_s=0.001) as client:
        runs = (case.run(client) for case in list(served.cases) * 16)
        ends = await asyncio.gather(*runs, return_exceptions=True)
    assert len(ends) == 16 * len(served.cases)
    assert {error.code if isinstance(error, TidegateError) else error for error in ends} == {
        "DEADLINE_EXCEEDED"
    }


@pytest.mark.parametrize("comes_back", [True, False])
async def test_half_open_connections(served, network, comes_back):
    async with AsyncClient(network.address, retry=None) as client, own_channel(network.address) as channel:
        call = pb_grpc.InferenceServiceStub(channel).Generate(request())
        await call.read()
        running = asyncio.create_task(served.run_cases(client))
        await served.cluster.until(lambda state: state.running_requests >= 4)
        network.hold()
        # Nobody knows that these clients are gone. Their requests end, and others are not disturbed.
        await served.run_cases(count=16)
        await served.cluster.check_empty()
        if comes_back:
            network.resume()
            assert len(await tokens_of(call)) == 300
            await running
        else:
            network.cut()
            network.resume()
            with pytest.raises(TidegateError, match="UNAVAILABLE"):
                await running
            with pytest.raises(grpc.aio.AioRpcError):
                await tokens_of(call)


async def test_a_storm_of_cancels(served):
    """Some cancel by closing the stream, some by name and twice, some not at all."""
    client = served.cluster.client
    before = (await served.cluster.state()).counters

    async def cancel(i: int) -> None:
        stream = client.generate(list(range(3, 40)), max_tokens=400, ignore_eos=True, request_id=f"storm-{i}")
        reading = asyncio.ensure_future(anext(aiter(stream), None))
        await asyncio.sleep(random.uniform(0.0, 0.3))
        if i % 2:
            found = [await client.cancel(f"storm-{i}") for _ in range(2)]
            assert found != [True, True]  # the first may come before its request
        stream.cancel()
        with contextlib.suppress(TidegateError, asyncio.CancelledError):
            await reading

    await asyncio.gather(served.run_cases(count=16), *(cancel(i) for i in range(400)))
    await served.cluster.check_empty()
    after = (await served.cluster.state()).counters
    assert after.requests_failed == before.requests_failed
    accepted = after.requests_accepted - before.requests_accepted
    finished = after.requests_finished - before.requests_finished
    assert accepted == finished + after.requests_cancelled - before.requests_cancelled
    assert after.requests_cancelled - before.requests_cancelled > 50  # the others finished or never came


async def test_blocks_are_free_when_a_cancel_is_answered(served):
    stub = pb_grpc.InferenceServiceStub(own_channel(served.cluster.scheduler.address))
    named = request(400)
    named.request_id = "to-be-cancelled"
    call = stub.Generate(named)
    while not (await call.read()).HasField("delta"):
        pass
    assert (await served.cluster.state()).workers[0].blocks_used > 0
    assert (await stub.Cancel(pb.CancelRequest(request_id=named.request_id))).found
    assert (await served.cluster.state()).workers[0].blocks_used == 0
    last = await call.read()
    while (response := await call.read()) is not grpc.aio.EOF:
        last = response
    assert last.finished.reason == pb.FINISH_REASON_CANCELLED


@dataclass(frozen=True)
class Answer:
    """What became of one request of a burst."""

    code: grpc.StatusCode
    latency_s: float  # until it was accepted or refused
    retry_after_s: float | None  # what a refusal said
    num_tokens: int


async def send(stub: pb_grpc.InferenceServiceStub, gate: asyncio.Semaphore) -> Answer:
    async with gate:
        started_s = time.perf_counter()
        call = stub.Generate(request(max_tokens=16), wait_for_ready=True)
        await call.initial_metadata()
        latency_s = time.perf_counter() - started_s
    try:
        tokens = await tokens_of(call)
    except grpc.aio.AioRpcError as error:
        return Answer(error.code(), latency_s, retry_after_s(error), 0)
    return Answer(grpc.StatusCode.OK, latency_s, None, len(tokens))


def retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    """The delay of a status's RetryInfo."""
    packed = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
    for detail in status_pb2.Status.FromString(packed).details:
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            return info.retry_delay.ToMilliseconds() / 1000
    return None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("at_once", [64, 10_000])
async def test_a_burst_of_ten_thousand_requests(served, at_once):
    """From 64 callers, each of which sends its next request when the last one is answered; and at once."""
    scheduler = served.cluster.scheduler
    memory_mib = scheduler.resident_mib()
    before = (await served.cluster.state()).counters
    gate = asyncio.Semaphore(at_once)
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(own_channel(scheduler.address)) for _ in range(8)]
        stubs = [pb_grpc.InferenceServiceStub(channel) for channel in channels]
        answers = await asyncio.gather(*(send(stubs[i % 8], gate) for i in range(10_000)))
    codes = Counter(answer.code for answer in answers)
    refused = [answer for answer in answers if answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED]
    accepted = [answer for answer in answers if answer.code is grpc.StatusCode.OK]
    assert len(refused) + len(accepted) == 10_000, codes
    assert len(accepted) >= MAX_QUEUED
    assert {answer.num_tokens for answer in accepted} == {16}
    assert all(answer.retry_after_s and answer.retry_after_s > 0 for answer in refused)
    counters = (await served.cluster.check_empty()).counters
    assert counters.requests_refused - before.requests_refused == len(refused)
    assert counters.requests_accepted - before.requests_accepted == len(accepted)
    assert scheduler.resident_mib(peak=True) - memory_mib < 256
    median_ms = 1000 * statistics.median(answer.latency_s for answer in refused or answers)
    print(f"{at_once} at once: {len(refused)} refused, at the median after {median_ms:.0f} ms")
