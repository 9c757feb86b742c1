"""A worker's spans: of stays in slots and of steps, from plans, results and notices in any order."""

from __future__ import annotations

import numpy as np
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tidegate_telemetry import names
from tidegate_telemetry.exporting import Outlets
from tidegate_telemetry.histogram import MemoryReader
from tidegate_telemetry.spans import SpanRecorder, new_context, traceparent
from worker_service.plan import Admission, Plan, Result, Sampling, Timings
from worker_service.telemetry import Telemetry
from worker_service.telemetry_spans import StreamSpans

NONE = np.empty(0, np.int32)
REQUEST = new_context()
STEP = new_context()


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def admission(slot: int, *, traced: bool = True, tokens: int = 6, computed: int = 2) -> Admission:
    header = traceparent(REQUEST) if traced else ""
    ids = np.arange(tokens, dtype=np.int32)
    return Admission(slot, f"r{slot}/0", ids, tokens, computed, column(1, 2), Sampling(), header)


def plan(seq: int, rows: dict[int, int], *, admitted=(), released=(), header: str = "") -> Plan:
    return Plan(
        seq=seq,
        released=column(*released),
        admitted=tuple(admitted),
        copy_sources=NONE,
        copy_destinations=NONE,
        slots=column(*rows),
        num_tokens=column(*rows.values()),
        block_rows=NONE,
        block_ids=NONE,
        traceparent=header,
    )


def result(seq: int, *sampled: int) -> Result:
    """A step of 50 ms that begins at seq x 100 ms."""
    at = seq * 100_000_000
    timings = Timings(at - 5_000_000, at, at + 10_000_000, at + 40_000_000, at + 50_000_000, 7_000_000)
    return Result(seq, column(*sampled), np.zeros(len(sampled), np.int32), NONE, None, timings)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter) -> StreamSpans:
    return StreamSpans(SpanRecorder(SimpleSpanProcessor(exporter), Resource({})), "w1", num_slots=4)


def run_three_steps(spans: StreamSpans) -> None:
    """Two chunks of two tokens, then a decode."""
    spans.executed(plan(1, {0: 2}, admitted=[admission(0)]), result(1))
    spans.executed(plan(2, {0: 2}), result(2, 0))
    spans.executed(plan(3, {0: 1}), result(3, 0))


def test_a_stay_becomes_a_prefill_and_a_decode(spans, exporter):
    run_three_steps(spans)
    spans.notice([], [(0, 1)])
    prefill, decode = exporter.get_finished_spans()
    assert (prefill.name, decode.name) == (names.SPAN_WORKER_PREFILL, names.SPAN_WORKER_DECODE)
    assert prefill.parent.span_id == decode.parent.span_id == REQUEST.span_id
    assert prefill.context.trace_id == decode.context.trace_id == REQUEST.trace_id
    assert prefill.end_time - prefill.start_time == 150_000_000
    assert decode.start_time == prefill.end_time
    assert decode.end_time - decode.start_time == 100_000_000
    assert prefill.attributes[names.TOKENS] == 4
    assert prefill.attributes[names.CACHED_TOKENS] == 2
    assert (prefill.attributes[names.STEPS], decode.attributes[names.STEPS]) == (2, 1)
    assert decode.attributes[names.TOKENS] == 1
    spans.close()
    assert len(exporter.get_finished_spans()) == 2


def test_a_stay_also_ends_with_its_release_and_with_the_stream(spans, exporter):
    run_three_steps(spans)
    spans.executed(plan(4, {1: 6}, admitted=[admission(1)], released=[0]), result(4, 1))
    assert len(exporter.get_finished_spans()) == 2
    spans.close()
    assert [span.name for span in exporter.get_finished_spans()][2:] == [names.SPAN_WORKER_PREFILL]


def test_a_notice_about_an_earlier_stay_leaves_the_next_one_alone(spans, exporter):
    run_three_steps(spans)
    spans.executed(plan(4, {0: 6}, admitted=[admission(0)], released=[0]), result(4, 0))
    spans.notice([], [(0, 1)])
    assert len(exporter.get_finished_spans()) == 2
    spans.executed(plan(5, {0: 1}), result(5, 0))
    spans.notice([], [(0, 4)])
    assert len(exporter.get_finished_spans()) == 4


def test_a_stay_that_ended_before_its_first_result_has_no_spans(spans, exporter):
    spans.notice([], [(0, 1)])
    run_three_steps(spans)
    spans.close()
    assert exporter.get_finished_spans() == ()


def test_requests_that_are_not_sampled_have_no_spans(spans, exporter):
    spans.executed(plan(1, {0: 4}, admitted=[admission(0, traced=False)]), result(1, 0))
    spans.close()
    assert exporter.get_finished_spans() == ()


def test_steps_are_recorded_when_the_scheduler_wants_them(spans, exporter):
    header = traceparent(STEP)
    spans.executed(plan(1, {0: 2, 1: 1}, header=header), result(1))
    spans.executed(plan(2, {0: 2}, header=header), result(2))
    spans.notice([1, 3], [])
    (first,) = exporter.get_finished_spans()
    assert first.name == names.SPAN_STEP_EXECUTE
    assert (first.parent.span_id, first.context.trace_id) == (STEP.span_id, STEP.trace_id)
    assert first.attributes[names.STEP_SEQ] == 1
    assert first.attributes[names.STEP_ROWS] == 2
    assert first.attributes[names.TOKENS] == 3
    assert first.attributes[names.PHASE_S["forward"]] == 0.03
    assert first.attributes[names.PHASE_S["gap"]] == 0.007
    spans.notice([1], [])
    spans.executed(plan(3, {0: 2}, header=header), result(3))
    seqs = [span.attributes[names.STEP_SEQ] for span in exporter.get_finished_spans()]
    assert seqs == [1, 3]


def test_metrics_count_steps_and_tokens():
    reader = MemoryReader()
    telemetry = Telemetry(Outlets(metric_readers=[reader]))
    stream = telemetry.stream("w1", 4)
    stream.executed(plan(1, {0: 4, 1: 2}), result(1, 0))
    stream.executed(plan(2, {0: 1}), result(2, 0))
    points = {
        metric.name: list(metric.data.data_points)
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    tokens = {point.attributes[names.KIND]: point.value for point in points[names.EXECUTOR_TOKENS.name]}
    assert tokens == {"computed": 7, "sampled": 2}
    assert points[names.EXECUTOR_STEPS.name][0].value == 2
    assert points[names.EXECUTOR_ROWS.name][0].sum == 3
    phases = {point.attributes[names.PHASE]: point.sum for point in points[names.EXECUTOR_PHASES.name]}
    assert phases == pytest.approx({"wait": 0.01, "prepare": 0.02, "forward": 0.06, "sampling": 0.02})
    assert points[names.EXECUTOR_GAP.name][0].sum == pytest.approx(0.014)
    telemetry.shutdown()
