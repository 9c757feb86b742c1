"""Leaving in good order: the scheduler's SIGTERM, what health says meanwhile, and the drain of one worker."""

from __future__ import annotations

import asyncio
import signal

import grpc
import pytest
from e2e.chaos.cluster import Cluster, launch, restart
from e2e.chaos.load import Load, mixed_cases, run_all, undisturbed
from e2e.conftest import VOCAB_SIZE
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tidegate.admin.v1 import admin_pb2
from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc
from tidegate_client import TidegateError

INFERENCE = "tidegate.inference.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# So few seats that requests wait.
SCHEDULER = {"max_num_seqs": 4, "drain_window": 1.0, "drain_timeout": 60, "worker_backoff_max": 0.5}
WORKER = {"num_blocks": 400, "max_num_seqs": 4, "max_num_batched_tokens": 256, "drain_timeout_s": 30}


async def health(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)).status


async def until_not_ready(channel: grpc.aio.Channel) -> None:
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
    async with asyncio.timeout(30):
        while (await watch.read()).status != NOT_SERVING:
            pass
    watch.cancel()


async def refusal(channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    """How a new request is refused."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pb_grpc.InferenceServiceStub(channel).Generate(request).read()
    return caught.value


@pytest.mark.parametrize("a_worker_dies", [False, True])
async def test_sigterm_finishes_all_that_was_accepted(tiny_model, tmp_path, a_worker_dies):
    cases = mixed_cases(20, VOCAB_SIZE, seed=8, max_tokens=(60, 120))
    async with (
        launch(tmp_path, tiny_model("llama"), 2, WORKER, SCHEDULER) as cluster,
        grpc.aio.insecure_channel(cluster.scheduler.address) as channel,
    ):
        cases, expected = await undisturbed(cluster.client, cases)
        running = asyncio.create_task(run_all(cluster.client, cases[:-4]))
        await cluster.until(lambda state: state.running_requests == 8 and state.waiting_requests > 2)
        cluster.scheduler.terminate()
        await until_not_ready(channel)
        assert await health(channel, "") == SERVING  # alive all the same
        # Before balancers have noticed, requests are still taken.
        late = asyncio.create_task(run_all(cluster.client, cases[-4:]))
        await cluster.until(lambda state: state.draining)
        if a_worker_dies:
            await cluster.nodes[0].process.kill()
        await check_refusal(await refusal(channel))
        assert await running + await late == expected
        assert await cluster.scheduler.ended() == 0
        # The workers outlive their scheduler: they wait for the next one.
        assert cluster.nodes[1].process.alive
    logged = [event["event"] for event in cluster.scheduler.events()]
    assert "drain_timed_out" not in logged
    assert logged[-1] == "stopped"


async def check_refusal(error: grpc.aio.AioRpcError) -> None:
    """It says that this scheduler leaves, and when to try again."""
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    packed = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    details = status_pb2.Status.FromString(packed).details
    assert [detail.Unpack(info) or detail.Unpack(retry) for detail in details] == [True, True]
    assert info.reason == "DRAINING"
    assert retry.retry_delay.ToMilliseconds() > 0


async def test_a_drain_that_runs_out_of_time_ends_with_a_status(tiny_model, tmp_path):
    options = {**SCHEDULER, "drain_window": 0, "drain_timeout": 0.2}
    async with launch(tmp_path, tiny_model("llama"), 1, WORKER, options) as cluster:
        cluster.nodes[0].proxy.delay_s = 0.05  # slow steps
        stream = cluster.client.generate([5, 6, 7], max_tokens=400, ignore_eos=True)
        await anext(aiter(stream))
        cluster.scheduler.terminate()
        with pytest.raises(TidegateError) as caught:
            await stream.result()
        assert caught.value.code == "UNAVAILABLE"
        assert await cluster.scheduler.ended() == 0
    assert "drain_timed_out" in [event["event"] for event in cluster.scheduler.events()]


async def test_a_drained_worker_gets_nothing_until_it_is_restarted(tiny_model, tmp_path):
    cases = mixed_cases(20, VOCAB_SIZE, seed=9)
    async with launch(tmp_path, tiny_model("llama"), 2, WORKER, SCHEDULER) as cluster:
        cases, expected = await undisturbed(cluster.client, cases)
        load = Load(cluster.client, cases, expected)
        running = asyncio.create_task(load.run(16))
        await cluster.until(lambda state: all(w.running_requests for w in state.workers))
        drained = cluster.nodes[0]
        answer = await drain(cluster, drained.worker_id)
        assert answer.moved_requests > 0
        assert (await drain(cluster, drained.worker_id)).moved_requests == 0  # once more does no harm
        steps = (await worker_state(cluster, drained.worker_id)).steps
        finished = load.finished
        while load.finished < finished + 16:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.02)
        state = await worker_state(cluster, drained.worker_id)
        assert (state.status, state.running_requests, state.blocks_used, state.steps) == (
            admin_pb2.WORKER_STATUS_DRAINING,
            0,
            0,
            steps,
        )
        await restart(cluster, drained)
        await cluster.until(lambda state: all(w.running_requests for w in state.workers))
        load.stop.set()
        await running
        assert load.wrong == []
        await cluster.check_empty()


async def drain(cluster: Cluster, worker_id: str) -> admin_pb2.DrainWorkerResponse:
    return await cluster.admin.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id=worker_id), timeout=30)


async def worker_state(cluster: Cluster, worker_id: str) -> admin_pb2.WorkerState:
    return next(w for w in (await cluster.state()).workers if w.worker_id == worker_id)


async def test_a_drain_of_an_unknown_worker_is_not_found(tiny_model, tmp_path):
    async with launch(tmp_path, tiny_model("llama"), 1, WORKER, SCHEDULER) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drain(cluster, "nobody")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        # A worker's SIGTERM tells the scheduler, which forgets it; its process ends with 0.
        cluster.nodes[0].process.send(signal.SIGTERM)
        assert await cluster.nodes[0].process.ended() == 0
        assert list((await cluster.state()).workers) == []
