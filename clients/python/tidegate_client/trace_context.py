"""The caller's trace, as headers, so that the server's spans continue it.

Owns that; without OpenTelemetry in the process there is nothing to send, and it is not imported.
"""

from __future__ import annotations

import sys


def trace_headers() -> tuple[tuple[str, str], ...]:
    """Returns the W3C headers (traceparent, tracestate) of the active span; nothing when none is active."""
    if "opentelemetry.trace" not in sys.modules:  # who has started a span has imported it
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return tuple(headers.items())
