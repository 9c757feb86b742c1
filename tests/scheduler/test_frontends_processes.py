"""Frontends as processes: a whole service over gRPC, its parts killed, drained and left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import grpc
import pytest
from engine_harness import VOCAB
from fake_engine import CHATML
from fake_worker import FakeWorker, expected_tokens
from google.rpc import error_details_pb2, status_pb2
from pydantic import ValidationError
from sample_tokenizers import library_tokenizer, tokenizer_json
from service_process import (
    NOT_SERVING,
    SERVING,
    ServiceProcess,
    cpu_ticks,
    generate,
    health,
    read,
    until_health,
)

from scheduler_service.config import ServiceConfig
from scheduler_service.server import ADMIN, INFERENCE, Service
from scheduler_service.telemetry import Telemetry
from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc
from tidegate.worker.v1 import worker_pb2

pytestmark = pytest.mark.timeout(180)

Start = Callable[..., Awaitable[Service]]


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(num_blocks=4097)
    await worker.start()
    yield worker
    await worker.stop()
    assert worker.violations == []


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts services whose engine is in this process, and stops them at the end."""
    services: list[Service] = []

    async def started(worker: FakeWorker, **options) -> Service:
        config = ServiceConfig(port=0, admin_port=0, worker=(worker.address,), drain_window=0.0, **options)
        services.append(Service(config, Telemetry()))
        await services[-1].start()
        await until(lambda: services[-1].engine.ready)
        return services[-1]

    yield started
    for service in services:
        await service.stop(grace_s=0)


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


