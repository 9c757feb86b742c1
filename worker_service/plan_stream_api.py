"""Owns one step stream: plans from gRPC to the step thread, results back, and how the stream ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from typing import Any

import grpc

from tidegate.worker.v1 import worker_pb2 as pb
from worker_service.errors import PlanError
from worker_service.plan import Limits, Plan, Result
from worker_service.plan_codec import decode_plan, encode_result
from worker_service.step_thread import Lease, StepThread
from worker_service.telemetry import StreamTelemetry

_LOGGER = logging.getLogger(__name__)


class StreamEnd(Exception):
    """The stream ends with this status."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class PlanStream:
    """Reads plans and writes results, until the scheduler is done, a rule is broken, or someone ends it."""

    def __init__(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        steps: StepThread,
        limits: Limits,
        max_in_flight: int,
        telemetry: StreamTelemetry | None = None,
    ) -> None:
        self._context = context
        self._telemetry = telemetry or StreamTelemetry()
        self._plans: deque[Plan] = deque()  # unanswered
        self._steps = steps
        self._limits = limits
        self._max_in_flight = max_in_flight
        self._loop = asyncio.get_running_loop()
        self._lease = Lease()
        self._outcomes: asyncio.Queue[Result | Exception] = asyncio.Queue()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._stop: asyncio.Future[None] = self._loop.create_future()
        self._end: StreamEnd | None = None
        self._over = asyncio.Event()

    @property
    def num_unanswered(self) -> int:
        """Plans whose results were not sent yet."""
        return len(self._plans)

    def end_now(self, end: StreamEnd) -> None:
        """Ends the stream, also one that drains. Plans that wait for their turn are dropped."""
        self._lease.ended = True
        self._idle.set()
        self._end = end
        if not self._stop.done():
            self._stop.set_result(None)

    async def drain(self, end: StreamEnd) -> None:
        """Reads no more, finishes what is in flight, then ends the stream; returns when it is over."""
        if not self._stop.done():
            self._end = end
            self._stop.set_result(None)
        await self._over.wait()

    async def run(self, hello: pb.WorkerHello) -> None:
        """Runs the stream on empty slots. Raises StreamEnd, unless the scheduler closed it in good order."""
        reader = writer = None
        try:
            await asyncio.wrap_future(self._steps.reset())
            await self._context.write(pb.ExecuteResponse(hello=hello))
            reader = asyncio.create_task(self._read_plans())
            writer = asyncio.create_task(self._write_results())
            causes: set[asyncio.Future[Any]] = {reader, writer, self._stop}
            await asyncio.wait(causes, return_when=asyncio.FIRST_COMPLETED)
            idle = asyncio.create_task(self._idle.wait())
            if not writer.done():
                if not reader.done():
                    reader.cancel()
                await asyncio.wait({writer, idle}, return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()
            if writer.done():
                writer.result()
            if self._end is not None:
                raise self._end
            reader.result()
        finally:
            self._lease.ended = True
            for task in (reader, writer):
                if task is not None:
                    task.cancel()
            self._steps.reset()
            self._telemetry.close()
            self._over.set()

    async def _read_plans(self) -> None:
        expected = 1
        while True:
            request = await self._context.read()
            if request is grpc.aio.EOF:
                return
            kind = request.WhichOneof("message")
            if kind == "notice":
                self._take_notice(request.notice)
                continue
            if kind != "plan":
                raise StreamEnd(
                    grpc.StatusCode.INVALID_ARGUMENT, "after the hello, only plans and notices may follow"
                )
            try:
                self._submit(request.plan, expected)
            except PlanError as error:
                raise StreamEnd(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
            expected += 1

    def _take_notice(self, notice: pb.TraceNotice) -> None:
        if len(notice.ended_slots) != len(notice.admitted_seqs):
            why = f"a notice has {len(notice.ended_slots)} slots and {len(notice.admitted_seqs)} seqs"
            raise StreamEnd(grpc.StatusCode.INVALID_ARGUMENT, why)
        ended = list(zip(notice.ended_slots, notice.admitted_seqs, strict=True))
        self._telemetry.notice(list(notice.step_seqs), ended)

    def _submit(self, message: pb.StepPlan, expected: int) -> None:
        if message.seq != expected:
            raise PlanError(message.seq, "seq", message.seq, f"{expected} comes next")
        if self._in_flight >= self._max_in_flight:
            raise PlanError(message.seq, "seq", message.seq, f"{self._max_in_flight} plans are unanswered")
        plan = decode_plan(message, self._limits)
        self._steps.executor.prepare(plan)
        self._in_flight += 1
        self._idle.clear()
        self._plans.append(plan)
        self._steps.submit(self._lease, plan, self._deliver)

    def _deliver(self, outcome: Result | Exception) -> None:
        """Called on the step thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: a shutdown did not wait for this step
            self._loop.call_soon_threadsafe(self._outcomes.put_nowait, outcome)

    async def _write_results(self) -> None:
        while True:
            outcome = await self._outcomes.get()
            if isinstance(outcome, PlanError):
                raise StreamEnd(grpc.StatusCode.INVALID_ARGUMENT, str(outcome))
            if isinstance(outcome, Exception):
                incident = secrets.token_hex(8)
                _LOGGER.error("step failed", exc_info=outcome, extra={"fields": {"incident": incident}})
                raise StreamEnd(grpc.StatusCode.INTERNAL, f"the step failed, incident {incident}")
            # Before the write: its reader may answer with the next plan before this coroutine goes on.
            self._in_flight -= 1
            await self._context.write(pb.ExecuteResponse(result=encode_result(outcome)))
            self._telemetry.executed(self._plans.popleft(), outcome)
            if self._in_flight == 0:
                self._idle.set()
