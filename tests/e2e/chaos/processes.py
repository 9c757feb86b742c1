"""Owns the processes of a deployment under test: how they start, how they are hurt, how they end.

Workers are forked from a server process that has imported torch and the model code, so that a restart takes
a moment and not ten seconds of importing; what runs in the child is the worker's own entry point.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_PR_SET_PDEATHSIG = 1

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["torch", "transformers.models.llama.modeling_llama", "worker_service.__main__", "worker_service.server"]
)


def free_port() -> int:
    """A TCP port of this machine that nobody uses now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _run_worker(flags: Sequence[str], log: str) -> None:
    """The child's life. It dies with its parent, also when it is stopped just then."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from worker_service.__main__ import main

    sys.argv = ["worker_service", *flags]
    status = 1
    try:
        status = main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class WorkerProcess:
    """One worker, restarted as often as it takes, always on the same port and with the same log."""

    def __init__(self, log: Path, port: int, flags: Sequence[str]) -> None:
        self.log = log
        self.port = port
        self._flags = [*flags, "--port", str(port), "--log-format", "json"]
        self._process: multiprocessing.context.ForkServerProcess | None = None

    @property
    def alive(self) -> bool:
        """Whether it runs, or is stopped."""
        return self._process is not None and self._process.exitcode is None

    def start(self) -> None:
        """Starts it. It must not run."""
        assert not self.alive
        process = _FORKS.Process(target=_run_worker, args=(self._flags, str(self.log)), daemon=True)
        process.start()
        self._process = process

    async def listening(self) -> None:
        """Waits until it listens, which it does before it loads its model. It handles signals by then."""
        async with asyncio.timeout(60):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    return

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        assert self._process is not None and self._process.pid is not None
        os.kill(self._process.pid, number)

    async def ended(self, timeout_s: float = 60.0) -> int:
        """Waits for its end. Returns the exit status, negative for a signal."""
        assert self._process is not None
        async with asyncio.timeout(timeout_s):
            while self._process.exitcode is None:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
        return self._process.exitcode

    async def kill(self) -> None:
        """kill -9, and waits for it."""
        if self.alive:
            self.send(signal.SIGKILL)
            await self.ended()

    def events(self) -> list[dict[str, object]]:
        """What it has logged, of all its lives."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{")]


class SchedulerProcess:
    """`python -m scheduler_service` on a free port."""

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        self.log = folder / "scheduler.log"
        self._ready_file = folder / "scheduler.json"
        self._flags = [*flags, "--port", "0", "--ready-file", str(self._ready_file), "--log-format", "json"]
        self.process: asyncio.subprocess.Process | None = None
        self.address = ""
        self.admin_address = ""

    async def start(self) -> None:
        """Starts it, and waits until it listens."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGATE_")}
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "scheduler_service", *self._flags),
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**environment, "PYTHONPATH": str(ROOT / "protos")},
            )
        async with asyncio.timeout(60):
            while not self._ready_file.exists():
                assert self.process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.02)
        ready = json.loads(self._ready_file.read_text())
        self.address = f"127.0.0.1:{ready['port']}"
        self.admin_address = f"127.0.0.1:{ready['admin_port']}"

    def terminate(self) -> None:
        """SIGTERM."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    async def ended(self, timeout_s: float = 60.0) -> int:
        """Waits for its end. Returns the exit status."""
        assert self.process is not None
        return await asyncio.wait_for(self.process.wait(), timeout_s)

    async def close(self) -> None:
        """Ends it if it still runs."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    def resident_mib(self, peak: bool = False) -> float:
        """Its memory now, or the most it ever was, in MiB."""
        name = "VmHWM:" if peak else "VmRSS:"
        status = (self._proc / "status").read_text()
        line = next(line for line in status.splitlines() if line.startswith(name))
        return int(line.split()[1]) / 1024

    def open_files(self) -> int:
        """Its file descriptors, connections among them."""
        return len(list((self._proc / "fd").iterdir()))

    @property
    def _proc(self) -> Path:
        assert self.process is not None
        return Path(f"/proc/{self.process.pid}")

    def events(self) -> list[dict[str, object]]:
        """What it has logged."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
