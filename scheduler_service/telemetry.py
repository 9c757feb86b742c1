"""Owns tracing and metrics: the only module that imports OpenTelemetry. Off unless OTEL_* asks for it.

Spans are built with explicit parents and times, never as "current" ones, since handlers suspend. Times come
from the engine's monotonic clock, moved to wall time by one offset, so that a request's spans add up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from scheduler_service import telemetry_names as names
from scheduler_service import telemetry_readings as readings
from scheduler_service.core.events import Admitted, Finished, FinishReason, Preempted, Resumed
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.state import SchedulerState
from scheduler_service.phases import phases
from scheduler_service.plan_codec import StepTimings

_PROVIDER = "tidegate"
_OPERATION = "text_completion"
_WALL_OFFSET_NS = time.time_ns() - time.monotonic_ns()

_Attributes = Mapping[str, str | int]

_propagator = TraceContextTextMapPropagator()
_rpc_context: ContextVar[Context | None] = ContextVar("rpc_context", default=None)


def rpc_traceparent() -> str:
    """The W3C header of the RPC that the calling task serves, for another process. Empty: no trace."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, _rpc_context.get() or Context())
    return carrier.get("traceparent", "")


def _request_parent(spec: RequestSpec) -> Context:
    """The RPC of a request: one of this task, or of another process, which has told its header."""
    context = _rpc_context.get()
    if context is not None or not spec.traceparent:
        return context or Context()
    return _propagator.extract({"traceparent": spec.traceparent}, Context())


def _wall_ns(monotonic_s: float) -> int:
    return int(monotonic_s * 1e9) + _WALL_OFFSET_NS


class RpcSpan:
    """The server span of one RPC. Requests that its handler submits become its children."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def end(self, status_code: str) -> None:
        """Ends with a gRPC status name, such as "OK"."""
        self._span.set_attribute(names.RPC_STATUS_CODE, status_code)
        if status_code not in ("OK", "CANCELLED"):
            self._span.set_attribute(names.ERROR_TYPE, status_code)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class RequestTrace:
    """The span of one request, and for each candidate spans of the states that it went through.

    A state's span is made when the candidate ends. Times are seconds of the engine's clock.
    """

    def __init__(self, tracer: trace.Tracer, spec: RequestSpec, now: float) -> None:
        self._tracer = tracer
        self._arrival = now
        self._span = tracer.start_span(
            f"{_OPERATION} {spec.model}",
            context=_request_parent(spec),
            start_time=_wall_ns(now),
            attributes=_request_attributes(spec),
        )
        self._context = trace.set_span_in_context(self._span, Context())
        self._turns: dict[int, list[tuple[str, float]]] = {
            i: [(names.SPAN_QUEUE, now)] for i in range(spec.n)
        }
        self._reasons: list[str] = []

    @property
    def traceparent(self) -> str:
        """The W3C header for workers. Empty where the request is not sampled."""
        if not self._span.is_recording():
            return ""
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, self._context)
        return carrier.get("traceparent", "")

    def admitted(self, event: Admitted, now: float) -> None:
        """A candidate got its first worker."""
        self._turn(event.index, names.SPAN_PREFILL, now)
        attributes: _Attributes = {names.WORKER_ID: event.worker_id, names.CACHED_TOKENS: event.cached_tokens}
        self._note(names.EVENT_ADMITTED, event.index, now, attributes)

    def preempted(self, event: Preempted, now: float) -> None:
        """A candidate went back to the queue."""
        self._turn(event.index, names.SPAN_PREEMPTED, now)
        attributes = {names.WORKER_ID: event.worker_id, names.PREEMPTION_REASON: event.reason}
        self._note(names.EVENT_PREEMPTED, event.index, now, attributes)

    def resumed(self, event: Resumed, now: float) -> None:
        """A candidate got a worker again."""
        self._turn(event.index, names.SPAN_PREFILL, now)
        attributes: _Attributes = {names.WORKER_ID: event.worker_id, names.CACHED_TOKENS: event.cached_tokens}
        self._note(names.EVENT_RESUMED, event.index, now, attributes)

    def finished(self, event: Finished, now: float) -> None:
        """A candidate ended. With the last one, the request's span ends."""
        first_s = event.timings.time_to_first_token_s
        first_token_at = None if first_s is None else self._arrival + first_s
        if first_token_at is not None:
            self._note(names.EVENT_FIRST_TOKEN, event.index, first_token_at, {})
        for name, start, end in phases(self._turns.pop(event.index, []), first_token_at, now):
            span = self._tracer.start_span(
                name, self._context, start_time=_wall_ns(start), attributes={names.CANDIDATE: event.index}
            )
            span.end(_wall_ns(end))
        reason = event.reason.value
        self._reasons.append(reason)
        usage = {
            names.GEN_AI_USAGE_INPUT_TOKENS: event.usage.prompt_tokens,
            names.GEN_AI_USAGE_OUTPUT_TOKENS: event.usage.output_tokens,
            names.GEN_AI_USAGE_CACHED_TOKENS: event.usage.cached_tokens,
            names.PREEMPTIONS: event.usage.preemptions,
        }
        self._note(names.EVENT_FINISHED, event.index, now, {names.OUTCOME: reason, **usage})
        if self._turns:
            return
        self._span.set_attributes(usage)
        self._span.set_attribute(names.GEN_AI_RESPONSE_FINISH_REASONS, self._reasons)
        if event.reason is FinishReason.ERROR:
            self._span.set_attribute(names.ERROR_TYPE, reason)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(_wall_ns(now))

    def refused(self, reason: str, now: float) -> None:
        """The request was not taken in."""
        self._span.set_attribute(names.ERROR_TYPE, reason)
        self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(_wall_ns(now))

    def _turn(self, index: int, state: str, now: float) -> None:
        self._turns[index].append((state, now))

    def _note(self, event: str, index: int, now: float, attributes: _Attributes) -> None:
        self._span.add_event(event, {names.CANDIDATE: index, **attributes}, _wall_ns(now))


