"""Where a candidate's time went: the phases that its timeline tells of, in order. Owns no connection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tidegate.admin.v1 import admin_pb2 as pb

_STARTS = {"admitted", "resumed", "preempted", "finished"}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens that a step computed: from its plan, or the end of the chunk before, to its result. Times
    are seconds since arrival."""

    start_s: float
    end_s: float
    step: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a candidate's life; the next one begins where it ends. Times are seconds since arrival."""

    name: str  # queue, prefill, decode or preempted
    start_s: float
    end_s: float
    worker_id: str  # empty: none
    first_step: int  # on the worker's stream; 0: none, or not known
    last_step: int
    detail: str  # what the timeline says of its beginning
    chunks: tuple[Chunk, ...]

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Waterfall:
    """The phases of one candidate, which fill its time without gaps."""

    phases: tuple[Phase, ...]
    total_s: float
    first_token_s: float | None  # since arrival; None: it has none yet
    between_tokens_s: float | None  # mean of decoding; None: it has fewer than two tokens
    restored: str = ""  # what the scheduler restored it from, if it began in an earlier process

    def total_of(self, name: str) -> float:
        """Seconds in all phases of that name."""
        return sum(phase.duration_s for phase in self.phases if phase.name == name)


def waterfall(candidate: pb.CandidateExplanation) -> Waterfall:
    """The phases of a candidate, live or ended."""
    timeline = list(candidate.timeline)
    ended = bool(timeline) and timeline[-1].event == "finished"
    total_s = timeline[-1].at_seconds if ended else candidate.state.age_seconds
    restored = timeline[0].detail if timeline and timeline[0].event == "restored" else ""
    first_token_s = next((each.at_seconds for each in timeline if each.event == "first_token"), None)
    # A restored one without a first token has had it before, at a time that is not known.
    had_token = bool(restored) and first_token_s is None and candidate.state.output_tokens > 0
    phases = tuple(_phases(candidate, timeline, total_s, had_token))
    decode_s = sum(phase.duration_s for phase in phases if phase.name == "decode")
    num_later = 0 if had_token else candidate.state.output_tokens - 1
    between_tokens_s = decode_s / num_later if num_later > 0 else None
    return Waterfall(phases, total_s, first_token_s, between_tokens_s, restored)


def _phases(
    candidate: pb.CandidateExplanation, timeline: list[pb.TimelineEntry], total_s: float, has_token: bool
) -> Iterator[Phase]:
    """A first token ends a prefill; one that comes after a preemption changes nothing."""
    name, began = "queue", pb.TimelineEntry()
    for entry in [*timeline, pb.TimelineEntry(at_seconds=total_s)]:
        if entry.event == "first_token":
            has_token = True
            if name != "prefill":
                continue
        elif entry.event and entry.event not in _STARTS:
            continue
        if name:
            yield _phase(candidate, name, began, entry)
        worker_id = began.worker_id
        began, name = entry, _name(entry.event, has_token)
        if entry.event == "first_token":
            began = pb.TimelineEntry(
                at_seconds=entry.at_seconds, worker_id=worker_id, step_sequence=entry.step_sequence
            )


def _name(event: str, has_token: bool) -> str:
    if event == "preempted":
        return "preempted"
    if event in ("admitted", "resumed", "first_token"):
        return "decode" if has_token else "prefill"
    return ""


def _phase(
    candidate: pb.CandidateExplanation, name: str, began: pb.TimelineEntry, end: pb.TimelineEntry
) -> Phase:
    on_worker = name in ("prefill", "decode")
    chunks = _chunks(candidate.chunks, began.at_seconds, end.at_seconds) if on_worker else ()
    return Phase(
        name,
        began.at_seconds,
        end.at_seconds,
        began.worker_id,
        began.step_sequence if on_worker else 0,
        end.step_sequence if on_worker else 0,
        began.detail,
        chunks,
    )


def _chunks(columns: pb.PrefillChunks, start_s: float, end_s: float) -> tuple[Chunk, ...]:
    """Those of a phase. One without a result lasts to its end."""
    chunks: list[Chunk] = []
    free_s = start_s
    ended = columns.ended_seconds or [0.0] * len(columns.at_seconds)
    rows = zip(columns.at_seconds, ended, columns.step_sequences, columns.tokens, strict=True)
    for at_s, ended_s, step, tokens in rows:
        if start_s <= at_s < end_s:
            began_s, free_s = max(at_s, free_s), min(ended_s or end_s, end_s)
            chunks.append(Chunk(began_s, free_s, step, tokens))
    return tuple(chunks)
