"""Owns the server span of an RPC, and what a request's span needs of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tidegate_telemetry import names

_propagator = TraceContextTextMapPropagator()
_rpc_context: ContextVar[Context | None] = ContextVar("rpc_context", default=None)


def rpc_traceparent() -> str:
    """The W3C header of the RPC that the calling task serves, for another process. Empty: no trace."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, _rpc_context.get() or Context())
    return carrier.get("traceparent", "")


def request_parent(traceparent: str) -> Context:
    """The RPC of a request: one of this task, or of another process, which has told its header."""
    context = _rpc_context.get()
    if context is not None or not traceparent:
        return context or Context()
    return _propagator.extract({"traceparent": traceparent}, Context())


class RpcSpan:
    """The server span of one RPC. Requests that its handler submits become its children."""

    def __init__(self, tracer: trace.Tracer, method: str, metadata: Mapping[str, str]) -> None:
        """`method` is `package.Service/Method`; the metadata name the caller's span. For the calling task."""
        parent = _propagator.extract(metadata, Context())
        attributes = {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: method}
        self._span: Span = tracer.start_span(method, parent, SpanKind.SERVER, attributes)
        _rpc_context.set(trace.set_span_in_context(self._span, Context()))

    def end(self, status_code: str) -> None:
        """Ends with a gRPC status name, such as "OK"."""
        self._span.set_attribute(names.RPC_STATUS_CODE, status_code)
        if status_code not in ("OK", "CANCELLED"):
            self._span.set_attribute(names.ERROR_TYPE, status_code)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()
