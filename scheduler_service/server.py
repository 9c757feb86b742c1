"""Owns the process: gRPC servers, health, reflection, readiness, drain and exit."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import grpc

from scheduler_service.admin_api import AdminApi
from scheduler_service.calls_api import Calls
from scheduler_service.config import ServiceConfig
from scheduler_service.console.gate import Gate
from scheduler_service.console.http import HttpServer
from scheduler_service.console.server import Console
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.engine import Engine
from scheduler_service.fleet import Fleet
from scheduler_service.free_ports import check_ports
from scheduler_service.frontend_engine import LocalEngine
from scheduler_service.frontend_processes import FrontendProcesses
from scheduler_service.journal import Journal
from scheduler_service.journal_options import default_journal
from scheduler_service.logs import EventLog
from scheduler_service.model_text import ModelTexts
from scheduler_service.port_api import ADMIN, INFERENCE, Health, Port, public_port
from scheduler_service.readiness import Readiness
from scheduler_service.recording import Recorder
from scheduler_service.recording_file import RecordingWriter
from scheduler_service.recovery import Recovery
from scheduler_service.security_api import Security
from scheduler_service.state_feed import StateFeeds
from scheduler_service.telemetry import Telemetry
from scheduler_service.worker_link import LinkOptions
from scheduler_service.workers import WorkerRegistry
from tidegate.admin.v1 import admin_pb2_grpc

_log = EventLog("server")
_T = TypeVar("_T")


class Service:
    """The scheduler service of one process."""

    def __init__(self, config: ServiceConfig, telemetry: Telemetry, journal: Journal | None = None) -> None:
        """`journal` was not started yet. Raises OSError where the file of the option `record` cannot be
        written."""
        self._journal = journal
        self._recorder = None
        if config.record is not None:
            self._recorder = Recorder(RecordingWriter(config.record), config.record_tokens)
        self._flushing: asyncio.Task[None] | None = None
        self._config = config
        self._telemetry = telemetry
        self._security = Security(config)
        self._registry = WorkerRegistry()
        if journal is not None:
            self._registry.continue_epochs(journal.last_epoch)
            self._registry.on_epoch = journal.note_epoch
        new_core = Scheduler if self._recorder is None else self._recorder.new_core
        self.engine = Engine(config.to_core(), self._registry, telemetry, journal=journal, new_core=new_core)
        self._recovery = None if journal is None else Recovery(self.engine, journal, config.queue_timeout)
        options = LinkOptions(
            hello_timeout_s=config.worker_hello_timeout,
            step_timeout_s=config.worker_step_timeout,
            max_backoff_s=config.worker_backoff_max,
            dialler=self._security.dialler,
        )
        self.fleet = Fleet(self.engine, self._registry, options)
        self._calls = Calls(INFERENCE, telemetry)
        self._health = Health()
        self._servers: list[grpc.aio.Server] = []
        self._texts = ModelTexts()
        texts = None if config.frontends else self._texts  # else frontends read them
        self._readiness = Readiness(texts, lambda ready: self._health.set_soon(INFERENCE, ready))
        self._feeds = StateFeeds(self.engine, self._registry)
        self._console = None if config.console_port is None else self._new_console()
        self._frontends = None
        if config.frontends:
            counts = self._calls.counts
            self._frontends = FrontendProcesses(self.engine, config, counts, self._recovery)
        self._draining = self._drain_timed_out = False
        self.port = 0
        self.admin_port = 0
        self.console_port = 0
        """Where browsers find the console; 0: nowhere."""

    @property
    def metrics_port(self) -> int:
        """Where Prometheus can scrape; 0: nowhere."""
        return self._telemetry.metrics_port

    async def start(self) -> None:
        """Listens, and dials the workers that are configured. Raises OSError where a port cannot be bound."""
        if self._journal is not None:
            self._journal.start()
        self._listen()
        if self._recorder is not None:
            self._flushing = asyncio.create_task(self._recorder.flush_often())
        await self._health.set("", True)
        await self._health.set(ADMIN, True)
        await self._health.set(INFERENCE, False)
        self.engine.on_ready_change = lambda ready: self._on_status()
        state = from_other_thread(asyncio.get_running_loop(), self.engine.state)
        self._telemetry.observe(state, self._registry.states, self._calls.counts)
        for server in self._servers:
            await server.start()
        if self._console is not None:
            host, port = self._config.console_host, self._config.console_port or 0
            self.console_port = await self._console.start(host, port)
        self._registry.on_change = self._on_models_change
        if self._frontends is not None:
            self.port = await self._frontends.start()
        for address in self._config.worker:
            await self.fleet.register(address)

    async def drain(self) -> None:
        """Says "not ready", takes requests a little longer, then finishes those that it has."""
        config = self._config
        _log.info("drain_started", window_s=config.drain_window, timeout_s=config.drain_timeout)
        self._draining = True
        await self._health.set(INFERENCE, False)
        self._on_status()
        if config.drain_window:
            await asyncio.sleep(config.drain_window)
        self.engine.start_draining()
        self._tell_frontends()
        try:
            async with asyncio.timeout(config.drain_timeout):
                await self.engine.wait_idle()
                await self._calls.idle.wait()  # the last tokens are on their way
                if self._frontends is not None:
                    await self._frontends.finish()
        except TimeoutError:
            self._drain_timed_out = True
            state = self.engine.state()
            left = state.waiting_requests + state.running_requests
            remedy = "a higher --drain-timeout lets them finish"
            _log.warning("drain_timed_out", timeout_s=config.drain_timeout, requests_left=left, remedy=remedy)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Ends RPCs that are left, and all streams. What the journal has as unfinished stays so."""
        if self._journal is not None:
            self._journal.close()
        if self._frontends is not None:
            await self._frontends.stop(grace_s)
        if self._drain_timed_out and grace_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._calls.end_all(self._last_words()), grace_s)
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
        await self.fleet.close()
        if self._console is not None:
            await self._console.stop()
        if self._flushing is not None:
            self._flushing.cancel()
        if self._recorder is not None:
            self._recorder.close()
        _log.info("stopped")

    def _last_words(self) -> str:
        return (
            f"the scheduler is shutting down, and its drain_timeout of {self._config.drain_timeout:g} s ran "
            "out before this request finished; a higher --drain-timeout allows more"
        )

    def _listen(self) -> None:
        config = self._config
        admin = AdminApi(self.engine, self._registry, self.fleet, self._feeds)
        if self._frontends is None:
            security = self._security.public_port()
            engine = LocalEngine(self.engine, self._recovery)
            public = public_port(engine, config, self._health, security, self._calls, self._texts)
            services = [INFERENCE]
            if config.admin_port is None:
                admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, public.server)
                services.append(ADMIN)
            self.port = self.admin_port = public.listen(config.host, config.port, services)
            self._servers.append(public.server)
        if config.admin_port is not None:
            private = Port(self._health, self._security.admin_port())
            admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, private.server)
            self.admin_port = private.listen(config.admin_host or config.host, config.admin_port, [ADMIN])
            self._servers.append(private.server)

    def _new_console(self) -> HttpServer:
        config = self._config
        security = self._security.console(shares_public_port=config.admin_port is None)
        gate = Gate(ADMIN, security.door, config.console_host, secure=security.tls is not None)
        console = Console(self.engine, self._feeds, gate)
        return HttpServer(console.answer, None if security.tls is None else security.tls.get)

    def _on_models_change(self) -> None:
        if self._recovery is not None:
            self._recovery.models_changed()
        self._on_status()

    def _on_status(self) -> None:
        ready = self.engine.ready and not self._draining
        self._readiness.note(ready, self.engine.models())
        self._tell_frontends()

    def _tell_frontends(self) -> None:
        if self._frontends is not None:
            self._frontends.send_status(self.engine.ready and not self._draining)


