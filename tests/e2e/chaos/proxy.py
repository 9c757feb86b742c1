"""Owns a TCP proxy that makes a network bad: delay, loss, cuts, silence. Knows nothing of what passes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

_CHUNK_BYTES = 64 * 1024
_RETRANSMISSION_S = 0.2  # what the loss of a packet costs a TCP connection: a stall, not missing bytes


@dataclass(eq=False)
class _Pipe:
    """One accepted connection and the one that was opened for it."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter

    def abort(self) -> None:
        """Resets both without a goodbye."""
        for writer in (self.near, self.far):
            if writer.transport is not None:
                writer.transport.abort()


@dataclass(eq=False)
class FaultyProxy:
    """Forwards connections to `target_port` of this machine. Its faults may be set at any time."""

    target_port: int
    delay_s: float = 0.0  # for each chunk, each way; later chunks are not delayed more
    loss: float = 0.0  # share of chunks that are lost once and sent again
    rng: random.Random = field(default_factory=random.Random)
    port: int = 0
    _pipes: set[_Pipe] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _flowing: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        """host:port to connect to."""
        return f"127.0.0.1:{self.port}"

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return len(self._pipes)

    async def start(self) -> None:
        """Listens on a free port."""
        self._flowing.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stops listening and resets every connection."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Resets every connection. New ones are let through."""
        for pipe in list(self._pipes):
            pipe.abort()

    def hold(self) -> None:
        """Forwards nothing any more, and tells neither side: what a dead network does."""
        self._flowing.clear()

    def resume(self) -> None:
        """Forwards again, what was held first."""
        self._flowing.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connect(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        pipe = _Pipe(writer, far_writer)
        self._pipes.add(pipe)
        try:
            # Whichever side ends first ends both: the streams here are never half closed.
            ways = [self._forward(reader, far_writer), self._forward(far_reader, writer)]
            tasks = [asyncio.create_task(way) for way in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in tasks:
                way.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            pipe.abort()
            self._pipes.discard(pipe)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copies one direction until its end."""
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=64)
        receiving = asyncio.create_task(self._receive(reader, chunks))
        try:
            while True:
                due_s, chunk = await chunks.get()
                await asyncio.sleep(due_s - asyncio.get_running_loop().time())
                await self._flowing.wait()
                if not chunk:
                    return
                writer.write(chunk)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
        finally:
            receiving.cancel()

    async def _receive(
        self, reader: asyncio.StreamReader, chunks: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        """Gives each chunk the time at which it may be sent on. An empty one is the end."""
        due_s = 0.0
        while True:
            try:
                chunk = await reader.read(_CHUNK_BYTES)
            except ConnectionError:
                chunk = b""
            lost_s = _RETRANSMISSION_S if self.rng.random() < self.loss else 0.0
            due_s = max(due_s, asyncio.get_running_loop().time() + self.delay_s + lost_s)
            await chunks.put((due_s, chunk))
            if not chunk:
                return
