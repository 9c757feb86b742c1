"""Owns the way from PEM files to gRPC's credentials: those of our ports, and those for dialling workers."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from scheduler_service.addresses import host_of, is_loopback
from scheduler_service.auth import Secret
from scheduler_service.watched_files import WatchedFiles


@dataclass(frozen=True, slots=True)
class Pem:
    """What the files hold. None: there is no such file."""

    certificate: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None

    def to_server(self) -> grpc.ServerCertificateConfiguration:
        """For a port; certificate and key are there."""
        # grpc's types know nothing of files that may be absent.
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.ca)  # type: ignore[list-item]


def watch_pem(certificate: Path | None, key: Path | None, ca: Path | None) -> WatchedFiles[Pem]:
    """Certificate chain and key of this service, and the CA of others. Raises OSError if they are no such."""
    paths = [path for path in (certificate, key, ca) if path is not None]

    def read() -> Pem:
        pem = Pem(*(None if path is None else path.read_bytes() for path in (certificate, key, ca)))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            if certificate is not None:
                context.load_cert_chain(certificate, key, password="")  # encrypted keys are not asked about
            if ca is not None:
                context.load_verify_locations(ca)
        except ssl.SSLError as error:
            names, why = ", ".join(map(str, paths)), error.reason or error
            raise OSError(f"{names}: not PEM, or key and certificate do not belong together: {why}") from None
        return pem

    return WatchedFiles(paths, read)


def watch_context(certificate: Path, key: Path | None, ca: Path | None) -> WatchedFiles[ssl.SSLContext]:
    """The same for a port without gRPC. Where there is a CA, callers must have a certificate of it."""

    def read() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(certificate, key, password="")  # encrypted keys are not asked about
            if ca is not None:
                context.load_verify_locations(ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except ssl.SSLError as error:
            raise OSError(f"{certificate}, {key}, {ca}: not PEM, or not a pair: {error.reason}") from None
        return context

    return WatchedFiles([path for path in (certificate, key, ca) if path is not None], read)


def server_credentials(files: WatchedFiles[Pem]) -> grpc.ServerCredentials:
    """For a port of this service. Where the files name a CA, callers must have a certificate of it.

    Each new connection uses what the files say by then.
    """
    pem = files.get()
    return grpc.dynamic_ssl_server_credentials(
        pem.to_server(), lambda: files.get().to_server(), require_client_authentication=pem.ca is not None
    )


class Dialler:
    """Opens channels to workers: with TLS if there is a CA to check them by, and with the secret."""

    def __init__(
        self, tls: WatchedFiles[Pem] | None = None, secret: WatchedFiles[Secret] | None = None
    ) -> None:
        self._tls = tls
        self._secret = secret

    def check(self, address: str) -> None:
        """Raises ValueError if the secret would go to that address in the clear."""
        if self._secret is not None and self._tls is None and not is_loopback(host_of(address)):
            raise ValueError(
                f"{address} is on another machine and would get the cluster's secret unencrypted; set tls_ca"
            )

    def open(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel that uses the files as they are now."""
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        pem = self._tls.get()
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)
        return grpc.aio.secure_channel(address, credentials, options=options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """To be sent with each call."""
        return () if self._secret is None else (("authorization", f"Bearer {self._secret.get().own}"),)
