"""Owns the door: what may enter the queue, and what a refusal says. Decides nothing about those inside."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.estimates import Estimates
from scheduler_service.core.model import Model
from scheduler_service.core.request import Request, RequestSpec

_RATE_TAU_S = 10.0
_RETRY_UNKNOWN_S = 1.0
_RETRY_RANGE_S = (0.1, 30.0)


class RefusalReason(Enum):
    """Why a request was not taken in."""

    DUPLICATE_ID = "duplicate_id"
    QUEUE_FULL_REQUESTS = "queue_full_requests"
    QUEUE_FULL_TOKENS = "queue_full_tokens"
    TENANT_QUEUE_FULL_REQUESTS = "tenant_queue_full_requests"
    TENANT_QUEUE_FULL_TOKENS = "tenant_queue_full_tokens"
    CONTEXT_TOO_LONG = "context_too_long"
    TOO_MANY_BLOCKS = "too_many_blocks"
    DEADLINE_TOO_CLOSE = "deadline_too_close"
    UNKNOWN_MODEL = "unknown_model"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is queued. Its candidates are in the order of their index."""

    request_id: str
    candidates: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was not taken in, and nothing has changed. The numbers are in the unit of `limit`:

    QUEUE_FULL_REQUESTS: candidates that it has, that wait, and that may wait.
    QUEUE_FULL_TOKENS: tokens that it adds, that wait, and that may wait.
    TENANT_QUEUE_FULL_...: the same of its tenant.
    CONTEXT_TOO_LONG: prompt + max_tokens, the prompt's part of it, and the model's length.
    TOO_MANY_BLOCKS: blocks that it needs, 0, and the blocks of the largest worker.
    DEADLINE_TOO_CLOSE: milliseconds that it needs at least, 0, and those that are left.
    """

    request_id: str
    reason: RefusalReason
    requested: int = 0
    current: int = 0
    limit: int = 0
    retry_after_s: float | None = None  # where waiting helps


class DrainRate:
    """Candidates that leave per second, over about the last ten seconds."""

    def __init__(self, rate: float = 0.0, noted_at: float = 0.0) -> None:
        self._rate = rate
        self._at = noted_at

    @property
    def values(self) -> tuple[float, float]:
        """What another one is made of that says the same."""
        return self._rate, self._at

    def note(self, now: float) -> None:
        """One has left."""
        self._rate = self.at(now) + 1 / _RATE_TAU_S
        self._at = now

    def at(self, now: float) -> float:
        """The rate, 0 if none has left yet."""
        return self._rate * math.exp(-max(0.0, now - self._at) / _RATE_TAU_S)

    def retry_after_s(self, excess: float, now: float) -> float:
        """Seconds until `excess` candidates will have left, within what is sensible to tell a client."""
        rate = self.at(now)
        if self._rate == 0.0:
            return _RETRY_UNKNOWN_S
        low, high = _RETRY_RANGE_S
        return min(high, max(low, excess / rate)) if rate > 0 else high


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """What waits now."""

    num_waiting: int
    num_tokens: int

    def plus(self, num: int, tokens: int) -> QueueLoad:
        """With so many more candidates and tokens."""
        return QueueLoad(self.num_waiting + num, self.num_tokens + tokens)


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A request of which no more is known than who asks and for how much."""

    request_id: str
    tenant: str
    num: int  # candidates
    ahead: int = 0  # candidates that came before it and are not in the queue yet
    ahead_of_tenant: int = 0  # those of its tenant


def refuse_newcomer(
    newcomer: Newcomer,
    load: QueueLoad,
    tenant_load: QueueLoad,
    config: SchedulerConfig,
    drain: DrainRate,
    now: float,
) -> Refused | None:
    """Refuses what the queue would have no room for if each prompt were a single token, as soon as what is
    ahead of it has come. So a prompt need not be looked at to say so.

    Thousands may be told so at once: the time to wait is in tenths of a second, so that few answers differ.
    """
    num, ahead, of_tenant = newcomer.num, newcomer.ahead, newcomer.ahead_of_tenant
    refused = refuse_overload(
        newcomer.request_id,
        QueueLoad(num, num),
        load.plus(ahead, ahead),
        tenant_load.plus(of_tenant, of_tenant),
        config,
        drain,
        now,
    )
    if refused is None or refused.retry_after_s is None:
        return refused
    return replace(refused, retry_after_s=math.ceil(refused.retry_after_s * 10) / 10)


