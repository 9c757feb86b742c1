"""Owns what became of candidates: the moments of live ones, and whole timelines of the last that ended."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from scheduler_service.core.request import Request
from scheduler_service.core.state import RequestState, request_state

_KEPT = 1_000
"""How many ended candidates are remembered."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to a candidate."""

    at_s: float  # since it came
    what: str  # "queued", "admitted", "first_token", "preempted", "resumed" or "finished"
    worker_id: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Past:
    """A candidate that has ended. The state is from its last moment, when it held no blocks any more."""

    state: RequestState
    finish_reason: str
    timeline: tuple[Moment, ...]


class History:
    """Notes moments as they happen. Those of live candidates are kept by their order, which is unique."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._live: dict[int, list[Moment]] = {}
        self._ended: deque[Past] = deque(maxlen=kept)

    def note(self, request: Request, what: str, now: float, worker_id: str = "", detail: str = "") -> None:
        """Something has happened to a live candidate."""
        self._live.setdefault(request.order, []).append(
            Moment(now - request.arrival, what, worker_id, detail)
        )

    def close(self, request: Request, reason: str, worker_id: str, now: float) -> None:
        """A candidate has ended."""
        end = Moment(now - request.arrival, "finished", worker_id, reason)
        timeline = (*self.timeline(request), end)
        self._live.pop(request.order, None)
        self._ended.append(Past(request_state(request, now), reason, timeline))

    def timeline(self, request: Request) -> tuple[Moment, ...]:
        """All that has happened to a live candidate, in order."""
        moments = [Moment(0.0, "queued"), *self._live.get(request.order, ())]
        if request.first_token_at is not None:
            first = Moment(request.first_token_at - request.arrival, "first_token")
            # After what happened at the same time: an admission comes before the token.
            place = sum(moment.at_s <= first.at_s for moment in moments)
            moments.insert(place, first)
        return tuple(moments)

    def ended(self, request_id: str) -> list[Past]:
        """Remembered candidates of the last request of that name, by index."""
        newest: dict[int, Past] = {}
        for past in reversed(self._ended):
            if past.state.request_id == request_id:
                newest.setdefault(past.state.index, past)
        return [newest[index] for index in sorted(newest)]
