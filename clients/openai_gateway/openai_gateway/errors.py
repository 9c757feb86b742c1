"""Failures as OpenAI's clients expect them: a status, a body with type and code, and retry headers.

Owns the one table from Tidegate's errors to HTTP. Texts are those that the scheduler sends to clients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.responses import Response

from openai_gateway.field_names import FieldNames
from tidegate_client import TidegateError

CLIENT_CLOSED_REQUEST = 499
"""What is counted for a client that went away; nobody receives it."""

# gRPC code: HTTP status, type of error.
_STATUSES = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "FAILED_PRECONDITION": (400, "invalid_request_error"),
    "OUT_OF_RANGE": (400, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"),
    "NOT_FOUND": (404, "invalid_request_error"),
    "ALREADY_EXISTS": (409, "invalid_request_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (CLIENT_CLOSED_REQUEST, "request_cancelled"),
    "UNAVAILABLE": (503, "service_unavailable"),
    "DEADLINE_EXCEEDED": (504, "timeout"),
}
# Reasons that OpenAI has a code of its own for.
_CODES = {
    "CONTEXT_TOO_LONG": "context_length_exceeded",
    "MODEL_NOT_FOUND": "model_not_found",
    "MISSING_TOKEN": "invalid_api_key",
    "BAD_TOKEN": "invalid_api_key",
    "QUEUE_FULL": "rate_limit_exceeded",
}
# Reasons that are about one parameter, and tell no field.
_ABOUT = {"MODEL_NOT_FOUND": "model"}


class HttpError(Exception):
    """A request ends with a status and a body. Everything in it may be sent."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error: dict[str, Any] = {"message": message, "type": type, "param": param, "code": code}
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The JSON body, which is an event of a stream as well."""
        return json.dumps({"error": self.error}).encode()

    def headers(self) -> dict[str, str]:
        """Headers that say when to try again; milliseconds are what OpenAI's own clients look for first."""
        if self.retry_after_s is None:
            return {}
        return {
            "retry-after": str(math.ceil(self.retry_after_s)),
            "retry-after-ms": str(math.ceil(self.retry_after_s * 1000)),
        }

    def response(self) -> Response:
        """The whole answer."""
        return Response(self.body(), self.status, self.headers(), "application/json")


def refused(message: str, param: str | None = None, code: str | None = None) -> HttpError:
    """A request that can't be served as it is."""
    return HttpError(400, message, param=param, code=code)


def from_tidegate(error: TidegateError, names: FieldNames | None = None) -> HttpError:
    """Turns what the scheduler said, or that it isn't there, into OpenAI's terms and the caller's names."""
    names = names or FieldNames()
    status, kind = _STATUSES.get(error.code, (500, "server_error"))
    if error.reason == "QUEUE_TIMEOUT":  # the service was too busy; it isn't the caller's time that ran out
        status, kind = 503, "service_unavailable"
    fields = [violation.field for violation in error.violations]
    message = names.message(error.message, fields)
    if error.code == "UNAVAILABLE" and not error.reason:  # it wasn't a scheduler that spoke, but the network
        message = "the scheduler can't be reached; try again later"
    return HttpError(
        status,
        message,
        type=kind,
        code=_CODES.get(error.reason, error.reason.lower() or None),
        param=names.name_of(fields[0]) if fields else _ABOUT.get(error.reason),
        retry_after_s=error.retry_after_s,
    )


@contextmanager
def told_by(names: FieldNames) -> Iterator[None]:
    """Raises what the scheduler refuses as an HttpError, with fields by these names."""
    try:
        yield
    except TidegateError as error:
        raise from_tidegate(error, names) from None


def internal() -> HttpError:
    """A bug in the gateway. The log has the rest."""
    return HttpError(500, "internal error of the gateway; its log says more", type="server_error")
