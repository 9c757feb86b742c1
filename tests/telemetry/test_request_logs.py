"""One event for each change of a request's state, with its name and its trace, and nothing of its text."""

from __future__ import annotations

import io
import json
import logging

import grpc
import pytest
from engine_harness import Cluster
from fake_worker import FakeWorker
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sample_tokenizers import library_tokenizer, tokenizer_json
from service_process import SERVING, until_health

from scheduler_service import logs
from scheduler_service.config import ServiceConfig
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.server import Service
from scheduler_service.telemetry import Telemetry
from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc
from tidegate.worker.v1 import worker_pb2
from tidegate_telemetry.exporting import Outlets

SECRET = "xylophone"


@pytest.fixture
def stream():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    logs.setup("debug", "json", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger(logs.ROOT).setLevel(logging.NOTSET)


async def test_each_change_of_state_is_one_line_with_request_and_trace(stream):
    exporter = InMemorySpanExporter()
    telemetry = Telemetry(Outlets(SimpleSpanProcessor(exporter)))
    cluster = Cluster(SchedulerConfig(max_num_seqs=16, watermark=0.0), telemetry=telemetry)
    await cluster.add(FakeWorker(num_blocks=20))
    for i in range(4):
        cluster.submit(f"r{i}", prompt=10, max_tokens=24)
    await cluster.finish()
    await cluster.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    traces = {
        span.attributes["gen_ai.response.id"]: format(span.context.trace_id, "032x")
        for span in exporter.get_finished_spans()
        if span.name == "text_completion fake"
    }
    assert len(traces) == 4
    for request_id, trace_id in traces.items():
        own = [line for line in lines if line.get("request_id") == request_id]
        assert {line["trace_id"] for line in own} == {trace_id}
        events = [line["event"] for line in own]
        assert events[:2] == ["request_accepted", "request_admitted"]
        assert events[-1] == "request_finished"
        assert events.count("request_preempted") == events.count("request_resumed") == (len(events) - 3) / 2
    assert any(line["event"] == "request_preempted" for line in lines)


async def test_prompts_and_outputs_are_never_logged(stream):
    files = worker_pb2.TokenizerFiles(tokenizer_json=tokenizer_json("byte_level"))
    worker = FakeWorker(vocab_size=library_tokenizer("byte_level").get_vocab_size(), tokenizer=files)
    service = Service(ServiceConfig(port=0, worker=(await worker.start(),)), Telemetry())
    await service.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        await until_health(channel, "tidegate.inference.v1.InferenceService", SERVING)
        stub = pb_grpc.InferenceServiceStub(channel)
        text = ""
        request = pb.GenerateRequest(text=f"{SECRET} " * 8, stopping=pb.StoppingParams(max_tokens=16))
        async for response in stub.Generate(request):
            text += response.delta.text
        assert text
        request.stopping.max_tokens = 1_000_000
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Generate(request).read()
    await service.stop()
    await worker.stop()
    written = stream.getvalue()
    assert "request_finished" in written
    assert SECRET not in written
    assert text not in written
