"""Owns the policy `fcfs`: first come, first served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from scheduler_service.core.policy import Policy

if TYPE_CHECKING:
    from scheduler_service.core.request import Request


class Fcfs(Policy):
    """Preempted candidates first, then by arrival. The last one admitted makes room."""

    name: ClassVar[str] = "fcfs"

    def waiting_key(self, request: Request) -> tuple[float, ...]:
        """Preempted before new, then arrival."""
        return (0 if request.was_admitted else 1, request.order)

    def victim(self, running: Sequence[Request]) -> Request:
        """The last one admitted: it has the least to lose."""
        return running[-1]
