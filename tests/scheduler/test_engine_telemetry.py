from __future__ import annotations

import asyncio
from itertools import pairwise

import grpc
import numpy as np
import pytest
from core_harness import Harness
from engine_harness import Cluster, FakeLink, FakeSink, spec
from fake_worker import FakeWorker
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from scheduler_service.config import ServiceConfig
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.events import Finished, FinishReason, Timings, Usage
from scheduler_service.core.step import StepPlan
from scheduler_service.engine import Engine
from scheduler_service.phases import phases
from scheduler_service.plan_codec import StepTimings
from scheduler_service.server import Service, from_other_thread
from scheduler_service.telemetry import Telemetry
from scheduler_service.workers import WorkerRegistry
from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc
from tidegate_telemetry import names
from tidegate_telemetry.exporting import Outlets
from tidegate_telemetry.histogram import MemoryReader

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def telemetry(exporter) -> Telemetry:
    return Telemetry(Outlets(SimpleSpanProcessor(exporter)))


def test_phases_leave_no_gap_and_split_computing_at_the_first_token():
    turns = [("queue", 0.0), ("prefill", 1.0), ("preempted", 2.0), ("prefill", 3.0), ("preempted", 6.0)]
    turns.append(("prefill", 7.0))
    assert phases(turns, 5.0, 9.0) == [
        ("queue", 0.0, 1.0),
        ("prefill", 1.0, 2.0),
        ("preempted", 2.0, 3.0),
        ("prefill", 3.0, 5.0),
        ("decode", 5.0, 6.0),
        ("preempted", 6.0, 7.0),
        ("decode", 7.0, 9.0),
    ]


def test_phases_without_a_first_token():
    assert phases([("queue", 0.0)], None, 2.0) == [("queue", 0.0, 2.0)]
    assert phases([("queue", 0.0), ("prefill", 1.0)], None, 2.0) == [("queue", 0, 1), ("prefill", 1, 2)]


async def run_one(telemetry: Telemetry, lose: bool = False) -> FakeLink:
    registry = WorkerRegistry()
    engine = Engine(SchedulerConfig(), registry, telemetry)
    link = FakeLink(engine, registry)
    link.connect()
    link.held = lose
    sink = FakeSink()
    engine.submit(spec("r1", sink, prompt=10, max_tokens=4))
    await asyncio.sleep(0.002)
    if lose:
        engine.worker_lost("w1", "gone")
        await asyncio.sleep(0.002)
        FakeLink(engine, registry).connect()
    await asyncio.wait_for(sink.done.wait(), 5)
    return link


async def test_a_request_is_one_span_whose_children_add_up(exporter, telemetry):
    await run_one(telemetry)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"text_completion fake", "queue", "prefill", "decode", "step"}
    root = spans["text_completion fake"]
    children = [spans[name] for name in ("queue", "prefill", "decode")]
    assert all(child.parent.span_id == root.context.span_id for child in children)
    assert [child.context.trace_id for child in children] == [root.context.trace_id] * 3
    assert children[0].start_time == root.start_time
    assert children[-1].end_time == root.end_time
    assert all(before.end_time == after.start_time for before, after in pairwise(children))
    assert [event.name for event in root.events] == ["admitted", "first_token", "finished"]
    assert root.attributes[names.GEN_AI_USAGE_INPUT_TOKENS] == 10
    assert root.attributes[names.GEN_AI_USAGE_OUTPUT_TOKENS] == 4
    assert root.attributes[names.GEN_AI_RESPONSE_FINISH_REASONS] == ("length",)
    assert root.attributes[names.GEN_AI_RESPONSE_ID] == "r1"


async def test_the_loss_of_a_worker_shows_as_a_phase(exporter, telemetry):
    await run_one(telemetry, lose=True)
    *others, root = exporter.get_finished_spans()
    phases_only = [span for span in others if span.name != "step"]
    spans = sorted(phases_only, key=lambda span: span.start_time)
    assert [span.name for span in spans] == ["queue", "prefill", "preempted", "prefill", "decode"]
    assert all(before.end_time == after.start_time for before, after in pairwise(spans))
    lost = next(event for event in root.events if event.name == "preempted")
    assert lost.attributes[names.PREEMPTION_REASON] == "worker_lost"
    assert root.attributes[names.PREEMPTIONS] == 1


