"""Owns what a frontend needs of the engine, and how it gets that from one in the same event loop.

The way to an engine in another process is remote_engine.py. Frontends do not know which of the two they have.
"""

from __future__ import annotations

from typing import Protocol

from scheduler_service import errors
from scheduler_service.core.admission import Newcomer, Refused
from scheduler_service.core.request import RequestSpec
from scheduler_service.delivery import EventSink
from scheduler_service.engine import Engine
from scheduler_service.errors import ServiceError
from scheduler_service.held_output import HeldOutput, Origin
from scheduler_service.presentation import Presentation
from scheduler_service.recovery import Recovery
from scheduler_service.served_model import ServedModel


class NamedSink(EventSink, Protocol):
    """A sink that stands for its request: a name may be used again."""

    request_id: str


class Output(NamedSink, Protocol):
    """Where a frontend wants one request's events."""

    presentation: Presentation

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


class Claim(OutputEngine, Protocol):
    """The output of a request whose client has lost sight of it, for one frontend. It is followed, or given
    back."""

    @property
    def origin(self) -> Origin:
        """What to know of the request."""
        ...

    def follow(self, output: Output) -> None:
        """Tells an output all from the request's beginning, and what comes. It talks to this claim."""
        ...

    def give_back(self) -> None:
        """Leaves it to others."""
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

    async def attach(self, request_id: str, tenant: str | None) -> Claim:
        """Claims the output of a request by its name; only of `tenant`, if that is given.

        Raises:
            ServiceError: it is not there, another stream has it, or the engine is gone.
        """
        ...

    async def cancel(self, request_id: str, tenant: str | None) -> bool:
        """Ends a request by its name; only one of `tenant`, if that is given. Whether it was live.

        Raises:
            ServiceError: the engine is gone.
        """
        ...


class LocalClaim:
    """A Claim in the engine's own event loop."""

    def __init__(self, engine: Engine, recovery: Recovery, held: HeldOutput) -> None:
        self._engine = engine
        self._recovery = recovery
        self._held = held
        self.origin = held.origin

    def follow(self, output: EventSink) -> None:
        """See Claim."""
        self._held.follow(output)

    def give_back(self) -> None:
        """See Claim."""
        self._recovery.give_back(self._held)

    def abandon(self, output: NamedSink) -> None:
        """See OutputEngine."""
        self._engine.cancel(self._held.request_id, sink=self._held)

    def stop(self, output: NamedSink, index: int, num_tokens: int) -> None:
        """See OutputEngine."""
        self._engine.stop(self._held.request_id, index, num_tokens, sink=self._held)


class LocalEngine:
    """The engine for a frontend in its own event loop."""

    def __init__(self, engine: Engine, recovery: Recovery | None = None) -> None:
        """Without a recovery there is nothing to attach to."""
        self._engine = engine
        self._recovery = recovery

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

    async def attach(self, request_id: str, tenant: str | None) -> LocalClaim:
        """See FrontendEngine."""
        if self._recovery is None:
            raise errors.request_not_found(request_id)
        held = await self._recovery.claim(request_id, tenant)
        return LocalClaim(self._engine, self._recovery, held)

    def abandon(self, output: NamedSink) -> None:
        """See OutputEngine."""
        self._engine.cancel(output.request_id, sink=output)

    def stop(self, output: NamedSink, index: int, num_tokens: int) -> None:
        """See OutputEngine."""
        self._engine.stop(output.request_id, index, num_tokens, sink=output)
