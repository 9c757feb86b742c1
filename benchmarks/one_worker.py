"""A worker process, and scheduler services in front of it: what benchmarks of scheduling serve loads with.

Owns their beginning and end. Loads and figures are the benchmarks' own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from scheduler_service.config import ServiceConfig
from scheduler_service.server import Service
from scheduler_service.telemetry import Telemetry
from tidegate_client import AsyncClient
from tidegate_client.cli import service_process
from tidegate_client.cli.demo_model import find_model
from tidegate_client.cli.service_process import ServiceProcess

FIRST_ID, LAST_ID = 256, 49_000
"""Ordinary tokens of the demo model, for prompts that are drawn."""


@contextlib.contextmanager
def worker_process(model: str, **options: object) -> Iterator[ServiceProcess]:
    """A worker on the CPU; the options are the worker service's. It is given time to end, then killed."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    values = {"model": find_model(model), "port": port, "device": "cpu", **options}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "worker.log"
        address = f"127.0.0.1:{port}"
        process = service_process.start(
            "worker", "worker_service", flags, address=address, log=log, environment={}
        )
        try:
            yield process
        finally:
            service_process.terminate([process], 10)
            service_process.kill([process])


@contextlib.asynccontextmanager
async def scheduler_of(
    worker: ServiceProcess, telemetry: Telemetry | None = None, **options: Any
) -> AsyncIterator[tuple[Service, AsyncClient]]:
    """A scheduler service in this process with that worker connected, and a client of it; the options are the
    service's."""
    settings: dict[str, Any] = {"port": 0, "worker": (worker.address,), "drain_window": 0.0, **options}
    service = Service(ServiceConfig(**settings), telemetry or Telemetry())
    await service.start()
    try:
        async with AsyncClient(f"127.0.0.1:{service.port}", retry=None) as client:
            while not await client.list_models():
                worker.check_alive()
                await asyncio.sleep(0.05)
            yield service, client
    finally:
        await service.stop(grace_s=0.0)
