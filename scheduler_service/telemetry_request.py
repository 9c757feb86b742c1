"""Owns the trace of one request: its span, and for each candidate spans of the states that it went through.

All spans are made when a candidate ends. Times are seconds of the engine's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from opentelemetry.sdk.trace import Event
from opentelemetry.trace import SpanContext

from scheduler_service.core.events import Admitted, Finished, FinishReason, Preempted, Resumed
from scheduler_service.core.explain import Explanation
from scheduler_service.core.request import RequestSpec
from scheduler_service.phases import phases
from scheduler_service.telemetry_metrics import OPERATION, PROVIDER
from scheduler_service.telemetry_steps import Stay, at_ns
from scheduler_service.telemetry_waits import Waits
from tidegate_telemetry import names
from tidegate_telemetry.spans import Attributes, SpanRecorder, new_context, span_event, traceparent

_Moment = tuple[float, str, Attributes]


class _Candidate:
    """What one candidate went through."""

    def __init__(self, arrival: float) -> None:
        self.has_token = False  # from an earlier process
        self.turns = [(names.SPAN_QUEUE, arrival)]
        self.waits = Waits()
        self.stays: deque[Stay] = deque()  # those that are not over, by their order
        self.chunks: list[_Moment] = []

    @property
    def is_waiting(self) -> bool:
        """Whether it is in the queue."""
        return self.turns[-1][0] != names.SPAN_PREFILL


class RequestTrace:
    """A sampled request, from its arrival to the end of its last candidate."""

    def __init__(
        self,
        recorder: SpanRecorder,
        spec: RequestSpec,
        context: SpanContext,
        parent: SpanContext | None,
        now: float,
        on_waiting: Callable[[RequestTrace], None],
        on_end: Callable[[RequestTrace], None],
    ) -> None:
        """`on_waiting` is told when a candidate is in the queue, `on_end` when the span has ended."""
        self.request_id = spec.request_id
        self.context = context
        self.trace_id = f"{context.trace_id:032x}"
        self.traceparent = traceparent(context)
        """The W3C header for workers."""
        self._recorder = recorder
        self._spec = spec
        self._parent = parent
        self._arrival = now if spec.arrival is None else min(spec.arrival, now)
        self._on_waiting = on_waiting
        self._on_end = on_end
        self._live = {i: _Candidate(self._arrival) for i in range(spec.n)}
        self._moments: list[_Moment] = []
        self._links: list[tuple[SpanContext, Attributes]] = []
        self._reasons: list[str] = []

    @property
    def is_waiting(self) -> bool:
        """Whether a candidate is in the queue."""
        return any(candidate.is_waiting for candidate in self._live.values())

    def leave_out(self, indices: set[int]) -> None:
        """Candidates ended in an earlier process: the span does not wait for them."""
        for index in indices:
            del self._live[index]

    def goes_on(self, indices: set[int]) -> None:
        """Candidates had their first token in an earlier process: what they compute is for the next ones."""
        for index in indices:
            self._live[index].has_token = True

    def waits_for(self, explanations: list[Explanation], now: float) -> None:
        """Notes what keeps candidates in the queue."""
        for explanation in explanations:
            candidate = self._live.get(explanation.state.index)
            if candidate is not None and candidate.is_waiting:
                candidate.waits.note(explanation, now)

    def stays(self, index: int, stay: Stay) -> None:
        """A candidate gets a slot. The event that says so comes later."""
        if index in self._live:
            self._live[index].stays.append(stay)

    def admitted(self, event: Admitted) -> None:
        """A candidate got its first worker."""
        self._enter(event.index, names.SPAN_PREFILL, event.at)
        attributes: Attributes = {names.WORKER_ID: event.worker_id, names.CACHED_TOKENS: event.cached_tokens}
        self._note(names.EVENT_ADMITTED, event.index, event.at, attributes)

    def preempted(self, event: Preempted) -> None:
        """A candidate went back to the queue."""
        self._leave(self._live[event.index])
        self._enter(event.index, names.SPAN_PREEMPTED, event.at)
        attributes = {names.WORKER_ID: event.worker_id, names.PREEMPTION_REASON: event.reason}
        self._note(names.EVENT_PREEMPTED, event.index, event.at, attributes)
        self._on_waiting(self)

    def resumed(self, event: Resumed) -> None:
        """A candidate got a worker again."""
        self._enter(event.index, names.SPAN_PREFILL, event.at)
        attributes: Attributes = {names.WORKER_ID: event.worker_id, names.CACHED_TOKENS: event.cached_tokens}
        self._note(names.EVENT_RESUMED, event.index, event.at, attributes)

    def finished(self, event: Finished) -> None:
        """A candidate ended. With the last one, the request's span ends."""
        candidate = self._live.pop(event.index, None)
        if candidate is None:
            return
        while candidate.stays:
            self._leave(candidate)
        first_s = event.timings.time_to_first_token_s
        first_token_at = self._arrival if candidate.has_token else None
        if first_s is not None:
            first_token_at = self._arrival + first_s
            self._note(names.EVENT_FIRST_TOKEN, event.index, first_token_at, {})
        self._record_phases(candidate, event, first_token_at)
        reason = event.reason.value
        self._reasons.append(reason)
        usage = {
            names.GEN_AI_USAGE_INPUT_TOKENS: event.usage.prompt_tokens,
            names.GEN_AI_USAGE_OUTPUT_TOKENS: event.usage.output_tokens,
            names.GEN_AI_USAGE_CACHED_TOKENS: event.usage.cached_tokens,
            names.PREEMPTIONS: event.usage.preemptions,
        }
        # Of a single candidate, the request's span says it already.
        told: Attributes = usage if self._spec.n > 1 else {}
        self._note(names.EVENT_FINISHED, event.index, event.at, {names.OUTCOME: reason, **told})
        if not self._live:
            error = reason if event.reason is FinishReason.ERROR else ""
            self._end({**usage, names.GEN_AI_RESPONSE_FINISH_REASONS: tuple(self._reasons)}, event.at, error)

    def refused(self, reason: str, now: float) -> None:
        """The request was not taken in."""
        self._live.clear()
        self._end({}, now, reason)

    def _end(self, attributes: Attributes, now: float, error: str) -> None:
        self._recorder.record(
            f"{OPERATION} {self._spec.model}",
            self.context,
            self._parent,
            at_ns(self._arrival),
            at_ns(now),
            {
                **_request_attributes(self._spec),
                **attributes,
                **({names.ERROR_TYPE: error} if error else {}),
            },
            events=_as_events(sorted(self._moments, key=lambda moment: moment[0])),
            links=self._links,
            error=error,
        )
        self._on_end(self)

    def _enter(self, index: int, state: str, now: float) -> None:
        self._live[index].turns.append((state, now))

    def _leave(self, candidate: _Candidate) -> None:
        if not candidate.stays:
            return
        stay = candidate.stays.popleft()
        self._links += stay.end()
        for chunk in stay.chunks:
            attributes: Attributes = {
                names.WORKER_ID: stay.worker_id,
                names.STEP_SEQ: chunk.seq,
                names.TOKENS: chunk.tokens,
                names.COMPUTED_TOKENS: chunk.computed,
                names.CACHED_TOKENS: stay.cached,
            }
            candidate.chunks.append((chunk.sent_at, names.EVENT_CHUNK, attributes))

    def _note(self, event: str, index: int, now: float, attributes: Attributes) -> None:
        self._moments.append((now, event, {**self._which(index), **attributes}))

    def _which(self, index: int) -> Attributes:
        """Tells candidates apart, where there are several."""
        return {names.CANDIDATE: index} if self._spec.n > 1 else {}

    def _record_phases(self, candidate: _Candidate, event: Finished, first_token_at: float | None) -> None:
        """The spans of what a candidate went through; what happened meanwhile are their events."""
        inside = candidate.waits.moments() + candidate.chunks
        for name, start, end in phases(candidate.turns, first_token_at, event.at):
            computing = name in (names.SPAN_PREFILL, names.SPAN_DECODE)
            moments = [
                moment
                for moment in inside
                if (moment[1] == names.EVENT_CHUNK) is computing and start <= moment[0] < end
            ]
            self._recorder.record(
                name,
                new_context(self.context),
                self.context,
                at_ns(start),
                at_ns(end),
                self._which(event.index),
                events=_as_events(moments),
            )


def _as_events(moments: list[_Moment]) -> list[Event]:
    return [span_event(name, at_ns(at), attributes) for at, name, attributes in moments]


def _request_attributes(spec: RequestSpec) -> dict[str, str | int | float]:
    """Those that filter nothing are left out: each attribute costs the exporter microseconds."""
    several = {names.GEN_AI_REQUEST_CHOICE_COUNT: spec.n} if spec.n > 1 else {}
    top_k = {names.GEN_AI_REQUEST_TOP_K: spec.sampling.top_k} if spec.sampling.top_k else {}
    top_p = {names.GEN_AI_REQUEST_TOP_P: spec.sampling.top_p} if spec.sampling.top_p < 1 else {}
    return {
        **several,
        **top_k,
        **top_p,
        names.GEN_AI_OPERATION: OPERATION,
        names.GEN_AI_PROVIDER: PROVIDER,
        names.GEN_AI_REQUEST_MODEL: spec.model,
        names.GEN_AI_REQUEST_MAX_TOKENS: spec.stopping.max_tokens,
        names.GEN_AI_REQUEST_TEMPERATURE: spec.sampling.temperature,
        names.GEN_AI_RESPONSE_ID: spec.request_id,
        names.TENANT: spec.tenant,
    }
