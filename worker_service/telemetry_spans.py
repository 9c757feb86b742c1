"""Owns a worker's spans: of sampled requests' stays in slots, and of the steps that the scheduler asks for.

It sees each plan with its result, in order. Nothing is done for a token: columns are written for a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from opentelemetry.trace import SpanContext

from tidegate_telemetry import names
from tidegate_telemetry.spans import Attributes, SpanRecorder, new_context, parse_traceparent, wall_ns
from worker_service.plan import Admission, Plan, Result, Timings

_KEPT_STEPS = 4_096


@dataclass(frozen=True, slots=True)
class _Stay:
    request_id: str
    parent: SpanContext
    admitted_seq: int
    started_ns: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class _Step:
    seq: int
    traceparent: str
    num_rows: int
    num_tokens: int
    timings: Timings


class StreamSpans:
    """The spans of one step stream. Times are nanoseconds of the monotonic clock."""

    def __init__(self, recorder: SpanRecorder, worker_id: str, num_slots: int) -> None:
        self._recorder = recorder
        self._worker_id = worker_id
        self._stays: dict[int, _Stay] = {}  # by slot
        self._ended_early: set[tuple[int, int]] = set()  # slot and seq of stays that ended unseen
        self._first_ns = np.zeros(num_slots, np.int64)  # end of the first step that sampled; 0: none yet
        self._last_ns = np.zeros(num_slots, np.int64)
        self._steps = np.zeros(num_slots, np.int64)
        self._computed = np.zeros(num_slots, np.int64)  # tokens
        self._sampled = np.zeros(num_slots, np.int64)
        self._recent: dict[int, _Step] = {}  # traced steps by seq, the oldest first
        self._wanted: set[int] = set()  # steps to record that have no result yet
        self._last_seq = 0

    def executed(self, plan: Plan, result: Result) -> None:
        """A step has its result."""
        self._last_seq = plan.seq
        for slot in plan.released.tolist() if self._stays else ():
            self._end(slot)
        for admission in plan.admitted:
            self._admit(admission, plan.seq, result.timings.started_ns)
        if self._stays:
            self._note_rows(plan, result)
        if plan.traceparent:
            self._note_step(plan, result.timings)

    def notice(self, step_seqs: list[int], ended: list[tuple[int, int]]) -> None:
        """What the scheduler has learnt: steps to record, and stays that are over (slot, admitting seq)."""
        for seq in step_seqs:
            step = self._recent.pop(seq, None)
            if step is not None:
                self._record_step(step)
            elif seq > self._last_seq:
                self._wanted.add(seq)
        for slot, seq in ended:
            stay = self._stays.get(slot)
            if stay is not None and stay.admitted_seq == seq:
                self._end(slot)
            elif seq > self._last_seq:
                self._ended_early.add((slot, seq))

    def close(self) -> None:
        """The stream has ended, and with it every stay."""
        for slot in list(self._stays):
            self._end(slot)

    def _admit(self, admission: Admission, seq: int, started_ns: int) -> None:
        slot = admission.slot
        parent = parse_traceparent(admission.traceparent)
        if parent is None or (slot, seq) in self._ended_early:
            self._ended_early.discard((slot, seq))
            return
        for column in (self._first_ns, self._last_ns, self._steps, self._computed, self._sampled):
            column[slot] = 0
        self._stays[slot] = _Stay(
            admission.request_id, parent, seq, started_ns, admission.num_computed_tokens
        )

    def _note_rows(self, plan: Plan, result: Result) -> None:
        """For all rows alike: those of requests that are not sampled cost less than to leave them out."""
        finished_ns, sampled = result.timings.finished_ns, result.slots
        self._last_ns[plan.slots] = finished_ns
        self._steps[plan.slots] += 1
        self._computed[plan.slots] += plan.num_tokens
        self._sampled[sampled] += 1
        first = sampled[self._sampled[sampled] == 1]
        if len(first):
            self._first_ns[first] = finished_ns

    def _note_step(self, plan: Plan, timings: Timings) -> None:
        num_tokens = int(plan.num_tokens.sum())
        step = _Step(plan.seq, plan.traceparent, len(plan.slots), num_tokens, timings)
        if plan.seq in self._wanted:
            self._wanted.discard(plan.seq)
            self._record_step(step)
            return
        self._recent[plan.seq] = step
        if len(self._recent) > _KEPT_STEPS:
            del self._recent[next(iter(self._recent))]

    def _end(self, slot: int) -> None:
        stay = self._stays.pop(slot, None)
        if stay is None or not self._steps[slot]:
            return
        first_ns, last_ns = int(self._first_ns[slot]), int(self._last_ns[slot])
        sampled, steps = int(self._sampled[slot]), int(self._steps[slot])
        about: dict[str, str | int | float] = {
            names.REQUEST_ID: stay.request_id,
            names.WORKER_ID: self._worker_id,
        }
        decodes = max(0, sampled - 1)
        prefill = {
            **about,
            names.CACHED_TOKENS: stay.cached_tokens,
            names.TOKENS: int(self._computed[slot]) - decodes,
            names.STEPS: steps - decodes,
        }
        self._record(names.SPAN_WORKER_PREFILL, stay.parent, stay.started_ns, first_ns or last_ns, prefill)
        if decodes:
            decode = {**about, names.TOKENS: decodes, names.STEPS: decodes}
            self._record(names.SPAN_WORKER_DECODE, stay.parent, first_ns, last_ns, decode)

    def _record_step(self, step: _Step) -> None:
        parent, timings = parse_traceparent(step.traceparent), step.timings
        if parent is None:
            return
        attributes: dict[str, str | int | float] = {
            names.WORKER_ID: self._worker_id,
            names.STEP_SEQ: step.seq,
            names.STEP_ROWS: step.num_rows,
            names.TOKENS: step.num_tokens,
        }
        for phase, duration_ns in timings.phases_ns().items():
            attributes[names.PHASE_S[phase]] = duration_ns / 1e9
        self._record(names.SPAN_STEP_EXECUTE, parent, timings.started_ns, timings.finished_ns, attributes)

    def _record(
        self, name: str, parent: SpanContext, start_ns: int, end_ns: int, attributes: Attributes
    ) -> None:
        context = new_context(parent)
        self._recorder.record(name, context, parent, wall_ns(start_ns), wall_ns(end_ns), attributes)
