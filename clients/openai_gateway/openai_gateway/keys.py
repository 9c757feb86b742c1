"""Who may call, and with which credential the scheduler is called for them.

Owns API keys: those of a file are checked here, others are the scheduler's to judge. Keys are kept as hashes
and never logged.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from openai_gateway.errors import HttpError

Metadata = Sequence[tuple[str, str]]

_MIN_CHARACTERS = 16
_HASHED = "sha256:"
_BEARER = re.compile(r"Bearer +([\x21-\x7e]+) *", re.IGNORECASE)

_log = logging.getLogger("openai_gateway")


class Keys(Protocol):
    """Decides about a caller by its `Authorization` header."""

    def admit(self, authorization: str | None) -> Metadata:
        """Returns what is sent to the scheduler for this caller. Raises HttpError 401."""


class ForwardedKeys:
    """The caller's key is its token at the scheduler, which knows what it is good for."""

    def __init__(self, *, is_protected: bool) -> None:
        """is_protected: nobody can read what goes to the scheduler; else keys stay here."""
        self._is_protected = is_protected

    def admit(self, authorization: str | None) -> Metadata:
        """Forwards the key; there may be none."""
        key = _key(authorization)
        return [("authorization", f"Bearer {key}")] if key and self._is_protected else ()


class FileKeys:
    """The keys of a file, one a line; the scheduler gets the gateway's own token.

    `sha256:` and 64 hexadecimal digits may stand for a key; # begins a comment. The file is followed.
    """

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises OSError, or ValueError with the number of the line, never with a key."""
        self._path = path
        self._stamp = _stamp(path)
        self._digests = _read(path)

    def admit(self, authorization: str | None) -> Metadata:
        """Looks the key up."""
        self._follow()
        key = _key(authorization)
        if key is None:
            raise _denied("this service wants an API key: send the header `Authorization: Bearer KEY`")
        if hashlib.sha256(key.encode()).digest() not in self._digests:
            raise _denied("the API key is not known here")
        return ()

    def _follow(self) -> None:
        """Reads the file again if it has changed. If that can't be used, the last good keys stay."""
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._digests = _read(self._path)
        except (OSError, ValueError) as error:
            _log.warning("API keys are not read again, and the last good ones hold: %s", error)
        else:
            _log.info("API keys were read again from %s", self._path)


def _key(authorization: str | None) -> str | None:
    match = _BEARER.fullmatch(authorization or "")
    return match.group(1) if match else None


def _denied(message: str) -> HttpError:
    return HttpError(401, message, type="authentication_error", code="invalid_api_key")


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> frozenset[bytes]:
    digests = set()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.partition("#")[0].split()
        if len(words) > 1:
            raise ValueError(f"{path}: line {number}: one key a line")
        if words:
            digests.add(_digest(words[0], f"{path}: line {number}"))
    if not digests:
        raise ValueError(f"{path}: there is no key in it")
    return frozenset(digests)


def _digest(word: str, where: str) -> bytes:
    if word.startswith(_HASHED):
        digits = word.removeprefix(_HASHED)
        if not re.fullmatch(r"[0-9A-Fa-f]{64}", digits):
            raise ValueError(f"{where}: {_HASHED} must be followed by 64 hexadecimal digits")
        return bytes.fromhex(digits)
    if len(word) < _MIN_CHARACTERS:
        raise ValueError(f"{where}: the key has {len(word)} characters; it must have {_MIN_CHARACTERS}")
    return hashlib.sha256(word.encode()).digest()