def _request_attributes(spec: RequestSpec) -> dict[str, str | int | float]:
    return {
        names.GEN_AI_OPERATION: _OPERATION,
        names.GEN_AI_PROVIDER: _PROVIDER,
        names.GEN_AI_REQUEST_MODEL: spec.model,
        names.GEN_AI_REQUEST_MAX_TOKENS: spec.stopping.max_tokens,
        names.GEN_AI_REQUEST_TEMPERATURE: spec.sampling.temperature,
        names.GEN_AI_REQUEST_TOP_P: spec.sampling.top_p,
        names.GEN_AI_REQUEST_TOP_K: spec.sampling.top_k,
        names.GEN_AI_REQUEST_CHOICE_COUNT: spec.n,
        names.GEN_AI_RESPONSE_ID: spec.request_id,
    }


class Telemetry:
    """Traces and metrics of the scheduler service. Without a processor or a reader, that half is off."""

    def __init__(
        self, span_processor: SpanProcessor | None = None, metric_reader: MetricReader | None = None
    ) -> None:
        resource = _resource()
        self._traces: TracerProvider | None = None
        self._tracer: trace.Tracer | None = None
        if span_processor is not None:
            self._traces = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._traces.add_span_processor(span_processor)
            self._tracer = self._traces.get_tracer(_PROVIDER)
        self._metrics: Metrics | None = None
        if metric_reader is not None:
            self._metrics = Metrics(MeterProvider([metric_reader], resource, shutdown_on_exit=False))

    @classmethod
    def from_environment(cls, *, metrics: bool = True) -> Telemetry:
        """What OTEL_* variables ask for; nothing unless they name an OTLP endpoint. Without `metrics`, traces
        only: those of a frontend, while the engine's process has the numbers."""
        processor: SpanProcessor | None = None
        reader: MetricReader | None = None
        if _wanted("TRACES"):
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            processor = BatchSpanProcessor(OTLPSpanExporter())
        if metrics and _wanted("METRICS"):
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

            reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        return cls(processor, reader)

    @property
    def traces(self) -> bool:
        """Whether traces are on."""
        return self._tracer is not None

    def rpc(self, method: str, metadata: Mapping[str, str]) -> RpcSpan | None:
        """Opens the span of an RPC, `package.Service/Method`, as the caller's child, for the calling task.
        None if traces are off."""
        if self._tracer is None:
            return None
        parent = _propagator.extract(metadata, Context())
        attributes = {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: method}
        span = self._tracer.start_span(method, parent, SpanKind.SERVER, attributes)
        _rpc_context.set(trace.set_span_in_context(span, Context()))
        return RpcSpan(span)

    def request(self, spec: RequestSpec, now: float) -> RequestTrace | None:
        """Opens the span of a request; None if it is not sampled."""
        if self._tracer is None:
            return None
        request = RequestTrace(self._tracer, spec, now)
        return request if request.traceparent else None

    def request_finished(self, model: str, event: Finished) -> None:
        """Counts a candidate that ended."""
        if self._metrics is not None:
            self._metrics.request_finished(model, event)

    def step_done(self, worker_id: str, timings: StepTimings) -> None:
        """Counts a step."""
        if self._metrics is not None:
            self._metrics.step_done(worker_id, timings)

    def observe(self, snapshot: Callable[[], SchedulerState]) -> None:
        """Makes gauges and counters from the scheduler's state. `snapshot` is called from another thread."""
        if self._metrics is not None:
            self._metrics.observe(snapshot)

    def shutdown(self) -> None:
        """Sends what is left. Blocks for up to the exporters' timeouts."""
        if self._traces is not None:
            self._traces.shutdown()
        if self._metrics is not None:
            self._metrics.provider.shutdown(timeout_millis=2_000)


