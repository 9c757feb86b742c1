"""Who may drive a worker: certificates and the secret, over real gRPC but without a model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from certificates import Authority, Certificate
from google.rpc import error_details_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from pydantic import ValidationError

from tidegate.admin.v1 import admin_pb2, admin_pb2_grpc
from tidegate.worker.v1 import worker_pb2 as pb
from tidegate.worker.v1 import worker_pb2_grpc
from worker_service import registration, watched_files
from worker_service.config import WorkerConfig
from worker_service.registration import keep_registered
from worker_service.secret import read_secret
from worker_service.security_api import Security

SECRET, NEXT_SECRET = "secret-0123456789", "next-0123456789ab"


@pytest.fixture(autouse=True)
def at_each_look(monkeypatch):
    """Files are looked at whenever their value is asked for."""
    monkeypatch.setattr(watched_files, "_LOOK_INTERVAL_S", 0.0)


@pytest.fixture
def cluster(tmp_path) -> Authority:
    return Authority(tmp_path, "cluster")


@pytest.fixture
def stranger(tmp_path) -> Authority:
    return Authority(tmp_path, "stranger")


class FakeWorkerApi(worker_pb2_grpc.WorkerServiceServicer):
    """Answers without a model."""

    async def GetStatus(self, request, context):
        return pb.GetStatusResponse(phase=pb.WORKER_PHASE_READY)

    async def Execute(self, _requests, context):
        await context.read()
        await context.write(pb.ExecuteResponse(hello=pb.WorkerHello(protocol_version=1)))


Start = Callable[..., Awaitable[int]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a worker's server with what its options say of security; returns the port."""
    servers: list[grpc.aio.Server] = []

    async def started(**options) -> int:
        security = Security(WorkerConfig(model="m", **options))
        server = grpc.aio.server(interceptors=security.interceptors)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(FakeWorkerApi(), server)
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
        servers.append(server)
        port = security.listen(server, "127.0.0.1:0")
        await server.start()
        return port

    yield started
    for server in servers:
        await server.stop(None)


def plain(port: int) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}")


def encrypted(port: int, authority: Authority, own: Certificate | None = None) -> grpc.aio.Channel:
    ca = authority.ca.read_bytes()
    key, cert = (own.key.read_bytes(), own.cert.read_bytes()) if own else (None, None)
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(ca, key, cert))


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def status(channel: grpc.aio.Channel, metadata=()) -> int:
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    return (await stub.GetStatus(pb.GetStatusRequest(), metadata=metadata, timeout=10)).phase


async def failure(awaitable) -> tuple[str, str]:
    """Status and ErrorInfo.reason (empty: there is none) of an RPC that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    info = error_details_pb2.ErrorInfo()
    details = rpc_status.from_call(caught.value)
    if details is not None:
        assert details.details[0].Unpack(info)
    return caught.value.code().name, info.reason


async def test_callers_must_show_the_secret(start, tmp_path):
    (tmp_path / "secret").write_text(SECRET)
    async with plain(await start(secret_file=tmp_path / "secret")) as channel:
        assert await failure(status(channel)) == ("UNAUTHENTICATED", "MISSING_TOKEN")
        assert await failure(status(channel, bearer("client-0123456789"))) == ("UNAUTHENTICATED", "BAD_TOKEN")
        assert await failure(status(channel, bearer(SECRET) * 2)) == ("UNAUTHENTICATED", "BAD_TOKEN")
        assert await status(channel, bearer(SECRET)) == pb.WORKER_PHASE_READY
        # A stream is refused before anything is read of it.
        execute = worker_pb2_grpc.WorkerServiceStub(channel).Execute(timeout=10)
        assert await failure(execute.read()) == ("UNAUTHENTICATED", "MISSING_TOKEN")
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_secret_is_replaced_while_the_worker_runs(start, tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET)
    async with plain(await start(secret_file=path)) as channel:
        path.write_text(f"{NEXT_SECRET}\n{SECRET}\n")
        for secret in (SECRET, NEXT_SECRET):
            assert await status(channel, bearer(secret)) == pb.WORKER_PHASE_READY
        path.write_text(NEXT_SECRET)
        assert await failure(status(channel, bearer(SECRET))) == ("UNAUTHENTICATED", "BAD_TOKEN")
        path.write_text("short")  # no secret: what was good stays good, and nothing else is
        assert await status(channel, bearer(NEXT_SECRET)) == pb.WORKER_PHASE_READY
        assert await failure(status(channel, bearer("short"))) == ("UNAUTHENTICATED", "BAD_TOKEN")


async def test_with_mtls_only_certificates_of_the_cluster_s_ca_get_in(start, cluster, stranger):
    own = cluster.issue("worker")
    port = await start(tls_cert=own.cert, tls_key=own.key, tls_ca=cluster.ca, mtls=True)
    expired = cluster.issue("expired", days=-1)
    for certificate in (None, stranger.issue("client"), expired):
        async with encrypted(port, cluster, certificate) as channel:
            assert (await failure(status(channel)))[0] == "UNAVAILABLE"
    async with plain(port) as channel:
        assert (await failure(status(channel)))[0] == "UNAVAILABLE"
    async with encrypted(port, cluster, cluster.issue("scheduler")) as channel:
        assert await status(channel) == pb.WORKER_PHASE_READY


async def test_callers_can_check_the_worker(start, cluster, stranger):
    own = cluster.issue("worker")
    port = await start(tls_cert=own.cert, tls_key=own.key)
    async with encrypted(port, stranger) as channel:
        assert (await failure(status(channel)))[0] == "UNAVAILABLE"
    async with encrypted(port, cluster) as channel:
        assert await status(channel) == pb.WORKER_PHASE_READY


class FakeAdmin(admin_pb2_grpc.AdminServiceServicer):
    """Writes down what workers say and show."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.registered_again = asyncio.Event()

    async def RegisterWorker(self, request, context):
        self._note("register", context)
        if len(self.calls) > 1:
            self.registered_again.set()
        return admin_pb2.RegisterWorkerResponse(worker_id="w")

    async def DeregisterWorker(self, request, context):
        self._note("deregister", context)
        return admin_pb2.DeregisterWorkerResponse(found=True)

    def _note(self, what: str, context) -> None:
        self.calls.append((what, dict(context.invocation_metadata()).get("authorization", "")))


