"""Owns what all RPCs of one service have in common: they are counted, and each has a server span."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from scheduler_service.call_counts import CallCounts
from scheduler_service.telemetry import Telemetry

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Calls(grpc.aio.ServerInterceptor):
    """Watches the RPCs of one service, whose handlers are coroutines."""

    def __init__(self, service: str, telemetry: Telemetry) -> None:
        self.idle = asyncio.Event()
        """Set while no RPC is open."""
        self.idle.set()
        self.counts = CallCounts()
        self._service = service
        self._telemetry = telemetry
        self._open: set[asyncio.Task[Any]] = set()
        self._last_words = ""

    async def end_all(self, why: str) -> None:
        """Ends open RPCs with UNAVAILABLE. There is no reason in it: who asks again may find the request."""
        self._last_words = why
        for task in self._open:
            task.cancel()
        await self.idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Wraps the handlers of the service."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.lstrip("/")
        if handler is None or not method.startswith(self._service + "/"):
            return handler
        # The stubs describe the handlers of threaded servers, which are no coroutines.
        behaviour: Any = handler.unary_unary
        new_handler: Callable[..., _Handler] = grpc.unary_unary_rpc_method_handler
        if handler.response_streaming:
            behaviour = handler.unary_stream
            new_handler = grpc.unary_stream_rpc_method_handler
        metadata = {
            key: value
            for key, value in handler_call_details.invocation_metadata or ()
            if isinstance(value, str)
        }

        async def watched(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101 - a coroutine runs in one
            self._open.add(task)
            self.idle.clear()
            span = self._telemetry.rpc(method, metadata)
            status = "OK"
            try:
                return await behaviour(request, context)
            except asyncio.CancelledError:
                status = "CANCELLED"
                if not self._last_words:
                    raise
                status = "UNAVAILABLE"
                await context.abort(grpc.StatusCode.UNAVAILABLE, self._last_words)
            except Exception:
                code = context.code()
                status = code.name if isinstance(code, grpc.StatusCode) else "INTERNAL"
                raise
            finally:
                self._open.discard(task)
                if not self._open:
                    self.idle.set()
                self.counts.note_end(method, status)
                if span is not None:
                    span.end(status)

        return new_handler(watched, handler.request_deserializer, handler.response_serializer)
