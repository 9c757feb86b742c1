"""Owns who a caller is and what it may call: token files, the cluster's secret, and the rules of a port.

No gRPC. Tokens are kept as hashes only, and are never logged.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from scheduler_service import errors
from scheduler_service.watched_files import WatchedFiles

MIN_TOKEN_CHARACTERS = 16
_MAX_TENANT_CHARACTERS = 128
_HASHED = "sha256:"
# What may follow "Bearer " by RFC 6750.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_KEY = secrets.token_bytes(32)


class Need(Enum):
    """What a service asks of its callers."""

    NOTHING = "nothing"
    CREDENTIAL = "any credential"
    TENANT = "a client's or an admin's token"
    ADMIN = "an admin's token or the cluster's secret"


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom a credential stands for."""

    tenant: str | None  # None: the cluster's secret, which is for services and operators
    admin: bool


Credentials = Mapping[bytes, Identity]
"""Identities by the keyed hashes of their tokens. Callers do not know the key, which is a new one in each
process, so how long a comparison of two such hashes takes tells them nothing: a look-up is as good as a
comparison in constant time with all of them.
"""

_caller: ContextVar[Identity | None] = ContextVar("caller", default=None)


def read_tokens(path: Path) -> Credentials:
    """Reads a file with one `token tenant [client|admin]` a line; # begins a comment.

    In place of a token there may be its hash: sha256: and 64 hexadecimal digits. Raises OSError, or
    ValueError with the number of the line, never with a token.
    """
    found: dict[bytes, Identity] = {}
    for where, words in _lines(path):
        if len(words) not in (2, 3) or words[2:] not in ([], ["client"], ["admin"]):
            raise ValueError(f"{where}: it must be `token tenant`, or that and `client` or `admin`")
        if len(words[1]) > _MAX_TENANT_CHARACTERS:
            allowed = f"allowed: at most {_MAX_TENANT_CHARACTERS}"
            raise ValueError(f"{where}: the tenant has {len(words[1])} characters; {allowed}")
        key = _keyed(_sha256(words[0], where))
        if key in found:
            raise ValueError(f"{where}: this token is there twice")
        found[key] = Identity(words[1], admin=words[2:] == ["admin"])
    return found


@dataclass(frozen=True, slots=True)
class Secret:
    """The secret that the services of one cluster share."""

    own: str = field(repr=False)  # what this service shows
    accepted: Credentials


def read_secret(path: Path) -> Secret:
    """Reads a file with one secret a line. The first is shown to others and all are accepted, so that one can
    be replaced while services run. Raises OSError, or ValueError with the number of the line."""
    lines = _lines(path)
    for where, words in lines:
        if len(words) != 1 or words[0].startswith(_HASHED):
            raise ValueError(f"{where}: it must be one secret, not hashed")
    if not lines:
        raise ValueError(f"{path}: there is no secret in it")
    identity = Identity(None, admin=True)
    accepted = {_keyed(_sha256(words[0], where)): identity for where, words in lines}
    return Secret(own=lines[0][1][0], accepted=accepted)


def _lines(path: Path) -> list[tuple[str, list[str]]]:
    """The words of each line that has any, and where it is."""
    text = path.read_text(encoding="utf-8")
    split = [(number, line.partition("#")[0].split()) for number, line in enumerate(text.splitlines(), 1)]
    return [(f"{path}: line {number}", words) for number, words in split if words]


def _sha256(token: str, where: str) -> bytes:
    if token.startswith(_HASHED):
        digits = token.removeprefix(_HASHED)
        if not re.fullmatch(r"[0-9A-Fa-f]{64}", digits):
            raise ValueError(f"{where}: {_HASHED} must be followed by 64 hexadecimal digits")
        return bytes.fromhex(digits)
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise ValueError(
            f"{where}: the token has {len(token)} characters; it must have at least {MIN_TOKEN_CHARACTERS}, "
            "such as those of `openssl rand -hex 32`"
        )
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"{where}: a token may have the characters A-Z a-z 0-9 . _ ~ + / - and = at its end")
    return hashlib.sha256(token.encode()).digest()


def _keyed(digest: bytes) -> bytes:
    return hashlib.blake2b(digest, key=_KEY, digest_size=32).digest()


class Door:
    """Decides for one port who may call which service."""

    def __init__(
        self,
        needs: Mapping[str, Need],
        tokens: WatchedFiles[Credentials] | None,
        secret: WatchedFiles[Secret] | None,
    ) -> None:
        """`needs`: by the full name of a service. One that is not named needs a credential."""
        self._needs = needs
        self._tokens = tokens
        self._secret = secret

    def admit(self, service: str, authorization: Sequence[str]) -> Identity | None:
        """Who calls; None where nobody asks. `authorization`: what the caller sent under that name.

        Raises ServiceError: MISSING_TOKEN, BAD_TOKEN or PERMISSION_DENIED.
        """
        need = self._needs.get(service, Need.CREDENTIAL)
        if need is Need.NOTHING:
            return None
        if not authorization:
            raise errors.missing_token()
        identity = self._identify(authorization)
        if identity is None:
            raise errors.bad_token()
        if (need is Need.ADMIN and not identity.admin) or (need is Need.TENANT and identity.tenant is None):
            raise errors.permission_denied(service, need.value)
        return identity

    def _identify(self, authorization: Sequence[str]) -> Identity | None:
        scheme, _, token = authorization[0].partition(" ")
        if len(authorization) != 1 or scheme.lower() != "bearer":
            return None
        key = _keyed(hashlib.sha256(token.strip().encode()).digest())
        return next((found[key] for found in self._sources() if key in found), None)

    def _sources(self) -> list[Credentials]:
        sources = []
        if self._tokens is not None:
            sources.append(self._tokens.get())
        if self._secret is not None:
            sources.append(self._secret.get().accepted)
        return sources


def set_caller(identity: Identity | None) -> None:
    """Notes who calls, for the rest of the current task."""
    _caller.set(identity)


def bound_tenant(asked_for: str) -> str:
    """The tenant of a request: the caller's, where callers have credentials, or what the request says.

    Raises ServiceError where the two differ.
    """
    identity = _caller.get()
    if identity is None or identity.tenant is None:
        return asked_for
    if asked_for not in ("", identity.tenant):
        raise errors.tenant_mismatch(asked_for, identity.tenant)
    return identity.tenant


def tenant_limit() -> str | None:
    """The tenant whose requests the caller may touch. None: all of them."""
    identity = _caller.get()
    return None if identity is None or identity.admin else identity.tenant
