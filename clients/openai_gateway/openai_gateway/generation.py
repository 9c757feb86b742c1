"""The streams behind one HTTP request: one for each prompt, n candidates each.

Owns their merging into numbered choices, and that all end together. Knows nothing of HTTP or JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import tidegate_client
from tidegate_client import AsyncStream, Delta, Finished, FinishReason, RequestCancelledError


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of all prompts and of all choices. A prompt counts once, whatever n is."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Generation:
    """What is being generated for one HTTP request. Leaving its `with` block cancels what still runs."""

    def __init__(self, streams: Sequence[AsyncStream], n: int) -> None:
        self._streams = streams
        self._n = n
        self.num_choices = n * len(streams)

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta | None]]:
        """Yields (stream, delta) as they come, and (stream, None) when a stream has ended.

        Choice `stream * n + delta.index` is the delta's. Raises TidegateError as soon as one stream fails.
        """
        if len(self._streams) == 1:
            async for delta in self._streams[0]:
                yield 0, delta
            yield 0, None
            return
        arrived: asyncio.Queue[tuple[int, Delta | None] | None] = asyncio.Queue()

        async def read(number: int, stream: AsyncStream) -> None:
            async for delta in stream:
                arrived.put_nowait((number, delta))
            arrived.put_nowait((number, None))

        reading = asyncio.gather(*(read(i, stream) for i, stream in enumerate(self._streams)))
        reading.add_done_callback(lambda _: arrived.put_nowait(None))
        try:
            while (arrival := await arrived.get()) is not None:
                yield arrival
            await reading
        finally:
            reading.cancel()

    def choices_of(self, stream: int) -> range:
        """The numbers of a stream's choices."""
        return range(stream * self._n, (stream + 1) * self._n)

    def finished(self, choice: int) -> Finished | None:
        """How a choice ended. None: it hasn't. Raises RequestCancelledError if it was cancelled by name."""
        finished = self._streams[choice // self._n].finished_at(choice % self._n)
        if finished is not None and finished.reason is FinishReason.CANCELLED:
            raise RequestCancelledError("CANCELLED", "the request was cancelled by its name")
        return finished

    async def results(self) -> list[tidegate_client.Generation]:
        """Reads everything to the end; returns the choices in order. Raises TidegateError."""
        async for _ in self.deltas():
            pass
        for choice in range(self.num_choices):
            self.finished(choice)
        return [generation for stream in self._streams for generation in stream.generations()]

    @property
    def model(self) -> str:
        """The model's name, once something has come."""
        admitted = self._streams[0].admitted
        return "" if admitted is None else admitted.model

    def usage(self) -> Usage:
        """The tokens of all that has finished."""
        ends = [[stream.finished_at(i) for i in range(self._n)] for stream in self._streams]
        usages = [[end.usage for end in of_stream if end is not None] for of_stream in ends]
        firsts = [of_stream[0] for of_stream in usages if of_stream]
        return Usage(
            prompt_tokens=sum(first.prompt_tokens for first in firsts),
            cached_tokens=sum(first.cached_tokens for first in firsts),
            completion_tokens=sum(each.output_tokens for of_stream in usages for each in of_stream),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams:
            stream.cancel()
