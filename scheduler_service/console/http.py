"""Owns HTTP as far as the console needs it: GET, one exchange a connection, no body. Knows no route."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit

from scheduler_service.logs import EventLog, new_incident_id

_MAX_HEAD_BYTES = 16_384
_MAX_CONNECTIONS = 64
_TIMEOUT_S = 10.0
_STREAM_WRITE_TIMEOUT_S = 30.0

_log = EventLog("console")

# Nothing from elsewhere, nothing inline, in nobody's frame.
_SAFETY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Request:
    """What a browser asked for."""

    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]  # by names in lower case; of several of a name, all, with commas between


@dataclass(frozen=True, slots=True)
class Response:
    """An answer that is there as a whole, or comes in parts until the browser leaves."""

    status: HTTPStatus
    body: bytes | AsyncGenerator[bytes, None]
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


def refusal(status: HTTPStatus, text: str, **headers: str) -> Response:
    """An answer that says what is wrong; header names have _ for -."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(status, f"{text}\n".encode(), headers=named)


class _BadRequestError(Exception):
    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


class HttpServer:
    """Listens on one address, and has a function answer."""

    def __init__(
        self,
        answer: Callable[[Request], Awaitable[Response]],
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`tls` is asked at each connection, so that certificates can be replaced. None: plain text."""
        self._answer = answer
        self._tls = tls
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens. Returns the port. Raises OSError where it can't be bound."""
        self._server = await asyncio.start_server(self._accept, host.strip("[]"), port, limit=_MAX_HEAD_BYTES)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Ends all connections."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio runs this as one
        self._connections.add(task)
        try:
            if len(self._connections) <= _MAX_CONNECTIONS:
                await self._exchange(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # whoever it was is gone
        except asyncio.CancelledError:
            pass  # by stop(); nobody waits for this task, and asyncio would log it
        finally:
            self._connections.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_TIMEOUT_S):
            if self._tls is not None:
                await writer.start_tls(self._tls())
            try:
                response = await self._respond(await reader.readuntil(b"\r\n\r\n"))
            except asyncio.LimitOverrunError:
                response = refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "The request is too long.")
        await _send(writer, response, secure=self._tls is not None)

    async def _respond(self, head: bytes) -> Response:
        try:
            return await self._answer(_parse(head))
        except _BadRequestError as error:
            return error.response
        except Exception:
            incident_id = new_incident_id()
            _log.error("console_fault", incident_id=incident_id)
            return refusal(HTTPStatus.INTERNAL_SERVER_ERROR, f"internal error, incident {incident_id}")


def _parse(head: bytes) -> Request:
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1.") or not parts[1].startswith("/"):
        raise _BadRequestError(refusal(HTTPStatus.BAD_REQUEST, "That is no HTTP/1 request."))
    if parts[0] != "GET":
        raise _BadRequestError(
            refusal(
                HTTPStatus.METHOD_NOT_ALLOWED, "Only GET is allowed: the page changes nothing.", Allow="GET"
            )
        )
    headers: dict[str, str] = {}
    for line in lines[1:-2]:
        name, colon, value = line.partition(":")
        key = name.lower()
        if not colon or not name or name != name.strip():
            raise _BadRequestError(refusal(HTTPStatus.BAD_REQUEST, "A header has no name."))
        headers[key] = f"{headers[key]},{value.strip()}" if key in headers else value.strip()
    try:
        target = urlsplit(parts[1])
        query = dict(parse_qsl(target.query, max_num_fields=8))
    except ValueError:
        raise _BadRequestError(refusal(HTTPStatus.BAD_REQUEST, "That is no address.")) from None
    return Request(target.path, query, headers)


async def _send(writer: asyncio.StreamWriter, response: Response, *, secure: bool) -> None:
    body, status = response.body, response.status
    headers = {"Content-Type": response.content_type, "Connection": "close", **_SAFETY, **response.headers}
    if secure:
        headers["Strict-Transport-Security"] = "max-age=31536000"
    if isinstance(body, bytes):
        headers["Content-Length"] = str(len(body))
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
    async with asyncio.timeout(_STREAM_WRITE_TIMEOUT_S):
        if isinstance(body, bytes):
            writer.write(body)
        await writer.drain()
    if isinstance(body, bytes):
        return
    async with aclosing(body):
        async for part in body:
            writer.write(part)
            async with asyncio.timeout(_STREAM_WRITE_TIMEOUT_S):
                await writer.drain()
