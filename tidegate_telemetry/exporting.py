"""Owns the way out: OTLP where OTEL_* variables ask for it, a Prometheus endpoint where an option does.

Receivers that are away, slow or dead cost what is not delivered, which is counted, and nothing else: queues
are bounded, and exporters have threads of their own.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from wsgiref.simple_server import WSGIServer

from opentelemetry.context import Context
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricReader, MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry, start_http_server

from tidegate_telemetry import names
from tidegate_telemetry.histogram import Histograms, PeriodicReader, WithHistograms

_SHUTDOWN_S = 5.0
_MAX_QUEUED_SPANS = 8_192

DROPPED_SPANS_QUEUE = ("traces", "queue_full")
DROPPED_SPANS_EXPORT = ("traces", "export_failed")
DROPPED_METRICS = ("metrics", "export_failed")


class Drops:
    """How much telemetry did not reach its receiver, by signal and reason. A count has one writing thread."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys((DROPPED_SPANS_QUEUE, DROPPED_SPANS_EXPORT, DROPPED_METRICS), 0)

    def add(self, what: tuple[str, str], num: int) -> None:
        """Counts `num` more."""
        self.counts[what] += num

    def read(self) -> list[tuple[int, dict[str, str]]]:
        """The counts with their labels."""
        return [
            (count, {names.SIGNAL: signal, names.REASON: reason})
            for (signal, reason), count in self.counts.items()
        ]


class SpanOutlet(SpanProcessor):
    """Queues spans for an exporter. What comes while the queue is full is dropped, and counted."""

    def __init__(self, exporter: SpanExporter, drops: Drops, max_queued: int = _MAX_QUEUED_SPANS) -> None:
        self._drops = drops
        self._max_queued = max_queued
        self._num_queued = 0  # in all, since the start; written by the threads that end spans
        self._exporter = _CountedSpans(exporter, drops)
        self._batches = BatchSpanProcessor(self._exporter, max_queue_size=max_queued)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing is known yet."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a span, if it is sampled."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._num_queued - self._exporter.num_taken >= self._max_queued:
            self._drops.add(DROPPED_SPANS_QUEUE, 1)
            return
        self._num_queued += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        """Sends what is left."""
        self._batches.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Sends what is queued now."""
        return self._batches.force_flush(timeout_millis)


class _CountedSpans(SpanExporter):
    def __init__(self, exporter: SpanExporter, drops: Drops) -> None:
        self._exporter = exporter
        self._drops = drops
        self.num_taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        try:
            result = self._exporter.export(spans)
        except Exception:
            result = SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            self._drops.add(DROPPED_SPANS_EXPORT, len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _CountedMetrics(MetricExporter):
    def __init__(self, exporter: MetricExporter, drops: Drops) -> None:
        super().__init__(exporter._preferred_temporality, exporter._preferred_aggregation)
        self._exporter = exporter
        self._drops = drops

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: object
    ) -> MetricExportResult:
        try:
            result = self._exporter.export(metrics_data, timeout_millis)
        except Exception:
            result = MetricExportResult.FAILURE
        if result is not MetricExportResult.SUCCESS:
            self._drops.add(DROPPED_METRICS, 1)
        return result

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: object) -> None:
        self._exporter.shutdown(timeout_millis)


class PrometheusEndpoint(WithHistograms, PrometheusMetricReader):
    """Answers scrapes of `/metrics` on an address. Labels are those of the metrics alone."""

    def __init__(self, host: str, port: int) -> None:
        """Port 0 is any free one. Raises OSError where the address cannot be bound."""
        registry = CollectorRegistry(auto_describe=False)
        super().__init__(scope_info_enabled=False, registry=registry)
        self._server: WSGIServer
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            why = error.strerror or str(error)
            raise OSError(f"no metrics on {host}:{port}: {why}; choose another --metrics-port") from error
        self.port: int = self._server.server_port

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: object) -> None:
        """Answers no more."""
        self._server.shutdown()
        self._server.server_close()
        super().shutdown(timeout_millis)


class Outlets:
    """Where spans and metrics of a process go. Nothing there: that half of telemetry is off."""

    def __init__(
        self,
        span_processor: SpanProcessor | None = None,
        metric_readers: Iterable[MetricReader] = (),
        drops: Drops | None = None,
    ) -> None:
        self.span_processor = span_processor
        self.metric_readers = tuple(metric_readers)
        self.drops = drops or Drops()

    @classmethod
    def from_environment(cls, *, metrics: bool = True, address: tuple[str, int] | None = None) -> Outlets:
        """What OTEL_* variables ask for, and an endpoint at `address`. Without `metrics`, traces only.

        Raises:
            OSError: the address cannot be bound.
        """
        drops = Drops()
        processor: SpanProcessor | None = None
        readers: list[MetricReader] = []
        if _wanted("TRACES"):
            from tidegate_telemetry.otlp import FastSpanExporter

            processor = SpanOutlet(FastSpanExporter(), drops)
        if metrics and _wanted("METRICS"):
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

            readers.append(PeriodicReader(_CountedMetrics(OTLPMetricExporter(), drops)))
        if metrics and address is not None:
            readers.append(PrometheusEndpoint(*address))
        if processor is not None or readers:
            # Of each batch that fails, but not of each try.
            logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        return cls(processor, readers, drops)

    @property
    def metrics_port(self) -> int:
        """Port of the Prometheus endpoint; 0 where there is none."""
        ports = [each.port for each in self.metric_readers if isinstance(each, PrometheusEndpoint)]
        return ports[0] if ports else 0


def shut_down(*ends: Callable[[], object]) -> None:
    """Calls each, side by side, and waits for 5 s at most: a dead receiver must not hold up an exit."""
    threads = [threading.Thread(target=end, daemon=True) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SHUTDOWN_S)


def resource(service_name: str) -> Resource:
    """Who this process is, unless OTEL_* variables say so themselves."""
    given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    named = "OTEL_SERVICE_NAME" in os.environ or names.SERVICE_NAME in given
    return Resource.create({} if named else {names.SERVICE_NAME: service_name})


def meter_provider(outlets: Outlets, about: Resource, histograms: Histograms) -> MeterProvider:
    """The SDK's, which every reader reads, and the histograms for each of them."""
    for reader in outlets.metric_readers:
        if isinstance(reader, WithHistograms):
            reader.histograms = histograms
    return MeterProvider(outlets.metric_readers, about, shutdown_on_exit=False)


def _wanted(signal: str) -> bool:
    """Whether OTEL_* variables name a place to send this signal to, and do not switch it off."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if os.environ.get(f"OTEL_{signal}_EXPORTER", "otlp") != "otlp":
        return False
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    return any(os.environ.get(variable) for variable in endpoints)
