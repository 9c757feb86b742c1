"""Owns the output of a request whose client has lost sight of it, until a client follows it. No gRPC here."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from scheduler_service.core.events import Admitted, Event, Finished
from scheduler_service.core.step import TokenLogprobs
from scheduler_service.delivery import EventSink
from scheduler_service.journal_codec import SavedRequest
from scheduler_service.presentation import Presentation


@dataclass(frozen=True, slots=True)
class Origin:
    """What a frontend must know of a request to show its output."""

    request_id: str
    model: str
    n: int
    prompt_tokens: int
    queue_timeout_s: float | None
    presentation: Presentation


class HeldOutput:
    """An EventSink that keeps what comes, from the request's beginning, for whoever follows it.

    Memory is bounded by the request's own max_tokens.
    """

    def __init__(self, saved: SavedRequest) -> None:
        """With what the journal has of the request."""
        spec = saved.acceptance.spec
        self.request_id = saved.request_id
        self.tenant = spec.tenant
        self.origin = Origin(
            saved.request_id,
            spec.model,
            spec.n,
            len(spec.prompt_token_ids),
            spec.queue_timeout_s,
            saved.acceptance.presentation,
        )
        self._follower: EventSink | None = None
        self._token_ids = [array("i", each.token_ids) for each in saved.candidates]
        self._logprobs: list[list[TokenLogprobs]] = [list(each.logprobs) for each in saved.candidates]
        self._admitted: Admitted | None = None
        self._ends = {index: each.end for index, each in enumerate(saved.candidates) if each.end is not None}
        if saved.finished:
            self._admitted = Admitted(saved.request_id, 0, "", self._ends[0].usage.cached_tokens)

    def push_tokens(self, index: int, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """See EventSink."""
        if self._follower is not None:
            self._follower.push_tokens(index, token_id, logprobs)
            return
        self._token_ids[index].append(token_id)
        if logprobs is not None:
            self._logprobs[index].append(logprobs)

    def push(self, event: Event) -> None:
        """See EventSink."""
        if self._follower is not None:
            self._follower.push(event)
        elif isinstance(event, Finished):
            self._ends[event.index] = event
        elif isinstance(event, Admitted) and self._admitted is None:
            self._admitted = event

    def follow(self, follower: EventSink) -> None:
        """Tells `follower` all that there was, and from now on what comes. May be called once."""
        self._follower = follower
        if self._admitted is not None:
            follower.push(self._admitted)
        for index, (token_ids, logprobs) in enumerate(zip(self._token_ids, self._logprobs, strict=True)):
            for i, token_id in enumerate(token_ids):
                follower.push_tokens(index, token_id, logprobs[i] if logprobs else None)
        self._token_ids, self._logprobs = [], []
        # An end with an error ends the stream for all candidates.
        for end in self._ends.values():
            follower.push(end)
