"""Owns what clients are told when something fails: the table from reasons to status codes, and the details.

It builds google.rpc.Status values and has no gRPC; the API files send them. What the core refuses is put into
its terms by refusal_errors.py. Texts never carry a prompt or what an unexpected exception said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN = "tidegate.dev"

# Statuses travel in trailing metadata, of which clients take 8 KiB.
_MAX_VIOLATIONS = 16
_MAX_VIOLATIONS_IN_MESSAGE = 3
_MAX_SHOWN_CHARACTERS = 64
_NO_WORKER_RETRY_S = 1.0


class Reason(Enum):
    """What failed, as clients can test for it: ErrorInfo.reason."""

    MISSING_TOKEN = "MISSING_TOKEN"  # noqa: S105 - a reason
    BAD_TOKEN = "BAD_TOKEN"  # noqa: S105 - a reason
    PERMISSION_DENIED = "PERMISSION_DENIED"
    TENANT_MISMATCH = "TENANT_MISMATCH"
    INVALID_REQUEST = "INVALID_REQUEST"
    CONTEXT_TOO_LONG = "CONTEXT_TOO_LONG"
    KV_MEMORY_TOO_SMALL = "KV_MEMORY_TOO_SMALL"
    CHAT_TEMPLATE_FAILED = "CHAT_TEMPLATE_FAILED"
    INVALID_GRAMMAR = "INVALID_GRAMMAR"
    GRAMMAR_TOO_COMPLEX = "GRAMMAR_TOO_COMPLEX"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    WORKER_NOT_FOUND = "WORKER_NOT_FOUND"
    REQUEST_ID_IN_USE = "REQUEST_ID_IN_USE"
    REQUEST_NOT_FOUND = "REQUEST_NOT_FOUND"
    QUEUE_FULL = "QUEUE_FULL"
    DRAINING = "DRAINING"
    NO_WORKER = "NO_WORKER"
    ENGINE_LOST = "ENGINE_LOST"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    INTERNAL = "INTERNAL"


CODES: dict[Reason, int] = {
    Reason.MISSING_TOKEN: code_pb2.UNAUTHENTICATED,
    Reason.BAD_TOKEN: code_pb2.UNAUTHENTICATED,
    Reason.PERMISSION_DENIED: code_pb2.PERMISSION_DENIED,
    Reason.TENANT_MISMATCH: code_pb2.PERMISSION_DENIED,
    Reason.INVALID_REQUEST: code_pb2.INVALID_ARGUMENT,
    Reason.CONTEXT_TOO_LONG: code_pb2.INVALID_ARGUMENT,
    Reason.KV_MEMORY_TOO_SMALL: code_pb2.INVALID_ARGUMENT,
    Reason.CHAT_TEMPLATE_FAILED: code_pb2.INVALID_ARGUMENT,
    Reason.INVALID_GRAMMAR: code_pb2.INVALID_ARGUMENT,
    Reason.GRAMMAR_TOO_COMPLEX: code_pb2.INVALID_ARGUMENT,
    Reason.MODEL_NOT_FOUND: code_pb2.NOT_FOUND,
    Reason.WORKER_NOT_FOUND: code_pb2.NOT_FOUND,
    Reason.REQUEST_ID_IN_USE: code_pb2.ALREADY_EXISTS,
    Reason.REQUEST_NOT_FOUND: code_pb2.NOT_FOUND,
    Reason.QUEUE_FULL: code_pb2.RESOURCE_EXHAUSTED,
    Reason.DRAINING: code_pb2.UNAVAILABLE,
    Reason.NO_WORKER: code_pb2.UNAVAILABLE,
    Reason.ENGINE_LOST: code_pb2.UNAVAILABLE,
    Reason.DEADLINE_EXCEEDED: code_pb2.DEADLINE_EXCEEDED,
    Reason.QUEUE_TIMEOUT: code_pb2.DEADLINE_EXCEEDED,
    Reason.INTERNAL: code_pb2.INTERNAL,
}


@dataclass(frozen=True, slots=True)
class Violation:
    """A field that is not allowed, or a quota that is used up."""

    subject: str  # path of the field in the request, or name of the quota
    description: str


class ServiceError(Exception):
    """A failure that clients are told of. Everything in it may be sent."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        numbers: Mapping[str, object] | None = None,
        retry_after_s: float | None = None,
        fields: Sequence[Violation] = (),
        quotas: Sequence[Violation] = (),
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = {key: str(value) for key, value in (numbers or {}).items()}
        self.retry_after_s = retry_after_s
        self.fields = tuple(fields)
        self.quotas = tuple(quotas)

    @property
    def code(self) -> int:
        """The google.rpc.Code."""
        return CODES[self.reason]


