"""Owns the step stream to one worker: dialling, hello, plans out, results in, watchdog, and dialling again.

It decides nothing: what a lost stream means for requests is the engine's affair. A stream is never resumed.
Each new one has a higher epoch, and nothing of the old one is read any more, so a late result cannot arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from scheduler_service.core.step import StepPlan, StepResult
from scheduler_service.hello_codec import decode_hello, encode_hello
from scheduler_service.logs import EventLog, new_incident_id
from scheduler_service.plan_codec import (
    MalformedResultError,
    ResultLimits,
    StepTimings,
    decode_result,
    decode_timings,
    encode_notice,
    encode_plan,
)
from scheduler_service.span_notice import SpanNotice
from scheduler_service.tls_api import Dialler
from scheduler_service.workers import DuplicateWorkerError, WorkerInfo, WorkerRefusedError
from tidegate.worker.v1 import worker_pb2 as pb
from tidegate.worker.v1 import worker_pb2_grpc as pb_grpc

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    # Each attempt dials afresh: this link's backoff is the only one.
    ("grpc.use_local_subchannel_pool", 1),
)
_FIRST_BACKOFF_S = 0.05
# A stream that lived this long was a good one: its end starts the backoff from the beginning.
_STABLE_S = 10.0

_log = EventLog("link")
_Call = grpc.aio.StreamStreamCall[pb.ExecuteRequest, pb.ExecuteResponse]


class StreamOwner(Protocol):
    """Whom a link reports to, from the event loop."""

    def worker_ready(self, worker_id: str, info: WorkerInfo, link: WorkerLink) -> None:
        """The worker's hello came. Raises WorkerRefusedError."""

    def worker_lost(self, worker_id: str, reason: str) -> None:
        """The stream ended, or could not be opened."""

    def step_done(self, worker_id: str, result: StepResult, timings: StepTimings) -> None:
        """A result came."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Time limits of a link, in seconds, and how it dials."""

    hello_timeout_s: float = 10.0
    step_timeout_s: float = 60.0
    max_backoff_s: float = 5.0
    dialler: Dialler = field(default_factory=Dialler)


