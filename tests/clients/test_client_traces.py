"""The caller's trace travels with each call; errors tell whose they are and which limit was reached."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest
from fake_server import FakeInference
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from tidegate.inference.v1 import inference_pb2 as pb
from tidegate_client import AsyncClient, Client, OverloadedError, QuotaViolation

TRACER = TracerProvider().get_tracer("test")


def traceparent(span: trace.Span) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def test_a_stream_continues_the_active_span(client: Client, server: FakeInference) -> None:
    with TRACER.start_as_current_span("mine") as span:
        stream = client.generate("x")
    stream.result()  # wherever it is read
    assert server.metadata[0]["traceparent"] == traceparent(span)


def test_an_async_stream_continues_the_span_of_its_task(server: FakeInference) -> None:
    async def run() -> list[str]:
        async with AsyncClient(server.address) as client:

            async def generate() -> str:
                with TRACER.start_as_current_span("mine") as span:
                    await client.generate("x").result()
                return traceparent(span)

            return list(await asyncio.gather(generate(), generate()))

    assert sorted(asyncio.run(run())) == sorted(seen["traceparent"] for seen in server.metadata)


def test_calls_with_one_answer_do_so_too(client: Client, server: FakeInference) -> None:
    with TRACER.start_as_current_span("mine") as span:
        client.cancel("r1")
    assert server.cancel_metadata["traceparent"] == traceparent(span)


def test_without_a_span_nothing_is_sent_and_a_given_header_wins(
    client: Client, server: FakeInference
) -> None:
    client.generate("x").result()
    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with TRACER.start_as_current_span("mine"):
        client.generate("x", metadata=[("traceparent", given)]).result()
    assert "traceparent" not in server.metadata[0]
    assert server.metadata[1]["traceparent"] == given


def test_opentelemetry_is_not_imported_for_it(server: FakeInference) -> None:
    script = (
        "import sys; from tidegate_client import Client\n"
        f"print(Client({server.address!r}).generate('x').result().text)\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == "Hello world\n[]\n"


def test_an_error_tells_whose_it_is_which_limit_and_when_to_come_back(
    client: Client, server: FakeInference
) -> None:
    def refuse(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        details = [
            error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="tidegate.dev", metadata={"limit": "5"}),
            error_details_pb2.RetryInfo(),
            error_details_pb2.QuotaFailure(),
        ]
        details[1].retry_delay.FromMilliseconds(90_500)
        details[2].violations.add(subject="max_num_queued_reqs", description="5 requests wait")
        status = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="full")
        for detail in details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        context.abort_with_status(rpc_status.to_status(status))
        yield pb.GenerateResponse()

    server.answer = refuse
    with pytest.raises(OverloadedError) as caught:
        client.generate("x").result()
    error = caught.value
    assert (error.reason, error.domain, error.metadata) == ("QUEUE_FULL", "tidegate.dev", {"limit": "5"})
    assert error.quota == (QuotaViolation("max_num_queued_reqs", "5 requests wait"),)
    assert (error.violations, error.retry_after_s) == ((), 90.5)