async def test_a_refused_request_is_an_error_span(exporter, telemetry):
    engine = Engine(SchedulerConfig(), WorkerRegistry(), telemetry)
    engine.submit(spec("r1", FakeSink()))
    (span,) = exporter.get_finished_spans()
    assert span.attributes[names.ERROR_TYPE] == "unknown_model"
    assert not span.status.is_ok


async def test_every_candidate_has_its_phases(exporter, telemetry):
    registry = WorkerRegistry()
    engine = Engine(SchedulerConfig(), registry, telemetry)
    FakeLink(engine, registry).connect()
    sink = FakeSink(n=2)
    engine.submit(spec("r1", sink, n=2))
    await asyncio.wait_for(sink.done.wait(), 5)
    spans = exporter.get_finished_spans()
    candidates = [span.attributes[names.CANDIDATE] for span in spans if span.name == "decode"]
    assert sorted(candidates) == [0, 1]
    assert [span.name for span in spans].count("text_completion fake") == 1


def test_candidates_that_ended_in_an_earlier_process_do_not_keep_the_span_open(exporter, telemetry):
    trace = telemetry.request(spec("r1", FakeSink(n=2), n=2), 1.0)
    trace.leave_out({0})
    usage, timings = Usage(10, 0, 1, 0), Timings(2.0, 0.0, 0.0, 0.0, None)
    trace.finished(Finished("r1", 1, FinishReason.CANCELLED, None, usage, timings, at=3.0))
    names_in_order = [span.name for span in exporter.get_finished_spans()]
    assert names_in_order == ["queue", "text_completion fake"]


async def test_without_traces_nothing_is_sent_to_workers():
    link = await run_one(Telemetry())
    assert [admission.traceparent for admission in link.plans[0].admitted] == [""]
    assert not Telemetry().traces
    assert Telemetry().rpc("x", {}) is None


async def test_the_callers_trace_goes_on_to_the_worker(exporter, telemetry):
    worker = FakeWorker()
    service = Service(ServiceConfig(port=0, worker=(await worker.start(),)), telemetry)
    await service.start()
    async with asyncio.timeout(10):
        while not service.engine.ready:  # noqa: ASYNC110 - nothing tells of it here
            await asyncio.sleep(0.01)
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1]),
        stopping=pb.StoppingParams(max_tokens=2),
        output=pb.OutputParams(text=False),
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        call = stub.Generate(request, metadata=(("traceparent", TRACEPARENT),))
        assert len([response async for response in call]) >= 3
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Cancel(pb.CancelRequest(), metadata=(("traceparent", TRACEPARENT),))
    await service.stop()
    await worker.stop()

    spans = {span.name: span for span in exporter.get_finished_spans()}
    rpc = spans["tidegate.inference.v1.InferenceService/Generate"]
    assert format(rpc.context.trace_id, "032x") == TRACE_ID
    assert format(rpc.parent.span_id, "016x") == "b7ad6b7169203331"
    assert rpc.attributes[names.RPC_STATUS_CODE] == "OK"
    request_span = spans["text_completion fake"]
    assert request_span.parent.span_id == rpc.context.span_id
    (admitted,) = worker.plans[0].admitted
    assert admitted.traceparent == f"00-{TRACE_ID}-{request_span.context.span_id:016x}-01"
    failed = spans["tidegate.inference.v1.InferenceService/Cancel"]
    assert failed.attributes[names.RPC_STATUS_CODE] == "INVALID_ARGUMENT"
    assert failed.attributes[names.ERROR_TYPE] == "INVALID_ARGUMENT"