async def registered(admin: FakeAdmin, address: str, **options) -> None:
    """A worker registers, and deregisters at its end."""
    dialler = Security(WorkerConfig(model="m", **options)).dialler
    task = asyncio.create_task(keep_registered(address, "127.0.0.1:1", dialler))
    try:
        await asyncio.wait_for(admin.registered_again.wait(), 30)  # so the answer to the first has come
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_worker_registers_with_its_certificate_and_the_secret(
    cluster, stranger, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(registration, "_INTERVAL_S", 0.05)
    admin, server = FakeAdmin(), grpc.aio.server()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    scheduler = cluster.issue("scheduler")
    credentials = grpc.ssl_server_credentials(
        [(scheduler.key.read_bytes(), scheduler.cert.read_bytes())], cluster.ca.read_bytes(), True
    )
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    await server.start()
    (tmp_path / "secret").write_text(SECRET)
    own = stranger.issue("worker")
    options = {"tls_ca": cluster.ca, "tls_cert": own.cert, "tls_key": own.key}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await registered(admin, address, **options)
    assert admin.calls == []
    # A good certificate takes the place of the bad one: the worker that is refused picks it up.
    task = asyncio.create_task(registered(admin, address, secret_file=tmp_path / "secret", **options))
    await asyncio.sleep(0.1)
    good = cluster.issue("good")
    own.cert.write_bytes(good.cert.read_bytes())
    own.key.write_bytes(good.key.read_bytes())
    await asyncio.wait_for(task, 30)
    await server.stop(None)
    assert set(admin.calls[:-1]) == {("register", f"Bearer {SECRET}")}
    assert admin.calls[-1] == ("deregister", f"Bearer {SECRET}")
    assert SECRET not in caplog.text


TLS = {"tls_cert": "c", "tls_key": "k"}


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"tls_cert": "c"}, "tls-cert and tls-key"),
        ({"mtls": True, **TLS}, "tls-ca"),
        ({"host": "0.0.0.0"}, "not a loopback address"),
        ({"host": "0.0.0.0", **TLS}, "secret-file"),
        ({"host": "0.0.0.0", "secret_file": "s", "insecure": True}, "unencrypted"),
        ({"scheduler": "10.0.0.1:50051", "secret_file": "s"}, "10.0.0.1:50051, another machine, unencrypted"),
    ],
)
def test_doors_that_would_stay_open_are_refused(options, part):
    with pytest.raises(ValidationError) as caught:
        WorkerConfig(model="m", **options)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"secret_file": "s", "scheduler": "localhost:50051"},
        {"secret_file": "s", "scheduler": "10.0.0.1:50051", "tls_ca": "a"},
        {"host": "0.0.0.0", "insecure": True},
        {"host": "0.0.0.0", "secret_file": "s", **TLS},
        {"host": "0.0.0.0", "mtls": True, "tls_ca": "a", **TLS},
    ],
)
def test_safe_combinations_are_taken(options):
    WorkerConfig(model="m", **options)


@pytest.mark.parametrize("content", ["", "# nothing\n", f"{SECRET} more\n", "short\n", "ümlaut-0123456789\n"])
def test_a_secret_file_must_have_a_secret_a_line(tmp_path, content):
    path = tmp_path / "secret"
    path.write_text(content)
    with pytest.raises(ValueError) as caught:
        read_secret(path)
    assert str(path) in str(caught.value)
    assert SECRET not in str(caught.value)