def refuse_misfit(spec: RequestSpec, model: Model) -> Refused | None:
    """Refuses what no worker of the model could ever finish."""
    total = len(spec.prompt_token_ids) + spec.stopping.max_tokens
    specs = model.specs()
    if any(worker.fits(total) for worker in specs):
        return None
    longest = max(worker.max_model_len for worker in specs)
    if total > longest:
        reason = RefusalReason.CONTEXT_TOO_LONG
        return Refused(spec.request_id, reason, total, len(spec.prompt_token_ids), longest)
    largest = max(specs, key=lambda worker: (worker.num_blocks - 1) * worker.block_size)
    needed = largest.blocks_for(total - 1)
    return Refused(spec.request_id, RefusalReason.TOO_MANY_BLOCKS, needed, 0, largest.num_blocks - 1)


def refuse_late(spec: RequestSpec, num_prefill: int, estimates: Estimates, now: float) -> Refused | None:
    """Refuses what would miss its deadline even if it were admitted now, with `num_prefill` prompt tokens to
    compute. Where nothing was measured lately, nothing is refused."""
    if spec.deadline is None:
        return None
    needed_s = estimates.least_s(spec.tenant, num_prefill, spec.stopping.max_tokens, now)
    left_s = spec.deadline - now
    if needed_s is None or needed_s <= left_s:
        return None
    needed_ms, left_ms = math.ceil(needed_s * 1000), max(0, int(left_s * 1000))
    return Refused(spec.request_id, RefusalReason.DEADLINE_TOO_CLOSE, needed_ms, 0, left_ms)


def refuse_overload(
    request_id: str,
    added: QueueLoad,
    load: QueueLoad,
    tenant_load: QueueLoad,
    config: SchedulerConfig,
    drain: DrainRate,
    now: float,
) -> Refused | None:
    """Refuses what the queue, or the tenant's part of it, has no room for: all candidates or none."""
    refused = _exceeds(added, load, config.max_num_queued_reqs, config.max_num_queued_tokens)
    reasons = RefusalReason.QUEUE_FULL_REQUESTS, RefusalReason.QUEUE_FULL_TOKENS
    if refused is None:
        limits = config.max_num_queued_reqs_per_tenant, config.max_num_queued_tokens_per_tenant
        refused = _exceeds(added, tenant_load, *limits)
        reasons = RefusalReason.TENANT_QUEUE_FULL_REQUESTS, RefusalReason.TENANT_QUEUE_FULL_TOKENS
        if refused is None:
            return None
        # Of those that leave the queue, as many are the tenant's as its part of the queue.
        refused.excess *= load.num_waiting / max(1, tenant_load.num_waiting)
    retry_after_s = drain.retry_after_s(refused.excess, now)
    reason = reasons[refused.by_tokens]
    return Refused(request_id, reason, refused.requested, refused.current, refused.limit, retry_after_s)


@dataclass(slots=True)
class _Exceeded:
    by_tokens: bool
    requested: int
    current: int
    limit: int
    excess: float  # candidates that must leave first


def _exceeds(
    added: QueueLoad, load: QueueLoad, most: int | None, most_tokens: int | None
) -> _Exceeded | None:
    num = load.num_waiting + added.num_waiting
    if most is not None and num > most:
        return _Exceeded(False, added.num_waiting, load.num_waiting, most, num - most)
    tokens = load.num_tokens + added.num_tokens
    if most_tokens is not None and load.num_waiting and tokens > most_tokens:
        excess = (tokens - most_tokens) / max(1.0, load.num_tokens / load.num_waiting)
        return _Exceeded(True, added.num_tokens, load.num_tokens, most_tokens, excess)
    return None
