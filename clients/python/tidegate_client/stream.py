"""The stream of one generation, for threads and for asyncio.

Owns the order of events, what has been received so far, and that a stream that is dropped is cancelled.
Both kinds share `Progress`; they differ only in how they wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self

import grpc

from tidegate.inference.v1 import inference_pb2 as pb
from tidegate_client.errors import RequestCancelledError, from_rpc_error, protocol_error
from tidegate_client.recovery import Calls, Recovery
from tidegate_client.retry import Attempts
from tidegate_client.types import Admitted, Delta, Finished, Generation, TokenLogprobs


class Progress:
    """What has come of one generation so far."""

    def __init__(self, num_candidates: int) -> None:
        self._num_candidates = num_candidates
        self._deltas: defaultdict[int, list[Delta]] = defaultdict(list)
        self._finished: dict[int, Finished] = {}
        self.admitted: Admitted | None = None
        """Name, model and prompt size of the request, once a worker has taken it."""
        self.cancelled = False
        """Whether this side has cancelled the stream."""

    @property
    def text(self) -> str:
        """The text of candidate 0 so far: all of it once the stream has ended."""
        return "".join(delta.text for delta in self._deltas[0])

    @property
    def finished(self) -> Finished | None:
        """How candidate 0 ended, with its usage and timings. None: it hasn't."""
        return self._finished.get(0)

    def finished_at(self, index: int) -> Finished | None:
        """How a candidate ended. None: it hasn't."""
        return self._finished.get(index)

    def generations(self) -> list[Generation]:
        """All of each candidate that has finished, by index."""
        return [_join(finished, self._deltas[i]) for i, finished in sorted(self._finished.items())]

    def received(self) -> list[pb.Received]:
        """How much has come of each candidate, for a stream that goes on after that."""
        return [
            pb.Received(
                index=index,
                num_tokens=sum(max(len(d.token_ids), len(d.logprobs)) for d in deltas),
                text_bytes=sum(len(d.text.encode()) for d in deltas),
                finished=index in self._finished,
            )
            for index in sorted(self._deltas.keys() | self._finished.keys())
            for deltas in [self._deltas.get(index, [])]
        ]

    def has_begun(self) -> bool:
        """Whether anything has come, so that the call must not be tried again."""
        return self.admitted is not None or bool(self._deltas) or bool(self._finished)

    def take(self, message: pb.GenerateResponse | pb.AttachResponse) -> Delta | None:
        """Takes in one event; returns it if it is a delta. Passes over kinds that only newer servers know."""
        if isinstance(message, pb.AttachResponse):
            message = message.event
        match message.WhichOneof("event"):
            case "delta":
                delta = Delta.from_message(message.delta)
                self._deltas[delta.index].append(delta)
                return delta
            case "admitted":
                self.admitted = Admitted.from_message(message.admitted)
            case "finished":
                self._finished[message.finished.index] = Finished.from_message(message.finished)
        return None

    def check_complete(self) -> None:
        """Raises ServerError unless every candidate has finished: a stream must not end early and clean."""
        if len(self._finished) != self._num_candidates and not self.cancelled:
            raise protocol_error(
                f"the stream ended with {len(self._finished)} of {self._num_candidates} candidates finished"
            )

    def first(self) -> Generation:
        """Returns all of candidate 0 after the stream's end; raises RequestCancelledError if it has none."""
        if 0 not in self._finished:
            raise RequestCancelledError("CANCELLED", "the stream was cancelled before its end")
        return _join(self._finished[0], self._deltas[0])


def _join(finished: Finished, deltas: list[Delta]) -> Generation:
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for delta in deltas:
        token_ids.extend(delta.token_ids)
        logprobs.extend(delta.logprobs)
    text = "".join(delta.text for delta in deltas)
    return Generation(finished.index, text, tuple(token_ids), tuple(logprobs), finished)


class Stream(Progress):
    """An iterator over the deltas of a generation. Not for use by several threads, except for cancel().

    Leaving its `with` block, cancel() or dropping the last reference cancels the request at the server.
    """

    def __init__(self, calls: Calls, attempts: Attempts, num_candidates: int) -> None:
        super().__init__(num_candidates)
        self._recovery = Recovery(calls, attempts, self)
        self._call = calls.generate(attempts.remaining_s())

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while not self.cancelled:
            try:
                message = next(self._call)
            except StopIteration:
                self.check_complete()
                raise
            except grpc.RpcError as rpc_error:
                self._retry_or_raise(rpc_error)
                continue
            self._recovery.note_progress()
            delta = self.take(message)
            if delta is not None:
                return delta
        raise StopIteration

    def _retry_or_raise(self, rpc_error: grpc.RpcError) -> None:
        if self.cancelled:
            return
        metadata = self._call.initial_metadata()
        pause_s = self._recovery.pause_s(from_rpc_error(rpc_error), metadata)
        time.sleep(pause_s)
        if not self.cancelled:
            self._call = self._recovery.next_call()

    def result(self) -> Generation:
        """Reads the stream to its end and returns all of candidate 0.

        Raises what iterating raises, and RequestCancelledError if cancel() was called before the end.
        """
        for _ in self:
            pass
        return self.first()

    def cancel(self) -> None:
        """Cancels the request; iterating then ends without an error. Does nothing after the stream's end."""
        self.cancelled = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_call"):  # else the call could not even be started
            self._call.cancel()


class AsyncStream(Progress):
    """An asynchronous iterator over the deltas of a generation.

    Leaving its `async with` block, cancel() or dropping the last reference cancels the request at the server.
    """

    def __init__(self, calls: Calls, attempts: Attempts, num_candidates: int) -> None:
        super().__init__(num_candidates)
        self._recovery = Recovery(calls, attempts, self)
        self._call = calls.generate(attempts.remaining_s())

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self.cancelled:
            try:
                message = await self._call.read()
            except grpc.RpcError as rpc_error:
                await self._retry_or_raise(rpc_error)
                continue
            except asyncio.CancelledError:
                # gRPC raises it for this task's end, for cancel() and for the channel's end.
                if _is_task_cancelled():
                    raise
                if not self.cancelled:
                    raise RequestCancelledError("CANCELLED", "the client was closed") from None
                break
            if message is grpc.aio.EOF:
                self.check_complete()
                break
            self._recovery.note_progress()
            delta = self.take(message)
            if delta is not None:
                return delta
        raise StopAsyncIteration

    async def _retry_or_raise(self, rpc_error: grpc.RpcError) -> None:
        if self.cancelled:
            return
        metadata = await self._call.initial_metadata()
        pause_s = self._recovery.pause_s(from_rpc_error(rpc_error), metadata)
        await asyncio.sleep(pause_s)
        if not self.cancelled:
            self._call = self._recovery.next_call()

    async def result(self) -> Generation:
        """Reads the stream to its end and returns all of candidate 0. Raises as Stream.result."""
        async for _ in self:
            pass
        return self.first()

    def cancel(self) -> None:
        """Cancels the request; iterating then ends without an error. Does nothing after the stream's end."""
        self.cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            with contextlib.suppress(RuntimeError):  # the event loop may be gone, and the channel with it
                self._call.cancel()


def _is_task_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
