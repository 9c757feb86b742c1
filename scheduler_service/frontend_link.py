"""Owns one end of the link between the engine and a frontend in another process: frames over a socket.

It knows nothing of what is in a frame. All that a turn of the event loop has to say goes out as one frame, by
one write; while the other end does not read, nothing is written and what there is to say waits where it is.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from scheduler_service.frontend_frames import Buffer
from scheduler_service.logs import EventLog

_COUNT = struct.Struct("<II")  # bytes of all that follows, number of parts
_MAX_WAITING_BYTES = 256 * 1024  # in this process, behind what the socket holds
_MAX_PARTS = 64

_log = EventLog("frontend_link")


def encode_frame(parts: Sequence[Buffer]) -> bytes:
    """A frame: its length, the parts' lengths, the parts."""
    lengths = struct.pack(f"<{len(parts)}I", *map(len, parts))
    size = len(lengths) + sum(map(len, parts)) + 4
    return b"".join((_COUNT.pack(size, len(parts)), lengths, *parts))


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[list[memoryview]]:
        """The parts of each frame that is complete. Raises ValueError for bytes that are no frame."""
        self._buffer += data
        while len(self._buffer) >= _COUNT.size:
            size, num_parts = _COUNT.unpack_from(self._buffer)
            if num_parts > _MAX_PARTS or size < 4 + 4 * num_parts:
                raise ValueError(f"a frame of {size} bytes says that it has {num_parts} parts")
            end = 4 + size
            if len(self._buffer) < end:
                return
            frame = memoryview(bytes(memoryview(self._buffer)[_COUNT.size : end]))
            del self._buffer[:end]
            yield _split(frame, num_parts)


def _split(frame: memoryview, num_parts: int) -> list[memoryview]:
    lengths = struct.unpack_from(f"<{num_parts}I", frame)
    parts = []
    start = 4 * num_parts
    for length in lengths:
        parts.append(frame[start : start + length])
        start += length
    if start != len(frame):
        raise ValueError(f"a frame's parts have {start} bytes together, not {len(frame)}")
    return parts


class FrontendLink(asyncio.Protocol):
    """One end. Its owner says that there is something to send, and is asked for it when that can be sent."""

    def __init__(
        self,
        take: Callable[[], Sequence[Buffer]],
        receive: Callable[[list[memoryview]], None],
        lost: Callable[[], None],
    ) -> None:
        """`take` gives the parts of a frame with all that there is to say. `lost` is called at the end."""
        self._take = take
        self._receive = receive
        self._lost = lost
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._due = False
        self._paused = False

    async def open(self, end: socket.socket) -> None:
        """Begins to read. The socket belongs to the link from now on."""
        await asyncio.get_running_loop().create_connection(lambda: self, sock=end)

    def send_soon(self) -> None:
        """There is something to send."""
        if not self._due:
            self._due = True
            if not self._paused:
                asyncio.get_running_loop().call_soon(self._send)

    def close(self) -> None:
        """Ends the link, with what was written before."""
        if self._transport is not None:
            self._transport.close()

    def _send(self) -> None:
        if not self._due or self._paused or self._transport is None:
            return
        self._due = False
        self._transport.write(encode_frame(self._take()))

    # For the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_MAX_WAITING_BYTES)
        if self._due:
            self._send()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        try:
            for parts in self._reader.feed(data):
                self._receive(parts)
        except Exception:
            _log.error("frontend_link_fault")
            if self._transport is not None:
                self._transport.abort()

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self._paused = True

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._paused = False
        if self._due:
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        self._lost()
