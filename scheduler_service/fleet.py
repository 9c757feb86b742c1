"""Owns the links to all workers: opens one when a worker becomes known, closes it when it is forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from scheduler_service.addresses import check_address
from scheduler_service.engine import Engine
from scheduler_service.logs import EventLog
from scheduler_service.worker_link import LinkOptions, WorkerLink
from scheduler_service.workers import WorkerRegistry, WorkerStatus

# Workers that are there tell so every few seconds.
_FORGET_AFTER_S = 600.0

_log = EventLog("fleet")


class Fleet:
    """Workers that are dialled, by name."""

    def __init__(
        self,
        engine: Engine,
        registry: WorkerRegistry,
        options: LinkOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._heard_at: dict[str, float] = {}  # of workers that announce themselves
        self._engine = engine
        self._registry = registry
        self._options = options
        self._links: dict[str, WorkerLink] = {}
        self._registering = asyncio.Lock()

    async def register(self, address: str, worker_id: str = "", *, announced: bool = False) -> str:
        """Dials a worker from now on, unless that is so already. Returns its name.

        A worker at a known address keeps the name that it has. A known name at a new address has moved.
        One that was `announced`, not configured, is forgotten when it is gone and nobody has announced it
        for ten minutes: those that come and go at ever new addresses do not add up.

        Raises:
            ValueError: address is not host:port, or the secret would go there in the clear.
        """
        check_address(address)
        self._options.dialler.check(address)
        async with self._registering:
            worker_id = await self._register(address, worker_id, announced)
            await self._forget_the_gone()
            return worker_id

    async def _register(self, address: str, worker_id: str, announced: bool) -> str:
        known = self._registry.by_address(address)
        if known is not None:
            if known.duplicate_of and self._registry.get(known.duplicate_of) is None:
                await self.deregister(known.worker_id)
            else:
                self._links[known.worker_id].dial_now()
                if known.worker_id in self._heard_at:
                    self._heard_at[known.worker_id] = self._clock()
                return known.duplicate_of or known.worker_id
        worker_id = worker_id or address
        if self._registry.get(worker_id) is not None:
            await self.deregister(worker_id)
        self._registry.add(worker_id, address)
        link = WorkerLink(worker_id, address, self._engine, self._registry.next_epoch, self._options)
        self._links[worker_id] = link
        if announced:
            self._heard_at[worker_id] = self._clock()
        link.start()
        _log.info("worker_registered", worker_id=worker_id, address=address)
        return worker_id

    async def deregister(self, worker_id: str) -> bool:
        """Forgets a worker; its requests move to others. Whether it was known."""
        link = self._links.pop(worker_id, None)
        self._heard_at.pop(worker_id, None)
        if link is None:
            return False
        self._engine.worker_lost(worker_id, "deregistered", expected=True)
        self._registry.remove(worker_id)
        _log.info("worker_deregistered", worker_id=worker_id)
        await link.close()
        return True

    async def _forget_the_gone(self) -> None:
        since = self._clock() - _FORGET_AFTER_S
        silent = [worker_id for worker_id, heard_at in self._heard_at.items() if heard_at < since]
        for worker_id in silent:
            record = self._registry.get(worker_id)
            if record is None or record.status is WorkerStatus.CONNECTING:
                await self.deregister(worker_id)

    async def close(self) -> None:
        """Ends all streams."""
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links))
