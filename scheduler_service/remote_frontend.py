"""Owns the engine's end of the link: a frontend in another process as the engine sees it."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from scheduler_service.core.admission import QueueLoad, Refused
from scheduler_service.core.events import Admitted, Event, Finished
from scheduler_service.core.step import TokenLogprobs
from scheduler_service.engine import Engine, EngineFaultError
from scheduler_service.frontend_codec import (
    INDEX_BITS,
    Buffer,
    FromFrontend,
    Message,
    ToFrontend,
    encode_finished,
    encode_models,
    encode_refused,
)
from scheduler_service.frontend_link import FrontendLink
from scheduler_service.served_model import ServedModel


class RemoteFrontend:
    """Takes a frontend's requests to the engine and their events back. When the link ends, so do they."""

    def __init__(self, engine: Engine) -> None:
        self.listening = asyncio.Event()
        """Set once the frontend takes connections."""
        self.lost = asyncio.Event()
        """Set at the end."""
        self._engine = engine
        self._outputs: dict[int, _RemoteOutput] = {}
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
                if (output := self._outputs.get(number)) is not None:
                    self._engine.cancel(output.request_id, sink=output)
            case ["stop", number, index, num_tokens]:
                if (output := self._outputs.get(number)) is not None:
                    self._engine.stop(output.request_id, index, num_tokens, sink=output)
            case ["cancel", number, request_id, tenant]:
                found = self._engine.cancel(request_id, tenant=tenant)
                self._say("cancelled", number, found)
            case ["turned_away", num]:
                self._engine.note_turned_away(num)
            case ["listening"]:
                self.listening.set()
            case _:
                raise ValueError(f"a frontend said {message[:1]}")

    def _submit(self, number: int, values: list[Any], frame: FromFrontend) -> None:
        output = _RemoteOutput(self, number)
        spec = frame.spec(values, output)
        output.request_id, output.num_open = spec.request_id, spec.n
        try:
            answer = self._engine.submit(spec)
        except EngineFaultError as fault:
            self._say("fault", number, fault.incident_id)
            return
        if isinstance(answer, Refused):
            self._say("refused", number, *encode_refused(answer))
            return
        self._outputs[number] = output
        self._say("accepted", number)

    def _say(self, *message: Any) -> None:
        self.out.before.append(list(message))
        self.link.send_soon()

    def _on_lost(self) -> None:
        self.lost.set()
        outputs, self._outputs = self._outputs, {}
        for output in outputs.values():
            self._engine.cancel(output.request_id, sink=output)


class _RemoteOutput:
    """The EventSink of one request: puts its events into the frontend's next frame."""

    __slots__ = ("_first", "_frontend", "_number", "num_open", "request_id")

    def __init__(self, frontend: RemoteFrontend, number: int) -> None:
        self.request_id = ""
        self.num_open = 0  # candidates that have not ended
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
