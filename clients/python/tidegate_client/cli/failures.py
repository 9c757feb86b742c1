"""Failures as people see them: one line with the reason, the numbers and what to do, and an exit code."""

from __future__ import annotations

import os
from pathlib import Path

from tidegate_client.access import TLS_CA_VARIABLE, TLS_VARIABLE, TOKEN_VARIABLE
from tidegate_client.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    TidegateError,
    UnavailableError,
)

SERVER_FAILED = 1
BAD_REQUEST = 2
UNREACHABLE = 3
OVERLOADED = 4
OUT_OF_TIME = 5
INTERRUPTED = 130

_HUNG_UP = ("Socket closed", "Connection reset by peer")  # what gRPC says of it

_EXIT_CODES: dict[type[TidegateError], int] = {
    InvalidRequestError: BAD_REQUEST,
    NotFoundError: BAD_REQUEST,
    AlreadyExistsError: BAD_REQUEST,
    AccessDeniedError: BAD_REQUEST,
    UnavailableError: UNREACHABLE,
    OverloadedError: OVERLOADED,
    DeadlineExceededError: OUT_OF_TIME,
}


class Failure(Exception):
    """A command can't do what it was asked. The text says why and what to do."""

    def __init__(self, text: str, code: int = SERVER_FAILED) -> None:
        super().__init__(text)
        self.code = code


def exit_code(error: Failure | TidegateError) -> int:
    """Returns the process's exit code for a failure."""
    return error.code if isinstance(error, Failure) else _EXIT_CODES.get(type(error), SERVER_FAILED)


def describe(error: Failure | TidegateError) -> str:
    """Returns the failure in one line."""
    if isinstance(error, Failure):
        return str(error)
    if isinstance(error, UnavailableError) and not error.reason:
        # Without a reason it wasn't a scheduler that spoke.
        return (
            f"no scheduler answers ({error.message}); {_tls_hint(error)}start one with "
            "`tidegate serve MODEL`, or name its host:port with --address or TIDEGATE_ADDRESS"
        )
    facts = [error.reason or error.code, *(f"{key}={value}" for key, value in sorted(error.metadata.items()))]
    parts = [f"{error.message} ({', '.join(facts)})"]
    parts += [
        f"{violation.field}: {violation.description}"
        for violation in error.violations
        if violation.description not in error.message
    ]
    if error.retry_after_s is not None:
        parts.append(f"try again in {error.retry_after_s:.1f} s")
    if error.code == "UNAUTHENTICATED" and not os.environ.get(TOKEN_VARIABLE):
        parts.append(f"set {TOKEN_VARIABLE}, or give --token before the command")
    return "; ".join(parts)


def unreadable(option: str, path: Path, error: Exception) -> Failure:
    """The failure for a file that was named by an option and can't be read or written."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return Failure(f"{option} {path}: {why}", BAD_REQUEST)


def _tls_hint(error: UnavailableError) -> str:
    """Somebody listens there and hangs up at once: who wants TLS does so where none is spoken."""
    speaks_tls = os.environ.get(TLS_CA_VARIABLE) or os.environ.get(TLS_VARIABLE)
    if speaks_tls or not any(text in error.message for text in _HUNG_UP):
        return ""
    return f"it may want TLS: {TLS_CA_VARIABLE} or --tls-ca; otherwise "
