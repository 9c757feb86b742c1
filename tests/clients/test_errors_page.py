"""docs/errors.md says of each reason what the scheduler sends: its code, its details, its numbers."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path

from google.rpc import code_pb2, error_details_pb2

from scheduler_service import errors, refusal_errors
from scheduler_service.core.admission import RefusalReason, Refused
from scheduler_service.errors import Reason, ServiceError, Violation
from scheduler_service.refusal_errors import refused

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
ROW = re.compile(
    r"^\| `(?P<reason>[A-Z_]+)` \| (?P<code>\w+) \| (?P<details>[\w ]*)\| (?P<keys>[\w` ]*)\| \S.*\|$"
)

FIELD = [Violation("n", "n is 0; allowed: 1 to 64")]
EXAMPLES: dict[str, Callable[[], list[ServiceError]]] = {
    "invalid_request": lambda: [
        errors.invalid_request(FIELD, reason)
        for reason in (Reason.INVALID_REQUEST, Reason.CHAT_TEMPLATE_FAILED, Reason.INVALID_GRAMMAR)
    ],
    "missing_token": lambda: [errors.missing_token()],
    "bad_token": lambda: [errors.bad_token()],
    "permission_denied": lambda: [errors.permission_denied("AdminService", "an admin's token")],
    "tenant_mismatch": lambda: [errors.tenant_mismatch("a", "b")],
    "model_not_found": lambda: [errors.model_not_found("a", ["b"])],
    "worker_not_found": lambda: [errors.worker_not_found("w")],
    "request_unknown": lambda: [errors.request_unknown("r")],
    "no_worker": lambda: [errors.no_worker()],
    "request_not_found": lambda: [errors.request_not_found("r")],
    "request_in_use": lambda: [errors.request_in_use("r")],
    "context_too_long": lambda: [errors.context_too_long(10, 5, 12), errors.context_too_long(12, 1, 12)],
    "grammar_too_complex": lambda: [errors.grammar_too_complex()],
    "deadline_exceeded": lambda: [errors.deadline_exceeded()],
    "queue_timeout": lambda: [errors.queue_timeout(1.0, worker_connected=c) for c in (False, True)],
    "draining": lambda: [errors.draining()],
    "engine_lost": lambda: [errors.engine_lost()],
    "internal": lambda: [errors.internal("4711")],
    "refused": lambda: [refused(refusal(reason)) for reason in RefusalReason],
}


def refusal(reason: RefusalReason) -> Refused:
    return Refused("r", reason, requested=9, current=5, limit=8, retry_after_s=2.0)


def sent() -> dict[str, tuple[set[str], set[str], set[str]]]:
    """Codes, details and keys by reason, from every way there is to make an error."""
    found: dict[str, tuple[set[str], set[str], set[str]]] = {}
    for make in EXAMPLES.values():
        for error in make():
            status = errors.to_status(error)
            codes, details, keys = found.setdefault(error.reason.value, (set(), set(), set()))
            codes.add(code_pb2.Code.Name(status.code))
            for packed in status.details:
                info = error_details_pb2.ErrorInfo()
                if packed.Unpack(info):
                    keys |= set(info.metadata)
                else:
                    details.add(packed.TypeName().removeprefix("google.rpc."))
    return found


def said() -> dict[str, tuple[set[str], set[str], set[str]]]:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    found = {}
    for line in rows:
        row = ROW.match(line)
        assert row is not None, f"not a row of the catalogue: {line}"
        assert row["reason"] not in found, f"twice: {row['reason']}"
        keys = set(re.findall(r"`(\w+)`", row["keys"]))
        found[row["reason"]] = {row["code"]}, set(row["details"].split()), keys
    return found


def test_every_way_to_make_an_error_is_tried() -> None:
    functions = {
        name
        for module in (errors, refusal_errors)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and not name.startswith("_")
        and inspect.signature(function).return_annotation == "ServiceError"
    }
    assert functions == EXAMPLES.keys()


def test_the_page_has_every_reason_with_its_code_details_and_numbers() -> None:
    assert said().keys() == {reason.value for reason in Reason}
    assert said() == sent()
