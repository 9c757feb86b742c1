"""Tidegate and its peers: how each is started, and how it is spoken to.

Owns the ways to start them, each with the same number of threads, KV memory and seats. Each runs from an
environment of its own (see install.sh). Knows nothing of workloads.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tidegate_client.aio import AsyncClient
from tidegate_client.bench.grpc_target import GrpcTarget
from tidegate_client.bench.openai_target import OpenAITarget
from tidegate_client.bench.target import Target
from tidegate_client.cli import service_process
from tidegate_client.cli.local_cluster import ClusterOptions, LocalCluster

SEATS = 16
KV_GIB = 2
MODEL_TOKENS = 2048
_START_TIMEOUT_S = 600.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Setup:
    """What all systems have in common."""

    model: Path
    """Folder of the model in bf16."""
    environments: Path
    """Folder with vllm-env, llama-env, openvino-env, and the models made for them in `models`."""
    threads: int
    logs: Path
    worker_flags: Sequence[str] = ()
    """Further ones for Tidegate's worker."""
    scheduler_flags: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Served:
    """A system that answers."""

    address: str
    """host:port."""
    is_grpc: bool
    start_s: float

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Target]:
        """Connects to its only model."""
        if self.is_grpc:
            async with AsyncClient(self.address, retry=None) as client:
                yield GrpcTarget(client, (await client.list_models())[0].name, ignore_eos=True)
            return
        target = OpenAITarget(f"http://{self.address}", "", chat=False, ignore_eos=True)
        try:
            await target.find_model()
            yield target
        finally:
            await target.close()


@dataclass(frozen=True, slots=True)
class System:
    """Something that serves the model."""

    name: str
    weights: str
    """"bf16" or "int8": those of one kind are compared."""
    start: Callable[[Setup], contextlib.AbstractContextManager[Served]]


@dataclass(frozen=True, slots=True)
class _Command:
    """How to start a peer's HTTP server."""

    words: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def _tidegate(setup: Setup, *flags: str) -> Iterator[Served]:
    began_s = time.monotonic()
    worker = ["--decoder=fused", "--dtype=bfloat16", *flags]
    worker += [f"--threads={setup.threads}", f"--kv-memory={KV_GIB}GiB", f"--max-model-len={MODEL_TOKENS}"]
    worker += setup.worker_flags
    scheduler = [f"--max-num-seqs={SEATS}", *setup.scheduler_flags]
    options = ClusterOptions(
        str(setup.model), port=0, device="cpu", scheduler_flags=scheduler, worker_flags=worker
    )
    with LocalCluster(options) as cluster:
        cluster.wait_ready(lambda progress: None)
        yield Served(cluster.address, True, time.monotonic() - began_s)


@contextlib.contextmanager
def _http_server(name: str, command: _Command, port: int, log: Path) -> Iterator[Served]:
    """Starts a peer, waits until it is healthy, and ends it with all its processes."""
    began_s = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command.words,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **command.environment},
            start_new_session=True,
        )
    service = service_process.ServiceProcess(name, f"127.0.0.1:{port}", process, log)
    try:
        _await_health(service, began_s + _START_TIMEOUT_S)
        yield Served(service.address, False, time.monotonic() - began_s)
    finally:
        service_process.terminate([service], 15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)  # its children too
        process.wait()


def _await_health(service: service_process.ServiceProcess, deadline_s: float) -> None:
    while True:
        service.check_alive()
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://{service.address}/health", timeout=5).status_code == httpx.codes.OK:
                return
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{service.name} was not ready in {_START_TIMEOUT_S:g} s; see {service.log}")
        time.sleep(_POLL_S)


def _peer(name: str, weights: str, command: Callable[[Setup, int], _Command]) -> System:
    def start(setup: Setup) -> contextlib.AbstractContextManager[Served]:
        port = _free_port()
        return _http_server(name, command(setup, port), port, setup.logs / f"{name}.log")

    return System(name, weights, start)


def _vllm(setup: Setup, port: int) -> _Command:
    root = setup.environments / "vllm-env"
    tcmalloc = "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"
    words = [f"{root}/bin/vllm", "serve", str(setup.model), "--dtype=bfloat16", "--host=127.0.0.1"]
    words += [f"--port={port}", f"--max-model-len={MODEL_TOKENS}", f"--max-num-seqs={SEATS}"]
    return _Command(
        words,
        {
            "LD_PRELOAD": f"{tcmalloc}:{root}/lib/libiomp5.so",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_NO_USAGE_STATS": "1",
        },
    )


def _llama(file: str) -> Callable[[Setup, int], _Command]:
    def command(setup: Setup, port: int) -> _Command:
        words = [str(setup.environments / "llama-env/bin/llama-server"), "--host", "127.0.0.1"]
        words += ["--port", str(port), "-m", str(setup.environments / "models" / file)]
        words += ["--parallel", str(SEATS), "--ctx-size", str(SEATS * MODEL_TOKENS)]
        words += ["--threads", str(setup.threads), "--threads-batch", str(setup.threads)]
        return _Command(words)

    return command


def _openvino(folder: str) -> Callable[[Setup, int], _Command]:
    def command(setup: Setup, port: int) -> _Command:
        python = str(setup.environments / "openvino-env/bin/python")
        script = str(Path(__file__).with_name("openvino_server.py"))
        model = str(setup.environments / "models" / folder)
        words = [python, script, model, "--port", str(port), "--threads", str(setup.threads)]
        return _Command([*words, "--seats", str(SEATS), "--kv-gib", str(KV_GIB)])

    return command


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


TIDEGATE = (
    System("tidegate", "bf16", _tidegate),
    System("tidegate-int8", "int8", lambda setup: _tidegate(setup, "--quantization=int8")),
)
PEERS = {
    peer.name: peer
    for peer in (
        _peer("vllm", "bf16", _vllm),
        _peer("llama", "bf16", _llama("bf16.gguf")),
        _peer("openvino", "bf16", _openvino("openvino-fp16")),
        _peer("llama-q8", "int8", _llama("q8_0.gguf")),
        _peer("openvino-int8", "int8", _openvino("openvino-int8")),
    )
}
