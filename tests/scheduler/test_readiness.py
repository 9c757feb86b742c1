"""When the service says that it takes requests: with the texts of its models made."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import grpc
import pytest
from fake_engine import CHATML, served_model
from fake_worker import FakeWorker
from sample_tokenizers import tokenizer_json
from service_process import NOT_SERVING, SERVING, health, until_health

from scheduler_service import model_text
from scheduler_service.config import ServiceConfig
from scheduler_service.model_text import ModelTexts
from scheduler_service.readiness import Readiness
from scheduler_service.server import INFERENCE, Service
from scheduler_service.telemetry import Telemetry
from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc
from tidegate.worker.v1 import worker_pb2


@pytest.fixture
def reading(monkeypatch):
    """Names of the models that were read, each of which is held up until `gate` is set."""
    make = model_text._make

    class Reading:
        names: list[str] = []  # noqa: RUF012 - one instance
        gate = threading.Event()

    def make_late(model):
        Reading.names.append(model.name)
        assert Reading.gate.wait(10)
        return make(model)

    monkeypatch.setattr(model_text, "_make", make_late)
    yield Reading
    Reading.gate.set()


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - polled from outside
            await asyncio.sleep(0.005)


async def test_the_service_is_not_ready_before_it_can_read_text(reading):
    files = worker_pb2.TokenizerFiles(tokenizer_json=tokenizer_json("byte_level"), chat_template=CHATML)
    worker = FakeWorker(vocab_size=500, tokenizer=files)
    service = Service(ServiceConfig(port=0, drain_window=0, worker=(await worker.start(),)), Telemetry())
    await service.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        await until(lambda: service.engine.ready and reading.names)
        assert await health(channel, INFERENCE) == NOT_SERVING
        reading.gate.set()
        await until_health(channel, INFERENCE, SERVING)
        stub = pb_grpc.InferenceServiceStub(channel)
        assert (await stub.Tokenize(pb.TokenizeRequest(text="Hi"))).token_ids
    assert reading.names == ["fake"]  # once, before the request
    await service.stop(0)
    await worker.stop()


async def test_another_model_is_read_while_the_first_is_served(reading):
    said = []
    readiness = Readiness(ModelTexts(), said.append)
    first, second = served_model("first"), served_model("second")
    readiness.note(True, {"first": first})
    await until(lambda: reading.names == ["first"])
    assert said == []
    reading.gate.set()
    await until(lambda: said == [True])
    reading.gate.clear()
    readiness.note(True, {"first": first, "second": second})
    await until(lambda: reading.names == ["first", "second"])
    assert readiness.ready
    readiness.note(False, {"first": replace(first, ready_workers=0), "second": second})
    assert said == [True, False]
    reading.gate.set()
    await asyncio.sleep(0.05)
    assert said == [True, False]


async def test_a_tokenizer_that_cannot_be_read_does_not_hold_up_token_ids(capsys):
    said = []
    model = replace(served_model(), tokenizer_json=b"{}")
    Readiness(ModelTexts(), said.append).note(True, {"tiny": model})
    await until(lambda: said == [True])


def test_a_process_without_a_frontend_reads_nothing():
    said = []
    readiness = Readiness(None, said.append)
    readiness.note(True, {"tiny": served_model()})
    readiness.note(True, {})
    readiness.note(False, {})
    assert said == [True, False]
