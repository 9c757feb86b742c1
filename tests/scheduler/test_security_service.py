"""Who may talk to the scheduler service, over real gRPC: certificates, tokens, the secret, their files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from certificates import Authority, Certificate
from fake_worker import FakeWorker
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from scheduler_service import watched_files
from scheduler_service.config import ServiceConfig
from scheduler_service.server import INFERENCE, Service
from scheduler_service.telemetry import Telemetry
from tidegate.admin.v1 import admin_pb2, admin_pb2_grpc
from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc
from tidegate.worker.v1 import worker_pb2, worker_pb2_grpc

ALICE, BOB, ROOT = "alice-0123456789", "bob-0123456789ab", "root-0123456789a"
SECRET = "secret-0123456789"
TOKENS = f"{ALICE} alice\n{BOB} bob\n{ROOT} operators admin\n"

Start = Callable[..., Awaitable[Service]]


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


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    services: list[Service] = []

    async def started(**options) -> Service:
        services.append(Service(ServiceConfig(port=0, drain_window=0.0, **options), Telemetry()))
        await services[-1].start()
        return services[-1]

    yield started
    for service in services:
        await service.stop(grace_s=0)


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    worker = FakeWorker()
    await worker.start()
    yield worker
    await worker.stop()


@pytest.fixture
async def guarded(start, worker, tmp_path) -> Service:
    """A service with tokens and a secret, and one ready worker."""
    (tmp_path / "tokens").write_text(TOKENS)
    (tmp_path / "secret").write_text(SECRET)
    service = await start(
        token_file=tmp_path / "tokens", secret_file=tmp_path / "secret", worker=(worker.address,)
    )
    async with plain(service) as channel, asyncio.timeout(20):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        async for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                break
    return service


def plain(service: Service) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{service.port}")


def encrypted(port: int, authority: Authority, own: Certificate | None = None) -> grpc.aio.Channel:
    ca = authority.ca.read_bytes()
    key, cert = (own.key.read_bytes(), own.cert.read_bytes()) if own else (None, None)
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(ca, key, cert))


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def generate(**fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        stopping=pb.StoppingParams(max_tokens=fields.pop("max_tokens", 3)),
        output=pb.OutputParams(text=False),
        **fields,
    )


async def list_models(channel: grpc.aio.Channel, metadata=()) -> pb.ListModelsResponse:
    stub = pb_grpc.InferenceServiceStub(channel)
    return await stub.ListModels(pb.ListModelsRequest(), metadata=metadata, timeout=10)


async def get_state(channel: grpc.aio.Channel, metadata=()) -> admin_pb2.GetStateResponse:
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    return await stub.GetState(admin_pb2.GetStateRequest(), metadata=metadata, timeout=10)


async def reason(awaitable) -> tuple[str, str]:
    """Status and ErrorInfo.reason of an RPC that must fail with details."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(caught.value)
    assert status is not None
    assert status.details[0].Unpack(info)
    assert info.domain == "tidegate.dev"
    return caught.value.code().name, info.reason


