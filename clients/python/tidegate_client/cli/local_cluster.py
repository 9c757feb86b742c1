"""A scheduler and its workers on this machine.

Owns what is started in which order, when it is ready, and that it ends. Talks to the services as any client
does, and imports nothing of theirs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from tidegate.worker.v1 import worker_pb2
from tidegate.worker.v1.worker_pb2_grpc import WorkerServiceStub
from tidegate_client.access import resolve_access
from tidegate_client.channel import open_channel
from tidegate_client.cli import service_process
from tidegate_client.cli.failures import Failure
from tidegate_client.cli.service_process import ServiceProcess
from tidegate_client.client import Client
from tidegate_client.errors import AccessDeniedError, TidegateError

_POLL_S = 0.1
_CALL_TIMEOUT_S = 5.0
_SCHEDULER_GRACE_S = 60.0
_WORKER_GRACE_S = 15.0


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What to start."""

    model: str
    num_workers: int = 1
    host: str = "127.0.0.1"
    port: int = 50051
    """0: any free one."""
    frontends: int = 0
    """Processes that serve clients; 0: the scheduler's own."""
    device: str = "auto"
    scheduler_flags: Sequence[str] = ()
    worker_flags: Sequence[str] = ()
    verbose: bool = False
    """Whether logs go to stderr instead of to files."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a worker is with loading."""

    worker: str
    share: float
    """0 to 1."""
    detail: str


class LocalCluster:
    """Starts on entering a `with` block, and is gone when the block is left, however it is left."""

    def __init__(self, options: ClusterOptions) -> None:
        self.options = options
        self.address = ""
        """host:port of the scheduler, once it listens."""
        self.model_name = ""
        """Name of the model, once it is served."""
        self._registry = ""  # host:port where workers register
        self.log_folder = Path(tempfile.mkdtemp(prefix="tidegate-"))
        """Where the logs are; it goes at the end unless something failed."""
        self._schedulers: list[ServiceProcess] = []  # one, or none yet
        self._workers: list[ServiceProcess] = []
        self._failed = False

    def __enter__(self) -> Self:
        try:
            self._start_scheduler()
            for i in range(self.options.num_workers):
                self._start_worker(i)
        except BaseException as error:
            self._failed = isinstance(error, Failure)
            self._stop(scheduler_grace_s=0.0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed |= isinstance(error, Failure)
        self._stop(scheduler_grace_s=_SCHEDULER_GRACE_S)

    def _start_scheduler(self) -> None:
        options = self.options
        ready_file = self.log_folder / "scheduler.json"
        flags = [f"--host={options.host}", f"--port={options.port}", f"--ready-file={ready_file}"]
        # On one machine nobody needs time to notice that this scheduler is about to go.
        flags += ["--drain-window=0"]
        if options.frontends:
            flags += [f"--frontends={options.frontends}", "--admin-port=0"]
        flags += options.scheduler_flags
        scheduler = service_process.start(
            "scheduler", "scheduler_service", flags, address="", log=self._log("scheduler"), environment={}
        )
        self._schedulers.append(scheduler)
        ready = _await_ports(scheduler, ready_file)
        self.address = scheduler.address = f"{_reachable(options.host)}:{ready['port']}"
        self._registry = f"{_reachable(ready['admin_host'])}:{ready['admin_port']}"

    def _start_worker(self, index: int) -> None:
        options = self.options
        address = f"127.0.0.1:{_free_port()}"
        flags = [f"--model={options.model}", f"--device={options.device}", f"--scheduler={self._registry}"]
        flags += ["--host=127.0.0.1", f"--port={address.rpartition(':')[2]}", *_share_of_cpu(options)]
        worker = service_process.start(
            f"worker {index}",
            "worker_service",
            [*flags, *options.worker_flags],
            address=address,
            log=self._log(f"worker-{index}"),
            environment=_share_of_gpus(options, index),
        )
        self._workers.append(worker)

    def _log(self, name: str) -> Path | None:
        return None if self.options.verbose else self.log_folder / f"{name}.log"

    def wait_ready(self, report: Callable[[list[LoadProgress]], None]) -> None:
        """Waits until every worker serves, and reports how far they are. Raises Failure if a process ends."""
        with contextlib.ExitStack() as stack:
            channels = [
                stack.enter_context(open_channel(w.address, resolve_access(w.address).credentials))
                for w in self._workers
            ]
            stubs = [WorkerServiceStub(channel) for channel in channels]
            client = stack.enter_context(Client(self.address, timeout_s=_CALL_TIMEOUT_S))
            while True:
                for service in (*self._schedulers, *self._workers):
                    service.check_alive()
                report([_progress(worker, stub) for worker, stub in zip(self._workers, stubs, strict=True)])
                try:
                    models = client.list_models()
                except AccessDeniedError:
                    raise  # waiting does not help
                except TidegateError:
                    models = []
                if models and sum(model.ready_workers for model in models) >= len(self._workers):
                    self.model_name = models[0].name
                    return
                time.sleep(_POLL_S)

    def wait(self, on_lost_worker: Callable[[ServiceProcess], None]) -> None:
        """Waits for the end of the scheduler or the last worker: a Failure. Reports each lost worker."""
        alive = list(self._workers)
        while alive:
            for scheduler in self._schedulers:
                scheduler.check_alive()
            for worker in list(alive):
                if not worker.is_alive():
                    alive.remove(worker)
                    self._failed = True
                    on_lost_worker(worker)
            time.sleep(_POLL_S)
        self._workers[-1].check_alive()

    def _stop(self, scheduler_grace_s: float) -> None:
        # The scheduler first: it finishes its requests, for which it needs the workers.
        try:
            service_process.terminate(self._schedulers, scheduler_grace_s)
            service_process.terminate(self._workers, _WORKER_GRACE_S)
        finally:  # also when interrupted once more
            service_process.kill([*self._schedulers, *self._workers])
            if not self._failed:
                shutil.rmtree(self.log_folder, ignore_errors=True)


def _await_ports(scheduler: ServiceProcess, ready_file: Path) -> dict[str, Any]:
    while True:
        scheduler.check_alive()
        with contextlib.suppress(FileNotFoundError, ValueError):
            return dict(json.loads(ready_file.read_text()))
        time.sleep(_POLL_S)


def _progress(worker: ServiceProcess, stub: WorkerServiceStub) -> LoadProgress:
    try:
        answer = stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=_CALL_TIMEOUT_S)
    except grpc.RpcError:
        return LoadProgress(worker.name, 0.0, "starting")
    ready = answer.phase in (worker_pb2.WORKER_PHASE_READY, worker_pb2.WORKER_PHASE_SERVING)
    phase = worker_pb2.WorkerPhase.Name(answer.phase).removeprefix("WORKER_PHASE_").lower().replace("_", " ")
    return LoadProgress(worker.name, 1.0 if ready else answer.progress, answer.detail or phase)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104 - asking, not binding


def _share_of_cpu(options: ClusterOptions) -> list[str]:
    if options.num_workers == 1 or options.device == "cuda":
        return []
    return [f"--threads={max(1, (os.cpu_count() or 1) // options.num_workers)}"]


def _share_of_gpus(options: ClusterOptions, index: int) -> dict[str, str]:
    if options.num_workers == 1 or options.device == "cpu":
        return {}
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = sorted(int(path.name.removeprefix("nvidia")) for path in Path("/dev").glob("nvidia[0-9]*"))
    gpus = listed.split(",") if listed else list(map(str, found))
    return {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {}
