"""Owns what the security options become: the port's encryption, its check of callers, and the dialler."""

from __future__ import annotations

import grpc

from worker_service.auth_api import SecretCheck
from worker_service.config import WorkerConfig
from worker_service.secret import read_secret
from worker_service.tls_api import Dialler, server_credentials, watch_pem
from worker_service.watched_files import WatchedFiles


class Security:
    """Everything that the options name, read and ready for use."""

    def __init__(self, config: WorkerConfig) -> None:
        """Raises OSError or ValueError for files that cannot be used."""
        path = config.secret_file
        secret = None if path is None else WatchedFiles([path], lambda: read_secret(path))
        self.interceptors = () if secret is None else (SecretCheck(secret),)
        self.dialler = Dialler(
            None if config.tls_ca is None else watch_pem(config.tls_cert, config.tls_key, config.tls_ca),
            secret,
        )
        self._credentials: grpc.ServerCredentials | None = None
        if config.tls_cert is not None:
            callers_ca = config.tls_ca if config.mtls else None
            self._credentials = server_credentials(watch_pem(config.tls_cert, config.tls_key, callers_ca))

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Binds an address and returns its port. Raises RuntimeError if that is not possible."""
        if self._credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self._credentials)
