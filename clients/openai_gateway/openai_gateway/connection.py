"""One HTTP exchange while its answer is being made: who is still there, and when it must end.

Owns the watch for a client that goes away and for the end of a drain, so that generation stops with either.
Knows nothing of what is generated.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from openai_gateway.errors import CLIENT_CLOSED_REQUEST, HttpError, internal

OUTCOME = "tidegate.outcome"
"""Key in a scope's state: the status that counts where it isn't the one that was sent."""

SILENCE_S = 15.0
"""Longest time without a byte for a client that waits for events; proxies often cut it off after a minute."""

_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_COMMENT = b": waiting\n\n"

_log = logging.getLogger("openai_gateway")


class Drain:
    """Whether the process is about to end, and the moment when answers must have ended."""

    def __init__(self, timeout_s: float) -> None:
        self.started = False
        self.timeout_s = timeout_s
        """How long answers have that are being made when it starts."""
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        """Ends all answers that are still being made."""
        if not self._over.done():
            self._over.set_result(None)

    @property
    def over(self) -> asyncio.Future[None]:
        """Done when answers must end."""
        return self._over


class Answer(ABC):
    """An ASGI application for one answer, whose making stops when the client goes away."""

    def __init__(self, drain: Drain, headers: dict[str, str]) -> None:
        self._drain = drain
        self._own_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Makes and sends the answer."""
        making = asyncio.create_task(self._guarded(self._make(send), send))
        leaving = asyncio.create_task(_disconnect(receive))
        try:
            await self._watch(making, leaving, scope, send)
        finally:
            making.cancel()
            leaving.cancel()
            # Generation is cancelled when this is over, not some time later.
            await asyncio.gather(making, leaving, return_exceptions=True)

    async def _watch(
        self, making: asyncio.Task[None], leaving: asyncio.Task[None], scope: Scope, send: Send
    ) -> None:
        while not making.done():
            events = (making, leaving, self._drain.over)
            done, _ = await asyncio.wait(events, timeout=SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
            if leaving in done and making not in done:
                scope.setdefault("state", {})[OUTCOME] = CLIENT_CLOSED_REQUEST
                return
            if self._drain.over in done and making not in done:
                making.cancel()
                await asyncio.gather(making, return_exceptions=True)
                await self._fail(_shutting_down(self._drain.timeout_s), send)
                return
            if not done:
                await self._keep_alive(send)

    async def _guarded(self, making: Coroutine[Any, Any, None], send: Send) -> None:
        try:
            await making
        except HttpError as error:
            await self._fail(error, send)
        except OSError:  # the client is gone, and so is whom to tell
            pass
        except Exception:
            _log.exception("a request failed by a bug")
            await self._fail(internal(), send)

    @abstractmethod
    async def _make(self, send: Send) -> None:
        """Makes the answer and sends it. Raises HttpError."""

    async def _fail(self, error: HttpError, send: Send) -> None:
        await send_whole(send, error.status, error.body(), self._own_headers | error.headers())

    async def _keep_alive(self, send: Send) -> None:
        """Nothing may have been sent for a while, which a JSON object can't change."""
        return


class JsonAnswer(Answer):
    """One JSON object, sent when it is complete."""

    def __init__(
        self, drain: Drain, headers: dict[str, str], make_body: Callable[[], Awaitable[dict[str, Any]]]
    ) -> None:
        super().__init__(drain, headers)
        self._make_body = make_body

    async def _make(self, send: Send) -> None:
        body = json.dumps(await self._make_body()).encode()
        await send_whole(send, 200, body, self._own_headers)


class EventAnswer(Answer):
    """Server-sent events, each sent when it is there.

    The status is sent with the first event, so that a refusal has its own. Who waits in the queue for longer
    gets the status and comments meanwhile, and a failure as an event, as it is later too.
    """

    def __init__(self, drain: Drain, headers: dict[str, str], events: AsyncGenerator[bytes]) -> None:
        super().__init__(drain, headers)
        self._events = events
        self._sending = asyncio.Lock()
        self._has_started = False
        self._sent = 0
        self._sent_before = 0

    async def _make(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                await self._send(send, event)
        await self._finish(send)

    async def _fail(self, error: HttpError, send: Send) -> None:
        if not self._has_started:
            await super()._fail(error, send)
            return
        await self._send(send, b"data: " + error.body() + b"\n\n")
        await self._finish(send)

    async def _keep_alive(self, send: Send) -> None:
        if self._sent == self._sent_before:
            await self._send(send, _COMMENT)
        self._sent_before = self._sent

    async def _send(self, send: Send, event: bytes) -> None:
        async with self._sending:
            if not self._has_started:
                self._has_started = True
                headers = self._own_headers | _HEADERS | {"content-type": "text/event-stream; charset=utf-8"}
                await send(_start(200, headers))
            self._sent += 1
            await send({"type": "http.response.body", "body": event, "more_body": True})

    async def _finish(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_whole(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    """Sends a JSON answer."""
    length = {"content-type": "application/json", "content-length": str(len(body))}
    await send(_start(status, headers | length))
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _start(status: int, headers: dict[str, str]) -> Message:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _shutting_down(timeout_s: float) -> HttpError:
    message = (
        f"the gateway is shutting down, and the request did not finish within its drain_timeout of "
        f"{timeout_s:g} s; send it again"
    )
    return HttpError(503, message, type="service_unavailable", code="draining", retry_after_s=1.0)
