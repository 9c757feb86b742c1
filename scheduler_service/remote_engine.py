"""Owns the frontend's end of the link: the engine as a frontend in another process sees it.

It runs in the frontend's event loop. Both processes are on one machine, whose monotonic clock they share.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from scheduler_service import errors
from scheduler_service.arrivals import Arrivals
from scheduler_service.call_counts import CallCounts
from scheduler_service.core.admission import DrainRate, Newcomer, QueueLoad, Refused, refuse_newcomer
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.request import RequestSpec
from scheduler_service.core_guard import EngineFaultError
from scheduler_service.frontend_codec import (
    decode_error,
    decode_models,
    decode_origin,
    decode_refused,
)
from scheduler_service.frontend_engine import Output
from scheduler_service.frontend_frames import Buffer, FromEngine, Message, ToEngine
from scheduler_service.frontend_link import FrontendLink
from scheduler_service.held_output import Origin
from scheduler_service.remote_requests import RemoteRequests
from scheduler_service.served_model import ServedModel


class RemoteClaim:
    """A Claim over a link."""

    def __init__(self, engine: RemoteEngine, number: int, origin: Origin) -> None:
        self._engine = engine
        self._number = number
        self.origin = origin

    def follow(self, output: Output) -> None:
        """See Claim."""
        self._engine.follow(self._number, output, self.origin.n)

    def give_back(self) -> None:
        """See Claim."""
        self._engine.give_back(self._number)

    def abandon(self, output: Output) -> None:
        """See OutputEngine."""
        self._engine.abandon(output)

    def stop(self, output: Output, index: int, num_tokens: int) -> None:
        """See OutputEngine."""
        self._engine.stop(output, index, num_tokens)


class RemoteEngine:
    """The interface FrontendEngine over a link."""

    def __init__(self, traceparent: Callable[[], str] = lambda: "") -> None:
        """`traceparent`: the W3C header of the RPC that the calling task serves."""
        self.draining = False
        self.limits = SchedulerConfig()
        """The queue's limits. The engine has the last word."""
        self.ready = False
        self.on_status: Callable[[], None] = lambda: None
        """Called when `ready` or the models may have changed."""
        self.setup: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The options of the service as JSON: the first thing that the engine's process says."""
        self.finishing = asyncio.Event()
        """Set when this process is to end with the requests that it has."""
        self.lost = asyncio.Event()
        """Set when the engine's process has ended, or wants this one to end at once."""
        self._traceparent = traceparent
        self._models: dict[str, ServedModel] = {}
        self._requests = RemoteRequests(self.abandon)
        self._last_number = 0
        self._load, self._drain = QueueLoad(0, 0), DrainRate()  # as last told
        self._asked: dict[int, tuple[str, int]] = {}  # submits without an answer: tenants and candidates
        self._unanswered = Arrivals()  # the same, which is not in that load yet
        self._turned_away = 0  # candidates, since the last frame
        self._attaches: dict[int, asyncio.Future[Origin]] = {}
        self._questions: dict[int, asyncio.Future[bool]] = {}
        self._out = ToEngine()
        self._link = FrontendLink(self._take, self._receive, self._on_lost)

    async def open(self, end: socket.socket) -> None:
        """Begins to talk with the engine."""
        await self._link.open(end)

    def say_listening(self) -> None:
        """Tells the engine's process that clients can connect."""
        self._say("listening")

    def say_counts(self, counts: CallCounts) -> None:
        """Tells the engine's process what has been counted since the last time."""
        rows, deltas = counts.take()
        if rows or deltas:
            self._say("counts", rows, deltas)

    def close(self) -> None:
        """Ends the link."""
        self._link.close()

    # FrontendEngine

    def now(self) -> float:
        """See FrontendEngine."""
        return time.monotonic()

    def models(self) -> dict[str, ServedModel]:
        """See FrontendEngine."""
        return self._models

    def turn_away(self, newcomer: Newcomer) -> Refused | None:
        """See FrontendEngine. What waits of one tenant is not known here."""
        ahead = replace(
            newcomer,
            ahead=newcomer.ahead + self._unanswered.num,
            ahead_of_tenant=newcomer.ahead_of_tenant + self._unanswered.of(newcomer.tenant),
        )
        load, drain = self._load, self._drain
        refused = refuse_newcomer(ahead, load, QueueLoad(0, 0), self.limits, drain, self.now())
        if refused is not None:
            self._turned_away += newcomer.num
            self._link.send_soon()
        return refused

    async def submit(self, spec: RequestSpec) -> Refused | None:
        """See FrontendEngine."""
        self._check_link()
        self._last_number += 1
        number, output = self._last_number, cast(Output, spec.sink)
        answer = self._requests.add(number, output, spec.n)
        self._asked[number] = spec.tenant, spec.n
        self._unanswered.add(spec.tenant, spec.n)
        self._out.submit(number, replace(spec, traceparent=self._traceparent()), output.presentation)
        self._link.send_soon()
        return await answer

    async def attach(self, request_id: str, tenant: str | None) -> RemoteClaim:
        """See FrontendEngine."""
        self._check_link()
        self._last_number += 1
        number = self._last_number
        answer: asyncio.Future[Origin] = asyncio.get_running_loop().create_future()
        self._attaches[number] = answer
        self._say("attach", number, request_id, tenant)
        try:
            return RemoteClaim(self, number, await answer)
        except asyncio.CancelledError:  # whoever wanted it has gone
            self._attaches.pop(number, None)
            self.give_back(number)
            raise

    def follow(self, number: int, output: Output, num_candidates: int) -> None:
        """See RemoteClaim."""
        self._check_link()
        self._requests.add(number, output, num_candidates).set_result(None)
        self._say("follow", number)

    def give_back(self, number: int) -> None:
        """See RemoteClaim."""
        self._say("give_back", number)

    async def cancel(self, request_id: str, tenant: str | None) -> bool:
        """See FrontendEngine."""
        self._check_link()
        self._last_number += 1
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._questions[self._last_number] = answer
        self._say("cancel", self._last_number, request_id, tenant)
        return await answer

    def abandon(self, output: Output) -> None:
        """See OutputEngine."""
        number = self._requests.number_of(output)
        if number is not None:
            self._requests.forget(number)
            self._say("abandon", number)

    def stop(self, output: Output, index: int, num_tokens: int) -> None:
        """See OutputEngine."""
        number = self._requests.number_of(output)
        if number is not None:
            self._say("stop", number, index, num_tokens)

    # The link

    def _say(self, *message: Any) -> None:
        self._out.messages.append(list(message))
        self._link.send_soon()

    def _take(self) -> list[Buffer]:
        if self._turned_away:
            self._out.messages.append(["turned_away", self._turned_away])
            self._turned_away = 0
        taken, self._out = self._out, ToEngine()
        return taken.encode()

    def _receive(self, parts: list[memoryview]) -> None:
        frame = FromEngine.decode(parts)
        if frame.queue is not None:
            self._load, self._drain = frame.queue
        for message in frame.before:
            self._handle(message, frame)
        self._requests.push_tokens(frame)
        for message in frame.after:
            self._handle(message, frame)

    def _handle(self, message: Message, frame: FromEngine) -> None:
        match message:
            case ["accepted", number]:
                self._note_answer(number)
                if (request := self._requests.get(number)) is not None:
                    _answer(request.answer, None)
            case ["refused", number, *values]:
                self._note_answer(number)
                if (request := self._requests.forget(number)) is not None:
                    _answer(request.answer, decode_refused(values))
            case ["fault", number, incident_id]:
                self._note_answer(number)
                if (request := self._requests.forget(number)) is not None and not request.answer.done():
                    request.answer.set_exception(EngineFaultError(incident_id))
            case ["admitted", number, index, worker_id, cached_tokens]:
                self._requests.admit(number, index, worker_id, cached_tokens)
            case ["finished", number, index, *values]:
                self._requests.finish(number, index, values)
            case ["attached", number, *values]:
                if number in self._attaches:
                    _answer(self._attaches.pop(number), decode_origin(values))
            case ["not_attached", number, *values]:
                refused = self._attaches.pop(number, None)
                if refused is not None and not refused.done():
                    refused.set_exception(decode_error(values))
            case ["cancelled", number, found]:
                _answer(self._questions.pop(number), found)
            case ["status", draining, ready, models]:
                self._note_status(draining, ready, dict(decode_models(models, frame.files, self._models)))
            case ["setup", options]:
                self.setup.set_result(options)
            case ["finish"]:
                self.finishing.set()
            case _:
                raise ValueError(f"the engine's process said {message[:1]}")

    def _note_answer(self, number: int) -> None:
        self._unanswered.remove(*self._asked.pop(number))

    def _note_status(self, draining: bool, ready: bool, models: dict[str, ServedModel]) -> None:
        self.draining = draining
        self._models = models
        self.ready = ready
        self.on_status()

    def _check_link(self) -> None:
        if self.lost.is_set():
            raise errors.engine_lost()

    def _on_lost(self) -> None:
        self.lost.set()
        if not self.setup.done():
            self.setup.cancel()
        self._requests.fail_all()
        unanswered: list[asyncio.Future[Any]] = [*self._questions.values(), *self._attaches.values()]
        for answer in unanswered:
            if not answer.done():
                answer.set_exception(errors.engine_lost())


def _answer(future: asyncio.Future[Any], value: Any) -> None:
    """Answers a call, unless its caller has gone."""
    if not future.done():
        future.set_result(value)
