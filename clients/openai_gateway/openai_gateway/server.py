"""The process: its socket, its signals, and how it ends.

SIGTERM makes /health say no at once. After the drain window no connection is taken any more; answers that are
being made then have the drain timeout to finish.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sys
from types import FrameType

import uvicorn

from openai_gateway.app import make_app
from openai_gateway.config import ConfigError, GatewayConfig
from openai_gateway.connection import Drain
from openai_gateway.keys import FileKeys, ForwardedKeys, Keys
from openai_gateway.upstream import Upstream, is_protected
from tidegate_client import InvalidRequestError

# For answers that are told to end, to say so.
_LAST_WORDS_S = 2
# Longer than clients and balancers keep connections that nobody uses, so that it is they who close them.
_KEEP_ALIVE_S = 75

_log = logging.getLogger("openai_gateway")


async def serve(config: GatewayConfig) -> None:
    """Runs until SIGTERM or SIGINT. Raises ConfigError."""
    server = make_server(config)
    await _check_address(config)
    await server.serve()


async def _check_address(config: GatewayConfig) -> None:
    """uvicorn would log an errno and end the process by itself. Raises ConfigError."""
    try:
        probe = await asyncio.get_running_loop().create_server(asyncio.Protocol, config.host, config.port)
    except OSError as error:
        what = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(
            f"host, port: can't listen on {config.host}:{config.port}: {what}; choose another --port, or end "
            "what listens there"
        ) from None
    probe.close()
    await probe.wait_closed()


def make_server(config: GatewayConfig) -> DrainingServer:
    """Puts the server together, in the event loop in which it will run. Raises ConfigError."""
    drain = Drain(config.drain_timeout)
    keys = _keys(config)
    try:
        upstream = Upstream(config.address)
    except InvalidRequestError as error:
        raise ConfigError(error.message) from None
    settings = _uvicorn_config(config, make_app(config, upstream, keys, drain))
    try:
        settings.load()
    except OSError as error:  # ssl's errors are, too
        raise ConfigError(f"tls_cert, tls_key: {error}") from None
    return DrainingServer(settings, config, drain)


class DrainingServer(uvicorn.Server):
    """uvicorn's server, with a drain before its end."""

    def __init__(self, config: uvicorn.Config, options: GatewayConfig, drain: Drain) -> None:
        super().__init__(config)
        self._options = options
        self._drain = drain
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Another one: end now."""
        self._loop.call_soon_threadsafe(self._begin_drain if not self._drain.started else self._end_now)

    def _begin_drain(self) -> None:
        if self._drain.started:
            return
        self._drain.started = True
        _log.info("Draining: answers that are being made finish first.")
        self._loop.call_later(self._options.drain_window, self._stop_listening)

    def _stop_listening(self) -> None:
        self.should_exit = True
        self._loop.call_later(self._options.drain_timeout, self._drain.end)

    def _end_now(self) -> None:
        self.should_exit = True
        self._drain.end()


def _keys(config: GatewayConfig) -> Keys:
    if config.api_keys is None:
        return ForwardedKeys(is_protected=is_protected(config.address))
    try:
        return FileKeys(config.api_keys)
    except (OSError, ValueError) as error:
        raise ConfigError(f"api_keys: {error}") from None


def _uvicorn_config(config: GatewayConfig, app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]  # an ASGI application
        host=config.host,
        port=config.port,
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=config.access_log,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
        timeout_graceful_shutdown=int(config.drain_timeout) + _LAST_WORDS_S,
    )


def set_up_logs(level: str) -> None:
    """Log lines go to stderr. uvicorn's own are told by level alone."""
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
