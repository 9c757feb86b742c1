"""Owns the admin API's messages: from values of core, registry and step log to protobuf. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

import numpy as np

from scheduler_service.core.block_map import BlockMap, Owner
from scheduler_service.core.explain import Blocker, Explanation
from scheduler_service.core.history import Chunk
from scheduler_service.core.queue_tally import QueueCounts, QueueKey
from scheduler_service.core.request import Status
from scheduler_service.core.state import Counters, RequestState, WorkerState
from scheduler_service.core.watch import Changes, Head, Progress
from scheduler_service.latency_log import INTERVAL_S, Durations, Interval, LatencyLog
from scheduler_service.step_log import Step
from scheduler_service.workers import WorkerRecord, WorkerStatus
from tidegate.admin.v1 import admin_pb2 as pb

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
_COUNTERS = frozenset(field.name for field in pb.Counters.DESCRIPTOR.fields)


def worker_message(record: WorkerRecord, state: WorkerState | None, steps_per_s: float) -> pb.WorkerState:
    """A worker that was registered; `state` is None while the core does not have it."""
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
        message.host_blocks_total = info.num_host_blocks
    if state is not None:
        message.blocks_used = state.blocks_used
        message.blocks_cached = state.blocks_cached
        message.blocks_free = state.blocks_free
        message.host_blocks_used = state.host_blocks_used
        message.running_requests = state.running_requests
        message.steps_in_flight = state.steps_in_flight
        message.steps = state.steps
        message.budget_tokens = state.budget_tokens
        message.watermark_blocks = state.watermark_blocks
        message.steps_per_second = round(steps_per_s, 1)
    return message


def counters_message(counters: Counters) -> pb.Counters:
    """Counts since the start."""
    values = asdict(counters)
    return pb.Counters(**{name: values[name] for name in values.keys() & _COUNTERS})


def request_message(state: RequestState) -> pb.RequestState:
    """A candidate."""
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
        model=state.model,
        key=state.order,
        max_tokens=state.max_tokens,
    )


def explanation_message(candidate: Explanation) -> pb.CandidateExplanation:
    """Why a candidate does not run, or what became of it."""
    return pb.CandidateExplanation(
        state=request_message(candidate.state),
        finish_reason=candidate.finish_reason,
        blockers=map(_blocker, candidate.blockers),
        position=candidate.position,
        estimated_start_seconds=candidate.estimated_start_s,
        timeline=[
            pb.TimelineEntry(
                at_seconds=moment.at_s,
                event=moment.what,
                worker_id=moment.worker_id,
                detail=moment.detail,
                step_sequence=moment.step,
            )
            for moment in candidate.timeline
        ],
        chunks=_chunks(candidate.chunks),
    )


def _chunks(chunks: tuple[Chunk, ...]) -> pb.PrefillChunks | None:
    if not chunks:
        return None
    at_s, steps, tokens, ended_s = zip(*chunks, strict=True)
    return pb.PrefillChunks(
        at_seconds=at_s,
        step_sequences=steps,
        tokens=tokens,
        ended_seconds=[each or 0.0 for each in ended_s],
    )


def _blocker(blocker: Blocker) -> pb.Blocker:
    return pb.Blocker(
        kind=f"BLOCKER_KIND_{blocker.kind.name}",
        worker_id=blocker.worker_id,
        needed=blocker.needed,
        reserve=blocker.reserve,
        available=blocker.available,
        limit=blocker.limit,
        other=blocker.other,
        text=blocker.text,
    )


def add_changes(message: pb.WatchStateResponse, changes: Changes) -> None:
    """Puts what has changed of requests and queues into an update."""
    message.snapshot = changes.from_nothing
    message.requests.extend(map(request_message, changes.requests))
    message.ended_keys.extend(changes.ended)
    message.hidden_requests = changes.hidden
    message.queues.extend(_queue(key, counts) for key, counts in changes.queues.items())
    message.heads.extend(map(_head, changes.heads))
    if changes.progress.orders:
        message.progress.CopyFrom(_progress(changes.progress))


def _progress(progress: Progress) -> pb.RequestProgress:
    return pb.RequestProgress(
        keys=progress.orders,
        output_tokens=progress.output_tokens,
        computed_tokens=progress.computed_tokens,
        blocks=progress.blocks,
    )


def _queue(key: QueueKey, counts: QueueCounts) -> pb.QueueState:
    return pb.QueueState(
        model=key.model,
        tenant=key.tenant,
        priority=key.priority,
        waiting_requests=counts.waiting,
        preempted_requests=counts.preempted,
        running_requests=counts.running,
        waiting_tokens=counts.tokens,
    )


def _head(head: Head) -> pb.QueueHead:
    blockers = map(_blocker, head.blockers)
    return pb.QueueHead(model=head.model, request_id=head.request_id, index=head.index, blockers=blockers)


def steps_message(worker_id: str, steps: Iterable[Step], unix_offset_s: float) -> pb.WorkerSteps:
    """Steps of a worker; `unix_offset_s` is what makes Unix time of the engine's."""
    _, seqs, ended, durations, prefill, decode, budgets, requests = zip(*steps, strict=True)
    return pb.WorkerSteps(
        worker_id=worker_id,
        sequences=seqs,
        ended_seconds=[at + unix_offset_s for at in ended],
        durations_ms=[duration * 1e3 for duration in durations],
        prefill_tokens=prefill,
        decode_tokens=decode,
        budget_tokens=budgets,
        requests=requests,
    )


def block_map_message(worker_id: str, blocks: BlockMap) -> pb.GetBlockMapResponse:
    """What each block of a worker holds."""
    return pb.GetBlockMapResponse(
        worker_id=worker_id,
        holders=np.minimum(blocks.holders, 255).astype(np.uint8).tobytes(),
        cached=blocks.cached.astype(np.uint8).tobytes(),
        owner_indices=blocks.owner_indices.astype("<i4").tobytes(),
        owners=map(_block_owner, blocks.owners),
        block_size=blocks.block_size,
        host_states=bytes(blocks.host_states),
        host_owner_indices=blocks.host_owner_indices.astype("<i4").tobytes(),
        host_owners=map(_block_owner, blocks.host_owners),
    )


def _block_owner(owner: Owner) -> pb.BlockOwner:
    return pb.BlockOwner(
        request_id=owner.request_id,
        index=owner.index,
        tenant=owner.tenant,
        key=owner.order,
        blocks=owner.num_blocks,
    )


def latency_message(log: LatencyLog, now: float, unix_offset_s: float) -> pb.GetLatencyResponse:
    """How long tokens took; `unix_offset_s` is what makes Unix time of the engine's."""
    recent, seconds = log.recent(now)
    return pb.GetLatencyResponse(
        recent_seconds=seconds,
        recent=_latency([recent], unix_offset_s),
        intervals=_latency(log.intervals(now), unix_offset_s),
        interval_seconds=INTERVAL_S,
    )


def _latency(intervals: Iterable[Interval], unix_offset_s: float) -> pb.Latencies:
    message = pb.Latencies()
    for each in intervals:
        message.started_seconds.append(each.started + unix_offset_s)
        message.output_tokens.append(each.output_tokens)
        message.prefill_tokens.append(each.prefill_tokens)
        _add_quantiles(message.time_to_first_token, each.first_token)
        _add_quantiles(message.between_tokens, each.between_tokens)
    return message


def _add_quantiles(message: pb.Quantiles, durations: Durations) -> None:
    p50, p95, p99 = durations.quantiles_ms()
    message.counts.append(durations.num)
    message.p50_ms.append(p50)
    message.p95_ms.append(p95)
    message.p99_ms.append(p99)