async def refused_connection(awaitable) -> str:
    """What gRPC says of a connection that must not come about."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return caught.value.details()


class TestCertificates:
    async def test_a_client_checks_the_service(self, start, cluster, stranger):
        own = cluster.issue("scheduler")
        service = await start(tls_cert=own.cert, tls_key=own.key)
        async with encrypted(service.port, cluster) as channel:
            assert list((await list_models(channel)).models) == []
        async with encrypted(service.port, stranger) as channel:
            assert "CERTIFICATE_VERIFY_FAILED" in await refused_connection(list_models(channel))
        async with plain(service) as channel:
            await refused_connection(list_models(channel))

    async def test_an_expired_certificate_is_refused_until_a_new_one_is_in_its_files(self, start, cluster):
        own = cluster.issue("scheduler", days=-1)
        service = await start(tls_cert=own.cert, tls_key=own.key)
        async with encrypted(service.port, cluster) as channel:
            assert "certificate has expired" in await refused_connection(list_models(channel))
        # The certificate first, then its key: in between they do not belong together.
        new = cluster.issue("new")
        own.cert.write_bytes(new.cert.read_bytes())
        async with encrypted(service.port, cluster) as channel:
            assert "certificate has expired" in await refused_connection(list_models(channel))
        own.key.write_bytes(new.key.read_bytes())
        async with encrypted(service.port, cluster) as channel:
            assert list((await list_models(channel)).models) == []

    async def test_clients_need_a_certificate_where_their_ca_is_set(self, start, cluster, stranger):
        own = cluster.issue("scheduler")
        service = await start(tls_cert=own.cert, tls_key=own.key, tls_client_ca=stranger.ca, admin_port=0)
        for certificate in (None, cluster.issue("client"), stranger.issue("expired", days=-1)):
            async with encrypted(service.port, cluster, certificate) as channel:
                await refused_connection(list_models(channel))
        async with encrypted(service.port, cluster, stranger.issue("client")) as channel:
            assert list((await list_models(channel)).models) == []

    async def test_the_admin_port_takes_the_cluster_s_certificates(self, start, cluster, stranger):
        own = cluster.issue("scheduler")
        tls = {"tls_cert": own.cert, "tls_key": own.key, "tls_ca": cluster.ca}
        service = await start(**tls, mtls=True, admin_port=0)
        for certificate in (None, stranger.issue("client")):
            async with encrypted(service.admin_port, cluster, certificate) as channel:
                await refused_connection(get_state(channel))
        async with encrypted(service.admin_port, cluster, cluster.issue("operator")) as channel:
            assert (await get_state(channel)).version
        async with encrypted(service.port, cluster) as channel:  # clients need none
            assert list((await list_models(channel)).models) == []
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await get_state(channel)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    async def test_certificate_and_secret_are_both_needed_where_both_are_set(self, start, cluster, tmp_path):
        own = cluster.issue("scheduler")
        (tmp_path / "secret").write_text(SECRET)
        tls = {"tls_cert": own.cert, "tls_key": own.key, "tls_ca": cluster.ca}
        service = await start(**tls, mtls=True, admin_port=0, secret_file=tmp_path / "secret")
        async with encrypted(service.admin_port, cluster, cluster.issue("worker")) as channel:
            assert await reason(get_state(channel)) == ("UNAUTHENTICATED", "MISSING_TOKEN")
            assert (await get_state(channel, bearer(SECRET))).version

    @pytest.mark.parametrize("broken", ["cert", "key", "ca"])
    def test_files_that_are_no_pem_are_refused_at_the_start(self, cluster, tmp_path, broken):
        own = cluster.issue("scheduler")
        files = {"tls_cert": own.cert, "tls_key": own.key, "tls_ca": cluster.ca}
        (tmp_path / "broken").write_text("no PEM")
        files[f"tls_{broken}"] = tmp_path / "broken"
        with pytest.raises(OSError, match="broken"):
            Service(ServiceConfig(port=0, **files), Telemetry())


class TestTokens:
    async def test_a_client_needs_a_token_that_is_known(self, guarded):
        async with plain(guarded) as channel:
            assert await reason(list_models(channel)) == ("UNAUTHENTICATED", "MISSING_TOKEN")
            assert await reason(list_models(channel, bearer("unknown-012345678"))) == (
                "UNAUTHENTICATED",
                "BAD_TOKEN",
            )
            assert [model.name for model in (await list_models(channel, bearer(ALICE))).models] == ["fake"]
            # A stream too, and before anything is read of it.
            call = pb_grpc.InferenceServiceStub(channel).Generate(generate(), timeout=10)
            assert await reason(call.read()) == ("UNAUTHENTICATED", "MISSING_TOKEN")

    async def test_a_client_may_not_call_the_admin_api_nor_the_secret_generate(self, guarded):
        async with plain(guarded) as channel:
            assert await reason(get_state(channel)) == ("UNAUTHENTICATED", "MISSING_TOKEN")
            assert await reason(get_state(channel, bearer(ALICE))) == (
                "PERMISSION_DENIED",
                "PERMISSION_DENIED",
            )
            for token in (ROOT, SECRET):
                assert (await get_state(channel, bearer(token))).version
            assert await reason(list_models(channel, bearer(SECRET))) == (
                "PERMISSION_DENIED",
                "PERMISSION_DENIED",
            )

    async def test_a_worker_service_is_not_to_be_found_here(self, guarded):
        async with plain(guarded) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            status = stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=10)
            assert await reason(status) == ("UNAUTHENTICATED", "MISSING_TOKEN")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetStatus(worker_pb2.GetStatusRequest(), metadata=bearer(ALICE), timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    async def test_a_changed_token_file_holds_at_once(self, guarded, tmp_path):
        async with plain(guarded) as channel:
            await list_models(channel, bearer(ALICE))
            (tmp_path / "tokens").write_text("carol-0123456789 carol\n")
            assert await reason(list_models(channel, bearer(ALICE))) == ("UNAUTHENTICATED", "BAD_TOKEN")
            await list_models(channel, bearer("carol-0123456789"))

    async def test_a_request_has_the_tenant_of_its_token(self, guarded, worker):
        worker.step_delay_s = 0.02
        async with plain(guarded) as channel:
            stub = pb_grpc.InferenceServiceStub(channel)
            stolen = stub.Generate(generate(tenant="bob"), metadata=bearer(ALICE), timeout=10)
            assert await reason(stolen.read()) == ("PERMISSION_DENIED", "TENANT_MISMATCH")
            calls = [
                stub.Generate(generate(max_tokens=400, **fields), metadata=bearer(token), timeout=60)
                for token, fields in ((ALICE, {}), (BOB, {"tenant": "bob"}))
            ]
            for call in calls:
                await call.read()
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            live = await admin.ListRequests(admin_pb2.ListRequestsRequest(), metadata=bearer(ROOT))
            assert [request.tenant for request in live.requests] == ["alice", "bob"]
            for call in calls:
                call.cancel()

    async def test_only_its_tenant_or_an_operator_cancels_a_request(self, guarded, worker):
        worker.step_delay_s = 0.02
        async with plain(guarded) as channel:
            stub = pb_grpc.InferenceServiceStub(channel)

            async def cancelled(token: str) -> bool:
                request = pb.CancelRequest(request_id="r")
                return (await stub.Cancel(request, metadata=bearer(token), timeout=10)).found

            for canceller in (ALICE, ROOT):
                request = generate(max_tokens=400, request_id="r")
                call = stub.Generate(request, metadata=bearer(ALICE), timeout=60)
                await call.read()
                assert not await cancelled(BOB)
                assert await cancelled(canceller)
                while (response := await call.read()) is not grpc.aio.EOF:
                    last = response
                assert last.finished.reason == pb.FINISH_REASON_CANCELLED

    async def test_health_is_open_and_reflection_is_not(self, guarded):
        async def services(channel, metadata=()) -> list[str]:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(metadata=metadata, timeout=10)
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            return [service.name for service in (await call.read()).list_services_response.service]

        async with plain(guarded) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert await reason(services(channel)) == ("UNAUTHENTICATED", "MISSING_TOKEN")
            for token in (ALICE, SECRET):
                assert INFERENCE in await services(channel, bearer(token))

    async def test_tokens_alone_close_the_admin_api_to_clients(self, start, tmp_path):
        (tmp_path / "tokens").write_text(TOKENS)
        service = await start(token_file=tmp_path / "tokens")
        async with plain(service) as channel:
            assert await reason(get_state(channel, bearer(ALICE))) == (
                "PERMISSION_DENIED",
                "PERMISSION_DENIED",
            )
            assert (await get_state(channel, bearer(ROOT))).version

    async def test_the_secret_alone_leaves_generation_open(self, start, tmp_path):
        (tmp_path / "secret").write_text(SECRET)
        service = await start(secret_file=tmp_path / "secret")
        async with plain(service) as channel:
            await list_models(channel)
            assert await reason(get_state(channel)) == ("UNAUTHENTICATED", "MISSING_TOKEN")


class ShownTo(FakeWorker):
    """A worker behind TLS that asks the scheduler for a certificate, and notes what else it shows."""

    async def Execute(self, requests, context):
        self.shown = dict(context.invocation_metadata()).get("authorization")
        await super().Execute(requests, context)

    async def listen(self, own: Certificate, ca: Authority) -> grpc.aio.Server:
        server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)
        credentials = grpc.ssl_server_credentials(
            [(own.key.read_bytes(), own.cert.read_bytes())], ca.ca.read_bytes(), True
        )
        self.address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
        await server.start()
        return server


class TestWorkers:
    async def test_a_worker_gets_a_certificate_and_the_secret(self, start, cluster, tmp_path):
        (tmp_path / "secret").write_text(SECRET)
        worker, own = ShownTo(), cluster.issue("scheduler")
        server = await worker.listen(cluster.issue("worker"), cluster)
        service = await start(
            worker=(worker.address,),
            tls_cert=own.cert,
            tls_key=own.key,
            tls_ca=cluster.ca,
            secret_file=tmp_path / "secret",
        )
        async with asyncio.timeout(20):
            while not service.engine.state().workers:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
        assert worker.shown == f"Bearer {SECRET}"
        await server.stop(None)

    @pytest.mark.parametrize("fault", ["no certificate", "a stranger's certificate", "a stranger's worker"])
    async def test_a_worker_and_a_scheduler_that_do_not_trust_each_other_stay_apart(
        self, start, cluster, stranger, fault
    ):
        worker = ShownTo()
        issuer = stranger if fault == "a stranger's worker" else cluster
        server = await worker.listen(issuer.issue("worker"), cluster)
        issuer_of_own = stranger if fault == "a stranger's certificate" else cluster
        own = issuer_of_own.issue("scheduler")
        files = {} if fault == "no certificate" else {"tls_cert": own.cert, "tls_key": own.key}
        service = await start(worker=(worker.address,), tls_ca=cluster.ca, **files)
        connect = encrypted(service.port, issuer_of_own) if files else plain(service)
        async with connect as channel, asyncio.timeout(20):
            while not (state := (await get_state(channel)).workers[0]).last_error:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
        assert state.status == admin_pb2.WORKER_STATUS_CONNECTING
        assert state.last_error.startswith("UNAVAILABLE")
        assert worker.hellos == []
        await server.stop(None)


async def test_the_secret_is_not_sent_to_another_machine_in_the_clear(guarded):
    async with plain(guarded) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        request = admin_pb2.RegisterWorkerRequest(address="10.0.0.2:50061")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.RegisterWorker(request, metadata=bearer(SECRET), timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "unencrypted" in caught.value.details()


async def test_without_options_everything_is_open_on_loopback(start):
    service = await start()
    async with plain(service) as channel:
        await list_models(channel)
        # A token that nobody asked for does no harm.
        assert (await get_state(channel, bearer(ALICE))).version
