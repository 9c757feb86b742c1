"""Fixtures for tests of the clients."""

from collections.abc import Iterator

import openai
import pytest
from fake_server import FakeInference
from running_gateway import RunningGateway

from tidegate_client import Client


@pytest.fixture
def server() -> Iterator[FakeInference]:
    fake = FakeInference()
    yield fake
    fake.call_ended.set()
    fake.stop()


@pytest.fixture
def client(server: FakeInference) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


@pytest.fixture
def gateway(server: FakeInference) -> Iterator[RunningGateway]:
    running = RunningGateway(server.address)
    yield running
    server.call_ended.set()
    running.stop()


@pytest.fixture(scope="module")
def shared_gateway() -> Iterator[tuple[FakeInference, RunningGateway]]:
    """For modules that look at answers alone, and have fixtures `server` and `gateway` made of it."""
    fake = FakeInference()
    running = RunningGateway(fake.address)
    yield fake, running
    fake.call_ended.set()
    running.stop()
    fake.stop()


@pytest.fixture
def openai_client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=30) as client:
        yield client
