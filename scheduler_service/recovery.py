"""Owns requests of an earlier process: their way back into the queue, and to their clients. No gRPC here."""

from __future__ import annotations

import asyncio

from scheduler_service import errors
from scheduler_service.core.admission import RefusalReason, Refused
from scheduler_service.core.events import Admitted, Finished, FinishReason, Timings, Usage
from scheduler_service.engine import Engine, EngineFaultError
from scheduler_service.errors import ServiceError, Violations
from scheduler_service.frontend import Frontend, Generation
from scheduler_service.frontend_engine import Output
from scheduler_service.generation_stream import GenerationStream
from scheduler_service.journal import Journal
from scheduler_service.journal_codec import SavedRequest
from scheduler_service.logs import EventLog
from scheduler_service.seam import Received, Seam
from scheduler_service.validation import MAX_N
from tidegate.inference.v1 import inference_pb2 as pb

_log = EventLog("recovery")


class _NoEngine:
    """For the output of what has ended."""

    def abandon(self, output: Output) -> None:
        """It has ended."""

    def stop(self, output: Output, index: int, num_tokens: int) -> None:
        """It has ended."""


class Recovery:
    """Queues what the journal has as unfinished, and gives clients the rest of what they have lost sight of.

    A request can be queued again once a worker has told of its model, whose tokenizer its text needs.
    """

    def __init__(self, engine: Engine, journal: Journal, frontend: Frontend, wait_s: float) -> None:
        """`wait_s`: longest time for which a client waits for a worker of its request's model."""
        self._engine = engine
        self._journal = journal
        self._frontend = frontend
        self._wait_s = wait_s
        self._pending = {saved.request_id: saved for saved in journal.unfinished}
        self._unattached: dict[str, tuple[Generation, str]] = {}  # with their tenants
        self._progress = asyncio.Event()  # replaced when it is set
        self._changed = False
        self._restoring: asyncio.Task[None] | None = None
        engine.on_closed = self._forget
        engine.reserved_ids = self._pending.keys()
        if self._pending:
            _log.info("journal_read", path=str(journal.path), requests=len(self._pending))

    def models_changed(self) -> None:
        """Workers have come or gone."""
        self._changed = True
        if self._pending and self._restoring is None:
            self._restoring = asyncio.create_task(self._restore_all())

    async def attach(self, request: pb.AttachRequest, tenant: str | None) -> tuple[Generation, Seam]:
        """The output of a request, and where it goes on for its client; only of `tenant`, if that is given.

        Raises ServiceError.
        """
        seam = Seam(_check(request))
        request_id = request.request_id
        saved = self._pending.get(request_id)
        if saved is not None and _is_of(saved, tenant):
            await self._restored(request_id)
        unattached = self._unattached.get(request_id)
        if unattached is not None and tenant in (None, unattached[1]):
            del self._unattached[request_id]
            return unattached[0], seam
        saved = await self._journal.find(request_id)
        if saved is None or not _is_of(saved, tenant):
            raise errors.request_not_found(request_id)
        if not saved.finished:
            raise errors.request_in_use(request_id)
        return await self._replay_finished(saved), seam

    async def _restored(self, request_id: str) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                while request_id in self._pending:
                    await self._progress.wait()
        except TimeoutError:
            raise errors.queue_timeout(self._wait_s, worker_connected=False) from None

    async def _replay_finished(self, saved: SavedRequest) -> Generation:
        generation = await self._frontend.reopen(saved, _NoEngine())
        ends = [each.end for each in saved.candidates if each.end is not None]
        cached_tokens = ends[0].usage.cached_tokens
        generation.stream.push(Admitted(saved.request_id, 0, "", cached_tokens))
        _replay(saved, generation.stream)
        return generation

    def _forget(self, request_id: str) -> None:
        """A request has ended, so that its output is in the journal."""
        self._unattached.pop(request_id, None)

    # Back into the queue

    async def _restore_all(self) -> None:
        try:
            while self._changed:
                self._changed = False
                for saved in list(self._pending.values()):
                    await self._restore(saved)
                    self._progress.set()
                    self._progress = asyncio.Event()
        finally:
            self._restoring = None

    async def _restore(self, saved: SavedRequest) -> None:
        request_id, spec = saved.request_id, saved.acceptance.spec
        model = self._engine.models().get(spec.model)
        if model is None:
            return
        if model.fingerprint != saved.acceptance.fingerprint:
            self._give_up(saved, f"model {spec.model!r} has other weights than when the request began")
            return
        try:
            generation = await self._frontend.reopen(saved)
            del self._pending[request_id]
            answer = self._engine.restore(saved, generation.stream)
        except (ServiceError, EngineFaultError) as error:
            self._give_up(saved, f"it cannot be queued again: {error}")
            return
        if isinstance(answer, Refused):
            if answer.reason is RefusalReason.UNKNOWN_MODEL:  # the worker has gone again
                self._pending[request_id] = saved
            else:
                self._give_up(saved, f"it cannot be queued again: {answer.reason.value}")
            return
        self._unattached[request_id] = generation, spec.tenant
        _replay(saved, generation.stream)
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


def _replay(saved: SavedRequest, stream: GenerationStream) -> None:
    """Tells a new stream of what there was before."""
    for index, candidate in enumerate(saved.candidates):
        for i, token_id in enumerate(candidate.token_ids):
            stream.push_tokens(index, token_id, candidate.logprobs[i] if candidate.logprobs else None)
    # An end with an error ends the stream for all candidates.
    for candidate in saved.candidates:
        if candidate.end is not None:
            stream.push(candidate.end)


def _is_of(saved: SavedRequest, tenant: str | None) -> bool:
    return tenant in (None, saved.acceptance.spec.tenant)


def _check(request: pb.AttachRequest) -> dict[int, Received]:
    wrong = Violations()
    if not request.request_id:
        wrong.note("request_id", "request_id is empty; name the request to go on with")
    received: dict[int, Received] = {}
    for i, entry in enumerate(request.received):
        if entry.index >= MAX_N or entry.index in received:
            wrong.note(
                f"received[{i}].index", f"index is {entry.index}; allowed: 0 to {MAX_N - 1}, each once"
            )
        received[entry.index] = Received(entry.num_tokens, entry.text_bytes, entry.finished)
    wrong.raise_any()
    return received
