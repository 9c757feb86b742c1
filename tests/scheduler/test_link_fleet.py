"""Workers that come, go, move and are drained: which of them serve, by which names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from engine_harness import Cluster, submit_many
from fake_worker import FakeWorker, Faults

from scheduler_service.fleet import Fleet
from scheduler_service.worker_link import LinkOptions, backoff_s
from scheduler_service.workers import WorkerStatus


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.close()


async def test_two_workers_share_the_queue(cluster):
    first = await cluster.add(FakeWorker(num_slots=4, step_delay_s=0.002))
    second = await cluster.add(FakeWorker(num_slots=4, step_delay_s=0.002))
    submit_many(cluster, 16)
    await cluster.finish()
    assert cluster.engine.models()["fake"].ready_workers == 2
    assert first.plans
    assert second.plans


async def test_workers_of_different_models_serve_their_own(cluster):
    await cluster.add(FakeWorker(model="a"))
    await cluster.add(FakeWorker(model="b", fingerprint="fp-2"))
    for i in range(6):
        cluster.submit(f"r{i}", model="ab"[i % 2])
    await cluster.finish()
    assert sorted(cluster.engine.models()) == ["a", "b"]


async def test_another_fingerprint_under_the_same_name_is_refused_while_the_first_serves(cluster):
    first = await cluster.add(FakeWorker())
    second = await cluster.add(FakeWorker(fingerprint="fp-2"), ready=False)
    await cluster.until(lambda: "fingerprint 'fp-2'" in cluster.record(second).last_error)
    assert cluster.engine.models()["fake"].fingerprint == "fp-1"
    await cluster.fleet.deregister(first.address)
    await cluster.until(lambda: cluster.status(second) is WorkerStatus.READY)
    assert cluster.engine.models()["fake"].fingerprint == "fp-2"


async def test_live_requests_keep_their_models_fingerprint(cluster):
    first = await cluster.add(FakeWorker(step_delay_s=0.005))
    cluster.submit("r1", max_tokens=40)
    await cluster.until(lambda: len(first.plans) >= 3)
    await first.stop()
    await cluster.until(lambda: not cluster.engine.ready)
    second = await cluster.add(FakeWorker(fingerprint="fp-2"), ready=False)
    await cluster.until(lambda: "live requests" in cluster.record(second).last_error)
    await cluster.add(FakeWorker())
    await cluster.finish()


async def test_one_worker_under_two_addresses_is_dialled_once(cluster):
    worker = await cluster.add(FakeWorker())
    alias = await cluster.fleet.register(f"localhost:{worker.port}", "alias")
    await cluster.until(lambda: any(record.duplicate_of for record in cluster.registry.records()))
    await cluster.until(lambda: cluster.engine.ready)
    submit_many(cluster)
    await cluster.finish()
    streams = worker.streams
    assert {alias, worker.address} == {record.worker_id for record in cluster.registry.records()}
    kept = next(record for record in cluster.registry.records() if not record.duplicate_of)
    for record in cluster.registry.records():
        assert await cluster.fleet.register(record.address) == kept.worker_id
    await asyncio.sleep(0.1)
    assert worker.streams == streams


async def test_a_worker_that_moves_keeps_its_name(cluster):
    worker = FakeWorker()
    cluster.workers.append(worker)
    assert await cluster.fleet.register(await worker.start(), "w1") == "w1"
    await cluster.until(lambda: cluster.engine.ready)
    moved = FakeWorker()
    cluster.workers.append(moved)
    assert await cluster.fleet.register(await moved.start(), "w1") == "w1"
    await cluster.until(lambda: moved.streams == 1 and cluster.engine.ready)
    submit_many(cluster)
    await cluster.finish()
    assert worker.plans == []


async def test_deregistering_a_worker_moves_its_requests(cluster):
    first = await cluster.add(FakeWorker(step_delay_s=0.005))
    submit_many(cluster, max_tokens=20)
    await cluster.until(lambda: len(first.plans) >= 4)
    assert await cluster.fleet.deregister(first.address)
    assert not await cluster.fleet.deregister(first.address)
    await cluster.add(FakeWorker())
    await cluster.finish()


async def test_a_drain_holds_over_a_lost_stream_until_the_worker_restarts(cluster):
    worker = await cluster.add(FakeWorker())
    cluster.engine.drain_worker(worker.address)
    await worker.stop()
    await cluster.until(lambda: cluster.status(worker) is WorkerStatus.CONNECTING)
    await worker.start(worker.port)
    await cluster.until(lambda: cluster.status(worker) is WorkerStatus.DRAINING)
    assert not cluster.engine.ready
    await worker.stop()
    reborn = FakeWorker()
    await reborn.start(worker.port)
    cluster.workers.append(reborn)
    await cluster.until(lambda: cluster.status(worker) is WorkerStatus.READY)


async def test_a_drain_of_a_worker_that_never_connected_holds_for_its_first_stream(cluster):
    worker = await cluster.add(FakeWorker(faults=Faults(silent_hello=True)), ready=False)
    assert cluster.engine.drain_worker(worker.address) == 0
    await worker.stop()
    worker.faults.silent_hello = False
    await worker.start(worker.port)
    await cluster.until(lambda: cluster.status(worker) is WorkerStatus.DRAINING)


def test_pauses_double_up_to_a_limit_with_jitter():
    for failures, full_s in [(0, 0.05), (1, 0.1), (2, 0.2), (6, 3.2), (7, 5.0), (1_000, 5.0)]:
        pauses = [backoff_s(failures, 5.0) for _ in range(200)]
        assert full_s / 2 <= min(pauses) < max(pauses) <= full_s


async def test_a_worker_that_is_not_there_is_dialled_again_until_it_is(cluster):
    worker = FakeWorker()
    await worker.start()
    port = worker.port
    await worker.stop()
    await cluster.fleet.register(worker.address)
    await cluster.until(lambda: "UNAVAILABLE" in cluster.record(worker).last_error)
    await worker.start(port)
    cluster.workers.append(worker)
    await cluster.until(lambda: cluster.status(worker) is WorkerStatus.READY)


async def test_an_announcement_ends_the_pause_before_the_next_attempt(cluster, monkeypatch):
    monkeypatch.setattr("scheduler_service.worker_link.backoff_s", lambda failures, max_s: 3600.0)
    worker = await cluster.add(FakeWorker())
    await worker.stop()
    await cluster.until(lambda: cluster.status(worker) is WorkerStatus.CONNECTING)
    await worker.start(worker.port)
    await cluster.fleet.register(worker.address, announced=True)
    await cluster.until(lambda: cluster.status(worker) is WorkerStatus.READY)


async def test_workers_that_are_gone_and_silent_are_forgotten(cluster):
    now = [0.0]
    fleet = Fleet(cluster.engine, cluster.registry, LinkOptions(), clock=lambda: now[0])
    here = FakeWorker()
    await fleet.register(await here.start(), announced=True)
    await cluster.until(lambda: cluster.status(here) is WorkerStatus.READY)
    gone = [f"127.0.0.1:{port}" for port in (1, 2, 3)]
    await fleet.register(gone[0])  # configured
    await fleet.register(gone[1], announced=True)
    await fleet.register(gone[2], announced=True)
    now[0] = 500.0
    await fleet.register(gone[2], announced=True)
    now[0] = 601.0
    await fleet.register(gone[0])
    known = [record.worker_id for record in cluster.registry.records()]
    assert known == [here.address, gone[0], gone[2]]
    await fleet.close()
    await here.stop()
