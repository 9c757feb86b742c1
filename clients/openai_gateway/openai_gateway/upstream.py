"""The scheduler behind the gateway: one channel for all callers, and whether it is ready.

Owns the client and its options. The only file here that knows of gRPC.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tidegate_client import AsyncClient, InvalidRequestError, RetryPolicy
from tidegate_client.access import resolve_access
from tidegate_client.channel import open_async_channel, resolve_address

_READY = "tidegate.inference.v1.InferenceService"
_HEALTH_TIMEOUT_S = 2.0
# A refusal is the caller's to deal with, who is told when to come back; a stream that broke goes on.
_RETRY = RetryPolicy(max_attempts=1)


class Upstream:
    """Must be made in the event loop that uses it."""

    def __init__(self, address: str | None) -> None:
        """address: host:port. None: TIDEGATE_ADDRESS, or localhost:50051. Raises InvalidRequestError."""
        self.client = AsyncClient(address, retry=_RETRY)
        access = resolve_access(resolve_address(address))
        self._channel = open_async_channel(address, access.credentials)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def is_ready(self) -> bool:
        """Whether requests are taken: a scheduler answers, and has a worker."""
        request = health_pb2.HealthCheckRequest(service=_READY)
        try:
            answer = await self._health.Check(request, timeout=_HEALTH_TIMEOUT_S)  # type: ignore[attr-defined]
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Closes the channels; streams that are open are cancelled."""
        await self.client.close()
        await self._channel.close()


def is_protected(address: str | None) -> bool:
    """Whether a credential may go to the scheduler: over TLS, or without leaving this machine."""
    try:
        resolve_access(resolve_address(address), token="any")  # noqa: S106 - only whether one may go
    except InvalidRequestError:
        return False
    return True
