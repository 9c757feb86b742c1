"""Owns what became of candidates: the moments of live ones, and whole timelines of the last that ended."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_service.core.request import Request
from scheduler_service.core.state import RequestState, request_state

_KEPT = 1_000
"""How many ended candidates are remembered."""

MOST_CHUNKS = 256
"""How many chunks are remembered of a candidate, one by one. Those that follow count for the last one."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to a candidate."""

    at_s: float  # since it came
    what: str  # "queued" or "restored"; "admitted", "first_token", "preempted", "resumed" or "finished"
    worker_id: str = ""
    detail: str = ""
    step: int = (
        0  # number of the worker's plan: the first that it is in, the one that gave the token, the last
    )


class Chunk(NamedTuple):
    """Known tokens that a plan computes, of a prompt or again after a preemption."""

    at_s: float  # when it was planned, since the candidate came
    step: int  # number of the plan
    tokens: int
    ended_s: float | None = None  # when its result came. None: not yet, or its worker was lost with it


@dataclass(frozen=True, slots=True)
class Past:
    """A candidate that has ended. The state is from its last moment, when it held no blocks any more."""

    state: RequestState
    finish_reason: str
    timeline: tuple[Moment, ...]
    chunks: tuple[Chunk, ...] = ()


@dataclass(slots=True)
class _Notes:
    """What is known of a live candidate."""

    moments: list[Moment] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    first_token_step: int = 0


_NOTHING = _Notes()


class History:
    """Notes moments as they happen. Those of live candidates are kept by their order, which is unique."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._live: dict[int, _Notes] = {}
        self._ended: deque[Past] = deque(maxlen=kept)
        # Chunks in plans without a result, by worker and plan: the notes of each candidate, its arrival, and
        # which chunk of it.
        self._unanswered: dict[str, dict[int, list[tuple[_Notes, float, int]]]] = {}

    def note(
        self, request: Request, what: str, now: float, worker_id: str = "", detail: str = "", step: int = 0
    ) -> None:
        """Something has happened to a live candidate."""
        moment = Moment(now - request.arrival, what, worker_id, detail, step)
        self._live.setdefault(request.order, _Notes()).moments.append(moment)

    def chunk(self, request: Request, worker_id: str, step: int, tokens: int, now: float) -> None:
        """A plan for a worker computes known tokens of a live candidate."""
        notes = self._live.setdefault(request.order, _Notes())
        if request.first_token_at is None:
            notes.first_token_step = step  # the last one gives the token
        if len(notes.chunks) < MOST_CHUNKS:
            notes.chunks.append(Chunk(now - request.arrival, step, tokens))
        else:
            last = notes.chunks[-1]
            notes.chunks[-1] = last._replace(step=step, tokens=last.tokens + tokens, ended_s=None)
        entry = (notes, request.arrival, len(notes.chunks) - 1)
        self._unanswered.setdefault(worker_id, {}).setdefault(step, []).append(entry)

    def answered(self, worker_id: str, step: int, now: float) -> None:
        """The result of a worker's plan has come."""
        for notes, arrival, index in self._unanswered.get(worker_id, {}).pop(step, ()):
            notes.chunks[index] = notes.chunks[index]._replace(ended_s=now - arrival)

    def lost(self, worker_id: str) -> None:
        """What a worker has not answered, it never will."""
        self._unanswered.pop(worker_id, None)

    def close(self, request: Request, reason: str, worker_id: str, now: float, step: int = 0) -> None:
        """A candidate has ended."""
        end = Moment(now - request.arrival, "finished", worker_id, reason, step)
        timeline, chunks = (*self.timeline(request), end), self.chunks(request)
        self._live.pop(request.order, None)
        self._ended.append(Past(request_state(request, now), reason, timeline, chunks))

    def timeline(self, request: Request) -> tuple[Moment, ...]:
        """All that has happened to a live candidate, in order."""
        notes = self._live.get(request.order, _NOTHING)
        moments = [_beginning(request), *notes.moments]
        if request.first_token_at is not None and not request.restored_tokens:
            at_s = request.first_token_at - request.arrival
            first = Moment(at_s, "first_token", step=notes.first_token_step)
            # After what happened at the same time: an admission comes before the token.
            place = sum(moment.at_s <= first.at_s for moment in moments)
            moments.insert(place, first)
        return tuple(moments)

    def chunks(self, request: Request) -> tuple[Chunk, ...]:
        """The known tokens of a live candidate that plans have computed, in order."""
        return tuple(self._live.get(request.order, _NOTHING).chunks)

    def ended(self, request_id: str) -> list[Past]:
        """Remembered candidates of the last request of that name, by index."""
        newest: dict[int, Past] = {}
        for past in reversed(self._ended):
            if past.state.request_id == request_id:
                newest.setdefault(past.state.index, past)
        return [newest[index] for index in sorted(newest)]


def _beginning(request: Request) -> Moment:
    if request.restored_tokens is None:
        return Moment(0.0, "queued")
    detail = f"from the journal with {request.restored_tokens} tokens; times count from here"
    return Moment(0.0, "restored", detail=detail)
