"""Owns step spans: which steps of a worker get one, and what they link.

A step costs too much to record if it is only one of thousands. So a sampled request has three of them
recorded for each stay on a worker: its first, its last and its slowest. All are kept in mind, without spans,
until that is known; then the worker is told to record its part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from opentelemetry.trace import SpanContext

from scheduler_service.core.step import Admission, StepPlan
from scheduler_service.plan_codec import StepTimings
from scheduler_service.span_notice import SpanNotice
from tidegate_telemetry import names
from tidegate_telemetry.spans import Attributes, SpanRecorder, new_context, traceparent, wall_ns

MAX_LINKS = 8
"""Of a step to requests: each costs the exporter as much as an attribute, and a request has its own links."""
_MANY = 64

# A message costs the event loop as much as a step's spans, so a worker is told of several requests at once.
_NOTICE_S = 0.25
_NOTICE_REQUESTS = 32

Notify = Callable[[SpanNotice], None]


def at_ns(monotonic_s: float) -> int:
    """Wall time of a moment of the engine's clock."""
    return wall_ns(int(monotonic_s * 1e9))


class Step:
    """A plan that was sent while sampled requests were on its worker."""

    __slots__ = (
        "busy_s",
        "context",
        "done_at",
        "num_requests",
        "num_rows",
        "num_tokens",
        "recorded",
        "requests",
        "sent_at",
        "seq",
        "timings",
    )

    def __init__(
        self, plan: StepPlan, requests: tuple[SpanContext, ...], num_requests: int, now: float
    ) -> None:
        """`requests` are the first few of the sampled ones that are on the worker."""
        self.seq = plan.seq
        self.context = new_context()
        self.requests = requests
        self.num_requests = num_requests
        self.num_rows = len(plan.slots)
        self.num_tokens = int(plan.num_tokens.sum())
        self.sent_at = now
        self.done_at: float | None = None
        self.timings: StepTimings | None = None
        self.busy_s = 0.0
        self.recorded = False  # or is to be, once it is done


class Chunk:
    """A part of a request's tokens that one step computed."""

    __slots__ = ("computed", "sent_at", "seq", "tokens")

    def __init__(self, step: Step, tokens: int, computed: int) -> None:
        self.seq, self.sent_at = step.seq, step.sent_at
        self.tokens, self.computed = tokens, computed


class Stay:
    """A sampled candidate in a slot of a worker."""

    def __init__(self, steps: WorkerSteps, admission: Admission, request: SpanContext) -> None:
        self._steps = steps
        self.request = request
        self.slot = admission.slot
        self.first: Step | None = None
        self.cached = admission.num_computed_tokens
        self.computed = admission.num_computed_tokens
        self.known = len(admission.token_ids)
        self.chunks: list[Chunk] = []

    @property
    def worker_id(self) -> str:
        """Where it is."""
        return self._steps.worker_id

    def end(self) -> list[tuple[SpanContext, Attributes]]:
        """It left its slot. Returns the links to its steps."""
        return self._steps.end(self)


