"""Owns the policy `deadline`: the earliest deadline first, and what could not meet its own is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from scheduler_service.core.policy import Policy

if TYPE_CHECKING:
    from scheduler_service.core.request import Request

_PATIENCE_S = 60.0
"""A request without a deadline is ordered as if it had one so long after its arrival, so that it is not
passed forever by those that have one: whoever arrives later than that comes after it."""


class Deadline(Policy):
    """By (deadline, arrival). The latest deadline makes room."""

    name: ClassVar[str] = "deadline"
    refuses_late: ClassVar[bool] = True

    def waiting_key(self, request: Request) -> tuple[float, ...]:
        """Deadline, then arrival."""
        deadline = request.spec.deadline
        return (request.arrival + _PATIENCE_S if deadline is None else deadline, request.order)

    def victim(self, running: Sequence[Request]) -> Request:
        """The one with the most time left."""
        return max(running, key=self.waiting_key)
