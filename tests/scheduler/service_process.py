"""The whole scheduler service as tests use it: requests, health, and a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ROOT = Path(__file__).parents[2]


def generate(max_tokens: int, seed: int = 7) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        sampling=pb.SamplingParams(seed=seed),
        stopping=pb.StoppingParams(max_tokens=max_tokens),
        output=pb.OutputParams(text=False),
    )


async def read(call) -> tuple[list[int], str]:
    """Tokens of a stream of one candidate, and how it ended."""
    tokens: list[int] = []
    end = ""
    while (response := await call.read()) is not grpc.aio.EOF:
        if response.HasField("delta"):
            tokens += response.delta.token_ids
        if response.HasField("finished"):
            end = pb.FinishReason.Name(response.finished.reason)
    return tokens, end


async def health(channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def until_health(channel, service: str, status: int) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(20):
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=service)):
            if answer.status == status:
                return


class ServiceProcess:
    """`python -m scheduler_service` on a free port."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._ready_file = folder / "ready.json"
        self._flags = ("--port", "0", "--log-format", "json", "--ready-file", str(self._ready_file), *flags)
        self._log = folder / "log"

    async def __aenter__(self) -> ServiceProcess:
        with self._log.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "scheduler_service",
                *self._flags,
                stderr=log,
                cwd=ROOT,
                env=service_environment(),
            )
        async with asyncio.timeout(60):
            while not self._ready_file.exists():
                assert self.process.returncode is None, self._log.read_text()
                await asyncio.sleep(0.02)
        self.ready = json.loads(self._ready_file.read_text())
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.ready['port']}")
        self.stub = pb_grpc.InferenceServiceStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        await self.channel.close()

    def events(self) -> list[dict]:
        lines = self._log.read_text().rpartition("\n")[0].splitlines()  # the last may be half written
        return [json.loads(line) for line in lines if line.startswith("{")]  # gRPC writes there, too

    async def exit_status(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 20)


def service_environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    environment["PYTHONPATH"] = str(ROOT / "protos")
    return environment


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
