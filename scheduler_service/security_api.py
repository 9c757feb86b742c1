"""Owns what the security options become: encryption and a door for each port, and the dialler of workers."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health

from scheduler_service.auth import Door, Need, read_secret, read_tokens
from scheduler_service.auth_api import Authentication
from scheduler_service.security_options import SecurityOptions
from scheduler_service.tls_api import Dialler, server_credentials, watch_context, watch_pem
from scheduler_service.watched_files import WatchedFiles
from tidegate.admin.v1 import admin_pb2
from tidegate.inference.v1 import inference_pb2

_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name


@dataclass(frozen=True, slots=True)
class PortSecurity:
    """How one port is guarded."""

    interceptors: tuple[grpc.aio.ServerInterceptor, ...]  # come before all others
    credentials: grpc.ServerCredentials | None  # None: plain text
    door: Door | None = None  # None: nobody is asked who they are

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Binds an address and returns its port. Raises RuntimeError if that is not possible."""
        if self.credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self.credentials)


@dataclass(frozen=True, slots=True)
class ConsoleSecurity:
    """How the console is guarded."""

    door: Door | None  # None: nobody is asked who they are
    tls: WatchedFiles[ssl.SSLContext] | None  # None: plain text


class Security:
    """Everything that the options name, read and ready for use."""

    def __init__(self, options: SecurityOptions) -> None:
        """Raises OSError for files that cannot be used."""
        self._options = options
        tokens, secret = options.token_file, options.secret_file
        try:
            self._tokens = None if tokens is None else WatchedFiles([tokens], lambda: read_tokens(tokens))
            self._secret = None if secret is None else WatchedFiles([secret], lambda: read_secret(secret))
        except ValueError as error:
            raise OSError(str(error)) from None
        dials_with_tls = options.tls_ca is not None
        pem = watch_pem(options.tls_cert, options.tls_key, options.tls_ca) if dials_with_tls else None
        self.dialler = Dialler(pem, self._secret)

    def console(self, *, shares_public_port: bool) -> ConsoleSecurity:
        """For the console, as for the port where the admin API is. Raises OSError for unusable files."""
        port = self.public_port() if shares_public_port else self.admin_port()
        options, ca = self._options, None
        if shares_public_port:
            ca = options.tls_client_ca
        elif options.mtls:
            ca = options.tls_ca
        tls = None if options.tls_cert is None else watch_context(options.tls_cert, options.tls_key, ca)
        return ConsoleSecurity(port.door, tls)

    def public_port(self) -> PortSecurity:
        """For the port of clients, which the admin API may share."""
        knows_callers = bool(self._tokens or self._secret)
        needs = {
            _INFERENCE: Need.TENANT if self._tokens else Need.NOTHING,
            _ADMIN: Need.ADMIN if knows_callers else Need.NOTHING,
        }
        return self._port(needs, knows_callers, self._options.tls_client_ca)

    def admin_port(self) -> PortSecurity:
        """For a port of the admin API alone. A certificate is credential enough where no secret is set."""
        mtls = self._options.mtls
        asks = bool(self._secret or (self._tokens and not mtls))
        needs = {_ADMIN: Need.ADMIN if asks else Need.NOTHING}
        return self._port(needs, asks, self._options.tls_ca if mtls else None)

    def _port(self, needs: dict[str, Need], asks: bool, callers_ca: Path | None) -> PortSecurity:
        options = self._options
        credentials = None
        if options.tls_cert is not None:
            credentials = server_credentials(watch_pem(options.tls_cert, options.tls_key, callers_ca))
        door = Door({**needs, health.SERVICE_NAME: Need.NOTHING}, self._tokens, self._secret)
        return PortSecurity((Authentication(door),) if asks else (), credentials, door if asks else None)
