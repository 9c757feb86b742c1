"""Histograms: bounds are inclusive, series have a limit, and every reader sees the same."""

from __future__ import annotations

import pytest

from tidegate_telemetry.histogram import Histogram
from tidegate_telemetry.names import Instrument, Metric

METRIC = Metric("m", Instrument.HISTOGRAM, "s", "A test.", ("worker", "kind"), (0.1, 1.0, 10.0))


def test_a_value_on_a_bound_belongs_below_it():
    histogram = Histogram(METRIC)
    series = histogram.series("w1", "a")
    for value in (0.05, 0.1, 0.100001, 1.0, 10.0, 11.0):
        series.record(value)
    (point,) = histogram.read(now_ns=5).data.data_points
    assert point.bucket_counts == [2, 2, 1, 1]
    assert (point.count, point.min, point.max) == (6, 0.05, 11.0)
    assert point.sum == pytest.approx(22.250001)
    assert point.explicit_bounds == METRIC.bounds
    assert point.attributes == {"worker": "w1", "kind": "a"}


def test_labels_that_are_empty_are_left_out_and_empty_series_are_not_told():
    histogram = Histogram(METRIC)
    histogram.series("w1", "").record(1)
    histogram.series("w2", "b")
    (point,) = histogram.read(now_ns=5).data.data_points
    assert point.attributes == {"worker": "w1"}


def test_the_number_of_series_is_bounded():
    histogram = Histogram(METRIC)
    for i in range(2_100):
        histogram.series(f"w{i}", "a").record(1)
    assert len(histogram.read(now_ns=5).data.data_points) == 2_000
