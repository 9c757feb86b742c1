"""Owns the way in: whether a request becomes candidates in the queue, or what refuses it."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_service.core.admission import (
    Accepted,
    Newcomer,
    QueueLoad,
    RefusalReason,
    Refused,
    refuse_late,
    refuse_misfit,
    refuse_newcomer,
    refuse_overload,
)
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.policy import Policy
from scheduler_service.core.prefix_hash import PrefixHasher
from scheduler_service.core.request import Prompt, Request, RequestSpec

_NOTHING = QueueLoad(0, 0)


class Intake:
    """Takes requests in, whole or not at all."""

    def __init__(self, config: SchedulerConfig, policy: Policy, lifecycle: Lifecycle) -> None:
        self.draining = False
        """Whether new requests are refused."""
        self._config = config
        self._policy = policy
        self._hasher = PrefixHasher(config.hash_key) if config.enable_prefix_caching else None
        self._lifecycle = lifecycle
        self._next_order = 0

    def turn_away(self, newcomer: Newcomer, now: float) -> Refused | None:
        """See Scheduler."""
        lifecycle = self._lifecycle
        load, drain = lifecycle.load, lifecycle.drain_rate
        return refuse_newcomer(newcomer, load, self._load_of(newcomer.tenant), self._config, drain, now)

    def submit(self, spec: RequestSpec, now: float) -> Accepted | Refused:
        """See Scheduler."""
        if self.draining:
            return Refused(spec.request_id, RefusalReason.DRAINING)
        misfit = self._misfit(spec)
        if misfit is not None:
            return misfit
        lifecycle = self._lifecycle
        candidates = self._new_candidates(spec, now)
        charge = lifecycle.charge(candidates[0])
        if self._policy.refuses_late and (late := refuse_late(spec, charge, lifecycle.estimates, now)):
            return late
        # The others follow the first one's prompt, and compute a token of it each.
        added = QueueLoad(spec.n, charge + spec.n - 1)
        load, drain = lifecycle.load, lifecycle.drain_rate
        own_load = self._load_of(spec.tenant)
        refused = refuse_overload(spec.request_id, added, load, own_load, self._config, drain, now)
        if refused is not None:
            return refused
        self._next_order += spec.n
        lifecycle.accept(candidates)
        return Accepted(spec.request_id, tuple(candidates))

    def restore(
        self, spec: RequestSpec, outputs: Sequence[Sequence[int] | None], now: float
    ) -> Accepted | Refused:
        """See Scheduler."""
        longest = max((len(tokens) for tokens in outputs if tokens is not None), default=0)
        if len(outputs) != spec.n or longest >= spec.stopping.max_tokens:
            raise ValueError(
                f"{len(outputs)} outputs of up to {longest} tokens; n is {spec.n}, max_tokens "
                f"{spec.stopping.max_tokens}"
            )
        misfit = self._misfit(spec)
        if misfit is not None:
            return misfit
        candidates = self._new_candidates(spec, now)
        self._next_order += spec.n
        self._lifecycle.restore(candidates, outputs, now)
        return Accepted(spec.request_id, tuple(candidates))

    def _misfit(self, spec: RequestSpec) -> Refused | None:
        """Refuses what can't be taken in however empty the queue is."""
        if spec.request_id in self._lifecycle.requests:
            return Refused(spec.request_id, RefusalReason.DUPLICATE_ID)
        model = self._lifecycle.models.get(spec.model)
        if model is None:
            return Refused(spec.request_id, RefusalReason.UNKNOWN_MODEL)
        return refuse_misfit(spec, model)

    def _load_of(self, tenant: str) -> QueueLoad:
        return self._lifecycle.tenant_loads.get(tenant, _NOTHING)

    def _new_candidates(self, spec: RequestSpec, now: float) -> list[Request]:
        prompt = Prompt(spec, self._hasher)
        return [Request(spec, i, prompt, self._next_order + i, now) for i in range(spec.n)]
