"""Owns the console's routes: the page's files, and what they ask for. It reads the state and changes none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from http import HTTPStatus
from pathlib import Path

from scheduler_service import admin_codec
from scheduler_service.console import codec
from scheduler_service.console.gate import Gate
from scheduler_service.console.http import Request, Response, refusal
from scheduler_service.core.errors import UnknownWorkerError
from scheduler_service.core_view import CoreView
from scheduler_service.state_feed import FeedOptions, StateFeeds
from tidegate.admin.v1 import admin_pb2 as pb

_PAGE = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_JSON = "application/json"
_OPTIONS = FeedOptions(interval_ms=1000, steps=True)
_PING_S = 15.0


class Console:
    """The page and its data."""

    def __init__(self, engine: CoreView, feeds: StateFeeds, gate: Gate) -> None:
        self._engine = engine
        self._feeds = feeds
        self._gate = gate
        self._files = _read_page()
        self._last: tuple[pb.WatchStateResponse, bytes] | None = None

    async def answer(self, request: Request) -> Response:
        """What a browser gets."""
        refused = self._gate.refuse(request)
        if refused is not None:
            return refused
        found = self._files.get(request.path)
        if found is not None:
            return found
        match request.path:
            case "/api/watch":
                return Response(HTTPStatus.OK, self._watch(), "text/event-stream")
            case "/api/blocks":
                return self._blocks(request.query.get("worker", ""))
            case "/api/request":
                return self._explain(request.query.get("id", ""))
            case "/api/latency":
                now = self._engine.now()
                message = admin_codec.latency_message(self._engine.latencies, now, time.time() - now)
                return _json(codec.to_plain(message))
        return refusal(HTTPStatus.NOT_FOUND, "There is nothing here.")

    async def _watch(self) -> AsyncGenerator[bytes, None]:
        watcher = self._feeds.join(_OPTIONS)
        try:
            yield b"retry: 2000\n\n"
            while True:
                try:
                    update = await asyncio.wait_for(watcher.next(), _PING_S)
                except TimeoutError:
                    yield b": still here\n\n"  # or it would never be noticed that the browser has gone
                else:
                    yield b"data: " + self._encoded(update) + b"\n\n"
        finally:
            self._feeds.leave(_OPTIONS, watcher)

    def _encoded(self, update: pb.WatchStateResponse) -> bytes:
        """All who watch get the same updates, so each is encoded once."""
        if self._last is None or self._last[0] is not update:
            self._last = (update, codec.update_json(update))
        return self._last[1]

    def _blocks(self, worker_id: str) -> Response:
        try:
            blocks = self._engine.block_map(worker_id)
        except UnknownWorkerError:
            return refusal(HTTPStatus.NOT_FOUND, "No such worker is connected.")
        return _json(codec.to_plain(admin_codec.block_map_message(worker_id, blocks)))

    def _explain(self, request_id: str) -> Response:
        candidates = self._engine.explain(request_id)
        if not candidates:
            return refusal(HTTPStatus.NOT_FOUND, "Nothing is known of this request.")
        return _json({"candidates": [codec.to_plain(admin_codec.explanation_message(c)) for c in candidates]})


def _json(plain: object) -> Response:
    return Response(HTTPStatus.OK, codec.to_json(plain), _JSON)


def _read_page() -> dict[str, Response]:
    """Responses by their paths. There are no others, so no path leads out of the folder."""
    files = {
        f"/{file.name}": Response(HTTPStatus.OK, file.read_bytes(), _TYPES[file.suffix])
        for file in sorted(_PAGE.iterdir())
        if file.suffix in _TYPES
    }
    return files | {"/": files["/index.html"]}
