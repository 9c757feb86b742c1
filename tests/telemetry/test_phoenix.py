"""A receiver that others use, arize-phoenix, finds the whole trace."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from service_process import SERVING, generate, read, until_health
from telemetry.receivers import save_tiny_model, scheduler_process, worker_process

from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc
from tidegate_telemetry import names

PHOENIX = Path(__file__).parents[2] / ".cache" / "phoenix" / "bin" / "phoenix"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(420),
    pytest.mark.skipif(
        not PHOENIX.exists(), reason="arize-phoenix is not installed: tests/telemetry/install_phoenix.sh"
    ),
]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def fetch(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.loads(answer.read())


@contextlib.asynccontextmanager
async def phoenix(folder: Path) -> AsyncIterator[tuple[str, str]]:
    """Its REST address, and that for OTLP."""
    http, otlp = free_port(), free_port()
    log = (folder / "phoenix.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        *(str(PHOENIX), "serve"),
        stdout=log,
        stderr=log,
        env={
            **os.environ,
            "PHOENIX_HOST": "127.0.0.1",
            "PHOENIX_PORT": str(http),
            "PHOENIX_GRPC_PORT": str(otlp),
            "PHOENIX_WORKING_DIR": str(folder / "phoenix"),
            "PHOENIX_TELEMETRY_ENABLED": "false",
            "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
        },
    )
    try:
        async with asyncio.timeout(240):
            while True:
                assert process.returncode is None, (folder / "phoenix.log").read_text()[-2000:]
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(fetch, f"http://127.0.0.1:{http}/v1/projects")
                    break
                await asyncio.sleep(0.5)
        yield f"http://127.0.0.1:{http}", f"http://127.0.0.1:{otlp}"
    finally:
        process.terminate()
        await process.wait()
        log.close()


async def test_phoenix_finds_the_whole_trace(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    async with phoenix(tmp_path) as (rest, otlp):
        export = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": otlp,
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        async with (
            worker_process(model, **export) as worker,
            scheduler_process(tmp_path, "--worker", worker["address"], **export) as scheduler,
            grpc.aio.insecure_channel(f"127.0.0.1:{scheduler['port']}") as channel,
        ):
            await until_health(channel, "tidegate.inference.v1.InferenceService", SERVING)
            request = generate(max_tokens=12)
            request.stopping.ignore_eos = True
            call = pb_grpc.InferenceServiceStub(channel).Generate(
                request, metadata=(("traceparent", f"00-{TRACE_ID}-{CALLER}-01"),)
            )
            tokens, _ = await read(call)
            assert len(tokens) == 12
        spans = await until_spans(rest, 7)
    by_name = {span["name"]: span for span in spans if span["context"]["trace_id"] == TRACE_ID}
    rpc, root = "tidegate.inference.v1.InferenceService/Generate", "text_completion model"
    children = (
        *(names.SPAN_QUEUE, names.SPAN_PREFILL, names.SPAN_DECODE),
        *(names.SPAN_WORKER_PREFILL, names.SPAN_WORKER_DECODE),
    )
    assert set(by_name) == {rpc, root, *children}
    assert by_name[rpc]["parent_id"] == CALLER
    assert by_name[root]["parent_id"] == by_name[rpc]["context"]["span_id"]
    for child in children:
        assert by_name[child]["parent_id"] == by_name[root]["context"]["span_id"], child
    assert by_name[root]["attributes"][names.GEN_AI_USAGE_OUTPUT_TOKENS] == 12
    events = {event["name"] for event in by_name[root]["events"]}
    assert {names.EVENT_ADMITTED, names.EVENT_FIRST_TOKEN, names.EVENT_FINISHED} <= events


async def until_spans(rest: str, num: int) -> list[dict]:
    """The spans that it has, once there are so many of the trace."""
    url = f"{rest}/v1/projects/default/spans?{urllib.parse.urlencode({'limit': 100})}"
    async with asyncio.timeout(60):
        while True:
            spans = (await asyncio.to_thread(fetch, url))["data"]
            if sum(span["context"]["trace_id"] == TRACE_ID for span in spans) >= num:
                return spans
            await asyncio.sleep(0.5)