def shown(value: str) -> str:
    """A client's own short value for use in a message; cut where it is long, escaped where it is odd."""
    text = ascii(value[:_MAX_SHOWN_CHARACTERS])
    return text if len(value) <= _MAX_SHOWN_CHARACTERS else f"{text}... ({len(value)} characters)"


def invalid_request(
    fields: Sequence[Violation], reason: Reason = Reason.INVALID_REQUEST, **numbers: object
) -> ServiceError:
    """Fields are not allowed; at least one."""
    message = "; ".join(
        f"{field.subject}: {field.description}" for field in fields[:_MAX_VIOLATIONS_IN_MESSAGE]
    )
    if len(fields) > _MAX_VIOLATIONS_IN_MESSAGE:
        message += f"; and {len(fields) - _MAX_VIOLATIONS_IN_MESSAGE} more"
    return ServiceError(reason, message, numbers=numbers, fields=fields)


class Violations(list[Violation]):
    """What is wrong with a request, as far as it has been checked."""

    def note(self, field: str, description: str) -> None:
        """Adds a field that is not allowed."""
        self.append(Violation(field, description))

    def raise_any(self) -> None:
        """Raises ServiceError if there are any."""
        if self:
            raise invalid_request(self)


def missing_token() -> ServiceError:
    """The caller showed no credential."""
    message = "this service wants a token: send the metadata `authorization: Bearer TOKEN`"
    return ServiceError(Reason.MISSING_TOKEN, message)


def bad_token() -> ServiceError:
    """The caller's credential is unknown."""
    message = "the token is not known here, or `authorization` is not one `Bearer TOKEN`"
    return ServiceError(Reason.BAD_TOKEN, message)


def permission_denied(service: str, need: str) -> ServiceError:
    """The caller's credential is good, but not for this service."""
    message = f"this token may not call {service}, which takes {need}"
    return ServiceError(Reason.PERMISSION_DENIED, message, numbers={"service": service})


def tenant_mismatch(asked_for: str, tenant: str) -> ServiceError:
    """A request names another tenant than its token."""
    message = f"tenant is {shown(asked_for)}, but the token is of {shown(tenant)}; leave tenant empty"
    return ServiceError(Reason.TENANT_MISMATCH, message, numbers={"tenant": tenant})


def model_not_found(name: str, served: Sequence[str]) -> ServiceError:
    """No model of that name is served."""
    some = ", ".join(map(shown, served[:8])) + (", ..." if len(served) > 8 else "")
    message = f"model {shown(name)} is not served; served: {some}"
    return ServiceError(Reason.MODEL_NOT_FOUND, message, numbers={"model": name[:_MAX_SHOWN_CHARACTERS]})


def worker_not_found(worker_id: str) -> ServiceError:
    """No worker of that name was registered."""
    return ServiceError(Reason.WORKER_NOT_FOUND, f"there is no worker {shown(worker_id)}")


def request_unknown(request_id: str) -> ServiceError:
    """Nothing is known of such a request."""
    message = (
        f"nothing is known of request {shown(request_id)}: it was never accepted, or too many requests have "
        "ended since it did"
    )
    return ServiceError(Reason.REQUEST_NOT_FOUND, message)


def no_worker() -> ServiceError:
    """No worker is connected, so nothing can be served yet."""
    message = "no worker is connected yet; try again, or look at the workers' logs"
    return ServiceError(Reason.NO_WORKER, message, retry_after_s=_NO_WORKER_RETRY_S)


