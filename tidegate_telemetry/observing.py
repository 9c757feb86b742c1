"""Owns gauges and counters that are read when somebody collects them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from tidegate_telemetry.names import Instrument, Metric

Values = list[tuple[int, dict[str, str]]]
"""Each with its labels."""


def observable(meter: Meter, metric: Metric, read: Callable[[], Values]) -> None:
    """Makes the instrument. `read` is called from other threads."""

    def observe(_options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, labels) for value, labels in read()]

    if metric.instrument is Instrument.COUNTER:
        meter.create_observable_counter(metric.name, [observe], metric.unit, metric.description)
    else:
        meter.create_observable_gauge(metric.name, [observe], metric.unit, metric.description)