class Metrics:
    """The instruments: histograms that are recorded, counters and gauges that are read from the state."""

    def __init__(self, provider: MeterProvider) -> None:
        self.provider = provider
        self._meter = provider.get_meter(_PROVIDER)
        self._seconds = {
            name: self._meter.create_histogram(name, "s", explicit_bucket_boundaries_advisory=bounds)
            for name, bounds in names.HISTOGRAM_BOUNDS_S.items()
        }

    def request_finished(self, model: str, event: Finished) -> None:
        """Records the histograms of a candidate."""
        attributes = {
            names.GEN_AI_OPERATION: _OPERATION,
            names.GEN_AI_PROVIDER: _PROVIDER,
            names.GEN_AI_REQUEST_MODEL: model,
        }
        timings, outputs = event.timings, event.usage.output_tokens
        if timings.time_to_first_token_s is not None:
            self._seconds[names.TIME_TO_FIRST_TOKEN].record(timings.time_to_first_token_s, attributes)
        if outputs > 1:
            self._seconds[names.TIME_PER_OUTPUT_TOKEN].record(timings.decode_s / (outputs - 1), attributes)
        if event.reason is FinishReason.ERROR:
            attributes[names.ERROR_TYPE] = event.reason.value
        total_s = timings.queue_s + timings.prefill_s + timings.decode_s + timings.preempted_s
        self._seconds[names.REQUEST_DURATION].record(total_s, attributes)

    def step_done(self, worker_id: str, timings: StepTimings) -> None:
        """Records the histograms of a step."""
        attributes = {names.WORKER_ID: worker_id}
        self._seconds[names.STEP_FORWARD].record(timings.forward_s, attributes)
        self._seconds[names.STEP_SAMPLING].record(timings.sampling_s, attributes)
        self._seconds[names.WORKER_GAP].record(timings.gap_s, attributes)

    def observe(self, snapshot: Callable[[], SchedulerState]) -> None:
        """Makes the instruments that read the state."""
        gauge, counter = self._meter.create_observable_gauge, self._meter.create_observable_counter

        def reading(read: readings.Reading) -> list[Callable[[CallbackOptions], Iterable[Observation]]]:
            return [
                lambda _options: [Observation(value, attributes) for value, attributes in read(snapshot())]
            ]

        gauge(names.REQUESTS_RUNNING, reading(readings.running), "{request}")
        gauge(names.REQUESTS_WAITING, reading(readings.waiting), "{request}")
        gauge(names.KV_BLOCKS, reading(readings.kv_blocks), "{block}")
        counter(names.REQUESTS, reading(readings.outcomes), "{request}")
        for name, (field, unit) in names.COUNTER_FIELDS.items():
            counter(name, reading(readings.count_of(field)), unit)


def _wanted(signal: str) -> bool:
    """Whether OTEL_* variables name a place to send this signal to, and do not switch it off."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if os.environ.get(f"OTEL_{signal}_EXPORTER", "otlp") != "otlp":
        return False
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    return any(os.environ.get(variable) for variable in endpoints)


def _resource() -> Resource:
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    return Resource.create({} if named else {"service.name": "tidegate-scheduler"})
