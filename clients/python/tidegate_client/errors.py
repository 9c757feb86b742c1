"""The client's exceptions, and the one table from gRPC statuses to them.

Owns the reading of google.rpc details. Knows nothing of channels or retries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """What is wrong with one field of a request."""

    field: str
    """Path of the field, such as "sampling.top_p"."""
    description: str


@dataclass(frozen=True, slots=True)
class QuotaViolation:
    """Which limit was reached."""

    subject: str
    """The limit's name, such as "max_num_queued_reqs"."""
    description: str


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """What a server says about a failure beside code and message."""

    reason: str = ""
    """Stable name of the cause, such as "QUEUE_FULL". Empty: the server gave none."""
    domain: str = ""
    """Whose reason it is."""
    metadata: Mapping[str, str] | None = None
    violations: tuple[FieldViolation, ...] = ()
    quota: tuple[QuotaViolation, ...] = ()
    retry_after_s: float | None = None


class TidegateError(Exception):
    """A request failed. Its text is for people; the attributes are for programs."""

    def __init__(self, code: str, message: str, details: ErrorDetails | None = None) -> None:
        super().__init__(f"{code}: {message}")
        details = details or ErrorDetails()
        self.code = code
        """Name of the gRPC status, such as "INVALID_ARGUMENT"."""
        self.message = message
        self.reason = details.reason
        """Stable name of the cause, such as "QUEUE_FULL". Empty: the server gave none."""
        self.domain = details.domain
        """Whose reason it is: "tidegate.dev" for a scheduler's, something else for a proxy's."""
        self.metadata: Mapping[str, str] = details.metadata or {}
        """Numbers and names that belong to the reason, such as {"limit": "512"}."""
        self.violations = details.violations
        """The fields that are wrong."""
        self.quota = details.quota
        """The limits that were reached."""
        self.retry_after_s = details.retry_after_s
        """Seconds after which the server expects to have room. None: it said nothing."""


class InvalidRequestError(TidegateError):
    """A field is out of range, or the request can never fit."""


class AccessDeniedError(TidegateError):
    """The credential is missing or unknown, or not good for this call."""


class NotFoundError(TidegateError):
    """There is no such model, worker or request."""


class AlreadyExistsError(TidegateError):
    """A request of this name is still running."""


class OverloadedError(TidegateError):
    """A queue or quota is full; see retry_after_s."""


class UnavailableError(TidegateError):
    """The service can't be reached, is shutting down, or has no worker."""


class DeadlineExceededError(TidegateError):
    """The time for the request ran out."""


class RequestCancelledError(TidegateError):
    """The server or the network cancelled the call. What this client cancels itself ends without an error."""


class ServerError(TidegateError):
    """The server failed, or broke the protocol."""


_CLASSES: dict[grpc.StatusCode, type[TidegateError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: AccessDeniedError,
    grpc.StatusCode.PERMISSION_DENIED: AccessDeniedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.INTERNAL: ServerError,
    grpc.StatusCode.UNKNOWN: ServerError,
    grpc.StatusCode.DATA_LOSS: ServerError,
}


def from_rpc_error(error: grpc.RpcError) -> TidegateError:
    """Turns what a call raised, sync or async, into the exception of its code."""
    code = _call_or(error, "code", grpc.StatusCode.UNKNOWN)
    message = _call_or(error, "details", None) or "the server gave no message"
    trailers = _call_or(error, "trailing_metadata", None) or ()
    return _CLASSES.get(code, TidegateError)(code.name, message, _read_details(trailers))


def invalid_field(field: str, value: object, why: str) -> InvalidRequestError:
    """The error for a value that doesn't even fit the protocol's message, found before anything is sent."""
    violation = FieldViolation(field, why)
    message = f"{field} = {value!r}: {why}"
    return InvalidRequestError("INVALID_ARGUMENT", message, ErrorDetails(violations=(violation,)))


def protocol_error(message: str) -> ServerError:
    """The error for a server that doesn't keep to the protocol."""
    return ServerError("INTERNAL", message)


def _call_or(error: grpc.RpcError, method: str, default: Any) -> Any:
    function = getattr(error, method, None)
    return function() if callable(function) else default


def _read_details(trailers: Sequence[tuple[str, str | bytes]]) -> ErrorDetails:
    status = status_pb2.Status()
    for key, value in trailers:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                status.ParseFromString(value)
            except DecodeError:  # a proxy mangled them; code and message still count
                return ErrorDetails()
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad_request = error_details_pb2.BadRequest()
    quota_failure = error_details_pb2.QuotaFailure()
    retry_after_s = None
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(bad_request)
        detail.Unpack(quota_failure)
        if detail.Unpack(retry):
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return ErrorDetails(
        reason=info.reason,
        domain=info.domain,
        metadata=dict(info.metadata),
        violations=tuple(FieldViolation(v.field, v.description) for v in bad_request.field_violations),
        quota=tuple(QuotaViolation(v.subject, v.description) for v in quota_failure.violations),
        retry_after_s=retry_after_s,
    )
