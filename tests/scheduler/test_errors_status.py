"""Each failure has one code, one reason, and the details that go with it."""

import pytest
from google.rpc import code_pb2, error_details_pb2

from scheduler_service import errors
from scheduler_service.core.admission import RefusalReason, Refused
from scheduler_service.errors import CODES, Reason, ServiceError, Violation, to_status
from scheduler_service.refusal_errors import refused

DETAILS = (
    error_details_pb2.ErrorInfo,
    error_details_pb2.RetryInfo,
    error_details_pb2.BadRequest,
    error_details_pb2.QuotaFailure,
)


def unpacked(error):
    """Details by type name."""
    found = {}
    for packed in to_status(error).details:
        for kind in DETAILS:
            if packed.Is(kind.DESCRIPTOR):
                found[kind.DESCRIPTOR.name] = detail = kind()
                packed.Unpack(detail)
    return found


def test_every_reason_has_a_code_and_every_refusal_an_error():
    assert set(CODES) == set(Reason)
    for reason in RefusalReason:
        assert isinstance(refused(Refused("r", reason, 3, 2, 1)), ServiceError)


@pytest.mark.parametrize(
    ("error", "code", "reason", "details"),
    [
        (
            errors.invalid_request([Violation("n", "n is 0")]),
            code_pb2.INVALID_ARGUMENT,
            "INVALID_REQUEST",
            {"BadRequest"},
        ),
        (errors.context_too_long(5, 6, 10), code_pb2.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", {"BadRequest"}),
        (errors.model_not_found("x", ["y"]), code_pb2.NOT_FOUND, "MODEL_NOT_FOUND", set()),
        (errors.no_worker(), code_pb2.UNAVAILABLE, "NO_WORKER", {"RetryInfo"}),
        (errors.draining(), code_pb2.UNAVAILABLE, "DRAINING", {"RetryInfo"}),
        (errors.deadline_exceeded(), code_pb2.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", set()),
        (
            errors.queue_timeout(2, worker_connected=True),
            code_pb2.DEADLINE_EXCEEDED,
            "QUEUE_TIMEOUT",
            set(),
        ),
        (errors.queue_timeout(2, worker_connected=False), code_pb2.UNAVAILABLE, "NO_WORKER", {"RetryInfo"}),
        (errors.internal("abc"), code_pb2.INTERNAL, "INTERNAL", set()),
        (
            refused(Refused("r", RefusalReason.DUPLICATE_ID)),
            code_pb2.ALREADY_EXISTS,
            "REQUEST_ID_IN_USE",
            set(),
        ),
        (
            refused(Refused("r", RefusalReason.QUEUE_FULL_REQUESTS, 2, 9, 10, 1.5)),
            code_pb2.RESOURCE_EXHAUSTED,
            "QUEUE_FULL",
            {"RetryInfo", "QuotaFailure"},
        ),
        (
            refused(Refused("r", RefusalReason.TOO_MANY_BLOCKS, 9, 0, 8)),
            code_pb2.INVALID_ARGUMENT,
            "KV_MEMORY_TOO_SMALL",
            {"BadRequest"},
        ),
    ],
)
def test_codes_reasons_and_details(error, code, reason, details):
    status = to_status(error)
    found = unpacked(error)
    assert status.code == code
    assert (found["ErrorInfo"].reason, found["ErrorInfo"].domain) == (reason, "tidegate.dev")
    assert set(found) == {"ErrorInfo"} | details
    assert len(found) == len(status.details)


def test_a_full_queue_is_told_with_its_numbers():
    error = refused(Refused("r", RefusalReason.QUEUE_FULL_TOKENS, 300, 900, 1000, 2.0004))
    found = unpacked(error)
    assert dict(found["ErrorInfo"].metadata) == {
        "unit": "tokens",
        "requested": "300",
        "waiting": "900",
        "limit": "1000",
    }
    assert found["QuotaFailure"].violations[0].subject == "max_num_queued_tokens"
    assert found["RetryInfo"].retry_delay.ToTimedelta().total_seconds() == 2.001  # rounded up
    assert "900 tokens wait and 300 more would exceed max_num_queued_tokens = 1000" in error.message


def test_a_full_queue_of_a_tenant_names_the_tenants_limit():
    error = refused(Refused("r", RefusalReason.TENANT_QUEUE_FULL_REQUESTS, 1, 8, 8, 3.0))
    found = unpacked(error)
    assert (error.code, error.reason) == (code_pb2.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL)
    assert found["QuotaFailure"].violations[0].subject == "max_num_queued_reqs_per_tenant"
    assert found["RetryInfo"].retry_delay.ToTimedelta().total_seconds() == 3.0
    assert error.message == (
        "the tenant's queue is full: 8 requests wait and 1 more would exceed max_num_queued_reqs_per_tenant "
        "= 8; try again later"
    )


def test_a_deadline_that_cannot_be_met_is_told_with_both_times():
    error = refused(Refused("r", RefusalReason.DEADLINE_TOO_CLOSE, 2200, 0, 2000))
    assert (error.code, error.reason) == (code_pb2.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED)
    assert error.metadata == {"needed_ms": "2200", "left_ms": "2000"}
    assert "about 2200 ms by what was measured lately, and its deadline leaves 2000 ms" in error.message


def test_a_core_context_refusal_gives_the_same_numbers_as_the_frontend_s():
    core = refused(Refused("r", RefusalReason.CONTEXT_TOO_LONG, 129, 29, 128))
    assert to_status(core) == to_status(errors.context_too_long(29, 100, 128))


def test_a_status_stays_small_however_much_is_wrong():
    fields = [Violation(f"stopping.stop[{i}]", "x" * 200) for i in range(1000)]
    error = errors.invalid_request(fields)
    assert len(to_status(error).SerializeToString()) < 6000
    assert error.message.endswith("; and 997 more")
    assert len(errors.model_not_found("\u4e16" * 100_000, ["é" * 1000] * 1000).message) < 3000


def test_an_incident_tells_nothing_else():
    found = unpacked(errors.internal("4711"))
    assert dict(found["ErrorInfo"].metadata) == {"incident_id": "4711"}
