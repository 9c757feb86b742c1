"""Owns AdminService: the operators' calls to the engine, the registry and the fleet, and who watches them."""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any, TypeVar

import grpc
from grpc_status import rpc_status

from scheduler_service import admin_codec as codec
from scheduler_service import errors
from scheduler_service.core.errors import UnknownWorkerError
from scheduler_service.engine import Engine
from scheduler_service.fleet import Fleet
from scheduler_service.logs import EventLog, new_incident_id
from scheduler_service.state_feed import FeedOptions, StateFeeds
from scheduler_service.workers import WorkerRegistry
from tidegate.admin.v1 import admin_pb2 as pb
from tidegate.admin.v1 import admin_pb2_grpc as pb_grpc

_DEFAULT_PAGE_SIZE = 100
_MAX_PAGE_SIZE = 1_000
_DEFAULT_INTERVAL_MS = 1_000
_INTERVALS_MS = (100, 60_000)
_WORKER_ID = re.compile(r"[A-Za-z0-9._:\[\]-]{0,128}")

_log = EventLog("admin")
_Response = TypeVar("_Response")
_Context = grpc.aio.ServicerContext[Any, Any]


class AdminApi(pb_grpc.AdminServiceServicer):
    """The operators' RPCs."""

    def __init__(
        self, engine: Engine, registry: WorkerRegistry, fleet: Fleet, feeds: StateFeeds | None = None
    ) -> None:
        """`feeds`: those of others who show the same state. None: it has its own."""
        self._engine = engine
        self._registry = registry
        self._fleet = fleet
        self._feeds = feeds or StateFeeds(engine, registry)

    async def GetState(self, request: pb.GetStateRequest, context: _Context) -> pb.GetStateResponse:
        """A snapshot, with the invariants checked where that is asked for."""

        async def answer() -> pb.GetStateResponse:
            state = self._engine.state()
            connected = {worker.worker_id: worker for worker in state.workers}
            steps, now = self._engine.steps, self._engine.now()
            return pb.GetStateResponse(
                version=version("tidegate"),
                draining=state.draining,
                workers=[
                    codec.worker_message(
                        record, connected.get(record.worker_id), steps.rate(record.worker_id, now)
                    )
                    for record in self._registry.records()
                ],
                waiting_requests=state.waiting_requests,
                running_requests=state.running_requests,
                waiting_tokens=state.waiting_tokens,
                counters=codec.counters_message(state.counters),
                violations=self._engine.violations() if request.verify else [],
            )

        return await _guarded(context, answer)

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: _Context
    ) -> pb.ListRequestsResponse:
        """One page of live requests."""

        async def answer() -> pb.ListRequestsResponse:
            if request.page_size < 0:
                raise _invalid(
                    "page_size", f"{request.page_size} is negative; allowed: 1 to {_MAX_PAGE_SIZE}"
                )
            size = min(request.page_size or _DEFAULT_PAGE_SIZE, _MAX_PAGE_SIZE)
            page = self._engine.requests(_after(request.page_token), size + 1)
            more = len(page) > size
            return pb.ListRequestsResponse(
                requests=map(codec.request_message, page[:size]),
                next_page_token=_page_token(page[size - 1].order) if more else "",
            )

        return await _guarded(context, answer)

    async def ExplainRequest(
        self, request: pb.ExplainRequestRequest, context: _Context
    ) -> pb.ExplainRequestResponse:
        """Why a request waits, or what became of it."""

        async def answer() -> pb.ExplainRequestResponse:
            candidates = self._engine.explain(request.request_id)
            if not candidates:
                raise errors.request_unknown(request.request_id)
            return pb.ExplainRequestResponse(candidates=map(codec.explanation_message, candidates))

        return await _guarded(context, answer)

    async def WatchState(self, request: pb.WatchStateRequest, context: _Context) -> None:
        """Streams a snapshot, then what changes."""

        async def answer() -> None:
            least, most = _INTERVALS_MS
            interval_ms = request.interval_ms or _DEFAULT_INTERVAL_MS
            if not least <= interval_ms <= most:
                raise _invalid("interval_ms", f"{interval_ms} is not allowed; allowed: {least} to {most}")
            options = FeedOptions(interval_ms, request.steps)
            watcher = self._feeds.join(options)
            try:
                while True:
                    await context.write(await watcher.next())
            finally:
                self._feeds.leave(options, watcher)

        await _guarded(context, answer)

    async def GetBlockMap(self, request: pb.GetBlockMapRequest, context: _Context) -> pb.GetBlockMapResponse:
        """What each block of a worker holds."""

        async def answer() -> pb.GetBlockMapResponse:
            try:
                blocks = self._engine.block_map(request.worker_id)
            except UnknownWorkerError:
                raise errors.worker_not_found(request.worker_id) from None
            return codec.block_map_message(request.worker_id, blocks)

        return await _guarded(context, answer)

    async def GetLatency(self, request: pb.GetLatencyRequest, context: _Context) -> pb.GetLatencyResponse:
        """How long tokens took over the last hour."""

        async def answer() -> pb.GetLatencyResponse:
            now = self._engine.now()
            return codec.latency_message(self._engine.latencies, now, time.time() - now)

        return await _guarded(context, answer)

    async def RegisterWorker(
        self, request: pb.RegisterWorkerRequest, context: _Context
    ) -> pb.RegisterWorkerResponse:
        """Dials a worker from now on."""

        async def answer() -> pb.RegisterWorkerResponse:
            if self._engine.draining:
                raise errors.draining()
            if not _WORKER_ID.fullmatch(request.worker_id):
                raise _invalid("worker_id", "at most 128 characters of A-Z a-z 0-9 . _ : [ ] - are allowed")
            try:
                worker_id = await self._fleet.register(request.address, request.worker_id, announced=True)
            except ValueError as error:
                raise _invalid("address", str(error)) from None
            return pb.RegisterWorkerResponse(worker_id=worker_id)

        return await _guarded(context, answer)

    async def DeregisterWorker(
        self, request: pb.DeregisterWorkerRequest, context: _Context
    ) -> pb.DeregisterWorkerResponse:
        """Forgets a worker."""

        async def answer() -> pb.DeregisterWorkerResponse:
            return pb.DeregisterWorkerResponse(found=await self._fleet.deregister(request.worker_id))

        return await _guarded(context, answer)

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: _Context) -> pb.DrainWorkerResponse:
        """Moves a worker's requests away."""

        async def answer() -> pb.DrainWorkerResponse:
            if self._registry.get(request.worker_id) is None:
                raise errors.worker_not_found(request.worker_id)
            return pb.DrainWorkerResponse(moved_requests=self._engine.drain_worker(request.worker_id))

        return await _guarded(context, answer)

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: _Context
    ) -> pb.ResetPrefixCacheResponse:
        """Forgets cached prefixes."""

        async def answer() -> pb.ResetPrefixCacheResponse:
            return pb.ResetPrefixCacheResponse(blocks=self._engine.reset_prefix_cache())

        return await _guarded(context, answer)


async def _guarded(context: _Context, answer: Callable[[], Awaitable[_Response]]) -> _Response:
    """Gives the answer, or ends the RPC with a status and its details."""
    try:
        return await answer()
    except errors.ServiceError as failure:
        error = failure
    except Exception:
        incident_id = new_incident_id()
        _log.error("admin_fault", incident_id=incident_id)
        error = errors.internal(incident_id)
    await context.abort_with_status(rpc_status.to_status(errors.to_status(error)))
    raise AssertionError("abort_with_status raises")


def _invalid(field: str, description: str) -> errors.ServiceError:
    return errors.invalid_request([errors.Violation(field, description)])


def _page_token(order: int) -> str:
    return base64.urlsafe_b64encode(f"1/{order}".encode()).decode()


def _after(page_token: str) -> int:
    """The arrival order after which a page begins."""
    if not page_token:
        return -1
    try:
        match = re.fullmatch(r"1/(\d{1,18})", base64.urlsafe_b64decode(page_token.encode()).decode())
    except (binascii.Error, UnicodeError):
        match = None
    if match is None:
        raise _invalid("page_token", "it is not a next_page_token that this service gave")
    return int(match[1])
