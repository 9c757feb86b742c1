"""Failures as people see them: one line with the reason, the numbers and what to do, and an exit code."""

from __future__ import annotations

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
            f"no scheduler answers ({error.message}); start one with `tidegate serve MODEL`, or name its "
            "host:port with --address or TIDEGATE_ADDRESS"
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
    return "; ".join(parts)
