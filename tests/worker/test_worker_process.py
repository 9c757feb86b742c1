"""The worker as a process: ready line, health, reflection, registration, an orderly end, clear refusals."""

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest
from fake_scheduler import greedy, int32
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tidegate.admin.v1 import admin_pb2, admin_pb2_grpc
from tidegate.worker.v1 import worker_pb2 as pb
from tidegate.worker.v1 import worker_pb2_grpc
from worker_service import __main__ as worker_main
from worker_service import server
from worker_service.config import WorkerConfig
from worker_service.model_files import find_files
from worker_service.server import StartError, serve
from worker_service.worker import Worker

SERVICE = "tidegate.worker.v1.WorkerService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class FakeAdmin(admin_pb2_grpc.AdminServiceServicer):
    """Writes down who registers. Fails the first call, as a scheduler does that is just starting."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.registered = asyncio.Event()

    async def RegisterWorker(self, request, context):
        self.calls.append(f"register {request.address}")
        if len(self.calls) == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        self.registered.set()
        return admin_pb2.RegisterWorkerResponse(worker_id="w1")

    async def DeregisterWorker(self, request, context):
        self.calls.append(f"deregister {request.worker_id}")
        return admin_pb2.DeregisterWorkerResponse(found=True)


async def start(folder, *arguments: str) -> asyncio.subprocess.Process:
    options = [
        "--model",
        str(folder),
        "--port",
        "0",
        "--max-num-seqs",
        "4",
        "--attention-backend",
        "reference",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "worker_service",
        *options,
        "--threads=1",
        "--log-format=json",
        *arguments,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def ready_line(process) -> dict:
    line = await asyncio.wait_for(process.stdout.readline(), 180)  # it may compile the fused decoder
    assert line, (await process.stderr.read()).decode()
    return json.loads(line)


async def test_life_of_a_worker_process(tiny_model):
    admin = FakeAdmin()
    server = grpc.aio.server()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    process = await start(
        tiny_model("llama"), "--scheduler", f"127.0.0.1:{port}", "--served-model-name", "tiny"
    )
    try:
        ready = await ready_line(process)
        assert (ready["event"], ready["model"], ready["blocks"]) == ("worker ready", "tiny", 4 * 10 + 1)
        address = ready["address"]
        async with grpc.aio.insecure_channel(address) as channel:
            await check_health_and_reflection(channel)
            await asyncio.wait_for(admin.registered.wait(), 30)
            await check_orderly_end(channel, process)
        assert admin.calls == [f"register {address}", f"register {address}", "deregister w1"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await server.stop(None)


async def check_health_and_reflection(channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    await reflection.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    services = {s.name for s in (await reflection.read()).list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= services
    reflection.cancel()


async def check_orderly_end(channel, process) -> None:
    """SIGTERM with a stream open: its steps are answered, then it ends, and the process exits with 0."""
    health = health_pb2_grpc.HealthStub(channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert (await watch.read()).status == SERVING
    call = worker_pb2_grpc.WorkerServiceStub(channel).Execute()
    await call.write(
        pb.ExecuteRequest(hello=pb.SchedulerHello(protocol_version=1, scheduler_epoch=1, worker_id="w1"))
    )
    assert (await call.read()).hello.model.name == "tiny"
    request = pb.AdmittedRequest(
        slot=0,
        request_id="r",
        token_ids=int32([4, 5, 6]),
        num_prompt_tokens=3,
        block_ids=int32([1]),
        sampling=greedy(),
    )
    plan = pb.StepPlan(seq=1, admitted=[request], slots=int32([0]), num_tokens=int32([3]))
    await call.write(pb.ExecuteRequest(plan=plan))
    assert (await call.read()).result.seq == 1
    process.send_signal(signal.SIGTERM)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await watch.read()).status == NOT_SERVING
    watch.cancel()
    assert await asyncio.wait_for(process.wait(), 30) == 0
    log = [json.loads(line) for line in (await process.stderr.read()).decode().splitlines()]
    assert [line["event"] for line in log][-1] == "worker stopped"


async def test_a_taken_port_ends_the_process_with_a_reason(tiny_model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = await start(tiny_model("llama"), "--port", str(taken.getsockname()[1]))
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert "cannot listen on" in errors.decode()


async def test_bad_options_end_the_process_with_their_names(tiny_model):
    process = await start(tiny_model("llama"), "--block-size", "0", "--max-num-seqs", "none")
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert "--block-size: " in errors.decode()
    assert "--max-num-seqs: " in errors.decode()


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"max_model_len": 161}, "161 is more than the 160 tokens"),
        ({"num_blocks": 5, "max_model_len": 100}, "5 KV blocks"),
        ({"model": "/nowhere/at/all"}, "no model at"),
        ({"max_num_seqs": 10**12, "num_blocks": 12}, "too little memory: .* Lower --max-num-seqs"),
    ],
)
async def test_a_worker_that_cannot_start_says_why(options, part, tiny_model):
    fields = {"model": str(tiny_model("llama")), "port": 0, "attention_backend": "reference", **options}
    with pytest.raises(StartError, match=part):
        await serve(WorkerConfig(**fields), stop=asyncio.Event())


def test_the_worker_listens_without_torch():
    code = "import sys, worker_service.__main__, worker_service.server; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert told.stdout.strip() == "False", told.stderr


def test_what_is_no_model_is_refused_before_torch_is_imported(tmp_path):
    code = "import sys, worker_service.__main__ as w; print(w.main(), 'torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, "--model", str(tmp_path / "nowhere")]
    told = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert told.stdout.strip() == "2 False"
    assert told.stderr.startswith(f"worker_service: there is no model at {tmp_path}/nowhere")


def test_demo_is_the_demo_model(monkeypatch):
    monkeypatch.setattr("worker_service.demo_model.prepare", lambda: Path("/cache/SmolLM2"))
    config = worker_main._with_model(WorkerConfig(model="demo", block_size=8))
    assert (config.model, config.model_name, config.block_size) == ("/cache/SmolLM2", "SmolLM2", 8)


def test_a_hub_model_that_is_not_there_is_named_with_what_to_do():
    with pytest.raises(FileNotFoundError, match=r"no folder no/such-model, .*--offline.*Give a local folder"):
        find_files(WorkerConfig(model="no/such-model", offline=True))


def test_a_ready_worker_collects_garbage_but_not_what_its_start_made():
    gc.disable()
    try:
        server._resume_collection()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.enable()
        gc.unfreeze()
    server._resume_collection()
    assert gc.get_freeze_count() == 0


async def test_a_stop_while_loading_ends_at_once(tiny_model, monkeypatch):
    loading = threading.Event()
    monkeypatch.setattr(Worker, "load", lambda self: loading.wait(30))
    stop = asyncio.Event()
    stop.set()
    await serve(WorkerConfig(model=str(tiny_model("llama")), port=0), stop)
    loading.set()