class WorkerLink:
    """The stream to one worker. Runs from `start` until `close`."""

    def __init__(
        self,
        worker_id: str,
        address: str,
        owner: StreamOwner,
        next_epoch: Callable[[], int],
        options: LinkOptions,
    ) -> None:
        self.worker_id = worker_id
        self.address = address
        self._owner = owner
        self._next_epoch = next_epoch
        self._options = options
        self._outbox: asyncio.Queue[pb.ExecuteRequest] = asyncio.Queue()
        self._in_flight = 0  # plans without an answer
        self._progress_at = 0.0  # when the oldest of them became the one to wait for
        self._ready_at = float("inf")  # when this stream's hello was accepted
        self._watchdog: asyncio.TimerHandle | None = None
        self._ended: asyncio.Future[str] | None = None
        self._dial_now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to dial."""
        self._task = asyncio.create_task(self._run(), name=f"link {self.worker_id}")

    def dial_now(self) -> None:
        """Ends the pause before the next attempt, if there is one: the worker has told that it is there."""
        self._dial_now.set()

    async def close(self) -> None:
        """Ends the stream for good."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def send(self, plan: StepPlan, traceparent: str = "") -> None:
        """Hands over a plan. In order, without waiting."""
        self._outbox.put_nowait(encode_plan(plan, traceparent))
        if not self._in_flight:
            self._progress_at = time.monotonic()
        self._in_flight += 1
        if self._watchdog is None:
            self._watch(self._options.step_timeout_s)

    def send_notice(self, notice: SpanNotice) -> None:
        """Tells which spans the worker is to record. In order, without waiting."""
        self._outbox.put_nowait(encode_notice(notice))

    def abort(self, reason: str) -> None:
        """Ends this stream; a new one follows after a pause."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)

    async def _run(self) -> None:
        failures = 0
        while True:
            self._ready_at = float("inf")
            reason = await self._session_outcome()
            if reason is None:
                return
            _log.repeated("worker_stream_ended", self.worker_id, worker_id=self.worker_id, reason=reason)
            self._owner.worker_lost(self.worker_id, reason)
            failures = 0 if time.monotonic() - self._ready_at >= _STABLE_S else failures + 1
            self._dial_now.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s(failures, self._options.max_backoff_s)):
                    await self._dial_now.wait()

    async def _session_outcome(self) -> str | None:
        """Why a stream ended, or None if the worker should not be dialled again.

        A stream runs in a task of its own: grpc.aio raises CancelledError also where the other side
        cancelled, which must not look like the end of this link.
        """
        session = asyncio.create_task(self._session())
        try:
            await asyncio.wait({session})
        finally:
            session.cancel()
            await asyncio.gather(session, return_exceptions=True)
        if session.cancelled():
            return "CANCELLED: the worker cancelled the stream"
        error = session.exception()
        if error is None:
            return session.result()
        if isinstance(error, DuplicateWorkerError):
            _log.warning("worker_duplicate", worker_id=self.worker_id, reason=str(error))
            self._owner.worker_lost(self.worker_id, str(error))
            return None
        if isinstance(error, WorkerRefusedError):
            return f"refused: {error}"
        if isinstance(error, grpc.aio.AioRpcError):
            return f"{error.code().name}: {error.details() or 'no details'}"
        incident_id = new_incident_id()
        trace = "".join(traceback.format_exception(error))
        _log.error("link_fault", worker_id=self.worker_id, incident_id=incident_id, exception=trace)
        return f"internal error, incident {incident_id}"

    async def _session(self) -> str:
        """One stream, from dial to end. Returns why it ended, or raises what says so."""
        epoch = self._next_epoch()
        self._outbox = asyncio.Queue()
        self._in_flight = 0
        self._ended = asyncio.get_running_loop().create_future()
        dialler = self._options.dialler
        channel = dialler.open(self.address, _CHANNEL_OPTIONS)
        try:
            call: _Call = pb_grpc.WorkerServiceStub(channel).Execute(metadata=dialler.metadata())
            info = await self._greet(call, epoch)
            self._owner.worker_ready(self.worker_id, info, self)
            self._ready_at = time.monotonic()
            return await self._serve(call, info, self._ended)
        finally:
            if self._watchdog is not None:
                self._watchdog.cancel()
                self._watchdog = None
            self._ended = None
            await channel.close()

    async def _greet(self, call: _Call, epoch: int) -> WorkerInfo:
        timeout_s = self._options.hello_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await call.write(encode_hello(self.worker_id, epoch))
                message = await call.read()
        except TimeoutError:
            raise WorkerRefusedError(f"no hello within {timeout_s} s") from None
        except asyncio.InvalidStateError:
            # The call was over before the write. Its status says why.
            message = await call.read()
        if not isinstance(message, pb.ExecuteResponse):
            raise WorkerRefusedError("it ended the stream without a hello")
        return decode_hello(message, epoch)

    async def _serve(self, call: _Call, info: WorkerInfo, ended: asyncio.Future[str]) -> str:
        reader = asyncio.create_task(self._read_results(call, info, ended))
        writer = asyncio.create_task(self._write_plans(call))
        try:
            done, _ = await asyncio.wait({reader, writer, ended}, return_when=asyncio.FIRST_COMPLETED)
            # Of reader and writer, the reader knows the status better.
            return await next(future for future in (ended, reader, writer) if future in done)
        finally:
            call.cancel()
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read_results(self, call: _Call, info: WorkerInfo, ended: asyncio.Future[str]) -> str:
        """Reads until the stream ends. Returns why."""
        limits = ResultLimits(info.num_slots, info.model.vocab_size)
        busy_until_ns = 0
        while not ended.done():
            message = await call.read()
            if not isinstance(message, pb.ExecuteResponse):
                return "the worker ended the stream"
            if message.WhichOneof("message") != "result":
                return "the worker sent a message that is not a result"
            try:
                result = decode_result(message.result, limits, busy_until_ns)
            except MalformedResultError as error:
                return str(error)
            busy_until_ns = message.result.timings.finished_ns
            self._in_flight = max(0, self._in_flight - 1)
            self._progress_at = time.monotonic()
            self._owner.step_done(self.worker_id, result, decode_timings(message.result.timings))
        return ended.result()

    async def _write_plans(self, call: _Call) -> str:
        while True:
            message = await self._outbox.get()
            try:
                await call.write(message)
            except asyncio.InvalidStateError:
                # The call is over. The reader learns its status.
                await asyncio.Event().wait()
            except grpc.aio.AioRpcError:
                # grpc.aio puts a status of its own over the one that the worker may have sent.
                return "the stream broke while a plan was being sent; the worker's log may say why"

    def _watch(self, delay_s: float) -> None:
        """One timer for each stretch of work, not for each step."""
        self._watchdog = asyncio.get_running_loop().call_later(delay_s, self._check_overdue)

    def _check_overdue(self) -> None:
        self._watchdog = None
        if not self._in_flight:
            return
        timeout_s = self._options.step_timeout_s
        remaining_s = self._progress_at + timeout_s - time.monotonic()
        if remaining_s > 0:
            self._watch(remaining_s)
        else:
            self.abort(f"no result for {timeout_s} s, the step timeout; {self._in_flight} steps unanswered")


def backoff_s(failures: int, max_s: float) -> float:
    """The pause before the next attempt: doubling from 50 ms, half of it at random, at most `max_s`."""
    full_s = min(max_s, _FIRST_BACKOFF_S * 2.0 ** min(failures, 16))
    return full_s * random.uniform(0.5, 1.0)