def request_not_found(request_id: str) -> ServiceError:
    """There is no such request to go on with."""
    message = (
        f"request {shown(request_id)} is not known: it was never accepted, its client has closed it, it "
        "finished too long ago, or this scheduler keeps no journal"
    )
    return ServiceError(Reason.REQUEST_NOT_FOUND, message)


def request_in_use(request_id: str) -> ServiceError:
    """Another stream has the request's output."""
    message = f"request {shown(request_id)} runs, and another stream has its output"
    return ServiceError(Reason.REQUEST_ID_IN_USE, message, numbers={"request_id": request_id})


def context_too_long(prompt_tokens: int, max_tokens: int, max_model_len: int) -> ServiceError:
    """Prompt and output together exceed the model's context."""
    if prompt_tokens >= max_model_len:
        field = Violation(
            "prompt",
            f"{prompt_tokens} tokens leave no room for output in the model's {max_model_len}; shorten the "
            f"prompt to at most {max_model_len - 1} tokens",
        )
    else:
        total = prompt_tokens + max_tokens
        field = Violation(
            "stopping.max_tokens",
            f"{prompt_tokens} prompt tokens + max_tokens {max_tokens} = {total}, more than the model's "
            f"{max_model_len}; allowed here: 1 to {max_model_len - prompt_tokens}",
        )
    return invalid_request(
        [field],
        Reason.CONTEXT_TOO_LONG,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        max_model_len=max_model_len,
    )


def grammar_too_complex() -> ServiceError:
    """An output has come to where its form can't be followed with reasonable effort."""
    description = "it became too complex to follow within an output; nest and repeat less in it"
    return invalid_request([Violation("structured_output", description)], Reason.GRAMMAR_TOO_COMPLEX)


def deadline_exceeded() -> ServiceError:
    """The RPC's deadline has passed."""
    return ServiceError(Reason.DEADLINE_EXCEEDED, "the request's deadline passed before it was finished")


def queue_timeout(timeout_s: float, *, worker_connected: bool) -> ServiceError:
    """No worker took the request in time."""
    waited = f"no worker took the request within its queue timeout of {timeout_s:g} s"
    numbers = {"queue_timeout_s": f"{timeout_s:g}"}
    if worker_connected:
        return ServiceError(Reason.QUEUE_TIMEOUT, waited, numbers=numbers)
    message = f"{waited}: none is connected"
    return ServiceError(Reason.NO_WORKER, message, numbers=numbers, retry_after_s=_NO_WORKER_RETRY_S)


def draining() -> ServiceError:
    """The service takes no new requests."""
    message = "the scheduler is shutting down; send the request to another one"
    return ServiceError(Reason.DRAINING, message, retry_after_s=_NO_WORKER_RETRY_S)


def engine_lost() -> ServiceError:
    """The process that schedules has ended."""
    message = "the scheduler ended while this request was with it; send it again"
    return ServiceError(Reason.ENGINE_LOST, message, retry_after_s=_NO_WORKER_RETRY_S)


def internal(incident_id: str) -> ServiceError:
    """A bug. The log has the rest under the incident's id."""
    message = f"internal error; the scheduler's log has it as incident {incident_id}"
    return ServiceError(Reason.INTERNAL, message, numbers={"incident_id": incident_id})


def to_status(error: ServiceError) -> status_pb2.Status:
    """The google.rpc.Status of a failure, with its details."""
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=error.metadata)
    details = [_packed(info)]
    if error.retry_after_s is not None:
        milliseconds = max(1, math.ceil(error.retry_after_s * 1000))
        delay = duration_pb2.Duration(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000)
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    if error.fields:
        bad = error_details_pb2.BadRequest()
        for field in error.fields[:_MAX_VIOLATIONS]:
            bad.field_violations.add(field=field.subject, description=field.description)
        details.append(_packed(bad))
    if error.quotas:
        failure = error_details_pb2.QuotaFailure()
        for quota in error.quotas:
            failure.violations.add(subject=quota.subject, description=quota.description)
        details.append(_packed(failure))
    return status_pb2.Status(code=error.code, message=error.message, details=details)


def _packed(detail: object) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)  # type: ignore[arg-type]  # google.rpc has no type stubs
    return packed
