"""Owns the frontends that are processes of their own: starts them, starts them again, ends them.

All listen on one port, which is held here, and each has a link to the engine in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process

from scheduler_service.call_counts import CallCounts
from scheduler_service.config import ServiceConfig
from scheduler_service.core.admission import QueueLoad
from scheduler_service.engine import Engine
from scheduler_service.logs import EventLog
from scheduler_service.port_api import cannot_listen
from scheduler_service.recovery import Recovery
from scheduler_service.remote_frontend import RemoteFrontend

_BACKOFF_RANGE_S = (0.1, 5.0)
_LONG_LIFE_S = 10.0  # after which a death does not count as one more of a row
_KILL_AFTER_S = 3.0
# Frontends hear of the queue with all else that they are told, and by themselves when it has changed by this
# part of its limits.
_QUEUE_STEPS = 32
_NEVER = 1 << 62
_PORT_WAIT_S = 3.0

_log = EventLog("frontends")


class FrontendProcesses:
    """The frontends of one service."""

    def __init__(
        self, engine: Engine, config: ServiceConfig, counts: CallCounts, recovery: Recovery | None = None
    ) -> None:
        """`counts` get those of all frontends."""
        self._engine = engine
        self._counts = counts
        self._recovery = recovery
        self._config = config
        self._ready = False
        self._port_holder: socket.socket | None = None
        self._options = ""
        self._frontends: dict[int, RemoteFrontend] = {}  # by index
        self._processes: dict[int, Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        limits = config.max_num_queued_reqs, config.max_num_queued_tokens
        if any(limit is not None for limit in limits):
            self._queue_steps = QueueLoad(
                *(_NEVER if it is None else it // _QUEUE_STEPS + 1 for it in limits)
            )
            engine.on_round = self._note_queue

    async def start(self) -> int:
        """Starts all. Returns the port, once all listen there. Raises OSError."""
        self._port_holder = await _hold_port_soon(self._config.host, self._config.port)
        port: int = self._port_holder.getsockname()[1]
        # Every value is there, so that neither file nor preset is looked into again.
        update = {"port": port, "config": None, "preset": None}
        self._options = self._config.model_copy(update=update).model_dump_json()
        indices = range(self._config.frontends)
        try:
            started = await asyncio.gather(*(self._start_one(index) for index in indices))
        except BaseException:
            await self.stop(0.0)
            raise
        if not all(started):
            await self.stop(0.0)
            raise OSError("a frontend process could not be started; its log lines say why")
        self._keepers = [asyncio.create_task(self._keep(index)) for index in indices]
        return port

    def send_status(self, ready: bool) -> None:
        """Tells all whether health is to say that requests are taken, what models there are, and so on."""
        self._ready = ready
        for frontend in self._frontends.values():
            frontend.send_status(ready)

    def _note_queue(self) -> None:
        load, _ = self._engine.queue()
        for frontend in self._frontends.values():
            frontend.note_queue(load, self._queue_steps)

    async def finish(self) -> None:
        """Returns once all clients have what is theirs, and the frontends have ended."""
        self._stop_keeping()
        for frontend in self._frontends.values():
            frontend.finish()
        await asyncio.gather(*(process.wait() for process in self._processes.values()))

    async def stop(self, grace_s: float) -> None:
        """Ends all: clients that are served get UNAVAILABLE."""
        self._stop_keeping()
        for frontend in self._frontends.values():
            frontend.close()
        ends = (_end(process, grace_s + _KILL_AFTER_S) for process in self._processes.values())
        await asyncio.gather(*ends)
        if self._port_holder is not None:
            self._port_holder.close()

    def _stop_keeping(self) -> None:
        """From here on, those that end are not started again."""
        for keeper in self._keepers:
            keeper.cancel()

    async def _keep(self, index: int) -> None:
        """Starts a frontend again whenever it has ended."""
        pause_s, most_s = _BACKOFF_RANGE_S
        started_at = time.monotonic()
        while True:
            process = self._processes[index]
            status = await process.wait()
            _log.warning("frontend_lost", frontend=index, pid=process.pid, exit_status=status)
            if time.monotonic() - started_at > _LONG_LIFE_S:
                pause_s = _BACKOFF_RANGE_S[0]
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, most_s)
            started_at = time.monotonic()
            await self._start_one(index)

    async def _start_one(self, index: int) -> bool:
        """Starts a frontend and waits until it listens. Whether it does."""
        frontend = RemoteFrontend(self._engine, self._recovery, self._counts)
        own_end, its_end = socket.socketpair()
        frontend.send_status(self._ready)
        await frontend.open(own_end, self._options)
        self._frontends[index] = frontend
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "scheduler_service.frontend_process", str(its_end.fileno())),
                pass_fds=[its_end.fileno()],
                stdin=DEVNULL,
            )
        finally:
            its_end.close()
        self._processes[index] = process
        await _first_of(frontend.listening, frontend.lost)
        if frontend.lost.is_set():
            await process.wait()
            return False
        _log.info("frontend_listening", frontend=index, pid=process.pid)
        return True


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _end(process: Process, within_s: float) -> None:
    """Waits for a process that has been told to end, and then does not wait any more."""
    try:
        async with asyncio.timeout(within_s):
            await process.wait()
    except TimeoutError:
        _log.warning("frontend_killed", pid=process.pid)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _hold_port_soon(host: str, port: int) -> socket.socket:
    """The same, once the frontends of a scheduler that was killed have noticed. Raises OSError."""
    give_up_at = time.monotonic() + _PORT_WAIT_S
    while True:
        try:
            return _hold_port(host, port)
        except OSError:
            if time.monotonic() >= give_up_at:
                raise
        await asyncio.sleep(0.1)


def _hold_port(host: str, port: int) -> socket.socket:
    """A socket that holds a port for others to listen on, without listening. Raises OSError."""
    last_error: OSError | None = None
    for family, _, _, _, address in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
        try:
            # Without SO_REUSEPORT, this fails where another service listens: each would get some requests.
            _bind(family, address, socket.SO_REUSEADDR).close()
            return _bind(family, address, socket.SO_REUSEADDR, socket.SO_REUSEPORT)
        except OSError as error:
            last_error = error
    raise cannot_listen(f"{host}:{port}") from last_error


def _bind(family: int, address: tuple[object, ...], *options: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in options:
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
