"""Owns the interface of scheduling policies: the order of the waiting queue and the choice of victims."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from scheduler_service.core.request import Request


class Policy(ABC):
    """Decides who goes first and who makes room. Has no other say: budgets and blocks are the planner's."""

    name: ClassVar[str]
    """What the option `policy` calls it."""
    can_displace: ClassVar[bool] = False
    """Whether displaces() is ever true."""

    @abstractmethod
    def waiting_key(self, request: Request) -> tuple[int, ...]:
        """Place in the waiting queue, lowest first. Asked each time the candidate enters the queue; must end
        with request.order, which no other candidate has."""

    @abstractmethod
    def victim(self, running: Sequence[Request]) -> Request:
        """Which of `running` (in order of admission, never empty) goes back to the queue to free blocks."""

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Whether `running` must make room for `waiting`, which lacks a seat or blocks."""
        return False
