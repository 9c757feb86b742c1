"""Owns the snapshots that operators and metrics see. Plain values, detached from the core's own state."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler_service.core.request import Request, Status
from scheduler_service.core.worker import Worker


@dataclass(slots=True)
class Counters:
    """Counts since the start. Candidates count one by one."""

    requests_accepted: int = 0
    requests_refused: int = 0
    requests_finished: int = 0  # by a stop or by length
    requests_cancelled: int = 0
    requests_failed: int = 0  # an error, or out of time
    preemptions: int = 0  # for want of blocks or slots
    preemptions_kept: int = 0  # of these, those whose KV was kept in host memory
    swapped_out_blocks: int = 0  # copied to host memory
    swapped_in_blocks: int = 0  # copied back
    requests_moved: int = 0  # worker lost or drained
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0

    def copy(self) -> Counters:
        """The counts as they are now."""
        return replace(self)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A connected worker. used + cached + free blocks = total."""

    worker_id: str
    model: str
    draining: bool
    blocks_total: int  # without the null block
    blocks_used: int
    blocks_cached: int  # nobody holds them, but their prefix can be hit
    blocks_free: int
    block_size: int  # tokens
    running_requests: int
    num_slots: int
    steps_in_flight: int
    steps: int
    budget_tokens: int  # most in its last plan: less than usual where a target between tokens says so
    watermark_blocks: int  # that an admission leaves free while something runs
    host_blocks_total: int = 0
    host_blocks_used: int = 0  # set aside for KV of preempted requests


@dataclass(frozen=True, slots=True)
class RequestState:
    """A live candidate."""

    request_id: str
    index: int
    model: str
    status: Status
    tenant: str
    priority: int
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    blocks: int
    worker_id: str | None
    age_s: float
    preemptions: int
    order: int  # of arrival: ask for the next page with it
    max_tokens: int  # that it may generate


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The whole, between two steps."""

    draining: bool
    workers: tuple[WorkerState, ...]
    waiting_requests: int  # preempted ones among them
    running_requests: int
    waiting_tokens: int  # still to be computed, less known prefix hits
    counters: Counters


def worker_state(worker: Worker) -> WorkerState:
    """Snapshot of a worker."""
    spec, pool = worker.spec, worker.pool
    return WorkerState(
        worker_id=spec.worker_id,
        model=spec.model,
        draining=worker.draining,
        blocks_total=spec.num_blocks - 1,
        blocks_used=spec.num_blocks - 1 - pool.num_free,
        blocks_cached=pool.num_free_hashed,
        blocks_free=pool.num_free - pool.num_free_hashed,
        block_size=spec.block_size,
        running_requests=worker.num_running,
        num_slots=spec.num_slots,
        steps_in_flight=len(worker.in_flight),
        steps=worker.seq,
        budget_tokens=worker.step_budget,
        watermark_blocks=worker.watermark_blocks,
        host_blocks_total=spec.num_host_blocks,
        host_blocks_used=spec.num_host_blocks - worker.host.num_free,
    )


def request_state(request: Request, now: float) -> RequestState:
    """Snapshot of a live candidate."""
    worker = request.worker
    return RequestState(
        request_id=request.request_id,
        index=request.index,
        model=request.spec.model,
        status=request.status,
        tenant=request.spec.tenant,
        priority=request.spec.priority,
        prompt_tokens=request.num_prompt,
        output_tokens=len(request.output_ids),
        computed_tokens=int(worker.computed[request.slot]) if worker else 0,
        blocks=len(request.block_ids),
        worker_id=worker.spec.worker_id if worker else None,
        age_s=now - request.arrival,
        preemptions=request.num_preemptions,
        order=request.order,
        max_tokens=request.spec.stopping.max_tokens,
    )
