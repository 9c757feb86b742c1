"""A gateway in a thread of its own, on a free port."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from openai_gateway.config import GatewayConfig
from openai_gateway.server import DrainingServer, make_server

DEADLINE_S = 30.0


class RunningGateway:
    """Serves until stop(), which drains it as SIGTERM does."""

    def __init__(self, address: str, **options: Any) -> None:
        options = {"drain_window": 0.0, "drain_timeout": 5.0, "log_level": "warning"} | options
        self._config = GatewayConfig(address=address, port=0, **options)
        self._server: DrainingServer | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        eventually(lambda: self._failure is not None or (self._server is not None and self._server.started))
        if self._failure is not None:
            raise self._failure
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def begin_drain(self) -> None:
        self._server.handle_exit(15, None)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        if self._thread.is_alive():
            self.begin_drain()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        async def serve() -> None:
            self._server = make_server(self._config)
            await self._server.serve()

        try:
            asyncio.run(serve())
        except BaseException as error:
            self._failure = error


def eventually(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
