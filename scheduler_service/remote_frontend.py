"""Owns the engine's end of the link: a frontend in another process as the engine sees it."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from scheduler_service.call_counts import CallCounts
from scheduler_service.core.admission import QueueLoad, Refused
from scheduler_service.core.events import Admitted, Event, Finished
from scheduler_service.core.step import TokenLogprobs
from scheduler_service.core_guard import EngineFaultError
from scheduler_service.engine import Engine
from scheduler_service.errors import ServiceError
from scheduler_service.frontend_codec import (
    decode_presentation,
    encode_error,
    encode_finished,
    encode_models,
    encode_origin,
    encode_refused,
)
from scheduler_service.frontend_engine import LocalClaim, LocalEngine
from scheduler_service.frontend_frames import INDEX_BITS, Buffer, FromFrontend, Message, ToFrontend
from scheduler_service.frontend_link import FrontendLink
from scheduler_service.presentation import Presentation
from scheduler_service.recovery import Recovery
from scheduler_service.served_model import ServedModel


class RemoteFrontend:
    """Takes a frontend's requests to the engine and their events back. When the link ends, so do they."""

    def __init__(
        self, engine: Engine, recovery: Recovery | None = None, counts: CallCounts | None = None
    ) -> None:
        """Without a recovery there is nothing to attach to. `counts` get those of the frontend."""
        self.listening = asyncio.Event()
        """Set once the frontend takes connections."""
        self.lost = asyncio.Event()
        """Set at the end."""
        self._engine = engine
        self._local = LocalEngine(engine, recovery)
        self._counts = counts or CallCounts()
        # Outputs that were not ended, and whom to tell that nobody wants the rest.
        self._outputs: dict[int, tuple[_RemoteOutput, LocalEngine | LocalClaim]] = {}
        self._claims: dict[int, LocalClaim] = {}  # that were not followed yet
        self._attaching: dict[int, asyncio.Task[None]] = {}
        self._ready = False
        self._status_due = False
        self._told_load = QueueLoad(0, 0)
        self._sent_models: dict[str, ServedModel] = {}
        self.out = ToFrontend()
        self.link = FrontendLink(self._take, self._receive, self._on_lost)

    async def open(self, end: socket.socket, options: str) -> None:
        """Begins to talk with the frontend. `options` are the service's, as JSON."""
        self.out.before.append(["setup", options])
        self.link.send_soon()
        await self.link.open(end)

    def send_status(self, ready: bool) -> None:
        """Tells whether health is to say that the service takes requests, and what models there are."""
        self._ready = ready
        self._status_due = True
        self.link.send_soon()

    def note_queue(self, load: QueueLoad, steps: QueueLoad) -> None:
        """Sends what waits, which goes with every frame, if it has changed by a step since the last one."""
        told = self._told_load
        if (
            abs(load.num_waiting - told.num_waiting) >= steps.num_waiting
            or abs(load.num_tokens - told.num_tokens) >= steps.num_tokens
        ):
            self.link.send_soon()

    def finish(self) -> None:
        """Has the frontend end once its clients have all that is theirs."""
        self.out.after.append(["finish"])
        self.link.send_soon()

    def close(self) -> None:
        """Ends the link, and so the frontend."""
        self.link.close()

    def forget(self, number: int) -> None:
        """A request has ended."""
        self._outputs.pop(number, None)

    def _take(self) -> list[Buffer]:
        taken, self.out = self.out, ToFrontend()
        taken.queue = self._engine.queue()
        self._told_load = taken.queue[0]
        if self._status_due:
            self._status_due = False
            models = self._engine.models()
            rows, taken.files = encode_models(models, self._sent_models)
            self._sent_models = models
            taken.before.append(["status", self._engine.draining, self._ready, rows])
        return taken.encode()

    def _receive(self, parts: list[memoryview]) -> None:
        frame = FromFrontend(parts)
        for message in frame.messages:
            self._handle(message, frame)

    def _handle(self, message: Message, frame: FromFrontend) -> None:
        match message:
            case ["submit", number, *values]:
                self._submit(number, values, frame)
            case ["abandon", number]:
                if number in self._outputs:
                    output, engine = self._outputs[number]
                    engine.abandon(output)
            case ["stop", number, index, num_tokens]:
                if number in self._outputs:
                    output, engine = self._outputs[number]
                    engine.stop(output, index, num_tokens)
            case ["attach", number, request_id, tenant]:
                task = asyncio.create_task(self._attach(number, request_id, tenant))
                self._attaching[number] = task
                task.add_done_callback(lambda _: self._attaching.pop(number, None))
            case ["follow", number]:
                claim = self._claims.pop(number)
                output = _RemoteOutput(self, number, claim.origin.request_id, claim.origin.n)
                self._outputs[number] = output, claim
                claim.follow(output)
            case ["give_back", number]:
                if number in self._attaching:
                    self._attaching[number].cancel()
                if number in self._claims:
                    self._claims.pop(number).give_back()
            case ["cancel", number, request_id, tenant]:
                found = self._engine.cancel(request_id, tenant=tenant)
                self._say("cancelled", number, found)
            case ["turned_away", num]:
                self._engine.note_turned_away(num)
            case ["counts", rows, deltas]:
                self._counts.add(rows, deltas)
            case ["listening"]:
                self.listening.set()
            case _:
                raise ValueError(f"a frontend said {message[:1]}")

    async def _attach(self, number: int, request_id: str, tenant: str | None) -> None:
        try:
            claim = await self._local.attach(request_id, tenant)
        except ServiceError as error:
            self._say("not_attached", number, *encode_error(error))
            return
        if self.lost.is_set():
            claim.give_back()
            return
        self._claims[number] = claim
        self._say("attached", number, *encode_origin(claim.origin))

    def _submit(self, number: int, values: list[Any], frame: FromFrontend) -> None:
        shown, *described = values
        output = _RemoteOutput(self, number)
        spec = frame.spec(described, output)
        output.request_id, output.num_open = spec.request_id, spec.n
        output.presentation = decode_presentation(shown)
        try:
            answer = self._engine.submit(spec)
        except EngineFaultError as fault:
            self._say("fault", number, fault.incident_id)
            return
        if isinstance(answer, Refused):
            self._say("refused", number, *encode_refused(answer))
            return
        self._outputs[number] = output, self._local
        self._say("accepted", number)

    def _say(self, *message: Any) -> None:
        self.out.before.append(list(message))
        self.link.send_soon()

    def _on_lost(self) -> None:
        self.lost.set()
        for task in self._attaching.values():
            task.cancel()
        for claim in self._claims.values():
            claim.give_back()
        self._claims.clear()
        outputs, self._outputs = self._outputs, {}
        for output, engine in outputs.values():
            engine.abandon(output)


