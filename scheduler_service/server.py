"""Owns the process: gRPC servers, health, reflection, readiness, drain and exit."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from scheduler_service.admin_api import AdminApi
from scheduler_service.calls_api import Calls
from scheduler_service.config import ServiceConfig
from scheduler_service.engine import Engine
from scheduler_service.fleet import Fleet
from scheduler_service.frontend import Frontend
from scheduler_service.frontend_engine import LocalEngine
from scheduler_service.inference_api import InferenceApi
from scheduler_service.logs import EventLog
from scheduler_service.security_api import PortSecurity, Security
from scheduler_service.telemetry import Telemetry
from scheduler_service.worker_link import LinkOptions
from scheduler_service.workers import WorkerRegistry
from tidegate.admin.v1 import admin_pb2, admin_pb2_grpc
from tidegate.inference.v1 import inference_pb2

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # Streams are silent while requests wait: clients may ping often, also without calls.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # And the server finds out about clients that vanished.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Two services on one port would each get some of the requests.
    ("grpc.so_reuseport", 0),
)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_log = EventLog("server")
_T = TypeVar("_T")


class Service:
    """The scheduler service of one process."""

    def __init__(self, config: ServiceConfig, telemetry: Telemetry) -> None:
        self._config = config
        self._telemetry = telemetry
        self._security = Security(config)
        self._registry = WorkerRegistry()
        self.engine = Engine(config.to_core(), self._registry, telemetry)
        options = LinkOptions(
            hello_timeout_s=config.worker_hello_timeout,
            step_timeout_s=config.worker_step_timeout,
            max_backoff_s=config.worker_backoff_max,
            dialler=self._security.dialler,
        )
        self.fleet = Fleet(self.engine, self._registry, options)
        self._calls = Calls(INFERENCE, telemetry)
        self._health = health.aio.HealthServicer()
        self._servers: list[grpc.aio.Server] = []
        self._background: set[asyncio.Task[None]] = set()
        self.port = 0
        self.admin_port = 0

    async def start(self) -> None:
        """Listens, and dials the workers that are configured. Raises OSError where a port cannot be bound."""
        config = self._config
        admin = AdminApi(self.engine, self._registry, self.fleet)
        security = self._security.public_port()
        public = grpc.aio.server(options=_SERVER_OPTIONS, interceptors=[*security.interceptors, self._calls])
        InferenceApi(Frontend(LocalEngine(self.engine), config)).add_to(public)
        services = [INFERENCE]
        if config.admin_port is None:
            admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, public)
            services.append(ADMIN)
        self.port = self.admin_port = self._listen(public, security, config.host, config.port, services)
        if config.admin_port is not None:
            security = self._security.admin_port()
            private = grpc.aio.server(options=_SERVER_OPTIONS, interceptors=security.interceptors)
            admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, private)
            host = config.admin_host or config.host
            self.admin_port = self._listen(private, security, host, config.admin_port, [ADMIN])
        await self._health.set("", _SERVING)
        await self._health.set(ADMIN, _SERVING)
        await self._health.set(INFERENCE, _NOT_SERVING)
        self.engine.on_ready_change = self._on_ready_change
        self._telemetry.observe(from_other_thread(asyncio.get_running_loop(), self.engine.state))
        for server in self._servers:
            await server.start()
        for address in config.worker:
            await self.fleet.register(address)

    async def drain(self) -> None:
        """Says "not ready", takes requests a little longer, then finishes those that it has."""
        config = self._config
        _log.info("drain_started", window_s=config.drain_window, timeout_s=config.drain_timeout)
        self.engine.on_ready_change = lambda ready: None
        await self._health.set(INFERENCE, _NOT_SERVING)
        if config.drain_window:
            await asyncio.sleep(config.drain_window)
        self.engine.start_draining()
        try:
            async with asyncio.timeout(config.drain_timeout):
                await self.engine.wait_idle()
                await self._calls.idle.wait()  # the last tokens are on their way
        except TimeoutError:
            state = self.engine.state()
            left = state.waiting_requests + state.running_requests
            _log.warning("drain_timed_out", timeout_s=config.drain_timeout, requests_left=left)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Ends RPCs that are left, and all streams."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
        await self.fleet.close()
        _log.info("stopped")

    def _listen(
        self, server: grpc.aio.Server, security: PortSecurity, host: str, port: int, services: list[str]
    ) -> int:
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection([*services, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
        try:
            bound = security.listen(server, address)
        except RuntimeError as error:
            raise OSError(
                f"cannot listen on {address}: is the port in use, and the host one of this machine?"
            ) from error
        self._servers.append(server)
        return bound

    def _on_ready_change(self, ready: bool) -> None:
        _log.info("readiness_changed", ready=ready)
        task = asyncio.create_task(self._health.set(INFERENCE, _SERVING if ready else _NOT_SERVING))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


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
    """Runs the service until SIGTERM or SIGINT, then drains. A second signal ends the process at once."""
    telemetry = Telemetry.from_environment()
    service = Service(config, telemetry)
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
    await service.start()
    _announce(config, service)
    await stopping.wait()
    await service.drain()
    await service.stop()
    await asyncio.to_thread(telemetry.shutdown)


def _announce(config: ServiceConfig, service: Service) -> None:
    ready = {
        "host": config.host,
        "port": service.port,
        "admin_host": config.admin_host or config.host,
        "admin_port": service.admin_port,
        "pid": os.getpid(),
    }
    _log.info("listening", **ready)
    if config.ready_file is not None:
        partial = Path(f"{config.ready_file}.{os.getpid()}")
        partial.write_text(json.dumps(ready), encoding="utf-8")
        partial.replace(config.ready_file)
