"""Owns the policy `priority`: lower values first, and the worst one makes room for a better one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from scheduler_service.core.policy import Policy

if TYPE_CHECKING:
    from scheduler_service.core.config import SchedulerConfig
    from scheduler_service.core.request import Request


class Priority(Policy):
    """By (priority, arrival). A waiting candidate displaces running ones of a strictly worse priority.

    With aging, each `aging_s` seconds since arrival count as one step of priority. All age alike, so two
    candidates never change their order: it is that of priority + arrival / aging_s. One that arrives more
    than (difference of priorities) * aging_s seconds after another comes after it, so nothing starves.
    """

    name: ClassVar[str] = "priority"
    can_displace: ClassVar[bool] = True

    def __init__(self, aging_s: float | None = None) -> None:
        self._aging_s = aging_s

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """With the option priority_aging_s."""
        return cls(config.priority_aging_s)

    def waiting_key(self, request: Request) -> tuple[float, ...]:
        """Aged priority, then arrival. A preempted candidate so regains its place by itself."""
        aged = request.arrival / self._aging_s if self._aging_s else 0.0
        return (request.spec.priority + aged, request.order)

    def victim(self, running: Sequence[Request]) -> Request:
        """The worst (aged priority, arrival)."""
        return max(running, key=self.waiting_key)

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Only a strictly worse priority makes room, so that equals never push each other about, and one that
        has aged past `waiting` never does."""
        if waiting.spec.priority >= running.spec.priority:
            return False
        return self.waiting_key(waiting) < self.waiting_key(running)
