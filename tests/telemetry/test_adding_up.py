"""Where a request's time went adds up, and everything that tells of it tells the same."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from itertools import pairwise

import pytest
from engine_harness import Cluster, FakeSink
from fake_worker import FakeWorker
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.telemetry import Telemetry
from tidegate_telemetry import names
from tidegate_telemetry.exporting import Outlets
from tidegate_telemetry.histogram import MemoryReader

NUM_REQUESTS = 64
PHASES = (names.SPAN_QUEUE, names.SPAN_PREFILL, names.SPAN_DECODE, names.SPAN_PREEMPTED)


class Outcome:
    """What a load of 64 requests left behind."""

    def __init__(
        self, spans: list[ReadableSpan], sinks: dict[str, FakeSink], points: dict[str, list]
    ) -> None:
        self.sinks = sinks
        self.points = points
        self.steps = [span for span in spans if span.name == names.SPAN_STEP]
        roots = [span for span in spans if span.name.startswith("text_completion ")]
        self.roots = {span.attributes[names.GEN_AI_RESPONSE_ID]: span for span in roots}
        self.children = defaultdict(list)
        by_id = {span.context.span_id: request_id for request_id, span in self.roots.items()}
        for span in spans:
            if span.parent is not None and span.parent.span_id in by_id:
                self.children[by_id[span.parent.span_id]].append(span)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return asyncio.run(run_load())


async def run_load() -> Outcome:
    exporter, reader = InMemorySpanExporter(), MemoryReader()
    telemetry = Telemetry(Outlets(SimpleSpanProcessor(exporter), [reader]))
    cluster = Cluster(SchedulerConfig(max_num_seqs=16, watermark=0.0), telemetry=telemetry)
    dying = await cluster.add(FakeWorker(num_blocks=60, step_delay_s=0.001))
    await cluster.add(FakeWorker(num_blocks=60, step_delay_s=0.001))
    sinks = {f"r{i}": cluster.submit(f"r{i}", prompt=10 + i % 7, max_tokens=24) for i in range(NUM_REQUESTS)}
    await cluster.until(lambda: sum(sink.done.is_set() for sink in sinks.values()) >= NUM_REQUESTS // 3)
    await dying.stop()
    await cluster.finish()
    counters = cluster.engine.state().counters
    assert counters.preemptions > 0
    assert counters.requests_moved > 0
    points = {
        metric.name: list(metric.data.data_points)
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    await cluster.close()
    telemetry.shutdown()
    return Outcome(list(exporter.get_finished_spans()), sinks, points)


def seconds(span: ReadableSpan) -> float:
    return (span.end_time - span.start_time) / 1e9


def test_children_cover_the_inference_span_without_overlap(outcome):
    assert len(outcome.roots) == NUM_REQUESTS
    for request_id, root in outcome.roots.items():
        children = sorted(outcome.children[request_id], key=lambda span: span.start_time)
        assert {span.name for span in children} <= set(PHASES)
        assert root.start_time <= children[0].start_time
        assert children[-1].end_time <= root.end_time
        assert all(before.end_time <= after.start_time for before, after in pairwise(children))
        unclaimed_s = seconds(root) - sum(map(seconds, children))
        assert unclaimed_s <= max(0.001, seconds(root) / 100), request_id


def test_preemption_and_failover_are_phases_of_their_own(outcome):
    preempted = [
        (request_id, span)
        for request_id, children in outcome.children.items()
        for span in children
        if span.name == names.SPAN_PREEMPTED
    ]
    assert preempted
    for request_id, _ in preempted:
        assert outcome.roots[request_id].attributes[names.PREEMPTIONS] > 0
    reasons = {
        event.attributes[names.PREEMPTION_REASON]
        for root in outcome.roots.values()
        for event in root.events
        if event.name == names.EVENT_PREEMPTED
    }
    assert {"blocks", "worker_lost"} <= reasons


def test_what_the_client_is_told_and_the_spans_agree(outcome):
    for request_id, sink in outcome.sinks.items():
        timings = sink.finished[0].timings
        told = dict(
            zip(
                PHASES,
                (timings.queue_s, timings.prefill_s, timings.decode_s, timings.preempted_s),
                strict=True,
            )
        )
        for phase in PHASES:
            spans = [span for span in outcome.children[request_id] if span.name == phase]
            assert math.isclose(sum(map(seconds, spans)), told[phase], abs_tol=1e-5), (request_id, phase)
        root = outcome.roots[request_id]
        (first,) = [event for event in root.events if event.name == names.EVENT_FIRST_TOKEN]
        first_s = (first.timestamp - root.start_time) / 1e9
        assert math.isclose(first_s, timings.time_to_first_token_s, abs_tol=1e-6)


def test_metrics_and_what_clients_are_told_agree(outcome):
    ends = [sink.finished[0] for sink in outcome.sinks.values()]
    expected = {
        names.TIME_TO_FIRST_TOKEN: [end.timings.time_to_first_token_s for end in ends],
        names.TIME_PER_OUTPUT_TOKEN: [end.timings.decode_s / (end.usage.output_tokens - 1) for end in ends],
        names.REQUEST_QUEUE: [end.timings.queue_s for end in ends],
        names.REQUEST_DURATION: [seconds(root) for root in outcome.roots.values()],
    }
    for metric, values in expected.items():
        (point,) = outcome.points[metric.name]
        assert point.count == NUM_REQUESTS
        assert math.isclose(point.sum, sum(values), abs_tol=1e-4), metric.name
        assert math.isclose(point.max, max(values), abs_tol=1e-5)
        assert sum(point.bucket_counts) == NUM_REQUESTS


def test_every_stay_links_its_first_its_slowest_and_its_last_step(outcome):
    steps = {span.context.span_id: span for span in outcome.steps}
    for request_id, root in outcome.roots.items():
        stays = 1 + root.attributes[names.PREEMPTIONS]
        roles = [link.attributes[names.STEP_ROLE] for link in root.links]
        assert roles.count("first") <= stays
        assert roles.count("first") == roles.count("slowest") == roles.count("last") > 0
        seqs = [steps[link.context.span_id].attributes[names.STEP_SEQ] for link in root.links]
        for first, slowest, last in zip(*[iter(seqs)] * 3, strict=True):
            assert first <= slowest <= last, request_id


def test_a_step_links_back_to_a_request_that_links_it(outcome):
    told = {
        root.context.span_id: {link.context.span_id for link in root.links} for root in outcome.roots.values()
    }
    for step in outcome.steps:
        assert any(step.context.span_id in told[link.context.span_id] for link in step.links)


def test_steps_are_traces_of_their_own_and_few(outcome):
    assert all(step.parent is None for step in outcome.steps)
    assert len({step.context.span_id for step in outcome.steps}) == len(outcome.steps)
    assert len(outcome.steps) <= 3 * sum(
        1 + root.attributes[names.PREEMPTIONS] for root in outcome.roots.values()
    )
    assert all(1 <= len(step.links) <= 8 for step in outcome.steps)


def test_waiting_has_its_reasons_with_numbers(outcome):
    events = [
        event
        for children in outcome.children.values()
        for span in children
        if span.name in (names.SPAN_QUEUE, names.SPAN_PREEMPTED)
        for event in span.events
    ]
    assert {event.name for event in events} == {names.EVENT_WAITING}
    reasons = {event.attributes[names.WAIT_REASON] for event in events}
    assert any("blocks" in reason or "slots" in reason for reason in reasons), reasons
    by_blocks = [event for event in events if "needs" in event.attributes[names.WAIT_TEXT]]
    for event in by_blocks:
        assert event.attributes[names.WAIT_LOOKS] >= 1


def test_prefill_chunks_add_up_to_what_was_computed(outcome):
    for request_id, sink in outcome.sinks.items():
        if sink.finished[0].usage.preemptions:
            continue
        chunks = [
            event
            for span in outcome.children[request_id]
            for event in span.events
            if event.name == names.EVENT_CHUNK
        ]
        usage = sink.finished[0].usage
        computed = sum(event.attributes[names.TOKENS] for event in chunks)
        assert computed == usage.prompt_tokens - usage.cached_tokens, request_id
