"""Owns what all ports of the service have in common: a gRPC server with limits, health and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from scheduler_service.calls_api import Calls
from scheduler_service.config import ServiceConfig
from scheduler_service.frontend import Frontend
from scheduler_service.frontend_engine import FrontendEngine
from scheduler_service.inference_api import SERVICE, InferenceApi
from scheduler_service.model_text import ModelTexts
from scheduler_service.security_api import PortSecurity
from tidegate.admin.v1 import admin_pb2

INFERENCE = SERVICE.full_name
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
    # A burst waits in gRPC, at about 11 KiB a request, until the event loop takes it in and says yes or no to
    # each. What is beyond these numbers gRPC cancels, without a reason: some of it, then all of it; and what
    # waits longer than this many seconds.
    ("grpc.server.max_pending_requests", 16_384),
    ("grpc.server.max_pending_requests_hard_limit", 20_480),
    ("grpc.server_max_unrequested_time_in_server", 300),
)


class Health:
    """What grpc.health.v1 says of this process: "" is alive, a service's name is ready."""

    def __init__(self) -> None:
        self.servicer = health.aio.HealthServicer()
        self._background: set[asyncio.Task[None]] = set()

    async def set(self, service: str, serving: bool) -> None:
        """Says it to those who watch, too."""
        states = health_pb2.HealthCheckResponse
        await self.servicer.set(service, states.SERVING if serving else states.NOT_SERVING)

    def set_soon(self, service: str, serving: bool) -> None:
        """The same from code that does not wait."""
        task = asyncio.create_task(self.set(service, serving))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class Port:
    """One address that the process listens on."""

    def __init__(
        self,
        health: Health,
        security: PortSecurity,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        *,
        shared: bool = False,
    ) -> None:
        """`shared`: other processes listen on the same port, and each gets some of the connections."""
        options = (*_SERVER_OPTIONS, ("grpc.so_reuseport", int(shared)))
        self.server = grpc.aio.server(options=options, interceptors=[*security.interceptors, *interceptors])
        self._health = health
        self._security = security

    def listen(self, host: str, port: int, services: Sequence[str]) -> int:
        """Binds the address once all services have been added. Returns the port. Raises OSError."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self.server)
        names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.server)
        address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
        try:
            return self._security.listen(self.server, address)
        except RuntimeError as error:
            raise cannot_listen(address) from error


def cannot_listen(address: str) -> OSError:
    """For an address that cannot be bound."""
    return OSError(
        f"cannot listen on {address}: is the port in use, and the host one of this machine? "
        "If it is, choose another --port"
    )


def public_port(
    engine: FrontendEngine,
    config: ServiceConfig,
    health: Health,
    security: PortSecurity,
    calls: Calls,
    texts: ModelTexts,
) -> Port:
    """The port of InferenceService, whose frontend is in this process. Others listen there, too, if there are
    several frontends."""
    port = Port(health, security, [calls], shared=config.frontends > 0)
    InferenceApi(Frontend(engine, config, texts), calls.counts).add_to(port.server)
    return port
