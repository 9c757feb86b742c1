"""Owns one request's way out: collects what the engine tells of its candidates, and gives it to one reader.

Memory is bounded by the request's own max_tokens, a few bytes a token. No gRPC here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler_service import errors
from scheduler_service.candidate_output import CandidateOutput, Delta, Finished
from scheduler_service.core import events as core
from scheduler_service.core.events import FinishReason
from scheduler_service.core.step import TokenLogprobs
from scheduler_service.frontend_engine import OutputEngine
from scheduler_service.logs import EventLog, new_incident_id
from scheduler_service.presentation import Presentation
from scheduler_service.text.output_text import OutputText
from scheduler_service.turnstile import Turnstile

_log = EventLog("frontend")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A worker has taken the request."""

    cached_tokens: int


StreamEvent = Admitted | Delta | Finished


class GenerationStream:
    """The events of one request: Admitted, then Deltas, then one Finished for each candidate.

    It ends once: with the last Finished, with a ServiceError, or by `close`.
    """

    def __init__(
        self,
        engine: OutputEngine,
        turnstile: Turnstile,
        request_id: str,
        outputs: Sequence[OutputText | None],
        *,
        presentation: Presentation,
        queue_timeout_error: Callable[[], errors.ServiceError],
    ) -> None:
        """`outputs` has one entry for each candidate, None where no text is asked for."""
        self.request_id = request_id
        self.presentation = presentation
        self._engine = engine
        self._queue_timeout_error = queue_timeout_error
        self._candidates = [
            CandidateOutput(index, output, sends_token_ids=presentation.token_ids)
            for index, output in enumerate(outputs)
        ]
        self._ready: deque[CandidateOutput] = deque()  # those with something to take
        self._num_unfinished = len(outputs)  # candidates whose Finished was not taken
        self._admitted: Admitted | None = None
        self._was_admitted = False
        self._failure: errors.ServiceError | None = None
        self._closed = False
        self._turnstile = turnstile
        self._reader: asyncio.Future[None] | None = None  # what a reader waits for that found nothing

    # For the engine; see EventSink.

    def push_tokens(self, index: int, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Candidate `index` gained a token."""
        candidate = self._candidates[index]
        if not candidate.open:
            return  # it was in flight when a stop string was found, or nobody reads any more
        num_tokens = candidate.add(token_id, logprobs)
        self._mark_ready(candidate)
        if num_tokens is not None:
            self._engine.stop(self, index, num_tokens)

    def push(self, event: core.Event) -> None:
        """Something else happened to a candidate."""
        if self._closed or self._failure is not None:
            return
        if isinstance(event, core.Admitted):
            if not self._was_admitted:
                self._was_admitted = True
                self._admitted = Admitted(event.cached_tokens)
                self._wake()
        elif isinstance(event, core.Finished):
            failure = self._failure_of(event)
            if failure is not None:
                self.fail(failure)
                return
            candidate = self._candidates[event.index]
            candidate.finish(event)
            self._mark_ready(candidate)

    def _failure_of(self, event: core.Finished) -> errors.ServiceError | None:
        match event.reason:
            case FinishReason.DEADLINE:
                return errors.deadline_exceeded()
            case FinishReason.QUEUE_TIMEOUT:
                return self._queue_timeout_error()
            case FinishReason.GRAMMAR:
                return errors.grammar_too_complex()
            case FinishReason.ERROR:
                incident_id = new_incident_id()
                _log.error(
                    "request_failed", request_id=self.request_id, incident_id=incident_id, detail=event.detail
                )
                return errors.internal(incident_id)
            case _:
                return None

    def fail(self, failure: errors.ServiceError) -> None:
        """Ends the stream with an error, for all candidates, after what waits to be taken."""
        self._failure = failure
        for candidate in self._candidates:
            candidate.open = False
        self._wake()
        self._engine.abandon(self)

    def _mark_ready(self, candidate: CandidateOutput) -> None:
        if not candidate.queued:
            candidate.queued = True
            self._ready.append(candidate)
            self._wake()

    def _wake(self) -> None:
        """There is something for the reader."""
        if self._reader is not None:
            self._turnstile.enter(self._reader)
            self._reader = None

    # For the reader.

    async def next_event(self) -> StreamEvent | None:
        """The next event; None after the last one. Raises ServiceError if the request failed."""
        while self._num_unfinished and not self._closed:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._reader = waiter
            if self._ready or self._admitted is not None or self._failure is not None:
                self._wake()
            await waiter
            event = self._take()
            if event is not None:
                return event
            if self._failure is not None:
                raise self._failure
        return None

    def close(self) -> None:
        """Nobody reads any more: the engine is told, unless all has ended. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._admitted = None
        self._ready.clear()
        for candidate in self._candidates:
            candidate.open = False
        self._wake()
        if self._num_unfinished > 0 and self._failure is None:
            self._engine.abandon(self)

    def _take(self) -> StreamEvent | None:
        if self._admitted is not None:
            admitted, self._admitted = self._admitted, None
            return admitted
        while self._ready:
            candidate = self._ready.popleft()
            event = candidate.take()
            if candidate.has_more:
                self._ready.append(candidate)
            else:
                candidate.queued = False
            if event is not None:
                if isinstance(event, Finished):
                    self._num_unfinished -= 1
                return event
        return None
