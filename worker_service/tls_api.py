"""Owns the way from PEM files to gRPC's credentials: those of the port, and those for a scheduler."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from worker_service.secret import Secret
from worker_service.watched_files import WatchedFiles


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
    """Certificate chain and key of this worker, and the CA of others. Raises OSError if they are no such."""
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


def server_credentials(files: WatchedFiles[Pem]) -> grpc.ServerCredentials:
    """For the port. Where the files name a CA, callers must have a certificate of it.

    Each new connection uses what the files say by then.
    """
    pem = files.get()
    return grpc.dynamic_ssl_server_credentials(
        pem.to_server(), lambda: files.get().to_server(), require_client_authentication=pem.ca is not None
    )


class Dialler:
    """Opens channels to the scheduler: with TLS if there is a CA to check it by, and with the secret."""

    def __init__(
        self, tls: WatchedFiles[Pem] | None = None, secret: WatchedFiles[Secret] | None = None
    ) -> None:
        self._tls = tls
        self._secret = secret

    def open(self, address: str) -> grpc.aio.Channel:
        """A channel that uses the files as they are now."""
        if self._tls is None:
            return grpc.aio.insecure_channel(address)
        pem = self._tls.get()
        return grpc.aio.secure_channel(
            address, grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)
        )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """To be sent with each call."""
        return () if self._secret is None else (("authorization", f"Bearer {self._secret.get().own}"),)
