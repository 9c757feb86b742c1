"""WatchState and GetBlockMap, as a console sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest
from engine_harness import Cluster, FakeSink, spec
from fake_worker import FakeWorker, Faults

from scheduler_service import state_feed
from scheduler_service.admin_api import AdminApi
from scheduler_service.admin_codec import block_map_message
from scheduler_service.core.block_map import BlockMap, Owner
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.state_feed import FeedOptions, StateFeeds, StateReader
from tidegate.admin.v1 import admin_pb2 as pb
from tidegate.admin.v1 import admin_pb2_grpc as pb_grpc


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster(SchedulerConfig(max_num_seqs=4))
    yield cluster
    await cluster.close()


@pytest.fixture
async def api(cluster) -> AdminApi:
    return AdminApi(cluster.engine, cluster.registry, cluster.fleet)


@pytest.fixture
async def admin(api) -> AsyncIterator[pb_grpc.AdminServiceStub]:
    server = grpc.aio.server()
    pb_grpc.add_AdminServiceServicer_to_server(api, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.AdminServiceStub(channel)
    await server.stop(None)


class Console:
    """Keeps what a stream tells, as a page would."""

    def __init__(self) -> None:
        self.sequence: int | None = None
        self.snapshots = 0
        self.updates = 0
        self.last = pb.WatchStateResponse()
        self.workers: dict[str, pb.WorkerState] = {}
        self.queues: dict[tuple[str, str, int], pb.QueueState] = {}
        self.heads: dict[str, pb.QueueHead] = {}
        self.requests: dict[int, pb.RequestState] = {}
        self.counters = pb.Counters()
        self.steps: dict[str, list[tuple]] = {}

    def take(self, update: pb.WatchStateResponse) -> None:
        if update.snapshot:
            self.__dict__.update(
                {**Console().__dict__, "snapshots": self.snapshots + 1, "updates": self.updates}
            )
        else:
            assert update.sequence == self.sequence + 1
        self.updates += 1
        self.sequence, self.last = update.sequence, update
        for name in update.removed_worker_ids:
            del self.workers[name]
        self.workers |= {worker.worker_id: worker for worker in update.workers}
        for queue in update.queues:
            key = (queue.model, queue.tenant, queue.priority)
            self.queues[key] = queue
            if not queue.waiting_requests + queue.preempted_requests + queue.running_requests:
                del self.queues[key]
        self.heads |= {head.model: head for head in update.heads}
        for key in update.ended_keys:
            del self.requests[key]
        self.requests |= {request.key: request for request in update.requests}
        told = update.progress
        for key, outputs in zip(told.keys, told.output_tokens, strict=True):
            self.requests[key].output_tokens = outputs
        if update.HasField("counters"):
            self.counters = update.counters
        for steps in update.steps:
            rows = zip(
                steps.sequences,
                steps.prefill_tokens,
                steps.decode_tokens,
                steps.budget_tokens,
                steps.requests,
                steps.durations_ms,
                steps.ended_seconds,
                strict=True,
            )
            self.steps.setdefault(steps.worker_id, []).extend(rows)


async def until(call: grpc.aio.UnaryStreamCall, console: Console, condition) -> None:
    async with asyncio.timeout(20):
        while not console.updates or not condition():
            console.take(await call.read())


async def test_a_watcher_sees_requests_come_run_and_end(cluster, admin):
    worker = await cluster.add(FakeWorker(num_slots=2, faults=Faults(stall_at_seq=2)))
    call, console = admin.WatchState(pb.WatchStateRequest(interval_ms=100, steps=True)), Console()
    await until(call, console, lambda: console.workers)
    assert (console.last.snapshot, console.last.version) == (True, "0.1.0")
    (seen,) = console.workers.values()
    assert (seen.status, seen.num_slots, seen.budget_tokens) == (pb.WORKER_STATUS_READY, 2, 2048)
    for i in range(4):
        cluster.engine.submit(spec(f"r{i}", FakeSink(), prompt=9, tenant="t", priority=3))
    await until(
        call, console, lambda: console.last.waiting_requests == 2 and console.counters.output_tokens == 2
    )
    queue = console.queues["fake", "t", 3]
    assert (queue.waiting_requests, queue.running_requests, queue.waiting_tokens) == (2, 2, 18)
    assert [request.request_id for request in console.requests.values()] == ["r0", "r1", "r2", "r3"]
    assert console.requests[0].status == pb.REQUEST_STATUS_RUNNING
    assert (console.requests[0].worker_id, console.requests[0].model) == (worker.address, "fake")
    assert [console.requests[key].output_tokens for key in range(4)] == [1, 1, 0, 0]
    head = console.heads["fake"]
    assert (head.request_id, head.blockers[0].kind) == ("r2", pb.BLOCKER_KIND_SLOTS)
    ((seq, prefill, decode, budget, requests, duration, ended),) = console.steps[worker.address]
    assert (seq, prefill, decode, budget, requests) == (1, 18, 0, 2048, 2)
    assert duration >= 0.0 and ended <= console.last.time_seconds
    for i in range(4):
        cluster.engine.cancel(f"r{i}")
    await until(call, console, lambda: not console.requests)
    assert (console.queues, console.heads["fake"].request_id) == ({}, "")
    assert (console.counters.requests_cancelled, console.snapshots) == (4, 1)
    call.cancel()


async def test_decodes_and_prompts_are_told_apart_by_step(cluster):
    worker = await cluster.add(FakeWorker())
    cluster.submit("r1", prompt=9, max_tokens=4)
    await cluster.finish()
    steps = cluster.engine.steps.since(worker.address, 0)
    assert [(step.prefill_tokens, step.decode_tokens) for step in steps] == [(9, 0), (0, 1), (0, 1), (0, 1)]
    assert [step.number for step in cluster.engine.steps.since(worker.address, 2)] == [3, 4]
    now = cluster.engine.now()
    assert cluster.engine.steps.rate(worker.address, now) == pytest.approx(4 / 5)
    assert cluster.engine.steps.rate(worker.address, now + 6) == 0.0


async def test_workers_that_go_are_told(cluster, admin):
    worker = await cluster.add(FakeWorker())
    call, console = admin.WatchState(pb.WatchStateRequest(interval_ms=100)), Console()
    await until(call, console, lambda: console.workers)
    await cluster.fleet.deregister(worker.address)
    await until(call, console, lambda: not console.workers)
    assert console.last.removed_worker_ids == [worker.address]
    call.cancel()


@pytest.mark.parametrize("interval_ms", [1, 99, 60_001])
async def test_other_intervals_are_refused_with_the_allowed_ones(admin, interval_ms):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await admin.WatchState(pb.WatchStateRequest(interval_ms=interval_ms)).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == f"interval_ms: {interval_ms} is not allowed; allowed: 100 to 60000"


async def test_nothing_is_made_while_nobody_watches_and_one_for_many(
    cluster, admin, api, monkeypatch, caplog
):
    reads = []
    read = StateReader.read
    monkeypatch.setattr(StateReader, "read", lambda self: reads.append(self) or read(self))
    request = pb.WatchStateRequest(interval_ms=100)
    calls = [admin.WatchState(request) for _ in range(5)]
    for call in calls:
        await call.read()
    assert len(api._feeds._feeds) == 1
    cluster.registry.add("new", "127.0.0.1:1")
    updates = [await call.read() for call in calls]
    assert {update.sequence for update in updates} == {updates[0].sequence}
    assert len({id(reader) for reader in reads}) <= 5  # a snapshot for each, at most
    for call in calls:
        call.cancel()
    await cluster.until(lambda: not api._feeds._feeds)
    reads.clear()
    await asyncio.sleep(0.25)
    assert reads == []
    assert [record for record in caplog.records if record.message == "admin_fault"] == []


async def test_a_slow_watcher_gets_a_snapshot_and_no_queue_grows(cluster):
    feeds = StateFeeds(cluster.engine, cluster.registry)
    options = FeedOptions(interval_ms=20, steps=False)
    slow, quick, console = feeds.join(options), feeds.join(options), Console()

    async def read(watcher) -> pb.WatchStateResponse:
        return await asyncio.wait_for(watcher.next(), 10)

    first, seen = await asyncio.gather(read(slow), read(quick))
    console.take(seen)
    for i in range(6):
        cluster.registry.add(f"w{i}", f"127.0.0.1:{i + 1}")
        console.take(await read(quick))
    assert (console.snapshots, len(console.workers)) == (1, 6)
    again = await read(slow)
    assert first.snapshot and again.snapshot
    assert [worker.worker_id for worker in again.workers] == [f"w{i}" for i in range(6)]
    cluster.registry.add("last", "127.0.0.1:9")
    following, _ = await asyncio.gather(read(slow), read(quick))
    assert (following.snapshot, following.sequence) == (False, again.sequence + 1)
    assert [worker.worker_id for worker in following.workers] == ["last"]
    feeds.leave(options, slow)
    feeds.leave(options, quick)
    assert feeds._feeds == {}


async def test_a_core_that_began_anew_is_told_whole(cluster, admin):
    await cluster.add(FakeWorker(faults=Faults(stall_at_seq=1)))
    call, console = admin.WatchState(pb.WatchStateRequest(interval_ms=100)), Console()
    cluster.engine.submit(spec("r1", FakeSink()))
    await until(call, console, lambda: console.requests)
    cluster.engine._guard.start_over("incident")
    await until(call, console, lambda: console.snapshots == 2)
    assert (console.requests, console.counters.requests_accepted) == ({}, 0)
    call.cancel()


async def test_a_bug_ends_the_stream_with_an_incident(cluster, admin, monkeypatch, caplog):
    monkeypatch.setattr(state_feed.StateReader, "read", lambda self: 1 / 0)
    call = admin.WatchState(pb.WatchStateRequest())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "division" not in caught.value.details()
    monkeypatch.undo()
    assert (await admin.WatchState(pb.WatchStateRequest()).read()).snapshot


def test_the_block_map_of_host_memory():
    owner = Owner("r2", 0, "t", 7, 2)
    held = np.zeros(3, np.int32)
    blocks = BlockMap(held, held > 0, held - 1, (), 4, (0, 2, 1), np.array([-1, 0, 0], np.int32), (owner,))
    told = block_map_message("w", blocks)
    assert list(told.host_states) == [0, 2, 1]
    assert np.frombuffer(told.host_owner_indices, "<i4").tolist() == [-1, 0, 0]
    assert told.host_owners == [pb.BlockOwner(request_id="r2", tenant="t", key=7, blocks=2)]


async def test_the_block_map_of_a_worker(cluster, admin):
    worker = await cluster.add(FakeWorker(num_blocks=33, faults=Faults(stall_at_seq=1)))
    cluster.engine.submit(spec("r1", FakeSink(), prompt=9, tenant="t"))
    await cluster.until(lambda: cluster.engine.state().running_requests == 1)
    told = await admin.GetBlockMap(pb.GetBlockMapRequest(worker_id=worker.address))
    holders, owners = np.frombuffer(told.holders, np.uint8), np.frombuffer(told.owner_indices, "<i4")
    assert (len(holders), len(told.cached), len(owners), told.block_size) == (33, 33, 33, 4)
    assert (holders == 1).sum() == told.owners[0].blocks == cluster.engine.state().workers[0].blocks_used
    assert (owners[holders == 1] == 0).all() and (owners[holders == 0] == -1).all()
    assert (told.owners[0].request_id, told.owners[0].tenant, told.owners[0].key) == ("r1", "t", 0)
    assert (told.host_states, told.host_owner_indices, list(told.host_owners)) == (b"", b"", [])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await admin.GetBlockMap(pb.GetBlockMapRequest(worker_id="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