async def test_metrics_follow_the_state():
    reader = MemoryReader()
    telemetry = Telemetry(Outlets(metric_readers=[reader]))
    cluster = Cluster(telemetry=telemetry)
    state = from_other_thread(asyncio.get_running_loop(), cluster.engine.state)
    telemetry.observe(state, cluster.registry.states)
    worker = await cluster.add(FakeWorker())
    for i in range(3):
        cluster.submit(f"r{i}", max_tokens=5)
    await cluster.finish()
    points = read_points(await asyncio.to_thread(reader.get_metrics_data))
    outcomes = {point.attributes[names.OUTCOME]: point.value for point in points[names.REQUESTS]}
    assert outcomes == {"accepted": 3, "refused": 0, "finished": 3, "cancelled": 0, "failed": 0}
    assert points[names.COUNTER_FIELDS["output_tokens"]][0].value == 15
    assert points[names.REQUESTS_RUNNING][0].value == 0
    blocks = {point.attributes[names.STATE]: point.value for point in points[names.KV_BLOCKS]}
    assert sum(blocks.values()) == worker.num_blocks - 1
    assert blocks["used"] == 0
    assert points[names.REQUEST_DURATION][0].count == 3
    assert points[names.TIME_TO_FIRST_TOKEN][0].count == 3
    assert points[names.TIME_PER_OUTPUT_TOKEN][0].count == 3
    assert points[names.STEP_PHASES["forward"]][0].count == cluster.engine.state().counters.steps
    telemetry.shutdown()
    await cluster.close()


def test_metrics_tell_of_host_memory_and_of_what_is_copied_there():
    reader = MemoryReader()
    telemetry = Telemetry(Outlets(metric_readers=[reader]))
    h = Harness(num_blocks=7, block_size=4, num_host_blocks=8, preemption_mode="swap")
    telemetry.observe(lambda: h.core.state(h.now))
    h.accept("a", 7, 12)
    h.accept("b", 8, 12)
    while not h.core.counters.swapped_out_blocks:
        assert h.step() is not None
    h.add_worker("without", num_host_blocks=0)
    points = read_points(reader.get_metrics_data())
    told = {field: points[metric][0].value for field, metric in names.COUNTER_FIELDS.items()}
    counters = h.core.counters
    assert (told["preemptions"], told["preemptions_kept"]) == (1, 1)
    assert told["swapped_out_blocks"] == counters.swapped_out_blocks > 0
    assert told["swapped_in_blocks"] == counters.swapped_in_blocks
    blocks = {tuple(point.attributes.values()): point.value for point in points[names.HOST_KV_BLOCKS]}
    used = h.core.state(h.now).workers[0].host_blocks_used
    assert used > 0
    assert blocks == {("w0", "used"): used, ("w0", "free"): 8 - used}
    telemetry.shutdown()


BY_NAME = {metric.name: metric for metric in names.METRICS}


def plan_of(num_tokens: list[int]) -> StepPlan:
    none, rows = np.zeros(0, np.int32), np.arange(len(num_tokens), dtype=np.int32)
    return StepPlan(1, none, (), none, none, rows, np.array(num_tokens, np.int32), none, none)


def read_points(data) -> dict[names.Metric, list]:
    return {
        BY_NAME[metric.name]: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


async def test_step_times_become_histograms():
    reader = MemoryReader()
    telemetry = Telemetry(Outlets(metric_readers=[reader]))
    telemetry.plan_sent("w1", plan_of([1, 7, 1]), 7, 10.0)
    telemetry.step_done("w1", 1, StepTimings(0.0, 0.0, 0.25, 0.5, 0.125), 11.5)
    points = read_points(reader.get_metrics_data())
    assert points[names.STEP_PHASES["forward"]][0].sum == 0.25
    assert points[names.STEP_PHASES["sampling"]][0].sum == 0.5
    assert points[names.WORKER_GAP][0].sum == 0.125
    assert points[names.WORKER_GAP][0].attributes == {names.WORKER_ID: "w1"}
    assert points[names.STEP_ROUND_TRIP][0].sum == 1.5
    assert points[names.STEP_REQUESTS_NUM][0].sum == 3
    tokens = {point.attributes[names.KIND]: point.sum for point in points[names.STEP_TOKENS]}
    assert tokens == {"decode": 2, "prefill": 7}


@pytest.mark.parametrize(
    ("environment", "traces"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:1"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_traces_are_on_only_where_the_environment_asks_for_them(monkeypatch, environment, traces):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Telemetry.from_environment().traces is traces
