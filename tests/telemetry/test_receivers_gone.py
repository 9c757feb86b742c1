"""A receiver that is away, slow or dying costs what it does not get, and nothing else."""

from __future__ import annotations

import asyncio
import time

import pytest
from engine_harness import Cluster
from fake_worker import FakeWorker
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from telemetry.receivers import FakeTraceService

from scheduler_service.telemetry import Telemetry
from tidegate_telemetry import names
from tidegate_telemetry.exporting import DROPPED_SPANS_EXPORT, DROPPED_SPANS_QUEUE, Drops, Outlets, SpanOutlet
from tidegate_telemetry.histogram import MemoryReader


async def serve(telemetry: Telemetry, num_requests: int) -> None:
    """Every request gives its right tokens, whatever becomes of its spans."""
    cluster = Cluster(telemetry=telemetry)
    await cluster.add(FakeWorker())
    for i in range(num_requests):
        cluster.submit(f"r{i}", max_tokens=5)
    await cluster.finish()
    await cluster.close()


def outlet_to(endpoint: str, max_queued: int = 8_192) -> tuple[SpanOutlet, Drops]:
    drops = Drops()
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=True, timeout=1)
    return SpanOutlet(exporter, drops, max_queued), drops


async def test_a_receiver_that_is_away(unused_tcp_port):
    outlet, drops = outlet_to(f"http://127.0.0.1:{unused_tcp_port}")
    telemetry = Telemetry(Outlets(outlet, drops=drops))
    await serve(telemetry, 3)
    await asyncio.to_thread(outlet.force_flush)
    # Three requests with queue, prefill and decode, and their steps.
    assert drops.counts[DROPPED_SPANS_EXPORT] >= 12
    assert drops.counts[DROPPED_SPANS_QUEUE] == 0
    await asyncio.to_thread(telemetry.shutdown)


async def test_a_receiver_that_refuses():
    receiver = FakeTraceService()
    receiver.refused = True
    outlet, drops = outlet_to(receiver.endpoint)
    telemetry = Telemetry(Outlets(outlet, drops=drops))
    await serve(telemetry, 2)
    await asyncio.to_thread(outlet.force_flush)
    assert drops.counts[DROPPED_SPANS_EXPORT] >= 8
    assert receiver.spans == []
    receiver.stop()
    await asyncio.to_thread(telemetry.shutdown)


async def test_a_slow_receiver_fills_the_queue_and_no_more():
    receiver = FakeTraceService()
    receiver.held.clear()
    outlet, drops = outlet_to(receiver.endpoint, max_queued=512)
    telemetry = Telemetry(Outlets(outlet, drops=drops))
    for _ in range(3):
        await serve(telemetry, 60)
    assert drops.counts[DROPPED_SPANS_QUEUE] > 0
    started = time.monotonic()
    await asyncio.to_thread(telemetry.shutdown)
    assert time.monotonic() - started < 20  # the limit is 5 s, so a bound that only a hang exceeds
    receiver.stop()


async def test_a_receiver_that_dies_and_comes_back_gets_later_spans():
    receiver = FakeTraceService()
    outlet, drops = outlet_to(receiver.endpoint)
    telemetry = Telemetry(Outlets(outlet, drops=drops))
    await serve(telemetry, 1)
    await asyncio.to_thread(outlet.force_flush)
    assert len(receiver.named("text_completion fake")) == 1
    receiver.refused = True
    await serve(telemetry, 1)
    await asyncio.to_thread(outlet.force_flush)
    dropped = drops.counts[DROPPED_SPANS_EXPORT]
    assert dropped > 0
    receiver.refused = False
    await serve(telemetry, 1)
    await asyncio.to_thread(outlet.force_flush)
    assert len(receiver.named("text_completion fake")) == 2
    assert drops.counts[DROPPED_SPANS_EXPORT] == dropped
    await asyncio.to_thread(telemetry.shutdown)
    receiver.stop()


def test_drops_are_a_metric():
    reader, drops = MemoryReader(), Drops()
    telemetry = Telemetry(Outlets(metric_readers=[reader], drops=drops))
    drops.add(DROPPED_SPANS_QUEUE, 3)
    (metric,) = (
        metric
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == names.TELEMETRY_DROPPED.name
    )
    values = {
        (point.attributes[names.SIGNAL], point.attributes[names.REASON]): point.value
        for point in metric.data.data_points
    }
    assert values[DROPPED_SPANS_QUEUE] == 3
    assert values[DROPPED_SPANS_EXPORT] == 0
    telemetry.shutdown()


@pytest.fixture
def unused_tcp_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
