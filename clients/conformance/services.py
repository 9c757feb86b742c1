"""Owns the servers that cases need: real services as processes, and the fake peer. Knows nothing of cases."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import grpc

from clients.conformance.fake_server import FakeInferenceServer
from tidegate.inference.v1 import inference_pb2, inference_pb2_grpc

_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 15.0

# Enough for every case, and small enough to start quickly. Block 0 is the null block.
_WORKER_FLAGS: dict[str, tuple[str, ...]] = {
    "default": ("--num-blocks", "1001", "--max-num-seqs", "16", "--max-model-len", "2048"),
    "small": ("--num-blocks", "65", "--max-num-seqs", "1", "--max-model-len", "1024"),
}
_SCHEDULER_FLAGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "small": ("--max-num-seqs", "1", "--max-num-queued-reqs", "4", "--max-num-queued-tokens", "200"),
    "no-worker": (),
    "guarded": (),
}
# Of the server `guarded`; the token, and whose it is.
_TOKENS = "a-token-for-conformance team-a client\n"


class ServiceError(RuntimeError):
    """A service did not start; the message has the end of its log."""


class Services:
    """Servers by name, from entering the block to leaving it."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(set(names))
        self._stack = ExitStack()
        self.addresses: dict[str, str] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for name in self._names:
                self.addresses[name] = self._start_fake(stack) if name == "fake" else self._start(stack, name)
            for name in self._names:
                if name in _WORKER_FLAGS:
                    _wait_for_model(self.addresses[name], self._folder / f"{name}-worker.log")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start_fake(self, stack: ExitStack) -> str:
        fake = FakeInferenceServer()
        stack.callback(fake.stop)
        return f"127.0.0.1:{fake.port}"

    def _start(self, stack: ExitStack, name: str) -> str:
        ready, log = self._folder / f"{name}-ready.json", self._folder / f"{name}-scheduler.log"
        command = ["scheduler_service", "--port", "0", "--ready-file", str(ready), *_SCHEDULER_FLAGS[name]]
        command += ["--journal", str(self._folder / f"{name}-journal.sqlite3")]
        if name == "guarded":
            tokens = self._folder / "tokens"
            tokens.write_text(_TOKENS)
            tokens.chmod(0o600)
            command += ["--token-file", str(tokens)]
        process = _spawn(stack, command, log)
        _wait(lambda: ready.exists() or process.poll() is not None, log)
        if process.poll() is not None:
            raise ServiceError(f"the scheduler ended:\n{_tail(log)}")
        address = f"127.0.0.1:{json.loads(ready.read_text())['port']}"
        if name in _WORKER_FLAGS:
            flags = ["--device", "cpu", "--dtype", "float32", "--port", "0", "--scheduler", address]
            command = ["worker_service", "--model", _demo_model(), *flags, *_WORKER_FLAGS[name]]
            _spawn(stack, command, self._folder / f"{name}-worker.log")
        return address


def _demo_model() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "worker_service.demo_model"], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip().splitlines()[-1]


def _spawn(stack: ExitStack, module: list[str], log: Path) -> subprocess.Popen[bytes]:
    output: IO[Any] = stack.enter_context(log.open("wb"))
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", *module], stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
    )
    stack.callback(_stop, process)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_for_model(address: str, log: Path) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        def served() -> bool:
            answer = stub.ListModels(inference_pb2.ListModelsRequest(), timeout=10, wait_for_ready=True)
            return any(model.ready_workers for model in answer.models)

        _wait(served, log)


def _wait(done: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not done():
        if time.monotonic() > deadline:
            raise ServiceError(f"not ready within {_START_TIMEOUT_S:.0f} s:\n{_tail(log)}")
        time.sleep(0.1)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:] if log.exists() else "(no log)"
