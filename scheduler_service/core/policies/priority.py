"""Owns the policy `priority`: lower values first, and the worst one makes room for a better one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from scheduler_service.core.policy import Policy

if TYPE_CHECKING:
    from scheduler_service.core.request import Request


class Priority(Policy):
    """By (priority, arrival). A waiting candidate displaces running ones of a strictly worse priority."""

    name: ClassVar[str] = "priority"
    can_displace: ClassVar[bool] = True

    def waiting_key(self, request: Request) -> tuple[int, ...]:
        """Priority, then arrival. A preempted candidate so regains its place by itself."""
        return (request.spec.priority, request.order)

    def victim(self, running: Sequence[Request]) -> Request:
        """The worst (priority, arrival)."""
        return max(running, key=self.waiting_key)

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Only a strictly worse priority makes room, so that equals never push each other about."""
        return waiting.spec.priority < running.spec.priority