class WorkerSteps:
    """The steps of one connection to a worker."""

    def __init__(self, worker_id: str, recorder: SpanRecorder, notify: Notify) -> None:
        self.worker_id = worker_id
        self._recorder = recorder
        self._notify = notify
        self._stays: dict[int, Stay] = {}  # by slot
        self._prefilling: list[Stay] = []
        self._requests: tuple[SpanContext, ...] | None = ()  # some of the stays'; None: to be made anew
        self._unanswered: dict[int, Step] = {}
        self._slowest: deque[Step] = deque()  # each slower than all after it
        self._last: Step | None = None
        self._notice = SpanNotice()
        self._noticed_at = 0.0

    def sent(self, plan: StepPlan, now: float, enter: Callable[[Admission, WorkerSteps], Stay | None]) -> str:
        """A plan goes out. Returns the header for it, empty if no sampled request is on the worker. `enter`
        makes the stay of a sampled request."""
        fresh = []
        for admission in plan.admitted:
            if self._stays.pop(admission.slot, None):
                self._requests = None
            stay = enter(admission, self) if admission.traceparent else None
            if stay is not None:
                fresh.append(stay)
                self._stays[admission.slot] = stay
                self._requests = None
        if not self._stays:
            return ""
        if self._requests is None:
            self._requests = tuple(stay.request for stay in list(self._stays.values())[:MAX_LINKS])
        step = self._unanswered[plan.seq] = Step(plan, self._requests, len(self._stays), now)
        for stay in fresh:
            stay.first = step
        self._prefilling += fresh
        if self._prefilling:
            self._prefilling = [stay for stay in self._prefilling if not _note_chunk(stay, step, plan)]
        return traceparent(step.context)

    def done(self, seq: int, timings: StepTimings, now: float) -> None:
        """A result came."""
        step = self._unanswered.pop(seq, None)
        if step is None:
            return
        step.done_at, step.timings = now, timings
        step.busy_s = timings.prepare_s + timings.forward_s + timings.sampling_s
        slowest = self._slowest
        while slowest and slowest[-1].busy_s < step.busy_s:
            slowest.pop()
        slowest.append(step)
        if len(slowest) > _MANY:
            oldest = min((stay.first.seq for stay in self._stays.values() if stay.first), default=seq)
            while slowest[0].seq < oldest:
                slowest.popleft()
        self._last = step
        if step.recorded:
            self._record(step)
        if now - self._noticed_at >= _NOTICE_S:
            self._noticed_at = now
            self._send_notice()

    def end(self, stay: Stay) -> list[tuple[SpanContext, Attributes]]:
        """A stay is over. Returns the links to its steps."""
        if self._stays.get(stay.slot) is stay:
            del self._stays[stay.slot]
            self._requests = None
        if stay in self._prefilling:
            self._prefilling.remove(stay)
        first = stay.first
        if first is None:
            return []
        last = self._last if self._last is not None and self._last.seq > first.seq else first
        slowest = next((step for step in self._slowest if step.seq >= first.seq), first)
        roles = (("first", first), ("slowest", slowest), ("last", last))
        self._notice.add(self._want([step for _, step in roles], stay.request), stay.slot, first.seq)
        if not self._stays or len(self._notice.ended_slots) >= _NOTICE_REQUESTS:
            self._send_notice()
        return [(step.context, {names.STEP_ROLE: role}) for role, step in roles]

    def lost(self, now: float) -> None:
        """The connection has ended: there will be no more results."""
        for step in self._unanswered.values():
            step.done_at = now
            if step.recorded:
                self._record(step)
        self._notify = lambda notice: None

    def _send_notice(self) -> None:
        if self._notice.ended_slots:
            notice, self._notice = self._notice, SpanNotice()
            self._notify(notice)

    def _want(self, steps: list[Step], request: SpanContext) -> list[int]:
        """Has steps recorded for a request. Returns those for which that is new, by seq."""
        fresh = {step.seq: step for step in steps if not step.recorded}
        for step in fresh.values():
            step.recorded = True
            if request not in step.requests:
                step.requests = (request, *step.requests[: MAX_LINKS - 1])
            if step.done_at is not None:
                self._record(step)
        return list(fresh)

    def _record(self, step: Step) -> None:
        done_at = step.sent_at if step.done_at is None else step.done_at
        self._recorder.record(
            names.SPAN_STEP,
            step.context,
            None,
            at_ns(step.sent_at),
            at_ns(done_at),
            {
                names.WORKER_ID: self.worker_id,
                names.STEP_SEQ: step.seq,
                names.STEP_ROWS: step.num_rows,
                names.TOKENS: step.num_tokens,
                names.STEP_REQUESTS: step.num_requests,
            },
            links=[(request, {}) for request in step.requests],
            error="worker_lost" if step.timings is None else "",
        )


def _note_chunk(stay: Stay, step: Step, plan: StepPlan) -> bool:
    """Notes what a plan computes of a stay's tokens. Whether that was the last of them."""
    rows = np.flatnonzero(plan.slots == stay.slot)
    if len(rows):
        tokens = int(plan.num_tokens[rows[0]])
        stay.computed += tokens
        stay.chunks.append(Chunk(step, tokens, stay.computed))
    return stay.computed >= stay.known
