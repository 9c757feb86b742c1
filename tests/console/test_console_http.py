"""The console's port: who may look, what is there, and that it says what the admin API says."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from fake_worker import FakeWorker
from service_process import SERVING, generate, read, until_health

from scheduler_service.config import ServiceConfig
from scheduler_service.console import http
from scheduler_service.server import Service
from scheduler_service.telemetry import Telemetry
from tidegate.admin.v1 import admin_pb2 as pb
from tidegate.admin.v1 import admin_pb2_grpc as pb_grpc
from tidegate.inference.v1 import inference_pb2_grpc

INFERENCE = "tidegate.inference.v1.InferenceService"
ADMIN_TOKEN = "an-admin-token-0123456789"
CLIENT_TOKEN = "a-client-token-0123456789"


@contextlib.asynccontextmanager
async def service(**options: Any) -> AsyncIterator[Service]:
    worker = FakeWorker()
    config = ServiceConfig(port=0, console_port=0, worker=(await worker.start(),), **options)
    running = Service(config, Telemetry())
    await running.start()
    try:
        yield running
    finally:
        await running.stop(0.1)
        await worker.stop()


async def get(
    running: Service, path: str, head: str = "", tls: ssl.SSLContext | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one exchange. `head`: header lines in place of Host: localhost."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.console_port, ssl=tls)
    writer.write(f"{method} {path} HTTP/1.1\r\n{head or 'Host: localhost'}\r\n\r\n".encode())
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    top, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, body


def basic(token: str) -> str:
    return "Host: localhost\r\nAuthorization: Basic " + base64.b64encode(f"me:{token}".encode()).decode()


async def test_the_page_is_there_and_can_load_nothing_from_elsewhere():
    async with service() as running:
        status, headers, body = await get(running, "/")
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "'unsafe" not in headers["content-security-policy"]
        assert "access-control-allow-origin" not in headers
        assert (headers["x-content-type-options"], headers["x-frame-options"]) == ("nosniff", "deny")
        for name in ("main.js", "console.css", "mark.svg"):
            status, headers, file = await get(running, f"/{name}")
            assert (status, len(file)) == (200, int(headers["content-length"]))
    assert b"<script>" not in body
    assert b" style=" not in body


def test_the_files_name_no_other_host():
    for file in (Path(http.__file__).parent / "page").iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, file
        assert "https://" not in text, file


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/nothing", "GET", 404),
        ("/../server.py", "GET", 404),
        ("/%2e%2e/server.py", "GET", 404),
        ("/api/request?id=x", "GET", 404),
        ("/api/blocks?worker=x", "GET", 404),
        ("/api/blocks?" + "a=1&" * 9, "GET", 400),
        ("/", "POST", 405),
        ("/", "HEAD", 405),
        ("nowhere", "GET", 400),
        ("/" + "x" * 20_000, "GET", 431),
    ],
)
async def test_what_is_not_there_and_what_is_not_allowed(path, method, status):
    async with service() as running:
        assert (await get(running, path, method=method))[0] == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 200),
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("10.0.0.7", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example:80", 403),
        ("", 403),
    ],
)
async def test_a_foreign_name_that_leads_here_is_refused(host, status):
    async with service() as running:
        assert (await get(running, "/", f"Host: {host}"))[0] == status
        assert (await get(running, "/api/latency", f"Host: {host}"))[0] == status


async def test_other_pages_may_not_ask_but_may_link():
    async with service() as running:
        site = "Host: localhost\r\nSec-Fetch-Site: cross-site"
        assert (await get(running, "/api/latency", site))[0] == 403
        assert (await get(running, "/", site))[0] == 200


async def test_a_page_asks_for_a_token_where_the_admin_api_does(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{ADMIN_TOKEN} ops admin\n{CLIENT_TOKEN} a client\n")
    async with service(token_file=tokens) as running:
        for path in ("/", "/main.js", "/api/watch", "/api/latency"):
            status, headers, _ = await get(running, path)
            assert (status, headers["www-authenticate"][:5]) == (401, "basic")
        assert (await get(running, "/", basic(CLIENT_TOKEN)))[0] == 401
        assert (await get(running, "/", "Host: localhost\r\nAuthorization: Basic !"))[0] == 401
        assert (await get(running, "/", basic(ADMIN_TOKEN)))[0] == 200
        bearer = f"Host: localhost\r\nAuthorization: Bearer {ADMIN_TOKEN}"
        assert (await get(running, "/api/latency", bearer))[0] == 200


def test_an_open_console_on_a_network_is_refused():
    with pytest.raises(ValueError, match=r"console_host = '0\.0\.0\.0' is not a loopback address"):
        ServiceConfig(console_port=0, console_host="0.0.0.0")
    assert ServiceConfig(console_host="0.0.0.0").console_port is None


async def test_with_mtls_a_certificate_is_needed(tmp_path):
    authority = Authority(tmp_path, "ca")
    own, caller = authority.issue("scheduler"), authority.issue("operator")
    files = {"tls_cert": own.cert, "tls_key": own.key, "tls_ca": authority.ca}
    options = {**files, "mtls": True, "admin_port": 0}
    async with service(**options) as running:
        without = ssl.create_default_context(cafile=authority.ca)
        without.check_hostname = False
        with pytest.raises((ssl.SSLError, ConnectionError, ValueError, IndexError)):
            await get(running, "/", tls=without)
        with_one = ssl.create_default_context(cafile=authority.ca)
        with_one.check_hostname = False
        with_one.load_cert_chain(caller.cert, caller.key)
        status, headers, _ = await get(running, "/", "Host: any.name", tls=with_one)
        assert (status, "strict-transport-security" in headers) == (200, True)


async def test_what_it_tells_is_what_the_admin_api_tells():
    async with (
        service() as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        await until_health(channel, INFERENCE, SERVING)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        question = generate(max_tokens=6)
        question.request_id = "r:1"
        await read(stub.Generate(question))
        admin = pb_grpc.AdminServiceStub(channel)
        _, headers, body = await get(running, "/api/request?id=r%3A1")
        assert headers["content-type"] == "application/json"
        (told,) = json.loads(body)["candidates"]
        (candidate,) = (await admin.ExplainRequest(pb.ExplainRequestRequest(request_id="r:1"))).candidates
        assert told["state"]["request_id"] == "r:1"
        assert told["state"]["output_tokens"] == candidate.state.output_tokens == 6
        assert [entry["event"] for entry in told["timeline"]] == [e.event for e in candidate.timeline]
        assert told["chunks"]["tokens"] == list(candidate.chunks.tokens)
        (worker,) = (await admin.GetState(pb.GetStateRequest())).workers
        _, _, body = await get(running, f"/api/blocks?worker={worker.worker_id}")
        blocks = await admin.GetBlockMap(pb.GetBlockMapRequest(worker_id=worker.worker_id))
        assert base64.b64decode(json.loads(body)["cached"]) == blocks.cached
        assert base64.b64decode(json.loads(body)["owner_indices"]) == blocks.owner_indices
        latency = json.loads((await get(running, "/api/latency"))[2])
        assert latency["recent"]["output_tokens"] == [6]


async def test_updates_come_as_events_and_a_leaver_is_forgotten():
    async with service() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.console_port)
        writer.write(b"GET /api/watch HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"text/event-stream" in head
            assert await reader.readuntil(b"\n\n") == b"retry: 2000\n\n"
            event = await reader.readuntil(b"\n\n")
        update = json.loads(event.removeprefix(b"data: "))
        assert update["snapshot"]
        assert update["requests"]["key"] == []
        writer.close()
        await running.stop(0.1)
    assert running._feeds._feeds == {}
