"""Prometheus metrics of the gateway, and the middleware that counts every exchange.

Owns their names. What the model service does is the scheduler's to measure.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openai_gateway.connection import OUTCOME

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """What is counted, in a registry of its own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # each would double the number of series
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tidegate_gateway_requests",
            "HTTP requests that ended; 499 is a client that went away.",
            ["route", "status"],
            registry=self.registry,
        )
        self.open = Gauge(
            "tidegate_gateway_open_requests", "HTTP requests that are being answered.", registry=self.registry
        )
        self.duration = Histogram(
            "tidegate_gateway_request_duration_seconds",
            "From an HTTP request to the end of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_byte = Histogram(
            "tidegate_gateway_time_to_first_byte_seconds",
            "From an HTTP request to the start of its answer, which for a stream is its first event.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )


class Counted:
    """Middleware that counts each exchange by its route and how it ended."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str]) -> None:
        """routes: paths with a label of their own; anyone can ask for others."""
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the exchange on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics = self._metrics
        route = scope["path"] if scope["path"] in self._routes else "other"
        start = time.monotonic()
        status = 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                metrics.first_byte.labels(route).observe(time.monotonic() - start)
            await send(message)

        metrics.open.inc()
        try:
            await self._app(scope, receive, watched)
        finally:
            metrics.open.dec()
            outcome = scope.get("state", {}).get(OUTCOME, status)
            metrics.requests.labels(route, str(outcome)).inc()
            metrics.duration.labels(route).observe(time.monotonic() - start)
