"""ExplainRequest, as operators' programs and the command line see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from engine_harness import Cluster, FakeSink, spec
from fake_worker import FakeWorker, Faults
from typer.testing import CliRunner

from scheduler_service.admin_api import AdminApi
from scheduler_service.core.config import SchedulerConfig
from tidegate.admin.v1 import admin_pb2 as pb
from tidegate.admin.v1 import admin_pb2_grpc as pb_grpc
from tidegate_client.admin import AdminClient
from tidegate_client.cli.app import app
from tidegate_client.errors import NotFoundError


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster(SchedulerConfig(max_num_seqs=2))
    yield cluster
    await cluster.close()


@pytest.fixture
async def address(cluster) -> AsyncIterator[str]:
    server = grpc.aio.server()
    api = AdminApi(cluster.engine, cluster.registry, cluster.fleet)
    pb_grpc.add_AdminServiceServicer_to_server(api, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def explain(address: str, request_id: str) -> list[pb.CandidateExplanation]:
    def ask() -> list[pb.CandidateExplanation]:
        with AdminClient(address) as admin:
            return admin.explain(request_id)

    return await asyncio.to_thread(ask)


async def tidegate(*arguments: str) -> str:
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


async def test_a_waiting_request_is_explained_in_numbers(cluster, address):
    await cluster.add(FakeWorker(num_slots=2, faults=Faults(stall_at_seq=1)))
    for i in range(4):
        cluster.engine.submit(spec(f"r{i}", FakeSink(), prompt=9, tenant="t"))
    await cluster.until(lambda: cluster.engine.state().running_requests == 2)
    (told,) = await explain(address, "r3")
    worker = cluster.workers[0].address
    assert (told.state.request_id, told.state.status) == ("r3", pb.REQUEST_STATUS_WAITING)
    assert (told.position, told.HasField("estimated_start_seconds")) == (2, False)
    (blocker,) = told.blockers
    assert (blocker.kind, blocker.worker_id, blocker.limit) == (pb.BLOCKER_KIND_SLOTS, worker, 2)
    assert [(entry.event, entry.at_seconds) for entry in told.timeline] == [("queued", 0.0)]
    printed = await tidegate("explain", "r3", "--address", address)
    assert "r3 waiting, 9 prompt and 0 output tokens" in printed
    assert "1 ahead in the queue" in printed
    assert f"2 of at most 2 run on {worker}" in printed


async def test_a_running_and_an_ended_request_have_timelines(cluster, address):
    await cluster.add(FakeWorker(faults=Faults(stall_at_seq=1)))
    cluster.engine.submit(spec("r", FakeSink(), prompt=9))
    await cluster.until(lambda: cluster.engine.state().running_requests == 1)
    (running,) = await explain(address, "r")
    assert (running.state.status, list(running.blockers)) == (pb.REQUEST_STATUS_RUNNING, [])
    assert not running.HasField("position")
    cluster.engine.cancel("r")
    (ended,) = await explain(address, "r")
    assert (ended.state.status, ended.finish_reason) == (pb.REQUEST_STATUS_FINISHED, "cancelled")
    assert [entry.event for entry in ended.timeline] == ["queued", "admitted", "finished"]
    assert ended.timeline[1].worker_id == cluster.workers[0].address
    printed = await tidegate("explain", "r", "--address", address)
    assert "r finished: cancelled, 9 prompt and 0 output tokens" in printed
    assert f"admitted on {cluster.workers[0].address}: 0 cached tokens" in printed
    assert '"finish_reason": "cancelled"' in await tidegate("explain", "r", "--json", "--address", address)


async def test_an_unknown_request_is_not_found(cluster, address):
    with pytest.raises(NotFoundError) as caught:
        await explain(address, "nobody")
    assert caught.value.reason == "REQUEST_NOT_FOUND"
    assert "nobody" in caught.value.message
