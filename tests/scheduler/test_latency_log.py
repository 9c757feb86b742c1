"""How long tokens took: by interval, by quantile, and as operators ask for it."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from engine_harness import Cluster, FakeSink, spec
from fake_worker import FakeWorker

from scheduler_service.admin_api import AdminApi
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.latency_log import KEPT_INTERVALS, Durations, LatencyLog
from scheduler_service.step_log import Step
from tidegate.admin.v1 import admin_pb2 as pb
from tidegate.admin.v1 import admin_pb2_grpc as pb_grpc


def step(ended: float, prefill: int = 0, decode: int = 0) -> Step:
    return Step(1, 1, ended, 0.01, prefill, decode, 64, 1)


def near(value: float) -> object:
    return pytest.approx(value, rel=0.05)


def test_quantiles_are_within_a_twentieth():
    durations = Durations()
    for milliseconds in range(1, 1001):
        durations.add(milliseconds / 1e3)
    assert durations.quantiles_ms() == (near(500), near(950), near(990))
    assert Durations().quantiles_ms() == (0.0, 0.0, 0.0)


def test_what_is_out_of_range_counts_as_the_nearest():
    durations = Durations()
    durations.add(0.0)
    durations.add(1e9)
    assert durations.quantiles_ms() == (near(0.1), near(215e3), near(215e3))


def test_the_time_between_two_results_counts_for_each_request_that_was_generating():
    log = LatencyLog(1000.0)
    log.step("w", step(1001.0, prefill=9), 1, [0.5])
    log.step("w", step(1001.2, decode=3), 3, [])
    log.step("v", step(1001.3, decode=5), 5, [])  # the first of its stream: after nothing
    log.forget("w")
    log.step("w", step(1009.0, decode=2), 2, [])
    recent, seconds = log.recent(1009.5)
    assert (recent.between_tokens.num, recent.first_token.num) == (3, 1)
    assert recent.between_tokens.quantiles_ms() == (near(200), near(200), near(200))
    assert (recent.prefill_tokens, recent.output_tokens, seconds) == (9, 11, 9.5)


def test_intervals_without_steps_are_left_out_and_old_ones_go():
    log = LatencyLog(0.0)
    for second in (5.0, 15.0, 16.0, 105.0):
        log.step("w", step(second), 1, [])
    assert [(each.started, each.output_tokens) for each in log.intervals(110.0)] == [
        (0.0, 1),
        (10.0, 2),
        (100.0, 1),
    ]
    assert log.recent(110.0)[0].output_tokens == 1
    an_hour = KEPT_INTERVALS * 10.0
    assert [each.started for each in log.intervals(an_hour + 10.0)] == [100.0]
    assert log.intervals(2 * an_hour) == []


async def test_operators_ask_for_it():
    cluster = Cluster(SchedulerConfig())
    await cluster.add(FakeWorker())
    server = grpc.aio.server()
    pb_grpc.add_AdminServiceServicer_to_server(
        AdminApi(cluster.engine, cluster.registry, cluster.fleet), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sinks = [FakeSink() for _ in range(3)]
    for i, sink in enumerate(sinks):
        cluster.engine.submit(spec(f"r{i}", sink, prompt=9, max_tokens=5))
    async with asyncio.timeout(20):
        await cluster.until(lambda: cluster.engine.state().counters.requests_finished == 3)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = await pb_grpc.AdminServiceStub(channel).GetLatency(pb.GetLatencyRequest())
    await server.stop(None)
    await cluster.close()
    recent = answer.recent
    assert list(recent.time_to_first_token.counts) == [3]
    assert list(recent.between_tokens.counts) == [12]
    assert (list(recent.output_tokens), list(recent.prefill_tokens)) == ([15], [27])
    assert 0 < recent.time_to_first_token.p50_ms[0] <= recent.time_to_first_token.p99_ms[0]
    assert sum(answer.intervals.output_tokens) == 15
    assert answer.interval_seconds == 10.0
