"""Receivers of OTLP for tests, and the processes that send to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

ROOT = Path(__file__).parents[2]


class FakeTraceService(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span. `held` makes it answer nothing; `refused` makes it fail."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, trace_pb2.Span]] = []  # with the service's name
        self.held = threading.Event()
        self.held.set()
        self.refused = False
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def Export(self, request, context):
        self.held.wait(60)
        if self.refused:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not today")
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def stop(self) -> None:
        self.held.set()
        self._server.stop(None).wait(5)

    def named(self, name: str) -> list[trace_pb2.Span]:
        return [span for _, span in list(self.spans) if span.name == name]

    async def until(self, *needed: str, count: int = 1) -> None:
        """Waits until there are so many spans of each name."""
        async with asyncio.timeout(60):
            while any(len(self.named(name)) < count for name in needed):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.05)


def attributes(owner) -> dict[str, object]:
    """Attributes of a span, an event or a link."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in owner.attributes}


@contextlib.asynccontextmanager
async def worker_process(model: Path, *flags: str, **environment: str) -> AsyncIterator[dict[str, object]]:
    """`python -m worker_service` on a free port: what it says once it is ready."""
    log = (model.parent / f"worker-{time.monotonic_ns()}.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worker_service", "--model", str(model), "--port", "0", "--threads", "1"),
        *("--attention-backend", "reference", "--max-num-seqs", "8", "--log-format", "json", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        env={**_clean_environment(), "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT,
    )
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 120)
        assert line, "the worker did not start"
        yield json.loads(line)
    finally:
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.wait(), 30)
        log.close()


@contextlib.asynccontextmanager
async def scheduler_process(
    folder: Path, *flags: str, **environment: str
) -> AsyncIterator[dict[str, object]]:
    """`python -m scheduler_service` on a free port: its ready file's content."""
    ready_file = folder / "ready.json"
    log = (folder / "scheduler.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scheduler_service", "--port", "0", "--ready-file", str(ready_file)),
        *("--drain-window", "0", "--log-format", "json", *flags),
        stderr=log,
        env={**_clean_environment(), **environment},
        cwd=ROOT,
    )
    try:
        async with asyncio.timeout(60):
            while not ready_file.exists():
                assert process.returncode is None
                await asyncio.sleep(0.02)
        yield json.loads(ready_file.read_text())
    finally:
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.wait(), 30)
        log.close()


def _clean_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TIDEGATE_", "OTEL_"))}
    return {**kept, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "protos", "kernels"))}


def save_tiny_model(folder: Path) -> Path:
    """A random model of the Llama family."""
    import torch
    import transformers

    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=251,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
