"""Owns the way of callers' credentials from gRPC to the door. It decides nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from grpc_status import rpc_status

from scheduler_service import errors
from scheduler_service.auth import Door, set_caller
from scheduler_service.errors import ServiceError
from scheduler_service.logs import EventLog

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_log = EventLog("auth")


class Authentication(grpc.aio.ServerInterceptor):
    """Asks a door about each RPC before its handler is looked for. The first of a server's interceptors."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Lets the RPC through, with its caller noted in the task's context, or refuses it."""
        service, _, method = handler_call_details.method.lstrip("/").rpartition("/")
        authorization = [
            str(value)
            for key, value in handler_call_details.invocation_metadata or ()
            if key == "authorization"
        ]
        try:
            set_caller(self._door.admit(service, authorization))
        except ServiceError as error:
            return _refusal(error, f"{service}/{method}")
        return await continuation(handler_call_details)


def _refusal(error: ServiceError, rpc: str) -> _Handler:
    async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        _log.repeated(
            "caller_refused", error.reason.value, reason=error.reason.value, rpc=rpc, peer=context.peer()
        )
        await context.abort_with_status(rpc_status.to_status(errors.to_status(error)))

    # On the wire all kinds of RPC look the same, and this kind reads nothing of what the caller sends.
    new_handler: Callable[..., _Handler] = grpc.stream_stream_rpc_method_handler
    return new_handler(refuse)
