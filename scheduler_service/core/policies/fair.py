"""Owns the policy `fair`: tenants share the service by weight, counted in tokens.

Each tenant of a model has a counter: prompt tokens that its candidates had to compute and tokens that they
sampled, divided by its weight. The waiting tenant with the lowest counter comes next; one that had nothing
waiting starts from where the others are, so that it cannot save up.

The bound: while two tenants both have candidates waiting that have room, their counters differ by at most
C * T / w, where C is how many candidates can be on board at a time, T the most tokens (prompt and output) of
one, and w the lower weight. For the tenant that is ahead was behind when its last candidate was admitted, and
since then only what it had on board has added to its counter. Candidates that pass one that has no room add
at most max_overtakes for each that is passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from scheduler_service.core.policies.tenant_heap import Lane, TenantHeap
from scheduler_service.core.policy import Policy

if TYPE_CHECKING:
    from scheduler_service.core.config import SchedulerConfig
    from scheduler_service.core.request import Request
    from scheduler_service.core.worker import Int64, Worker

_RESUMED: Lane = ()
"""Lane of candidates that were on board before: they come first, since their turn was counted then."""
_KEPT_ACCOUNTS = 1024


@dataclass(slots=True)
class _Account:
    number: int
    weight: float
    served: float  # tokens / weight


class Fair(Policy):
    """The tenant that was served least comes first, and the one that was served most makes room."""

    name: ClassVar[str] = "fair"
    counts_service: ClassVar[bool] = True

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}
        self._accounts: dict[Lane, _Account] = {}
        self._by_number: dict[int, _Account] = {}
        self._floor: dict[str, float] = {}  # by model: what the tenant had that was admitted last
        self._next_number = 0
        self._most_accounts = _KEPT_ACCOUNTS

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """With the option tenant_weights."""
        return cls(config.tenant_weights)

    def heap(self) -> TenantHeap:
        """One lane for each tenant."""
        return TenantHeap(self)

    def lane(self, request: Request) -> Lane:
        """Where a waiting candidate stands."""
        return _RESUMED if request.was_admitted else (request.spec.model, request.spec.tenant)

    def wake(self, lane: Lane) -> None:
        """The first candidate of a lane comes to wait."""
        if lane != _RESUMED:
            account = self._account(lane)
            account.served = max(account.served, self._floor.get(lane[0], 0.0))

    def standing(self, lane: Lane) -> float:
        """The lowest lane is next. Never goes down."""
        return float("-inf") if lane == _RESUMED else self._account(lane).served

    def waiting_key(self, request: Request) -> tuple[float, ...]:
        """Arrival; the order of lanes comes before it."""
        return (request.order,)

    def victim(self, running: Sequence[Request]) -> Request:
        """The last one admitted of the tenant that was served most."""
        return max(reversed(running), key=lambda r: self._account((r.spec.model, r.spec.tenant)).served)

    def note_admitted(self, worker: Worker, request: Request, num_tokens: int) -> None:
        """Counts the prompt at once, so that the next choice of the same plan knows of it. What is computed
        again after a preemption is not the tenant's doing."""
        lane = (request.spec.model, request.spec.tenant)
        account = self._account(lane)
        worker.account[request.slot] = account.number
        if not request.was_admitted:
            self._floor[lane[0]] = max(self._floor.get(lane[0], 0.0), account.served)
            account.served += num_tokens / account.weight

    def note_sampled(self, worker: Worker, slots: Int64) -> None:
        """Counts output tokens."""
        numbers, counts = np.unique(worker.account[slots], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            account = self._by_number.get(number)
            if account is not None:
                account.served += count / account.weight

    def _account(self, lane: Lane) -> _Account:
        account = self._accounts.get(lane)
        if account is None:
            if len(self._accounts) >= self._most_accounts:
                self._forget()
            account = _Account(
                self._next_number, self._weights.get(lane[1], 1.0), self._floor.get(lane[0], 0.0)
            )
            self._next_number += 1
            self._accounts[lane] = self._by_number[account.number] = account
        return account

    def _forget(self) -> None:
        """Drops the accounts that would be lifted to the floor when they wake, to keep their number small."""
        floor = self._floor
        self._accounts = {
            lane: each for lane, each in self._accounts.items() if each.served >= floor.get(lane[0], 0.0)
        }
        self._by_number = {account.number: account for account in self._accounts.values()}
        self._most_accounts = max(_KEPT_ACCOUNTS, 2 * len(self._accounts))
