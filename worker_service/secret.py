"""Owns the secret that the services of a cluster share: its file, and what callers show. No gRPC."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_MIN_CHARACTERS = 16
# What may follow "Bearer " by RFC 6750.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")


@dataclass(frozen=True, slots=True)
class Secret:
    """One that is shown to others, and hashes of all that are accepted from them."""

    own: str = field(repr=False)
    accepted: tuple[bytes, ...] = field(repr=False)

    def is_shown_in(self, authorization: Sequence[str]) -> bool:
        """Whether a caller's `authorization` metadata is one `Bearer SECRET`."""
        if len(authorization) != 1:
            return False
        scheme, _, token = authorization[0].partition(" ")
        digest = hashlib.sha256(token.strip().encode()).digest()
        # All are compared, so that the time does not tell which.
        found = [hmac.compare_digest(digest, known) for known in self.accepted]
        return scheme.lower() == "bearer" and any(found)


def read_secret(path: Path) -> Secret:
    """Reads a file with one secret a line; # begins a comment. The first is shown to others and all are
    accepted, so that one can be replaced while services run. Raises OSError, or ValueError with the number
    of the line, never with a secret."""
    secrets = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 1 or len(words[0]) < _MIN_CHARACTERS or not _TOKEN.fullmatch(words[0]):
            allowed = f"at least {_MIN_CHARACTERS} characters A-Z a-z 0-9 . _ ~ + / -"
            raise ValueError(
                f"{path}: line {number} must be one secret of {allowed}, such as `openssl rand -hex 32` makes"
            )
        secrets.append(words[0])
    if not secrets:
        raise ValueError(f"{path}: there is no secret in it")
    return Secret(secrets[0], tuple(hashlib.sha256(secret.encode()).digest() for secret in secrets))
