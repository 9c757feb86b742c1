"""Owns histograms that cost under a microsecond a value, and their way into the SDK's readers.

The SDK's own take 8 us or more a value, and a step has nine of them. Values are recorded on one thread and
read on another: a reader may miss the value that is being recorded, no more.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import TYPE_CHECKING

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    HistogramDataPoint,
    InMemoryMetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.metrics.export import Metric as MetricData
from opentelemetry.sdk.metrics.export import MetricReader as _AnyReader
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from tidegate_telemetry.names import Metric

_SCOPE = InstrumentationScope("tidegate")
_MAX_SERIES = 2_000  # as the SDK's own limit


class Series:
    """The values that had the same labels."""

    __slots__ = ("attributes", "bounds", "counts", "max", "min", "sum")

    def __init__(self, attributes: dict[str, str], bounds: tuple[float, ...]) -> None:
        self.attributes = attributes
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.min = float("inf")
        self.max = float("-inf")

    def record(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        if value < self.min:
            self.min = value
        if value > self.max:
            self.max = value


class Histogram:
    """One metric. Keep the series of labels that come often."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._series: dict[tuple[str, ...], Series] = {}
        self._started_ns = time.time_ns()

    def series(self, *values: str) -> Series:
        """The series of these labels, in the metric's order. Empty ones are left out."""
        series = self._series.get(values)
        if series is None:
            named = zip(self.metric.labels, values, strict=False)
            series = Series({name: value for name, value in named if value}, self.metric.bounds)
            if len(self._series) < _MAX_SERIES:
                self._series[values] = series
        return series

    def read(self, now_ns: int) -> MetricData:
        """What was recorded since the start."""
        points = [
            HistogramDataPoint(
                attributes=each.attributes,
                start_time_unix_nano=self._started_ns,
                time_unix_nano=now_ns,
                count=sum(counts := list(each.counts)),
                sum=each.sum,
                bucket_counts=counts,
                explicit_bounds=each.bounds,
                min=each.min,
                max=each.max,
            )
            for each in list(self._series.values())
            if any(each.counts)
        ]
        data = HistogramData(points, AggregationTemporality.CUMULATIVE)
        return MetricData(self.metric.name, self.metric.description, self.metric.unit, data)


class Histograms:
    """All histograms of a process."""

    def __init__(self) -> None:
        self._all: list[Histogram] = []

    def new(self, metric: Metric) -> Histogram:
        """A histogram that readers see from now on."""
        histogram = Histogram(metric)
        self._all.append(histogram)
        return histogram

    def added_to(self, data: MetricsData) -> MetricsData:
        """What the SDK has collected, with the histograms."""
        now_ns = time.time_ns()
        metrics = [each for each in (one.read(now_ns) for one in self._all) if each.data.data_points]
        first, *others = data.resource_metrics
        scope = ScopeMetrics(_SCOPE, metrics, "")
        with_ours = ResourceMetrics(first.resource, [*first.scope_metrics, scope], first.schema_url)
        return MetricsData([with_ours, *others])


if TYPE_CHECKING:
    _Base = _AnyReader
else:
    _Base = object


class WithHistograms(_Base):
    """For a reader of the SDK: it sees `histograms`, too. Put it before the reader's class."""

    histograms: Histograms | None = None

    def _receive_metrics(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **more: object
    ) -> None:
        if self.histograms is not None and metrics_data.resource_metrics:
            metrics_data = self.histograms.added_to(metrics_data)
        super()._receive_metrics(metrics_data, timeout_millis, **more)  # type: ignore[safe-super]


class PeriodicReader(WithHistograms, PeriodicExportingMetricReader):
    """Pushes to an exporter."""


class MemoryReader(WithHistograms, InMemoryMetricReader):
    """Keeps what is collected, for tests and benchmarks."""
