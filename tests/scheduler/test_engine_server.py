"""The whole scheduler service: in this process over gRPC, and as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from engine_harness import VOCAB
from fake_worker import FakeWorker, expected_tokens
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from service_process import (
    NOT_SERVING,
    ROOT,
    SERVING,
    ServiceProcess,
    cpu_ticks,
    generate,
    health,
    read,
    service_environment,
    until_health,
)

from scheduler_service.config import ServiceConfig
from scheduler_service.server import ADMIN, INFERENCE, Service, serve
from scheduler_service.telemetry import Telemetry
from tidegate.admin.v1 import admin_pb2, admin_pb2_grpc
from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    worker = FakeWorker()
    await worker.start()
    yield worker
    await worker.stop()


Start = Callable[..., Awaitable[Service]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts services in this process, and stops them at the end."""
    services: list[Service] = []

    async def started(worker: FakeWorker | None = None, **options) -> Service:
        addresses = (worker.address,) if worker else ()
        config = ServiceConfig(port=0, worker=addresses, drain_window=0.0, **options)
        services.append(Service(config, Telemetry()))
        await services[-1].start()
        return services[-1]

    yield started
    for service in services:
        await service.stop(grace_s=0)


async def test_a_request_goes_all_the_way(start, worker):
    service = await start(worker)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        await until_health(channel, INFERENCE, SERVING)
        tokens, end = await read(pb_grpc.InferenceServiceStub(channel).Generate(generate(20)))
        assert tokens == expected_tokens(7, 3, 20, VOCAB)
        assert end == "FINISH_REASON_LENGTH"
    assert worker.violations == []


async def test_a_client_that_goes_away_frees_its_blocks(start, worker):
    worker.step_delay_s = 0.01
    service = await start(worker)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        await until_health(channel, INFERENCE, SERVING)
        call = pb_grpc.InferenceServiceStub(channel).Generate(generate(400))
        await call.read()
        assert service.engine.state().workers[0].blocks_used > 0
        call.cancel()
        await asyncio.wait_for(service.engine.wait_idle(), 5)
    state = service.engine.state()
    assert (state.workers[0].blocks_used, state.counters.requests_cancelled) == (0, 1)


async def test_health_tells_alive_from_ready(start, worker):
    service = await start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        assert await health(channel, "") == SERVING
        assert await health(channel, ADMIN) == SERVING
        assert await health(channel, INFERENCE) == NOT_SERVING
        await service.fleet.register(worker.address)
        await until_health(channel, INFERENCE, SERVING)
        await service.fleet.deregister(worker.address)
        await until_health(channel, INFERENCE, NOT_SERVING)
        assert await health(channel, "") == SERVING


async def test_reflection_lists_the_services(start):
    service = await start()

    def listed() -> set[str]:
        with grpc.insecure_channel(f"127.0.0.1:{service.port}") as channel:
            return set(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert {INFERENCE, ADMIN, "grpc.health.v1.Health"} <= await asyncio.to_thread(listed)


async def test_the_admin_api_can_have_a_port_of_its_own(start):
    service = await start(admin_port=0)
    assert service.admin_port != service.port
    request = admin_pb2.GetStateRequest()
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{service.port}") as public,
        grpc.aio.insecure_channel(f"127.0.0.1:{service.admin_port}") as private,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin_pb2_grpc.AdminServiceStub(public).GetState(request)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert not (await admin_pb2_grpc.AdminServiceStub(private).GetState(request)).workers
        assert await health(private, ADMIN) == SERVING


async def test_messages_have_a_limit_and_the_service_lives_on(start, worker):
    service = await start(worker)
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}", options=options) as channel:
        await until_health(channel, INFERENCE, SERVING)
        stub = pb_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(pb.TokenizeRequest(text="a" * (17 * 1024 * 1024)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await read(stub.Generate(generate(3))))[1] == "FINISH_REASON_LENGTH"


async def test_a_drain_that_runs_out_of_time_leaves_no_request(start, worker):
    worker.step_delay_s = 0.05
    service = await start(worker, drain_timeout=0.1)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        await until_health(channel, INFERENCE, SERVING)
        call = pb_grpc.InferenceServiceStub(channel).Generate(generate(400))
        await call.read()
        await service.drain()
        await service.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "drain_timeout of 0.1 s ran out before this request finished" in caught.value.details()
    await asyncio.wait_for(service.engine.wait_idle(), 5)


async def test_a_drain_waits_for_clients_that_read_slowly(start, worker):
    service = await start(worker, drain_timeout=10)
    options = [("grpc.http2.bdp_probe", 0)]  # no more than 64 KiB on their way to a client
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}", options=options) as channel:
        await until_health(channel, INFERENCE, SERVING)
        request = generate(500)
        request.output.logprobs = 20
        call = pb_grpc.InferenceServiceStub(channel).Generate(request)
        async with asyncio.timeout(10):
            while not service.engine.state().counters.requests_finished:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        draining = asyncio.create_task(service.drain())
        await asyncio.sleep(0.1)
        assert not draining.done()
        assert await read(call) == (expected_tokens(7, 3, 500, VOCAB), "FINISH_REASON_LENGTH")
        await asyncio.wait_for(draining, 5)


