"""Owns what clients are told of requests that the core does not take in: its refusals as errors."""

from __future__ import annotations

from scheduler_service import errors
from scheduler_service.core.admission import RefusalReason, Refused
from scheduler_service.errors import Reason, ServiceError, Violation, shown


def refused(refusal: Refused) -> ServiceError:
    """The core did not take the request in."""
    match refusal.reason:
        case RefusalReason.DUPLICATE_ID:
            message = f"request_id {shown(refusal.request_id)} is in use by a request that is not finished"
            numbers = {"request_id": refusal.request_id}
            return ServiceError(Reason.REQUEST_ID_IN_USE, message, numbers=numbers)
        case RefusalReason.QUEUE_FULL_REQUESTS:
            return _queue_full(refusal, "requests", "max_num_queued_reqs")
        case RefusalReason.QUEUE_FULL_TOKENS:
            return _queue_full(refusal, "tokens", "max_num_queued_tokens")
        case RefusalReason.TENANT_QUEUE_FULL_REQUESTS:
            return _queue_full(refusal, "requests", "max_num_queued_reqs_per_tenant")
        case RefusalReason.TENANT_QUEUE_FULL_TOKENS:
            return _queue_full(refusal, "tokens", "max_num_queued_tokens_per_tenant")
        case RefusalReason.CONTEXT_TOO_LONG:
            return errors.context_too_long(
                refusal.current, refusal.requested - refusal.current, refusal.limit
            )
        case RefusalReason.TOO_MANY_BLOCKS:
            return _too_many_blocks(refusal)
        case RefusalReason.DEADLINE_TOO_CLOSE:
            return _deadline_too_close(refusal)
        case RefusalReason.UNKNOWN_MODEL:
            return errors.no_worker()
        case RefusalReason.DRAINING:
            return errors.draining()


def _queue_full(refusal: Refused, unit: str, option: str) -> ServiceError:
    whose = "the tenant's queue" if option.endswith("_per_tenant") else "the queue"
    description = (
        f"{refusal.current} {unit} wait and {refusal.requested} more would exceed {option} = {refusal.limit}"
    )
    return ServiceError(
        Reason.QUEUE_FULL,
        f"{whose} is full: {description}; try again later",
        numbers={
            "unit": unit,
            "requested": refusal.requested,
            "waiting": refusal.current,
            "limit": refusal.limit,
        },
        retry_after_s=refusal.retry_after_s,
        quotas=[Violation(option, description)],
    )


def _deadline_too_close(refusal: Refused) -> ServiceError:
    message = (
        f"the request would take about {refusal.requested} ms by what was measured lately, and its deadline "
        f"leaves {refusal.limit} ms; allow more time, or lower max_tokens"
    )
    numbers = {"needed_ms": refusal.requested, "left_ms": refusal.limit}
    return ServiceError(Reason.DEADLINE_EXCEEDED, message, numbers=numbers)


def _too_many_blocks(refusal: Refused) -> ServiceError:
    description = (
        f"prompt and output need {refusal.requested} KV blocks; the largest worker has {refusal.limit}; "
        "shorten the prompt, lower max_tokens, or give the worker more KV memory"
    )
    return errors.invalid_request(
        [Violation("stopping.max_tokens", description)],
        Reason.KV_MEMORY_TOO_SMALL,
        required_blocks=refusal.requested,
        worker_blocks=refusal.limit,
    )
