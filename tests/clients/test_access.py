"""How the Python client and the command line are let in: TLS, tokens, and what they refuse to send."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from certificates import Authority
from fake_server import FakeInference, abort
from google.rpc import code_pb2

from tidegate.inference.v1 import inference_pb2_grpc
from tidegate_client import AccessDeniedError, AdminClient, AsyncClient, Client, InvalidRequestError, Tls
from tidegate_client.access import resolve_access
from tidegate_client.cli import main

TOKEN = "alice-0123456789"
BEARER = f"Bearer {TOKEN}"


class FakeTlsInference(FakeInference):
    """Adds a port with TLS that asks for certificates."""

    def __init__(self, authority: Authority) -> None:
        super().__init__()
        own = authority.issue("server")
        pair = (own.key.read_bytes(), own.cert.read_bytes())
        credentials = grpc.ssl_server_credentials([pair], authority.ca.read_bytes(), True)
        self._tls_server = grpc.server(ThreadPoolExecutor(max_workers=2))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._tls_server)
        self.tls_address = f"127.0.0.1:{self._tls_server.add_secure_port('127.0.0.1:0', credentials)}"
        self._tls_server.start()

    def stop(self) -> None:
        self._tls_server.stop(grace=None).wait()
        super().stop()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture
def tls_server(authority: Authority) -> Iterator[FakeTlsInference]:
    server = FakeTlsInference(authority)
    yield server
    server.call_ended.set()
    server.stop()


def test_a_client_shows_its_certificate_and_token(tls_server, authority) -> None:
    own = authority.issue("client")
    tls = Tls(authority.ca, own.cert, own.key)
    with Client(tls_server.tls_address, tls=tls, token=TOKEN, metadata=[("also", "this")]) as client:
        assert "".join(delta.text for delta in client.generate("Once")) == "Hello world"
    assert tls_server.metadata[0]["authorization"] == BEARER
    assert tls_server.metadata[0]["also"] == "this"


async def test_an_async_client_does_so_too(tls_server, authority) -> None:
    own = authority.issue("client")
    tls = Tls(str(authority.ca), str(own.cert), str(own.key))
    async with AsyncClient(tls_server.tls_address, tls=tls, token=TOKEN) as client:
        assert "".join([delta.text async for delta in client.generate("Once")]) == "Hello world"
    assert tls_server.metadata[0]["authorization"] == BEARER


def test_the_environment_fills_in_what_is_not_given(tls_server, authority, monkeypatch) -> None:
    own = authority.issue("client")
    for name, value in {"TLS_CA": authority.ca, "TLS_CERT": own.cert, "TLS_KEY": own.key}.items():
        monkeypatch.setenv(f"TIDEGATE_{name}", str(value))
    monkeypatch.setenv("TIDEGATE_TOKEN", TOKEN)
    with Client(tls_server.tls_address) as client:
        assert "".join(delta.text for delta in client.generate("Once")) == "Hello world"
    assert tls_server.metadata[0]["authorization"] == BEARER


def test_the_command_line_has_options_for_all_of_it(tls_server, authority, monkeypatch, capsys) -> None:
    own = authority.issue("client")
    for name in ("TLS", "TLS_CA", "TLS_CERT", "TLS_KEY", "TOKEN"):
        monkeypatch.setenv(f"TIDEGATE_{name}", "")  # and back to what it was, after the test
    options = [f"--tls-ca={authority.ca}", f"--tls-cert={own.cert}", f"--tls-key={own.key}"]
    command = ["generate", "Once", f"--address={tls_server.tls_address}"]
    monkeypatch.setattr(sys, "argv", ["tidegate", *options, f"--token={TOKEN}", *command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().out) == (0, "Hello world\n")
    assert tls_server.metadata[0]["authorization"] == BEARER


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("localhost:50051", True),
        ("127.0.0.1:50051", True),
        ("127.8.8.8:1", True),
        ("[::1]:50051", True),
        ("ipv4:127.0.0.1:50051", True),
        ("ipv6:[::1]:50051", True),
        ("dns:///localhost:50051", True),
        ("unix:/run/tidegate", True),
        ("localhost", True),
        ("10.0.0.1:50051", False),
        ("[2001:db8::1]:50051", False),
        ("localhost.example.com:50051", False),
        ("dns:///gpu-host:50051", False),
        ("dns://127.0.0.1/gpu-host:50051", False),
        ("dns://10.0.0.1/localhost:50051", False),
        ("xds:///localhost:50051", False),
    ],
)
def test_a_token_goes_unencrypted_to_this_machine_only(target, local) -> None:
    assert resolve_access(target).metadata == ()
    assert resolve_access(target, tls=Tls(), token=TOKEN).metadata == (("authorization", BEARER),)
    if local:
        assert resolve_access(target, token=TOKEN).metadata == (("authorization", BEARER),)
    else:
        with pytest.raises(InvalidRequestError, match="unencrypted") as caught:
            resolve_access(target, token=TOKEN)
        assert TOKEN not in str(caught.value)


@pytest.mark.parametrize("make", [Client, AdminClient])
def test_clients_refuse_to_be_made_like_that(make) -> None:
    with pytest.raises(InvalidRequestError, match="unencrypted"):
        make("10.0.0.1:50051", token=TOKEN)


def test_tls_files_must_be_there_and_in_pairs(tmp_path) -> None:
    with pytest.raises(InvalidRequestError, match="nowhere"):
        Tls(tmp_path / "nowhere").credentials()
    with pytest.raises(InvalidRequestError, match="belong together"):
        Tls(cert=tmp_path / "cert").credentials()


def test_tls_without_files_trusts_the_public_authorities(monkeypatch) -> None:
    assert resolve_access("10.0.0.1:1").credentials is None
    monkeypatch.setenv("TIDEGATE_TLS", "0")
    assert resolve_access("10.0.0.1:1").credentials is None
    monkeypatch.setenv("TIDEGATE_TLS", "1")
    assert resolve_access("10.0.0.1:1").credentials is not None


@pytest.mark.parametrize(
    ("code", "reason"),
    [(code_pb2.UNAUTHENTICATED, "MISSING_TOKEN"), (code_pb2.PERMISSION_DENIED, "PERMISSION_DENIED")],
)
def test_a_refused_credential_is_an_error_of_its_own_and_not_retried(server, client, code, reason) -> None:
    def refuse(request, context):
        abort(context, code, "no", reason=reason)
        yield

    server.answer = refuse
    with pytest.raises(AccessDeniedError) as caught:
        list(client.generate("Once"))
    assert caught.value.reason == reason
    assert len(server.requests) == 1


def test_a_token_is_in_no_representation_of_what_holds_it() -> None:
    assert TOKEN not in repr(resolve_access("localhost:1", token=TOKEN))