async def test_sigterm_finishes_what_runs_and_refuses_what_comes(worker, tmp_path):
    worker.step_delay_s = 0.02
    flags = ("--worker", worker.address, "--drain-window", "0.3", "--drain-timeout", "20")
    async with ServiceProcess(tmp_path, *flags) as service:
        await until_health(service.channel, INFERENCE, SERVING)
        running = service.stub.Generate(generate(80))
        await running.read()
        service.process.send_signal(signal.SIGTERM)
        await until_health(service.channel, INFERENCE, NOT_SERVING)
        # In the window, before balancers have noticed, requests are still taken.
        late = service.stub.Generate(generate(5, seed=8))
        assert await read(late) == (expected_tokens(8, 3, 5, VOCAB), "FINISH_REASON_LENGTH")
        admin = admin_pb2_grpc.AdminServiceStub(service.channel)
        async with asyncio.timeout(10):
            while not (await admin.GetState(admin_pb2.GetStateRequest())).draining:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(service.stub.Generate(generate(5)))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        tokens, end = await read(running)
        assert (tokens[-1], end) == (expected_tokens(7, 3, 80, VOCAB)[-1], "FINISH_REASON_LENGTH")
        assert await service.exit_status() == 0
        names = [event["event"] for event in service.events()]
        assert names[-1] == "stopped"
        listening = next(event for event in service.events() if event["event"] == "listening")
        assert listening["port"] == service.ready["port"]


async def test_a_second_signal_ends_the_process_at_once(worker, tmp_path):
    worker.step_delay_s = 0.05
    async with ServiceProcess(tmp_path, "--worker", worker.address, "--drain-timeout", "60") as service:
        await until_health(service.channel, INFERENCE, SERVING)
        running = service.stub.Generate(generate(400))
        await running.read()
        service.process.send_signal(signal.SIGINT)
        await until_health(service.channel, INFERENCE, NOT_SERVING)
        service.process.send_signal(signal.SIGINT)
        assert await service.exit_status() == 128 + signal.SIGINT
        running.cancel()


async def test_an_idle_service_uses_no_cpu(worker, tmp_path):
    async with ServiceProcess(tmp_path, "--worker", worker.address) as service:
        await until_health(service.channel, INFERENCE, SERVING)
        await read(service.stub.Generate(generate(5)))
        await asyncio.sleep(0.5)  # what start-up has left to do
        before = cpu_ticks(service.process.pid)
        await asyncio.sleep(1.5)
        ticks = cpu_ticks(service.process.pid) - before
        assert ticks <= 0.05 * 1.5 * os.sysconf("SC_CLK_TCK")


async def run(*flags: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "scheduler_service", *flags),
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env=service_environment(),
    )
    _, errors = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, errors.decode()


async def test_options_that_cannot_be_used_end_the_command_with_2():
    status, errors = await run("--max-num-seqs", "0")
    assert (status, len(errors.splitlines())) == (2, 1)
    assert "--max-num-seqs" in errors


@pytest.mark.parametrize(
    ("option", "what"),
    [("port", "cannot listen on"), ("admin-port", "cannot listen on"), ("console-port", "no console on")],
)
async def test_a_port_in_use_ends_the_command_with_1_and_one_line(option, what, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # A journal that cannot be used: the port is the first thing that is looked at.
        others = () if option == "port" else ("--port", "0")
        status, errors = await run(f"--{option}", str(port), *others, "--journal", str(tmp_path))
    assert status == 1
    assert errors == f"{what} 127.0.0.1:{port}: Address already in use; choose another --{option}\n"


async def test_a_host_of_another_machine_ends_the_command_with_1_and_one_line():
    status, errors = await run("--host", "192.0.2.1", "--port", "50999", "--journal-off", "--insecure")
    line = "cannot listen on 192.0.2.1:50999: Cannot assign requested address; choose another --host\n"
    assert (status, errors) == (1, line)


@pytest.mark.parametrize("option", ["port", "console_port"])
async def test_a_port_that_is_taken_while_the_service_starts_leaves_nothing_open(option, monkeypatch):
    monkeypatch.setattr("scheduler_service.server.check_ports", lambda config: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = {"port": 0, "journal_off": True, option: taken.getsockname()[1]}
        with pytest.raises(OSError, match=r"cannot listen on|address already in use"):
            await serve(ServiceConfig(**options))