class _RemoteOutput:
    """The EventSink of one request: puts its events into the frontend's next frame."""

    __slots__ = ("_first", "_frontend", "_number", "num_open", "presentation", "request_id")

    def __init__(
        self, frontend: RemoteFrontend, number: int, request_id: str = "", num_candidates: int = 0
    ) -> None:
        self.request_id = request_id
        self.num_open = num_candidates  # that have not ended
        self.presentation = Presentation()
        self._frontend = frontend
        self._number = number
        self._first = number << INDEX_BITS

    def push_tokens(self, index: int, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """See EventSink."""
        frontend = self._frontend
        out = frontend.out
        out.candidates.append(self._first + index)
        out.token_ids.append(token_id)
        if logprobs is not None:
            out.add_logprobs(logprobs)
        frontend.link.send_soon()

    def push(self, event: Event) -> None:
        """See EventSink. Clients are not told of preemptions, so frontends are not either."""
        out = self._frontend.out
        if isinstance(event, Admitted):
            message = ["admitted", self._number, event.index, event.worker_id, event.cached_tokens]
            out.before.append(message)
        elif isinstance(event, Finished):
            out.after.append(["finished", self._number, event.index, *encode_finished(event)])
            self.num_open -= 1
            if not self.num_open:
                self._frontend.forget(self._number)
        else:
            return
        self._frontend.link.send_soon()