def from_other_thread(loop: asyncio.AbstractEventLoop, read: Callable[[], _T]) -> Callable[[], _T]:
    """`read`, to be called from another thread: it runs on the event loop, between two steps."""

    def call() -> _T:
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(read())
            except Exception as error:
                future.set_exception(error)

        loop.call_soon_threadsafe(run)
        return future.result(timeout=1.0)

    return call


async def serve(config: ServiceConfig) -> None:
    """Runs the service until SIGTERM or SIGINT, then drains. A second signal ends the process at once.

    Raises OSError where a port cannot be bound or a file not be used; nothing is left open then.
    """
    check_ports(config)
    address = None if config.metrics_port is None else (config.metrics_host, config.metrics_port)
    telemetry = Telemetry.from_environment(metrics_address=address)
    service = Service(config, telemetry, _open_journal(config))
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stopping.is_set():
            _log.warning("exit_forced", signal=number.name)
            os._exit(128 + number)
        _log.info("signal_received", signal=number.name)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await service.start()
    except OSError:
        await service.stop(grace_s=0.0)
        raise
    _announce(config, service)
    await stopping.wait()
    await service.drain()
    await service.stop()
    await asyncio.to_thread(telemetry.shutdown)


def _open_journal(config: ServiceConfig) -> Journal | None:
    """The journal that the options ask for. Raises OSError where they name one that cannot be used."""
    if config.journal_off or (config.journal is None and not config.port):
        return None
    path = config.journal or default_journal(config.host, config.port)
    try:
        return Journal(path, config.journal_retention, config.journal_max_finished)
    except OSError as error:
        if config.journal is not None:
            raise
        _log.warning("journal_unusable", path=str(path), reason=str(error))
        return None


def _announce(config: ServiceConfig, service: Service) -> None:
    ready = {
        "host": config.host,
        "port": service.port,
        "admin_host": config.admin_host or config.host,
        "admin_port": service.admin_port,
        "metrics_port": service.metrics_port,
        "console_host": config.console_host,
        "console_port": service.console_port,
        "pid": os.getpid(),
    }
    _log.info("listening", **ready)
    if config.ready_file is not None:
        partial = Path(f"{config.ready_file}.{os.getpid()}")
        partial.write_text(json.dumps(ready), encoding="utf-8")
        partial.replace(config.ready_file)
