"""Owns requests of an earlier process: their way back into the queue, and to their clients. No gRPC here."""

from __future__ import annotations

import asyncio

from scheduler_service import errors
from scheduler_service.core.admission import RefusalReason, Refused
from scheduler_service.core.events import Finished, FinishReason, Timings, Usage
from scheduler_service.core_guard import EngineFaultError
from scheduler_service.engine import Engine
from scheduler_service.held_output import HeldOutput
from scheduler_service.journal import Journal
from scheduler_service.journal_codec import SavedRequest
from scheduler_service.logs import EventLog

_log = EventLog("recovery")


class Recovery:
    """Queues what the journal has as unfinished, and gives out the output of what clients have lost sight of.

    A request can be queued again once a worker has told of its model.
    """

    def __init__(self, engine: Engine, journal: Journal, wait_s: float) -> None:
        """`wait_s`: longest time for which a client waits for a worker of its request's model."""
        self._engine = engine
        self._journal = journal
        self._wait_s = wait_s
        self._pending = {saved.request_id: saved for saved in journal.unfinished}
        self._unclaimed: dict[str, HeldOutput] = {}
        self._progress = asyncio.Event()  # replaced when it is set
        self._due = False
        engine.on_closed = self._forget
        engine.reserved_ids = self._pending.keys()
        if self._pending:
            _log.info("journal_read", path=str(journal.path), requests=len(self._pending))

    def models_changed(self) -> None:
        """Workers have come or gone. The core hears of a new one in this turn of the event loop."""
        if self._pending and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._restore_all)

    async def claim(self, request_id: str, tenant: str | None) -> HeldOutput:
        """The output of a request, for one client; only of `tenant`, if that is given.

        Raises ServiceError.
        """
        saved = self._pending.get(request_id)
        if saved is not None and tenant in (None, saved.acceptance.spec.tenant):
            await self._restored(request_id)
        unclaimed = self._unclaimed.get(request_id)
        if unclaimed is not None and tenant in (None, unclaimed.tenant):
            return self._unclaimed.pop(request_id)
        saved = await self._journal.find(request_id)
        if saved is None or tenant not in (None, saved.acceptance.spec.tenant):
            raise errors.request_not_found(request_id)
        if not saved.finished:
            raise errors.request_in_use(request_id)
        return HeldOutput(saved)

    def give_back(self, output: HeldOutput) -> None:
        """Whoever claimed it has not followed it, and does not want it."""
        if self._engine.is_live(output.request_id, output):
            self._unclaimed[output.request_id] = output

    async def _restored(self, request_id: str) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                while request_id in self._pending:
                    await self._progress.wait()
        except TimeoutError:
            raise errors.queue_timeout(self._wait_s, worker_connected=False) from None

    def _forget(self, request_id: str) -> None:
        """A request has ended, so that its output is in the journal."""
        self._unclaimed.pop(request_id, None)

    # Back into the queue

    def _restore_all(self) -> None:
        self._due = False
        for saved in list(self._pending.values()):
            self._restore(saved)
        self._progress.set()
        self._progress = asyncio.Event()

    def _restore(self, saved: SavedRequest) -> None:
        request_id, spec = saved.request_id, saved.acceptance.spec
        model = self._engine.models().get(spec.model)
        if model is None:
            return
        if model.fingerprint != saved.acceptance.fingerprint:
            self._give_up(saved, f"model {spec.model!r} has other weights than when the request began")
            return
        output = HeldOutput(saved)
        del self._pending[request_id]
        try:
            answer = self._engine.restore(saved, output)
        except EngineFaultError as error:
            self._give_up(saved, f"it cannot be queued again: {error}")
            return
        if isinstance(answer, Refused):
            if answer.reason is RefusalReason.UNKNOWN_MODEL:  # the worker has gone again
                self._pending[request_id] = saved
            else:
                self._give_up(saved, f"it cannot be queued again: {answer.reason.value}")
            return
        self._unclaimed[request_id] = output
        num_tokens = sum(len(each.token_ids) for each in saved.candidates)
        _log.info("request_restored", request_id=request_id, output_tokens=num_tokens)

    def _give_up(self, saved: SavedRequest, detail: str) -> None:
        self._pending.pop(saved.request_id, None)
        _log.error("request_not_restored", request_id=saved.request_id, detail=detail)
        spec = saved.acceptance.spec
        for index, candidate in enumerate(saved.candidates):
            if candidate.end is None:
                usage = Usage(len(spec.prompt_token_ids), 0, len(candidate.token_ids), 0)
                timings = Timings(0.0, 0.0, 0.0, 0.0, None)
                end = Finished(saved.request_id, index, FinishReason.ERROR, None, usage, timings, detail)
                self._journal.end(saved.number, spec.n, end)
