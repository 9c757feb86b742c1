from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from engine_harness import Cluster, FakeSink, spec
from fake_worker import FakeWorker, Faults
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from scheduler_service.admin_api import AdminApi
from scheduler_service.core.config import SchedulerConfig
from tidegate.admin.v1 import admin_pb2 as pb
from tidegate.admin.v1 import admin_pb2_grpc as pb_grpc


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster(SchedulerConfig(max_num_seqs=8))
    yield cluster
    await cluster.close()


@pytest.fixture
async def admin(cluster) -> AsyncIterator[pb_grpc.AdminServiceStub]:
    server = grpc.aio.server()
    api = AdminApi(cluster.engine, cluster.registry, cluster.fleet)
    pb_grpc.add_AdminServiceServicer_to_server(api, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.AdminServiceStub(channel)
    await server.stop(None)


async def failure(call: grpc.aio.UnaryUnaryCall) -> tuple[str, str, str]:
    """Code, ErrorInfo.reason and message of an RPC that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    status = rpc_status.from_call(caught.value)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "tidegate.dev"
    return caught.value.code().name, info.reason, status.message


async def test_state_of_an_idle_service(cluster, admin):
    state = await admin.GetState(pb.GetStateRequest(verify=True))
    assert (state.version, state.draining) == ("0.1.0", False)
    assert (len(state.workers), state.waiting_requests, state.running_requests) == (0, 0, 0)
    assert list(state.violations) == []


async def test_state_follows_workers_and_requests(cluster, admin):
    worker = FakeWorker(num_blocks=33, num_slots=4, faults=Faults(stall_at_seq=3))
    cluster.workers.append(worker)
    answer = await admin.RegisterWorker(
        pb.RegisterWorkerRequest(address=await worker.start(), worker_id="w1")
    )
    assert answer.worker_id == "w1"
    await cluster.until(lambda: cluster.engine.ready)
    for i in range(6):
        cluster.engine.submit(spec(f"r{i}", FakeSink(), prompt=8, max_tokens=20))
    await cluster.until(lambda: cluster.engine.state().workers[0].steps == 4)
    state = await admin.GetState(pb.GetStateRequest(verify=True))
    (seen,) = state.workers
    assert (seen.worker_id, seen.address, seen.model) == ("w1", worker.address, "fake")
    assert seen.status == pb.WORKER_STATUS_READY
    assert (seen.blocks_total, seen.block_size, seen.num_slots) == (32, 4, 4)
    assert seen.blocks_used + seen.blocks_cached + seen.blocks_free == seen.blocks_total
    assert seen.blocks_used >= 4 * 2
    assert (seen.running_requests, seen.steps_in_flight, seen.steps) == (4, 2, 4)
    assert (state.running_requests, state.waiting_requests, state.waiting_tokens) == (4, 2, 16)
    assert (state.counters.requests_accepted, state.counters.steps) == (6, 4)
    assert state.counters.output_tokens == 4 * 2
    assert list(state.violations) == []


async def test_violations_are_reported(cluster, admin, monkeypatch):
    from scheduler_service.core.errors import InvariantError

    def broken() -> None:
        raise InvariantError(["block 7 is nobody's", "slot 3 is taken twice"])

    monkeypatch.setattr(cluster.engine._core, "check", broken)
    state = await admin.GetState(pb.GetStateRequest(verify=True))
    assert list(state.violations) == ["block 7 is nobody's", "slot 3 is taken twice"]
    assert list((await admin.GetState(pb.GetStateRequest())).violations) == []


async def test_requests_are_listed_in_pages_without_prompts(cluster, admin):
    await cluster.add(FakeWorker(num_slots=2, faults=Faults(stall_at_seq=1)))
    for i in range(5):
        cluster.engine.submit(spec(f"r{i}", FakeSink(), prompt=9, priority=i, tenant="t"))
    await cluster.until(lambda: cluster.engine.state().running_requests == 2)
    pages, token = [], ""
    while True:
        page = await admin.ListRequests(pb.ListRequestsRequest(page_size=2, page_token=token))
        pages.append([request.request_id for request in page.requests])
        token = page.next_page_token
        if not token:
            break
    assert pages == [["r0", "r1"], ["r2", "r3"], ["r4"]]
    everything = await admin.ListRequests(pb.ListRequestsRequest())
    assert everything.next_page_token == ""
    first, last = everything.requests[0], everything.requests[4]
    assert (first.status, last.status) == (pb.REQUEST_STATUS_RUNNING, pb.REQUEST_STATUS_WAITING)
    assert (first.worker_id, last.worker_id) == (cluster.workers[0].address, "")
    assert (first.prompt_tokens, first.blocks, first.tenant, last.priority) == (9, 3, "t", 4)
    assert first.age_seconds > 0


async def test_a_page_token_outlives_the_request_that_it_points_at(cluster, admin):
    await cluster.add(FakeWorker(faults=Faults(stall_at_seq=1)))
    for i in range(4):
        cluster.engine.submit(spec(f"r{i}", FakeSink()))
    page = await admin.ListRequests(pb.ListRequestsRequest(page_size=2))
    cluster.engine.cancel("r1")
    rest = await admin.ListRequests(pb.ListRequestsRequest(page_token=page.next_page_token))
    assert [request.request_id for request in rest.requests] == ["r2", "r3"]


@pytest.mark.parametrize("token", ["x", "!!!", "MS8tMQ==", "Mi8z", "MS8" + "5" * 40, "é"])
async def test_page_tokens_that_were_never_given_are_refused(cluster, admin, token):
    code, reason, message = await failure(admin.ListRequests(pb.ListRequestsRequest(page_token=token)))
    assert (code, reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
    assert message.startswith("page_token: ")


async def test_page_sizes(cluster, admin):
    code, _, message = await failure(admin.ListRequests(pb.ListRequestsRequest(page_size=-1)))
    assert code == "INVALID_ARGUMENT"
    assert "-1 is negative" in message
    assert not (await admin.ListRequests(pb.ListRequestsRequest(page_size=2_000_000_000))).requests


async def test_registering_is_idempotent_and_deregistering_too(cluster, admin):
    worker = await cluster.add(FakeWorker())
    again = await admin.RegisterWorker(pb.RegisterWorkerRequest(address=worker.address, worker_id="other"))
    assert again.worker_id == worker.address
    assert worker.streams == 1
    request = pb.DeregisterWorkerRequest(worker_id=worker.address)
    assert (await admin.DeregisterWorker(request)).found
    assert not (await admin.DeregisterWorker(request)).found
    assert not cluster.engine.ready


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("", "not host:port"),
        ("worker", "not host:port"),
        ("worker:", "allowed is 1 to 65535"),
        ("worker:99999", "allowed is 1 to 65535"),
        ("unix:/tmp/x:1", "has a character"),
        ("a b:1", "has a character"),
    ],
)
async def test_addresses_that_cannot_be_dialled_are_refused(cluster, admin, address, complaint):
    code, _, message = await failure(admin.RegisterWorker(pb.RegisterWorkerRequest(address=address)))
    assert code == "INVALID_ARGUMENT"
    assert complaint in message
    assert cluster.registry.records() == []


async def test_names_of_workers_are_checked(cluster, admin):
    request = pb.RegisterWorkerRequest(address="127.0.0.1:1", worker_id="a\nb")
    code, _, message = await failure(admin.RegisterWorker(request))
    assert (code, message.startswith("worker_id: ")) == ("INVALID_ARGUMENT", True)


async def test_a_draining_service_takes_no_workers(cluster, admin):
    cluster.engine.start_draining()
    request = pb.RegisterWorkerRequest(address="127.0.0.1:1")
    assert (await failure(admin.RegisterWorker(request)))[:2] == ("UNAVAILABLE", "DRAINING")
    assert (await admin.GetState(pb.GetStateRequest())).draining


async def test_draining_a_worker_moves_its_requests(cluster, admin):
    first = await cluster.add(FakeWorker(step_delay_s=0.005))
    for i in range(4):
        cluster.submit(f"r{i}", max_tokens=30)
    await cluster.until(lambda: len(first.plans) >= 3)
    answer = await admin.DrainWorker(pb.DrainWorkerRequest(worker_id=first.address))
    assert answer.moved_requests == 4
    again = await admin.DrainWorker(pb.DrainWorkerRequest(worker_id=first.address))
    assert again.moved_requests == 0
    state = await admin.GetState(pb.GetStateRequest())
    assert state.workers[0].status == pb.WORKER_STATUS_DRAINING
    assert state.waiting_requests == 4
    await cluster.add(FakeWorker())
    await cluster.finish()
    assert (await admin.GetState(pb.GetStateRequest())).counters.requests_moved == 4


async def test_draining_an_unknown_worker_is_not_found(cluster, admin):
    call = admin.DrainWorker(pb.DrainWorkerRequest(worker_id="nobody"))
    assert await failure(call) == ("NOT_FOUND", "WORKER_NOT_FOUND", "there is no worker 'nobody'")


async def test_cached_prefixes_can_be_forgotten(cluster, admin):
    await cluster.add(FakeWorker())
    cluster.submit("r1", prompt=16)
    await cluster.finish()
    cached = (await admin.GetState(pb.GetStateRequest())).workers[0].blocks_cached
    assert cached >= 4
    assert (await admin.ResetPrefixCache(pb.ResetPrefixCacheRequest())).blocks == cached
    assert (await admin.GetState(pb.GetStateRequest())).workers[0].blocks_cached == 0


async def test_bugs_are_told_by_incident_only(cluster, admin, monkeypatch, caplog):
    monkeypatch.setattr(cluster.engine, "reset_prefix_cache", lambda: 1 / 0)
    code, reason, message = await failure(admin.ResetPrefixCache(pb.ResetPrefixCacheRequest()))
    assert (code, reason) == ("INTERNAL", "INTERNAL")
    fault = next(record for record in caplog.records if record.message == "admin_fault")
    assert fault.fields["incident_id"] in message
    assert "division" not in message
