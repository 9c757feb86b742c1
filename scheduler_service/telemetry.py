"""Owns what the scheduler service tells of itself: traces and metrics. Off unless OTEL_* or an option asks.

Modules named telemetry* and the package tidegate_telemetry are all that import OpenTelemetry. Spans have
explicit parents and times, never "current" ones, since handlers suspend. Times come from the engine's
monotonic clock, moved to wall time by one offset, so that a request's spans add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import SpanContext, get_current_span

from scheduler_service.call_counts import CallCounts
from scheduler_service.core.events import Finished
from scheduler_service.core.explain import Explanation
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.state import SchedulerState
from scheduler_service.core.step import Admission, StepPlan
from scheduler_service.plan_codec import StepTimings
from scheduler_service.telemetry_metrics import OPERATION, PROVIDER, Metrics
from scheduler_service.telemetry_request import RequestTrace
from scheduler_service.telemetry_rpc import RpcSpan, request_parent, rpc_traceparent
from scheduler_service.telemetry_steps import Notify, Stay, WorkerSteps
from scheduler_service.telemetry_waits import QueueWatch
from tidegate_telemetry.exporting import Outlets, resource, shut_down
from tidegate_telemetry.spans import SpanRecorder, new_context

__all__ = ["RequestTrace", "RpcSpan", "Telemetry", "rpc_traceparent"]

_SERVICE_NAME = "tidegate-scheduler"
_SAMPLED = Decision.RECORD_AND_SAMPLE


class Telemetry:
    """Traces and metrics of the scheduler service. Without a processor or a reader, that half is off."""

    def __init__(self, outlets: Outlets | None = None) -> None:
        self._outlets = outlets or Outlets()
        self._traces: Traces | None = None
        self._metrics: Metrics | None = None
        if self._outlets.span_processor is not None:
            self._traces = Traces(self._outlets)
        if self._outlets.metric_readers:
            self._metrics = Metrics(self._outlets, resource(_SERVICE_NAME))

    @classmethod
    def from_environment(
        cls, *, metrics: bool = True, metrics_address: tuple[str, int] | None = None
    ) -> Telemetry:
        """What OTEL_* variables ask for; nothing unless they name an OTLP endpoint. Prometheus can scrape the
        address, if there is one. Without `metrics`, traces only: those of a frontend, while the engine's
        process has the numbers. Raises OSError where the address cannot be bound."""
        return cls(Outlets.from_environment(metrics=metrics, address=metrics_address))

    @property
    def traces(self) -> bool:
        """Whether traces are on."""
        return self._traces is not None

    @property
    def metrics_port(self) -> int:
        """Port that Prometheus can scrape; 0 where there is none."""
        return self._outlets.metrics_port

    # Requests

    def rpc(self, method: str, metadata: Mapping[str, str]) -> RpcSpan | None:
        """Opens the span of an RPC, `package.Service/Method`, as the caller's child, for the calling task.
        None if traces are off."""
        return None if self._traces is None else RpcSpan(self._traces.tracer, method, metadata)

    def request(self, spec: RequestSpec, now: float) -> RequestTrace | None:
        """Opens the span of a request; None if it is not sampled."""
        return None if self._traces is None else self._traces.request(spec, now)

    def request_refused(self, reason: str, num: int = 1) -> None:
        """Counts requests that were not taken in."""
        if self._metrics is not None:
            self._metrics.request_refused(reason, num)

    def request_finished(self, spec: RequestSpec, event: Finished) -> None:
        """Counts a candidate that ended."""
        if self._metrics is not None:
            self._metrics.request_finished(spec, event)

    def look_at_queue(self, explain: Callable[[str], list[Explanation]], now: float) -> None:
        """Notes what sampled requests wait for. `explain` gives the reasons of a request by its name."""
        if self._traces is not None:
            self._traces.queue.look(explain, now)

    # Workers

    def worker_ready(self, worker_id: str, notify: Notify) -> None:
        """A stream to a worker begins. `notify` tells the worker which of its spans are of interest."""
        if self._traces is not None:
            self._traces.workers[worker_id] = WorkerSteps(worker_id, self._traces.recorder, notify)

    def worker_lost(self, worker_id: str, now: float) -> None:
        """Its stream has ended."""
        if self._metrics is not None:
            self._metrics.worker_lost(worker_id)
        if self._traces is not None and (steps := self._traces.workers.pop(worker_id, None)):
            steps.lost(now)

    def plan_sent(self, worker_id: str, plan: StepPlan, prefill_tokens: int, now: float) -> str:
        """Notes a plan; `prefill_tokens` of its tokens are no decodes. Returns the W3C header for it; empty
        if no sampled request is on the worker."""
        if self._metrics is not None:
            self._metrics.plan_sent(worker_id, plan, prefill_tokens, now)
        if self._traces is None or (steps := self._traces.workers.get(worker_id)) is None:
            return ""
        return steps.sent(plan, now, self._traces.enter)

    def step_done(self, worker_id: str, seq: int, timings: StepTimings, now: float) -> None:
        """Notes a result."""
        if self._metrics is not None:
            self._metrics.step_done(worker_id, timings, now)
        if self._traces is not None and (steps := self._traces.workers.get(worker_id)):
            steps.done(seq, timings, now)

    # The process

    def observe(
        self,
        read_state: Callable[[], SchedulerState],
        read_workers: Callable[[], Mapping[str, str]] = dict,
        calls: CallCounts | None = None,
    ) -> None:
        """Makes gauges and counters from the scheduler's state, each worker's state by its name, and what was
        counted of public RPCs. All are read from other threads."""
        if self._metrics is not None:
            self._metrics.observe(read_state, read_workers, calls or CallCounts())

    def shutdown(self) -> None:
        """Sends what is left. Blocks for at most a few seconds."""
        ends: list[Callable[[], object]] = []
        if self._traces is not None:
            ends.append(self._traces.provider.shutdown)
        if self._metrics is not None:
            ends.append(self._metrics.provider.shutdown)
        shut_down(*ends)


class Traces:
    """The sampled requests, and the steps that they are in."""

    def __init__(self, outlets: Outlets) -> None:
        assert outlets.span_processor is not None  # noqa: S101 - only then is it made
        about = resource(_SERVICE_NAME)
        self.provider = TracerProvider(resource=about, shutdown_on_exit=False)
        self.provider.add_span_processor(outlets.span_processor)
        self.tracer = self.provider.get_tracer(PROVIDER)
        self.recorder = SpanRecorder(outlets.span_processor, about)
        self.queue = QueueWatch()
        self.workers: dict[str, WorkerSteps] = {}
        self._requests: dict[str, RequestTrace] = {}

    def request(self, spec: RequestSpec, now: float) -> RequestTrace | None:
        """The trace of a request that has come; None if it is not sampled."""
        around = request_parent(spec.traceparent)
        context = get_current_span(around).get_span_context()
        parent: SpanContext | None = context if context.is_valid else None
        own = new_context(parent)
        name = f"{OPERATION} {spec.model}"
        if self.provider.sampler.should_sample(around, own.trace_id, name).decision is not _SAMPLED:
            return None
        trace = RequestTrace(self.recorder, spec, own, parent, now, self.queue.add, self._forget)
        self._requests[spec.request_id] = trace
        self.queue.add(trace)
        return trace

    def enter(self, admission: Admission, steps: WorkerSteps) -> Stay | None:
        """The stay of a request that gets a slot; None if it is not known."""
        trace = self._requests.get(admission.request_id)
        if trace is None:
            return None
        stay = Stay(steps, admission, trace.context)
        trace.stays(admission.index, stay)
        return stay

    def _forget(self, trace: RequestTrace) -> None:
        if self._requests.get(trace.request_id) is trace:
            del self._requests[trace.request_id]
