"""How a client is let in: TLS files and a token, given or from the environment.

Owns the rule that a token never crosses a network unencrypted.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from tidegate_client.errors import InvalidRequestError

TLS_VARIABLE = "TIDEGATE_TLS"
TLS_CA_VARIABLE = "TIDEGATE_TLS_CA"
TLS_CERT_VARIABLE = "TIDEGATE_TLS_CERT"
TLS_KEY_VARIABLE = "TIDEGATE_TLS_KEY"
TOKEN_VARIABLE = "TIDEGATE_TOKEN"  # noqa: S105 - a name


@dataclass(frozen=True, slots=True)
class Tls:
    """Encryption. The files are PEM, and are read when the client is made."""

    ca: str | Path | None = None
    """CA of the scheduler's certificate. None: the public ones that gRPC knows."""
    cert: str | Path | None = None
    """This client's own certificate chain, for schedulers that ask for one."""
    key: str | Path | None = None
    """Its key."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises InvalidRequestError if that is not possible."""
        if (self.cert is None) != (self.key is None):
            raise _refused("a TLS certificate and its key belong together; give both, or neither")
        try:
            ca, key, cert = (
                None if path is None else Path(path).read_bytes() for path in (self.ca, self.key, self.cert)
            )
        except OSError as error:
            raise _refused(f"the TLS file {error.filename} can't be read: {error.strerror}") from None
        return grpc.ssl_channel_credentials(ca, key, cert)


@dataclass(frozen=True, slots=True)
class Access:
    """What a channel and its calls need."""

    credentials: grpc.ChannelCredentials | None
    """None: no encryption."""
    metadata: tuple[tuple[str, str], ...] = field(repr=False)


def resolve_access(
    target: str,
    tls: Tls | None = None,
    token: str | None = None,
    credentials: grpc.ChannelCredentials | None = None,
) -> Access:
    """Completes what is given from the environment. Raises InvalidRequestError for what must not be sent."""
    if credentials is None:
        tls = tls or _tls_from_environment()
        credentials = None if tls is None else tls.credentials()
    token = token or os.environ.get(TOKEN_VARIABLE)
    if not token:
        return Access(credentials, ())
    if credentials is None and not _is_local(target):
        raise _refused(
            f"the token would go to {target} unencrypted; use TLS (tls=Tls(...), or {TLS_CA_VARIABLE})"
        )
    return Access(credentials, (("authorization", f"Bearer {token}"),))


def _tls_from_environment() -> Tls | None:
    ca = os.environ.get(TLS_CA_VARIABLE)
    if not ca and os.environ.get(TLS_VARIABLE, "").lower() not in ("1", "true", "yes", "on"):
        return None
    return Tls(
        ca or None, os.environ.get(TLS_CERT_VARIABLE) or None, os.environ.get(TLS_KEY_VARIABLE) or None
    )


def _is_local(target: str) -> bool:
    """Whether only this machine sees what goes to a gRPC target, or to several with commas."""
    if "," in target:
        return all(map(_is_local, target.split(",")))
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    endpoint = target.removeprefix("dns:///").removeprefix("dns:").removeprefix("ipv4:").removeprefix("ipv6:")
    host, colon, port = endpoint.rpartition(":")
    host = (host if colon and port.isdigit() else endpoint).strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError("INVALID_ARGUMENT", message)
