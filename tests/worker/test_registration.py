"""A worker looks for its scheduler when it starts: a wrong address shows at once."""

from __future__ import annotations

import logging
import socket

import grpc
import pytest

from worker_service import registration
from worker_service.config import WorkerConfig
from worker_service.registration import look_for
from worker_service.security_api import Security


@pytest.fixture
def dialler():
    return Security(WorkerConfig(model="m")).dialler


async def test_an_address_where_nobody_answers_is_named(dialler, monkeypatch, caplog):
    monkeypatch.setattr(registration, "_TIMEOUT_S", 0.2)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with caplog.at_level(logging.WARNING):
            await look_for(address, dialler)
    (record,) = caplog.records
    assert "no scheduler found yet" in record.getMessage()
    assert record.fields["scheduler"] == address


async def test_nothing_is_said_where_a_scheduler_answers(dialler, caplog):
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    with caplog.at_level(logging.WARNING):
        await look_for(address, dialler)
    assert caplog.records == []
    await server.stop(0)
