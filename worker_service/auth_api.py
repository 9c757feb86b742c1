"""Owns the check of callers: all but health takes the cluster's secret, where the worker has one."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health
from grpc_status import rpc_status

from worker_service.logs import log_event
from worker_service.secret import Secret
from worker_service.watched_files import WatchedFiles

_LOGGER = logging.getLogger(__name__)
_DOMAIN = "tidegate.dev"
_LOG_INTERVAL_S = 10.0
_MESSAGES = {
    "MISSING_TOKEN": "this worker wants its cluster's secret; clients talk to the scheduler instead",
    "BAD_TOKEN": "this is not the secret of the worker's cluster; clients talk to the scheduler instead",
}

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class SecretCheck(grpc.aio.ServerInterceptor):
    """Refuses callers that do not show the secret."""

    def __init__(self, secret: WatchedFiles[Secret]) -> None:
        self._secret = secret
        self._logged_at = float("-inf")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Lets the RPC through or refuses it."""
        if handler_call_details.method.startswith(f"/{health.SERVICE_NAME}/"):
            return await continuation(handler_call_details)
        metadata = handler_call_details.invocation_metadata or ()
        authorization = [str(value) for key, value in metadata if key == "authorization"]
        if self._secret.get().is_shown_in(authorization):
            return await continuation(handler_call_details)
        reason = "BAD_TOKEN" if authorization else "MISSING_TOKEN"

        async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            self._log(reason, context.peer())
            await context.abort_with_status(rpc_status.to_status(_status(reason)))

        # On the wire all kinds of RPC look the same, and this kind reads nothing of what the caller sends.
        new_handler: Callable[..., _Handler] = grpc.stream_stream_rpc_method_handler
        return new_handler(refuse)

    def _log(self, reason: str, peer: str) -> None:
        """Nobody can fill the log with it."""
        now = time.monotonic()
        if now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = now
            log_event(_LOGGER, logging.WARNING, "caller refused", reason=reason, peer=peer)


def _status(reason: str) -> status_pb2.Status:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=_DOMAIN))
    return status_pb2.Status(code=code_pb2.UNAUTHENTICATED, message=_MESSAGES[reason], details=[detail])
