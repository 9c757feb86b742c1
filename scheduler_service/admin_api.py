"""Owns AdminService: translates between its messages and the engine, the registry and the fleet."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any, TypeVar

import grpc
from grpc_status import rpc_status

from scheduler_service import errors
from scheduler_service.core.explain import Explanation
from scheduler_service.core.request import Status
from scheduler_service.core.state import Counters, RequestState, WorkerState
from scheduler_service.engine import Engine
from scheduler_service.fleet import Fleet
from scheduler_service.logs import EventLog, new_incident_id
from scheduler_service.workers import WorkerRecord, WorkerRegistry, WorkerStatus
from tidegate.admin.v1 import admin_pb2 as pb
from tidegate.admin.v1 import admin_pb2_grpc as pb_grpc

_DEFAULT_PAGE_SIZE = 100
_MAX_PAGE_SIZE = 1_000
_WORKER_ID = re.compile(r"[A-Za-z0-9._:\[\]-]{0,128}")

_WORKER_STATUS = {
    WorkerStatus.CONNECTING: pb.WORKER_STATUS_CONNECTING,
    WorkerStatus.READY: pb.WORKER_STATUS_READY,
    WorkerStatus.DRAINING: pb.WORKER_STATUS_DRAINING,
}
_REQUEST_STATUS = {
    Status.WAITING: pb.REQUEST_STATUS_WAITING,
    Status.RUNNING: pb.REQUEST_STATUS_RUNNING,
    Status.PREEMPTED: pb.REQUEST_STATUS_PREEMPTED,
    Status.FINISHED: pb.REQUEST_STATUS_FINISHED,
}

_log = EventLog("admin")
_Response = TypeVar("_Response")
_Context = grpc.aio.ServicerContext[Any, Any]


class AdminApi(pb_grpc.AdminServiceServicer):
    """The operators' RPCs."""

    def __init__(self, engine: Engine, registry: WorkerRegistry, fleet: Fleet) -> None:
        self._engine = engine
        self._registry = registry
        self._fleet = fleet

    async def GetState(self, request: pb.GetStateRequest, context: _Context) -> pb.GetStateResponse:
        """A snapshot, with the invariants checked where that is asked for."""

        async def answer() -> pb.GetStateResponse:
            state = self._engine.state()
            connected = {worker.worker_id: worker for worker in state.workers}
            return pb.GetStateResponse(
                version=version("tidegate"),
                draining=state.draining,
                workers=[
                    _worker(record, connected.get(record.worker_id)) for record in self._registry.records()
                ],
                waiting_requests=state.waiting_requests,
                running_requests=state.running_requests,
                waiting_tokens=state.waiting_tokens,
                counters=_counters(state.counters),
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
                requests=[_request(state) for state in page[:size]],
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
            return pb.ExplainRequestResponse(candidates=map(_explanation, candidates))

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


def _worker(record: WorkerRecord, state: WorkerState | None) -> pb.WorkerState:
    info = record.info
    message = pb.WorkerState(
        worker_id=record.worker_id,
        address=record.address,
        status=_WORKER_STATUS[record.status],
        last_error=record.last_error,
    )
    if info is not None:
        message.model = info.model.name
        message.block_size = info.block_size
        message.num_slots = info.num_slots
        message.blocks_total = info.num_blocks - 1
    if state is not None:
        message.blocks_used = state.blocks_used
        message.blocks_cached = state.blocks_cached
        message.blocks_free = state.blocks_free
        message.running_requests = state.running_requests
        message.steps_in_flight = state.steps_in_flight
        message.steps = state.steps
    return message


def _counters(counters: Counters) -> pb.Counters:
    return pb.Counters(
        requests_accepted=counters.requests_accepted,
        requests_refused=counters.requests_refused,
        requests_finished=counters.requests_finished,
        requests_cancelled=counters.requests_cancelled,
        requests_failed=counters.requests_failed,
        preemptions=counters.preemptions,
        requests_moved=counters.requests_moved,
        prefix_queried_tokens=counters.prefix_queried_tokens,
        prefix_hit_tokens=counters.prefix_hit_tokens,
        prefill_tokens=counters.prefill_tokens,
        output_tokens=counters.output_tokens,
        steps=counters.steps,
    )


def _explanation(candidate: Explanation) -> pb.CandidateExplanation:
    return pb.CandidateExplanation(
        state=_request(candidate.state),
        finish_reason=candidate.finish_reason,
        blockers=[
            pb.Blocker(
                kind=f"BLOCKER_KIND_{blocker.kind.name}",
                worker_id=blocker.worker_id,
                needed=blocker.needed,
                reserve=blocker.reserve,
                available=blocker.available,
                limit=blocker.limit,
                other=blocker.other,
                text=blocker.text,
            )
            for blocker in candidate.blockers
        ],
        position=candidate.position,
        estimated_start_seconds=candidate.estimated_start_s,
        timeline=[
            pb.TimelineEntry(
                at_seconds=moment.at_s, event=moment.what, worker_id=moment.worker_id, detail=moment.detail
            )
            for moment in candidate.timeline
        ],
    )


def _request(state: RequestState) -> pb.RequestState:
    return pb.RequestState(
        request_id=state.request_id,
        index=state.index,
        status=_REQUEST_STATUS[state.status],
        tenant=state.tenant,
        priority=state.priority,
        prompt_tokens=state.prompt_tokens,
        output_tokens=state.output_tokens,
        computed_tokens=state.computed_tokens,
        blocks=state.blocks,
        worker_id=state.worker_id or "",
        age_seconds=state.age_s,
        preemptions=state.preemptions,
    )
