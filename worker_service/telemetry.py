"""Owns what a worker tells of itself: metrics and spans. Off unless OTEL_* or an option asks for them.

Modules named telemetry* and the package tidegate_telemetry are all that import OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Callable

from tidegate_telemetry import names
from tidegate_telemetry.exporting import Outlets, meter_provider, resource, shut_down
from tidegate_telemetry.histogram import Histograms
from tidegate_telemetry.observing import Values, observable
from tidegate_telemetry.spans import SpanRecorder
from worker_service.plan import Plan, Result
from worker_service.telemetry_spans import StreamSpans
from worker_service.worker import Phase, Worker

_SERVICE_NAME = "tidegate-worker"


class Telemetry:
    """Traces and metrics of a worker. Without a processor or a reader, that half is off."""

    def __init__(self, outlets: Outlets | None = None) -> None:
        self._outlets = outlets or Outlets()
        self._recorder: SpanRecorder | None = None
        self._metrics: _Metrics | None = None
        if self._outlets.span_processor is not None:
            self._recorder = SpanRecorder(self._outlets.span_processor, resource(_SERVICE_NAME))
        if self._outlets.metric_readers:
            self._metrics = _Metrics(self._outlets)

    @classmethod
    def from_environment(cls, metrics_address: tuple[str, int] | None) -> Telemetry:
        """What OTEL_* variables ask for; Prometheus can scrape the address, if there is one. Raises OSError
        where it cannot be bound."""
        return cls(Outlets.from_environment(address=metrics_address))

    @property
    def metrics_port(self) -> int:
        """Port that Prometheus can scrape; 0 where there is none."""
        return self._outlets.metrics_port

    def observe(self, worker: Worker) -> None:
        """Makes the instruments that read the worker's state, from other threads."""
        if self._metrics is not None:
            self._metrics.observe(worker)

    def stream(self, worker_id: str, num_slots: int) -> StreamTelemetry:
        """For a step stream that begins. The scheduler calls this worker `worker_id`."""
        spans = None if self._recorder is None else StreamSpans(self._recorder, worker_id, num_slots)
        return StreamTelemetry(self._metrics, spans)

    def shutdown(self) -> None:
        """Sends what is left. Blocks for at most a few seconds."""
        ends: list[Callable[[], object]] = []
        if self._outlets.span_processor is not None:
            ends.append(self._outlets.span_processor.shutdown)
        if self._metrics is not None:
            ends.append(self._metrics.provider.shutdown)
        shut_down(*ends)


class StreamTelemetry:
    """What is noted of one step stream."""

    def __init__(self, metrics: _Metrics | None = None, spans: StreamSpans | None = None) -> None:
        self._metrics = metrics
        self._spans = spans

    def executed(self, plan: Plan, result: Result) -> None:
        """A step has its result. Plans come in order."""
        if self._metrics is not None:
            self._metrics.executed(plan, result)
        if self._spans is not None:
            self._spans.executed(plan, result)

    def notice(self, step_seqs: list[int], ended: list[tuple[int, int]]) -> None:
        """What the scheduler has learnt: steps to record, and stays that are over (slot, admitting seq)."""
        if self._spans is not None:
            self._spans.notice(step_seqs, ended)

    def close(self) -> None:
        """The stream has ended."""
        if self._spans is not None:
            self._spans.close()


class _Metrics:
    """Counts that are told on the event loop, and read from other threads."""

    def __init__(self, outlets: Outlets) -> None:
        histograms = Histograms()
        self.provider = meter_provider(outlets, resource(_SERVICE_NAME), histograms)
        self._meter = self.provider.get_meter("tidegate")
        self._phases = histograms.new(names.EXECUTOR_PHASES)
        self._gap = histograms.new(names.EXECUTOR_GAP).series()
        self._rows = histograms.new(names.EXECUTOR_ROWS).series()
        self._num_steps = 0
        self._computed = 0  # tokens
        self._sampled = 0
        observable(self._meter, names.EXECUTOR_STEPS, lambda: [(self._num_steps, {})])
        observable(self._meter, names.EXECUTOR_TOKENS, self._read_tokens)
        observable(self._meter, names.TELEMETRY_DROPPED, outlets.drops.read)

    def executed(self, plan: Plan, result: Result) -> None:
        for phase, duration_ns in result.timings.phases_ns().items():
            series = self._gap if phase == "gap" else self._phases.series(phase)
            series.record(duration_ns / 1e9)
        self._rows.record(len(plan.slots))
        self._num_steps += 1
        self._computed += int(plan.num_tokens.sum())
        self._sampled += len(result.slots)

    def observe(self, worker: Worker) -> None:
        def state() -> Values:
            return [(int(worker.phase is phase), {names.STATE: phase.value}) for phase in Phase]

        def kv_memory() -> Values:
            engine = worker.engine
            if engine is None:
                return []
            limits = engine.limits
            return [(limits.num_blocks * limits.block_size * engine.kv_bytes_per_token, {})]

        observable(self._meter, names.EXECUTOR_PHASE, state)
        observable(self._meter, names.EXECUTOR_KV, kv_memory)

    def _read_tokens(self) -> Values:
        return [(self._computed, {names.KIND: "computed"}), (self._sampled, {names.KIND: "sampled"})]
