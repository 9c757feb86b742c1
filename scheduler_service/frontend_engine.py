"""Owns what a frontend needs of the engine, and how it gets that from one in the same event loop.

The way to an engine in another process is remote_engine.py. Frontends do not know which of the two they have.
"""

from __future__ import annotations

from typing import Protocol

from scheduler_service.core.admission import Newcomer, Refused
from scheduler_service.core.request import RequestSpec
from scheduler_service.delivery import EventSink
from scheduler_service.engine import Engine
from scheduler_service.errors import ServiceError
from scheduler_service.served_model import ServedModel


class Output(EventSink, Protocol):
    """Where a frontend wants one request's events. It stands for the request: a name may be used again."""

    request_id: str

    def fail(self, failure: ServiceError) -> None:
        """The request is lost: nothing more will come."""
        ...


class OutputEngine(Protocol):
    """What an output needs of the engine."""

    def abandon(self, output: Output) -> None:
        """Ends the request, if it has not ended: nobody wants its output."""
        ...

    def stop(self, output: Output, index: int, num_tokens: int) -> None:
        """Ends a candidate since a stop string was found in its first `num_tokens` tokens."""
        ...


class FrontendEngine(OutputEngine, Protocol):
    """What a frontend needs of the engine."""

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        ...

    def now(self) -> float:
        """Seconds on the monotonic clock that deadlines use."""
        ...

    def models(self) -> dict[str, ServedModel]:
        """Models that workers serve or have served, by name. Do not change it."""
        ...

    def turn_away(self, newcomer: Newcomer) -> Refused | None:
        """Refuses a request for a full queue before its prompt is looked at. None: it may be submitted, and
        then the queue's limits are looked at again."""
        ...

    async def submit(self, spec: RequestSpec) -> Refused | None:
        """Queues a request; its events go to `spec.sink`, an Output. Returns why not, if it was not.

        Raises:
            EngineFaultError: a bug. The request is not queued.
            ServiceError: the engine is gone.
        """
        ...

    async def cancel(self, request_id: str, tenant: str | None) -> bool:
        """Ends a request by its name; only one of `tenant`, if that is given. Whether it was live.

        Raises:
            ServiceError: the engine is gone.
        """
        ...


class LocalEngine:
    """The engine for a frontend in its own event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def draining(self) -> bool:
        """See FrontendEngine."""
        return self._engine.draining

    def now(self) -> float:
        """See FrontendEngine."""
        return self._engine.now()

    def models(self) -> dict[str, ServedModel]:
        """See FrontendEngine."""
        return self._engine.models()

    def turn_away(self, newcomer: Newcomer) -> Refused | None:
        """See FrontendEngine."""
        return self._engine.turn_away(newcomer)

    async def submit(self, spec: RequestSpec) -> Refused | None:
        """See FrontendEngine."""
        answer = self._engine.submit(spec)
        return answer if isinstance(answer, Refused) else None

    async def cancel(self, request_id: str, tenant: str | None) -> bool:
        """See FrontendEngine."""
        return self._engine.cancel(request_id, tenant=tenant)

    def abandon(self, output: Output) -> None:
        """See OutputEngine."""
        self._engine.cancel(output.request_id, sink=output)

    def stop(self, output: Output, index: int, num_tokens: int) -> None:
        """See OutputEngine."""
        self._engine.stop(output.request_id, index, num_tokens, sink=output)
