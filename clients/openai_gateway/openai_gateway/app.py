"""The ASGI application: routes, middleware, and what is alive as long as it is."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from openai_gateway.config import GatewayConfig
from openai_gateway.connection import Drain
from openai_gateway.endpoints import Endpoint, Endpoints
from openai_gateway.errors import HttpError
from openai_gateway.keys import Keys
from openai_gateway.metrics import Counted, Metrics
from openai_gateway.upstream import Upstream

_PATHS = frozenset(["/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"])


def make_app(config: GatewayConfig, upstream: Upstream, keys: Keys, drain: Drain) -> Starlette:
    """Puts the gateway together. The upstream is closed when the application's lifespan ends."""
    metrics = Metrics()
    endpoints = Endpoints(config, upstream, keys, metrics, drain)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        await upstream.close()

    return Starlette(
        routes=[
            Route("/v1/chat/completions", Endpoint(endpoints.chat), methods=["POST"]),
            Route("/v1/completions", Endpoint(endpoints.complete), methods=["POST"]),
            Route("/v1/models", Endpoint(endpoints.models), methods=["GET"]),
            Route("/v1/models/{name:path}", Endpoint(endpoints.model), methods=["GET"]),
            Route("/health", Endpoint(endpoints.health), methods=["GET"]),
            Route("/metrics", Endpoint(endpoints.metrics), methods=["GET"]),
        ],
        middleware=[Middleware(Counted, metrics=metrics, routes=_PATHS)],
        exception_handlers={HTTPException: _explain},
        lifespan=lifespan,
    )


async def _explain(request: Request, error: Exception) -> Response:
    """A path or method that isn't there."""
    assert isinstance(error, HTTPException)  # noqa: S101 - it is registered for them alone
    phrase = HTTPStatus(error.status_code).phrase
    message = f"{request.method} is not possible at this path: {phrase}; see docs/openai.md for what is"
    return HttpError(error.status_code, message, code="unknown_url").response()
