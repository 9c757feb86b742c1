"""Owns the interface of scheduling policies: the order of the waiting queue and the choice of victims."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from scheduler_service.core.request_heap import RequestHeap

if TYPE_CHECKING:
    from scheduler_service.core.config import SchedulerConfig
    from scheduler_service.core.request import Request
    from scheduler_service.core.worker import Int64, Worker


class Policy(ABC):
    """Decides who goes first and who makes room. Has no other say: budgets and blocks are the planner's."""

    name: ClassVar[str]
    """What the option `policy` calls it."""
    can_displace: ClassVar[bool] = False
    """Whether displaces() is ever true."""
    counts_service: ClassVar[bool] = False
    """Whether note_admitted() and note_sampled() do anything."""
    refuses_late: ClassVar[bool] = False
    """Whether a request is refused that could not meet its deadline by the measured rates."""

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """The policy with the options that are its own."""
        return cls()

    def heap(self) -> RequestHeap:
        """Where a model's waiting candidates are kept in the policy's order."""
        return RequestHeap()

    @abstractmethod
    def waiting_key(self, request: Request) -> tuple[float, ...]:
        """Place in the waiting queue, lowest first. Asked each time the candidate enters the queue; must end
        with request.order, which no other candidate has."""

    @abstractmethod
    def victim(self, running: Sequence[Request]) -> Request:
        """Which of `running` (in order of admission, never empty) goes back to the queue to free blocks."""

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Whether `running` must make room for `waiting`, which lacks a seat or blocks."""
        return False

    def note_admitted(self, worker: Worker, request: Request, num_tokens: int) -> None:  # noqa: B027 - optional
        """`request` has got its slot and is going to compute `num_tokens` of what is known of it."""

    def note_sampled(self, worker: Worker, slots: Int64) -> None:  # noqa: B027 - optional
        """A plan samples one token in each of these slots."""
