"""Owns the requests that a frontend has with an engine in another process: whose output is whose, by number.

Outputs are others' code: what they raise ends their own request and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scheduler_service import errors
from scheduler_service.core.admission import Refused
from scheduler_service.core.events import Admitted, Event
from scheduler_service.frontend_codec import decode_finished
from scheduler_service.frontend_engine import Output
from scheduler_service.frontend_frames import INDEX_BITS, INDEX_MASK, FromEngine
from scheduler_service.logs import EventLog, new_incident_id

_log = EventLog("remote_engine")

Answer = asyncio.Future[Refused | None]
"""Of a submit."""


@dataclass(slots=True)
class RemoteRequest:
    """A request that was sent. It is forgotten when it has ended or nobody wants it any more."""

    output: Output
    num_open: int  # candidates that have not ended
    answer: Answer


class RemoteRequests:
    """Live requests, by the numbers that they have on the link."""

    def __init__(self, abandon: Callable[[Output], None]) -> None:
        """`abandon` ends a request at the engine and forgets it here."""
        self._abandon = abandon
        self._live: dict[int, RemoteRequest] = {}
        self._numbers: dict[Output, int] = {}

    def add(self, number: int, output: Output, num_candidates: int) -> Answer:
        """A request is on its way. Returns its answer to come."""
        answer: Answer = asyncio.get_running_loop().create_future()
        self._live[number] = RemoteRequest(output, num_candidates, answer)
        self._numbers[output] = number
        return answer

    def get(self, number: int) -> RemoteRequest | None:
        """The request of that number. None: nobody wants it any more."""
        return self._live.get(number)

    def number_of(self, output: Output) -> int | None:
        """The number of an output's request. None: it has ended."""
        return self._numbers.get(output)

    def forget(self, number: int) -> RemoteRequest | None:
        """Nothing more of it is of interest here. Returns what it was, if it was there."""
        request = self._live.pop(number, None)
        if request is not None:
            del self._numbers[request.output]
        return request

    def push_tokens(self, frame: FromEngine) -> None:
        """Hands out the tokens of a frame."""
        live, logprobs = self._live, frame.logprobs
        for row, (candidate, token_id) in enumerate(zip(frame.candidates, frame.token_ids, strict=True)):
            request = live.get(candidate >> INDEX_BITS)
            if request is None:
                continue  # nobody wants it any more
            try:
                request.output.push_tokens(
                    candidate & INDEX_MASK, token_id, logprobs.get(row) if logprobs else None
                )
            except Exception:
                self._output_failed(request)

    def admit(self, number: int, index: int, worker_id: str, cached_tokens: int) -> None:
        """A candidate runs."""
        request = self._live.get(number)
        if request is not None:
            self._push(request, Admitted(request.output.request_id, index, worker_id, cached_tokens))

    def finish(self, number: int, index: int, values: list[Any]) -> None:
        """A candidate has ended; the values are decode_finished()'s."""
        request = self._live.get(number)
        if request is None:
            return
        request.num_open -= 1
        if not request.num_open:
            self.forget(number)
        self._push(request, decode_finished(request.output.request_id, index, values))

    def fail_all(self) -> None:
        """Ends all, since the engine is gone."""
        for number, request in list(self._live.items()):
            self.forget(number)
            if not request.answer.done():
                request.answer.set_exception(errors.engine_lost())
            request.output.fail(errors.engine_lost())

    def _push(self, request: RemoteRequest, event: Event) -> None:
        try:
            request.output.push(event)
        except Exception:
            self._output_failed(request)

    def _output_failed(self, request: RemoteRequest) -> None:
        incident_id = new_incident_id()
        _log.error("output_failed", request_id=request.output.request_id, incident_id=incident_id)
        self._abandon(request.output)
        request.output.fail(errors.internal(incident_id))
