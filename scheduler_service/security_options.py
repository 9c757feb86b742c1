"""Owns the options that say who may talk to the service, and what combinations of them are safe to start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings

from scheduler_service.addresses import host_of, is_loopback


class SecurityOptions(BaseSettings):
    """Encryption, certificates and tokens. All files are read again when they change."""

    insecure: bool = Field(
        False, description="Allow plain text, and an open admin API, on addresses other than loopback."
    )
    tls_cert: Path | None = Field(
        None, description="PEM file: certificate chain of this service, for its ports and for workers."
    )
    tls_key: Path | None = Field(None, description="PEM file: key of tls_cert.")
    tls_ca: Path | None = Field(
        None, description="PEM file: CA of workers, which are then dialled with TLS (unset: plain text)."
    )
    mtls: bool = Field(False, description="Callers of the admin port must have a certificate of tls_ca.")
    tls_client_ca: Path | None = Field(
        None, description="PEM file: callers of the public port must have a certificate of this CA."
    )
    token_file: Path | None = Field(
        None,
        description="Clients need a token; one `token tenant [client|admin]` a line (unset: they do not).",
    )
    secret_file: Path | None = Field(
        None, description="Secret that workers, operators and this service share; the first line is sent."
    )

    def check_security(
        self, host: str, admin_host: str | None, workers: Sequence[str], console_host: str | None = None
    ) -> None:
        """Raises ValueError for options that contradict each other or leave a door open.

        admin_host: where the admin API listens. None: it shares the port of `host`.
        console_host: where the console listens. None: there is none.
        """
        self._check_files(admin_has_own_port=admin_host is not None)
        self._check_secret_stays_private(workers)
        if not is_loopback(host):
            self._check_exposed("host", host, has_admin=admin_host is None)
        if admin_host is not None and not is_loopback(admin_host):
            self._check_exposed("admin_host", admin_host, has_admin=True)
        if console_host is not None and not is_loopback(console_host):
            self._check_exposed("console_host", console_host, has_admin=True)

    def _check_files(self, *, admin_has_own_port: bool) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together; set both, or neither")
        if self.mtls and not (self.tls_cert and self.tls_ca and admin_has_own_port):
            raise ValueError("mtls needs tls_cert, tls_key, tls_ca, and an admin_port, where no clients come")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        if self.tls_client_ca and not admin_has_own_port and not self.admin_is_guarded:
            raise ValueError(
                "with tls_client_ca alone every client could steer the service by the admin API, since that "
                "shares the public port; set secret_file, token_file or admin_port"
            )

    def _check_secret_stays_private(self, workers: Sequence[str]) -> None:
        remote = [address for address in workers if not is_loopback(host_of(address))]
        if self.secret_file and not self.tls_ca and remote:
            raise ValueError(
                f"worker {remote[0]} is on another machine and would get the secret unencrypted; set tls_ca"
            )

    def _check_exposed(self, option: str, host: str, *, has_admin: bool) -> None:
        """The rules for a host that other machines can reach."""
        if not self.tls_cert and (self.token_file or (self.secret_file and has_admin)):
            raise ValueError(
                f"{option} = {host!r}: tokens and secrets would come there unencrypted; set tls_cert and "
                "tls_key, or listen on 127.0.0.1 behind a proxy that has TLS"
            )
        if not self.tls_cert and not self.insecure:
            raise ValueError(
                f"{option} = {host!r} is not a loopback address and connections are not encrypted; listen on "
                "127.0.0.1, set tls_cert and tls_key, or set --insecure if the network is trusted"
            )
        if has_admin and not self.admin_is_guarded and not self.insecure:
            raise ValueError(
                f"{option} = {host!r}: whoever reaches it could steer the service by the admin API; set "
                "secret_file, token_file or mtls, or set --insecure if the network is trusted"
            )

    @property
    def admin_is_guarded(self) -> bool:
        """Whether the admin API asks its callers for anything."""
        return bool(self.secret_file or self.token_file or self.mtls)
