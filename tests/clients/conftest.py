"""Fixtures for tests of the clients."""

from collections.abc import Iterator

import pytest
from fake_server import FakeInference

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