def connections(port: int, count: int) -> list[grpc.aio.Channel]:
    """Channels that share no connection, so that the kernel deals them out among the frontends."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(count)]


async def close(channels: Sequence[grpc.aio.Channel]) -> None:
    await asyncio.gather(*(channel.close() for channel in channels))


def reason_of(error: grpc.aio.AioRpcError) -> str:
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info.reason


async def test_a_frontend_that_dies_takes_its_clients_along_and_comes_back(start, worker):
    worker.step_delay_s = 0.01
    service = await start(worker, frontends=2)
    channels = connections(service.port, 16)
    calls = [
        pb_grpc.InferenceServiceStub(each).Generate(generate(300, seed)) for seed, each in enumerate(channels)
    ]
    for call in calls:
        await call.read()
    victim = service._frontends._processes[0]
    victim.kill()
    results = await asyncio.gather(*(read(call) for call in calls), return_exceptions=True)
    lost = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
    assert {error.code() for error in lost} == {grpc.StatusCode.UNAVAILABLE}
    finished = 0
    for seed, result in enumerate(results):
        if result not in lost:
            finished += 1
            assert result == (expected_tokens(seed, 3, 300, VOCAB), "FINISH_REASON_LENGTH")
    assert lost and finished
    assert service.engine.state().counters.requests_cancelled == len(lost)
    await until(lambda: service._frontends._processes[0] is not victim)
    await until(lambda: service._frontends._frontends[0].listening.is_set())
    again = connections(service.port, 16)
    for seed, each in enumerate(again):
        stub = pb_grpc.InferenceServiceStub(each)
        assert await read(stub.Generate(generate(3, seed), wait_for_ready=True)) == (
            expected_tokens(seed, 3, 3, VOCAB),
            "FINISH_REASON_LENGTH",
        )
    await close([*channels, *again])
    assert service.engine.violations() == []
    assert service.engine.state().workers[0].blocks_used == 0


async def test_text_tokens_and_tenants_work_as_in_the_engines_own_process(start, worker, tmp_path):
    library = library_tokenizer("byte_level")
    worker.vocab_size = library.get_vocab_size()
    worker.step_delay_s = 0.005
    worker.tokenizer = worker_pb2.TokenizerFiles(
        tokenizer_json=tokenizer_json("byte_level"), chat_template=CHATML
    )
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-the-first one\na-token-of-the-second two\n")
    service = await start(worker, frontends=1, token_file=tokens)
    first, second = ((("authorization", f"Bearer a-token-of-the-{name}"),) for name in ("first", "second"))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(pb.ListModelsRequest())
        assert reason_of(caught.value) == "MISSING_TOKEN"
        (model,) = (await stub.ListModels(pb.ListModelsRequest(), metadata=first)).models
        assert (model.ready_workers, model.has_chat_template) == (1, True)

        prompt = library.encode("Hello there").ids
        outputs = expected_tokens(5, len(prompt), 400, worker.vocab_size)
        text = library.decode(outputs[:30])
        stop = text[-4:]
        request = pb.GenerateRequest(text="Hello there", request_id="r", sampling=pb.SamplingParams(seed=5))
        request.stopping.stop.append(stop)
        responses = [each async for each in stub.Generate(request, metadata=first)]
        streamed = "".join(each.delta.text for each in responses)
        assert library.decode(outputs).startswith(streamed + stop)
        assert stop not in streamed
        assert responses[-1].finished.stop_string == stop

        request.stopping.Clear()
        request.stopping.max_tokens = 100
        call = stub.Generate(request, metadata=first)
        await call.read()
        assert service.engine.state().running_requests == 1
        cancel = pb.CancelRequest(request_id="r")
        assert not (await stub.Cancel(cancel, metadata=second)).found
        assert (await stub.Cancel(cancel, metadata=first)).found
        assert (await read(call))[1] == "FINISH_REASON_CANCELLED"


async def test_refusals_reach_clients_with_their_details(start, worker):
    worker.step_delay_s = 0.02
    service = await start(worker, frontends=1, max_num_queued_reqs=1, max_num_seqs=1)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        running = stub.Generate(generate(400))
        await running.read()
        waiting = stub.Generate(generate(1))
        await waiting.initial_metadata()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(generate(1)).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason_of(caught.value) == "QUEUE_FULL"
        assert int(dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"]) >= 100
        running.cancel()
        assert (await read(waiting))[1] == "FINISH_REASON_LENGTH"


def frontend_pids(engine_pid: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{engine_pid}/task/{engine_pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_rpcs_and_deltas_of_all_frontends_are_counted_in_one_place(start, worker):
    service = await start(worker, frontends=2)
    counts = service._calls.counts
    channels = connections(service.port, 6)
    num_deltas = 0
    for each in channels:
        stub = pb_grpc.InferenceServiceStub(each)
        num_deltas += sum([answer.HasField("delta") async for answer in stub.Generate(generate(5))])
        with pytest.raises(grpc.aio.AioRpcError):
            await read(stub.Generate(generate(100_000)))
    await close(channels)
    await until(lambda: sum(num for *_, num in counts.rows()) == 12)
    method = f"{INFERENCE}/Generate"
    assert sorted(counts.rows()) == [(method, "INVALID_ARGUMENT", 6), (method, "OK", 6)]
    assert counts.deltas == num_deltas > 0


async def test_idle_frontends_use_no_cpu_and_end_when_the_engine_dies(worker, tmp_path):
    flags = ("--worker", worker.address, "--frontends", "2", "--admin-port", "0")
    async with ServiceProcess(tmp_path, *flags) as service:
        await until_health(service.channel, INFERENCE, SERVING)
        await read(service.stub.Generate(generate(5)))
        pids = frontend_pids(service.process.pid)
        assert len(pids) == 2
        processes = [service.process.pid, *pids]
        await asyncio.sleep(0.5)  # what start-up has left to do
        before = sum(map(cpu_ticks, processes))
        await asyncio.sleep(1.5)
        assert sum(map(cpu_ticks, processes)) - before <= 3 * 0.05 * 1.5 * os.sysconf("SC_CLK_TCK")

        worker.step_delay_s = 0.05
        running = service.stub.Generate(generate(400))
        await running.read()
        service.process.kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(running)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(caught.value) == "ENGINE_LOST"
        await until(lambda: not any(map(is_alive, pids)))


async def test_sigterm_drains_frontends_too(worker, tmp_path):
    worker.step_delay_s = 0.02
    flags = ("--worker", worker.address, "--frontends", "1", "--admin-port", "0", "--drain-window", "0.5")
    async with ServiceProcess(tmp_path, *flags, "--drain-timeout", "30") as service:
        await until_health(service.channel, INFERENCE, SERVING)
        admin = grpc.aio.insecure_channel(f"127.0.0.1:{service.ready['admin_port']}")
        assert await health(admin, ADMIN) == SERVING
        assert await health(admin, INFERENCE) == SERVING
        running = service.stub.Generate(generate(150))
        await running.read()
        (pid,) = frontend_pids(service.process.pid)
        # As a terminal or a supervisor does, the signal goes to all processes; the engine acts on it.
        os.kill(pid, signal.SIGTERM)
        service.process.send_signal(signal.SIGTERM)
        await until_health(service.channel, INFERENCE, NOT_SERVING)
        late = service.stub.Generate(generate(5, seed=8))
        assert await read(late) == (expected_tokens(8, 3, 5, VOCAB), "FINISH_REASON_LENGTH")
        async with asyncio.timeout(20):
            while True:
                try:
                    await read(service.stub.Generate(generate(1)))
                except grpc.aio.AioRpcError as error:
                    refusal = error
                    break
        assert (refusal.code(), reason_of(refusal)) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        tokens, end = await read(running)
        assert tokens[-1] == expected_tokens(7, 3, 150, VOCAB)[-1]
        assert end == "FINISH_REASON_LENGTH"
        assert await service.exit_status() == 0
        assert not is_alive(pid)
        await admin.close()


async def test_a_port_in_use_is_told_at_start(start, worker):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        service = Service(ServiceConfig(port=port, admin_port=0, frontends=1), Telemetry())
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            await service.start()
        await service.stop(0)


async def test_a_frontend_that_cannot_start_is_told_at_start(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-the-first one\n")
    service = Service(ServiceConfig(port=0, admin_port=0, frontends=1, token_file=tokens), Telemetry())
    tokens.unlink()
    with pytest.raises(OSError, match="a frontend process could not be started"):
        await service.start()
    await service.stop(0)


def test_frontends_need_a_port_for_the_admin_api():
    with pytest.raises(ValidationError, match="frontends is 2 and admin_port is not set"):
        ServiceConfig(frontends=2)
