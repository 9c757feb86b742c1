"""Clients in Node and Go take part in a trace: the spans of the server continue their caller's."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from fake_worker import FakeWorker
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from service_process import SERVING, until_health

from clients.conformance.driver import LANGUAGES, DriverProcess
from scheduler_service.config import ServiceConfig
from scheduler_service.server import Service
from scheduler_service.telemetry import Telemetry
from tidegate_telemetry.exporting import Outlets

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
COMMAND = {
    "method": "Generate",
    "deadline_ms": 30_000,
    "metadata": {"traceparent": f"00-{TRACE_ID}-{CALLER}-01"},
    "request": {
        "tokenIds": {"ids": [1, 2, 3]},
        "stopping": {"maxTokens": 4},
        "output": {"text": False},
    },
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("language", ["python", "node", "go"])
async def test_the_callers_trace_is_continued(language):
    lacking = LANGUAGES[language].missing()
    if lacking:
        pytest.skip(f"no toolchain for {language}, missing: {', '.join(lacking)}")
    await asyncio.to_thread(LANGUAGES[language].build)
    exporter = InMemorySpanExporter()
    worker = FakeWorker()
    service = Service(
        ServiceConfig(port=0, worker=(await worker.start(),)),
        Telemetry(Outlets(SimpleSpanProcessor(exporter))),
    )
    await service.start()
    target = f"127.0.0.1:{service.port}"
    async with grpc.aio.insecure_channel(target) as channel:
        await until_health(channel, "tidegate.inference.v1.InferenceService", SERVING)
    with contextlib.closing(await asyncio.to_thread(DriverProcess, LANGUAGES[language], target)) as driver:
        answer = await asyncio.to_thread(driver.execute, COMMAND)
    assert answer["code"] == "OK", answer
    await service.stop()
    await worker.stop()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    rpc = spans["tidegate.inference.v1.InferenceService/Generate"]
    assert format(rpc.context.trace_id, "032x") == TRACE_ID
    assert format(rpc.parent.span_id, "016x") == CALLER
    root = spans["text_completion fake"]
    assert root.parent.span_id == rpc.context.span_id
    assert format(root.context.trace_id, "032x") == TRACE_ID
