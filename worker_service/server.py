"""Owns the process: the gRPC server from before the model is loaded to an orderly end after SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tidegate.worker.v1 import worker_pb2, worker_pb2_grpc
from worker_service.config import WorkerConfig
from worker_service.errors import KvMemoryError, UnsupportedModelError
from worker_service.logs import log_event, log_ready
from worker_service.registration import keep_registered, look_for
from worker_service.security_api import Security
from worker_service.telemetry import Telemetry
from worker_service.tls_api import Dialler
from worker_service.worker import Engine, Phase, Worker
from worker_service.worker_api import WorkerApi

_LOGGER = logging.getLogger(__name__)
_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
_MAX_MESSAGE_BYTES = 64 << 20
_OPTIONS = [
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # A scheduler that is cut off without a word is noticed in 40 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Schedulers ping as often as that on a stream that is silent while it has no work.
    ("grpc.http2.min_ping_interval_without_data_ms", 20_000),
    ("grpc.so_reuseport", 0),  # two workers on one port are a mistake
]


class StartError(Exception):
    """The worker cannot start; the message tells the operator why."""


async def serve(config: WorkerConfig, stop: asyncio.Event | None = None) -> None:
    """Serves until SIGTERM, SIGINT or `stop`. Raises StartError."""
    stop = stop or _stop_on_signals()
    try:
        security = Security(config)
    except (OSError, ValueError) as error:
        raise StartError(str(error)) from None
    telemetry = _telemetry(config)
    worker = Worker(config)
    telemetry.observe(worker)
    api = WorkerApi(worker, telemetry)
    async with _server(api, config, security) as (port, ready):
        looking = None
        if config.scheduler is not None:
            looking = asyncio.create_task(look_for(config.scheduler, security.dialler))
        try:
            engine = await _load(worker, stop)
            if engine is not None:
                ports = port, telemetry.metrics_port
                await _serve_until(stop, worker, engine, ready, ports, security.dialler)
        finally:
            if looking is not None:
                looking.cancel()
            await ready.set(_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
            worker.phase = Phase.DRAINING
            await _drain(api, worker)
    await asyncio.to_thread(telemetry.shutdown)
    log_event(_LOGGER, logging.INFO, "worker stopped")


def _telemetry(config: WorkerConfig) -> Telemetry:
    address = None if config.metrics_port is None else (config.metrics_host, config.metrics_port)
    try:
        return Telemetry.from_environment(address)
    except OSError as error:
        raise StartError(str(error)) from None


async def _serve_until(
    stop: asyncio.Event,
    worker: Worker,
    engine: Engine,
    ready: health.aio.HealthServicer,
    ports: tuple[int, int],
    dialler: Dialler,
) -> None:
    """Makes the worker known and waits for the end. `ports` are those of plans and of metrics."""
    port, metrics_port = ports
    _resume_collection()
    worker.phase = Phase.READY
    await ready.set(_SERVICE, health_pb2.HealthCheckResponse.SERVING)
    address = _advertised_address(worker.config, port)
    log_ready(
        address=address,
        model=engine.model.name,
        dtype=str(engine.model.dtype).removeprefix("torch."),
        kv_dtype=str(engine.model.kv_dtype).removeprefix("torch."),
        decoder=engine.model.decoder_name,
        attention=engine.model.backend_name,
        blocks=engine.limits.num_blocks,
        block_size=engine.limits.block_size,
        slots=engine.limits.num_slots,
        max_model_len=engine.limits.max_model_len,
        metrics_port=metrics_port,
    )
    registration = None
    if worker.config.scheduler is not None:
        registration = asyncio.create_task(keep_registered(worker.config.scheduler, address, dialler))
    await stop.wait()
    log_event(_LOGGER, logging.INFO, "draining")
    worker.phase = Phase.DRAINING
    await ready.set(_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    if registration is not None:
        registration.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await registration


async def _drain(api: WorkerApi, worker: Worker) -> None:
    """Finishes the steps in flight and ends their thread, within the drain timeout."""
    try:
        async with asyncio.timeout(worker.config.drain_timeout_s):
            await api.drain()
            if worker.engine is not None:
                await asyncio.wrap_future(worker.engine.steps.close())
    except TimeoutError:
        api.stop_draining(worker.config.drain_timeout_s)


@contextlib.asynccontextmanager
async def _server(
    api: WorkerApi, config: WorkerConfig, security: Security
) -> AsyncIterator[tuple[int, health.aio.HealthServicer]]:
    """A started server: its port, and its health service."""
    server = grpc.aio.server(options=_OPTIONS, interceptors=security.interceptors)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(api, server)
    ready = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(ready, server)
    names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    await ready.set("", health_pb2.HealthCheckResponse.SERVING)  # the process is alive
    await ready.set(_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    try:
        port = security.listen(server, f"{config.host}:{config.port}")
    except RuntimeError:
        raise StartError(f"cannot listen on {config.host}:{config.port}: choose another --port") from None
    await server.start()
    log_event(_LOGGER, logging.INFO, "listening", host=config.host, port=port, model=config.model_name)
    try:
        yield port, ready
    finally:
        await server.stop(grace=1.0)


async def _load(worker: Worker, stop: asyncio.Event) -> Engine | None:
    """The loaded engine; None when the worker is told to stop first. Raises StartError."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Engine] = loop.create_future()

    def load() -> None:
        try:
            engine = worker.load()
        except Exception as error:
            outcome: tuple[Engine | None, Exception | None] = None, error
        else:
            outcome = engine, None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker was stopped meanwhile
            loop.call_soon_threadsafe(_set_unless_done, done, *outcome)

    # A daemon, since a load can't be interrupted and must not hold up the end of the process.
    threading.Thread(target=load, name="load", daemon=True).start()
    stopped = asyncio.create_task(stop.wait())
    ends: set[asyncio.Future[Any]] = {done, stopped}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not done.done():
        done.cancel()
        return None
    try:
        return done.result()
    except UnsupportedModelError as error:
        raise StartError(f"cannot serve {worker.config.model}: {error}") from error
    except (KvMemoryError, OSError) as error:
        raise StartError(str(error)) from error
    except MemoryError as error:
        raise StartError(
            f"there is too little memory: {error}. Lower --max-num-seqs, --max-num-batched-tokens or "
            "--max-model-len"
        ) from error


def _resume_collection() -> None:
    """What a start made stays as long as the process, so collections need not look at it.

    Does nothing where collection was never off: whoever runs the server in a process of its own has its say.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _set_unless_done(future: asyncio.Future[Engine], engine: Engine | None, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    elif engine is not None:
        future.set_result(engine)


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def _advertised_address(config: WorkerConfig, port: int) -> str:
    if config.advertise_address is not None:
        return config.advertise_address
    if config.host not in ("0.0.0.0", "::", "[::]"):  # noqa: S104 - asking, not binding
        return f"{config.host}:{port}"
    return f"{socket.getfqdn()}:{port}"
