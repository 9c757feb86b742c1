"""One trace across real processes: the caller's, the scheduler's and the worker's spans, and their links."""

from __future__ import annotations

import grpc
import pytest
from service_process import SERVING, generate, read, until_health
from telemetry.receivers import (
    FakeTraceService,
    attributes,
    save_tiny_model,
    scheduler_process,
    worker_process,
)

from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc
from tidegate_telemetry import names

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
RPC = "tidegate.inference.v1.InferenceService/Generate"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def test_a_trace_goes_from_the_caller_through_the_scheduler_to_the_worker(tmp_path):
    receiver = FakeTraceService()
    export = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    model = save_tiny_model(tmp_path / "model")
    async with (
        worker_process(model, **export) as worker,
        scheduler_process(tmp_path, "--worker", worker["address"], **export) as scheduler,
        grpc.aio.insecure_channel(f"127.0.0.1:{scheduler['port']}") as channel,
    ):
        await until_health(channel, "tidegate.inference.v1.InferenceService", SERVING)
        stub = pb_grpc.InferenceServiceStub(channel)
        request = generate(max_tokens=12)
        request.model = "model"
        request.stopping.ignore_eos = True
        call = stub.Generate(request, metadata=(("traceparent", f"00-{TRACE_ID}-{CALLER}-01"),))
        tokens, _ = await read(call)
        assert len(tokens) == 12
        # The caller's decision holds for a request that is not sampled.
        unsampled = (("traceparent", f"00-{'1' * 32}-{CALLER}-00"),)
        await read(stub.Generate(request, metadata=unsampled))
        await receiver.until(
            *(RPC, names.SPAN_WORKER_PREFILL, names.SPAN_WORKER_DECODE, "text_completion model")
        )
        await receiver.until(names.SPAN_STEP, names.SPAN_STEP_EXECUTE, count=2)
    receiver.stop()
    check_tree(receiver)
    check_steps(receiver)


def check_tree(receiver: FakeTraceService) -> None:
    """Every span of the request has the caller's trace, the right parent, and the right process."""
    ours = {span.name: (service, span) for service, span in receiver.spans if span.trace_id.hex() == TRACE_ID}
    assert {span.trace_id.hex() for _, span in receiver.spans if span.name == RPC} == {TRACE_ID}
    root_name = "text_completion model"
    parents = {
        RPC: CALLER,
        root_name: ours[RPC][1].span_id.hex(),
        **dict.fromkeys(
            (
                *(names.SPAN_QUEUE, names.SPAN_PREFILL, names.SPAN_DECODE),
                *(names.SPAN_WORKER_PREFILL, names.SPAN_WORKER_DECODE),
            ),
            ours[root_name][1].span_id.hex(),
        ),
    }
    assert {name: span.parent_span_id.hex() for name, (_, span) in ours.items()} == parents
    workers = {name for name, (service, _) in ours.items() if service == "tidegate-worker"}
    assert workers == {names.SPAN_WORKER_PREFILL, names.SPAN_WORKER_DECODE}
    assert {service for service, _ in ours.values()} == {"tidegate-worker", "tidegate-scheduler"}
    root, prefill, decode = (
        ours[name][1] for name in (root_name, names.SPAN_WORKER_PREFILL, names.SPAN_WORKER_DECODE)
    )
    assert attributes(prefill)[names.TOKENS] == 3
    assert attributes(decode)[names.TOKENS] == 11
    assert attributes(decode)[names.STEPS] == 11
    assert root.start_time_unix_nano < prefill.start_time_unix_nano < root.end_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    (chunk,) = ours[names.SPAN_PREFILL][1].events
    assert (chunk.name, attributes(chunk)[names.TOKENS]) == (names.EVENT_CHUNK, 3)


def check_steps(receiver: FakeTraceService) -> None:
    """The request's links lead to steps, which link back; the worker's part is a child in the same trace."""
    (root,) = (span for span in receiver.named("text_completion model"))
    steps = {span.span_id: span for span in receiver.named(names.SPAN_STEP)}
    executed = receiver.named(names.SPAN_STEP_EXECUTE)
    assert [attributes(link)[names.STEP_ROLE] for link in root.links] == ["first", "slowest", "last"]
    assert {link.span_id for link in root.links} == set(steps)
    for step in steps.values():
        assert [link.span_id for link in step.links] == [root.span_id]
        (part,) = [span for span in executed if span.parent_span_id == step.span_id]
        assert part.trace_id == step.trace_id != root.trace_id
        assert step.start_time_unix_nano <= part.start_time_unix_nano
        assert part.end_time_unix_nano <= step.end_time_unix_nano
        assert attributes(part)[names.STEP_SEQ] == attributes(step)[names.STEP_SEQ]
        assert attributes(part)[names.PHASE_S["forward"]] > 0
    assert len(executed) == len(steps)
