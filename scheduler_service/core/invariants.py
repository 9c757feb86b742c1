"""Owns the list of what must always hold between two calls of the core. Reads everything, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scheduler_service.core.admission import QueueLoad
from scheduler_service.core.host_tier import Stash
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.queue_tally import QueueTally, column_of
from scheduler_service.core.request import Request, Status
from scheduler_service.core.worker import FIRST, PARENT, Worker


def find_violations(workers: Mapping[str, Worker], lifecycle: Lifecycle) -> list[str]:
    """Every invariant that does not hold, in words."""
    found: list[str] = []
    for worker in workers.values():
        found += (f"worker {worker.spec.worker_id}: {violation}" for violation in _worker(worker))
    found += _queues(lifecycle)
    placed = {request for worker in workers.values() for request in worker.running}
    for candidates in lifecycle.requests.values():
        if all(request.finished for request in candidates):
            found.append(f"request {candidates[0].request_id} has finished and is still listed")
        for request in candidates:
            where = f"candidate {request.request_id}/{request.index}"
            found += (f"{where}: {violation}" for violation in _request(request, placed, workers))
    return found


def _worker(worker: Worker) -> Iterator[str]:
    refs = [0] * worker.spec.num_blocks
    for request in worker.running:
        for block in request.block_ids:
            refs[block] += 1
    yield from worker.pool.violations(refs)
    yield from worker.host.violations()
    for request, stash in worker.host.stashes.items():
        yield from (f"stash of {request.request_id}: {each}" for each in _stash(worker, request, stash))
    slots = [request.slot for request in worker.running]
    if slots != worker.rows.tolist() or slots != worker.rows32.tolist():
        yield "the running order and its slots differ"
    if len(set(slots)) != len(slots) or len(slots) != worker.num_running:
        yield f"{len(slots)} candidates run in {worker.num_running} slots"
    if sorted(slots) != worker.active.nonzero()[0].tolist():
        yield "active slots are not those of running candidates"
    if worker.num_running > worker.seats:
        yield f"{worker.num_running} candidates run on {worker.seats} seats"
    if len(set(worker.released)) != len(worker.released):
        yield "a slot is to be released twice"
    if len(worker.in_flight) > worker.depth:
        yield f"{len(worker.in_flight)} plans are in flight, {worker.depth} allowed"
    if worker.draining and worker.running:
        yield "it drains and something runs on it"
    for request in worker.running:
        yield from (f"slot {request.slot}: {violation}" for violation in _slot(worker, request))
    yield from _promises(worker)


def _slot(worker: Worker, request: Request) -> Iterator[str]:
    slot = request.slot
    total, pending = int(worker.total[slot]), int(worker.pending[slot])
    computed, held = int(worker.computed[slot]), int(worker.held[slot])
    if request.worker is not worker or request.status is not Status.RUNNING:
        yield "its candidate does not run here"
    if total - pending != request.num_known:
        yield f"{total} tokens less {pending} in flight are not the {request.num_known} known ones"
    if pending != _in_flight(worker, request):
        yield f"{pending} tokens are counted as in flight, {_in_flight(worker, request)} are"
    if not 0 <= computed <= total or computed > int(worker.last[slot]):
        yield f"{computed} tokens are computed of {total}, at most {worker.last[slot]} ever"
    if total > request.max_total:
        yield f"planned past its length: {total} > {request.max_total}"
    if held != len(request.block_ids) or computed > held << worker.shift:
        yield f"{held} blocks counted, {len(request.block_ids)} held, {computed} tokens computed"
    if request.registered > min(computed, request.num_known) >> worker.shift:
        yield "blocks are registered that are not full of known, planned tokens"
    if bool(worker.flags[slot] & FIRST) != (not request.output_ids):
        yield "the flag for the first token is wrong"
    if bool(worker.flags[slot] & PARENT) != (_has_siblings(request) and not request.prompt_planned):
        yield "the flag for waiting siblings is wrong"


def _stash(worker: Worker, request: Request, stash: Stash) -> Iterator[str]:
    if request.stash is not stash or request.last_worker is not worker:
        yield "its candidate knows of none here"
    if request.worker is not None or request.finished:
        yield f"its candidate is {request.status.value}"
    num_blocks = worker.spec.blocks_for(stash.num_computed)
    if num_blocks < 1 or num_blocks != len(stash.blocks):
        yield f"{len(stash.blocks)} blocks are kept for {stash.num_computed} tokens"
    if stash.num_computed >= request.num_known + request.draining:
        yield f"{stash.num_computed} tokens are kept of {request.num_known} and {request.draining} to come"
    if worker.draining:
        yield "its worker drains"


def _has_siblings(request: Request) -> bool:
    return request.index == 0 and len(request.siblings) > 1


def _in_flight(worker: Worker, request: Request) -> int:
    """Tokens that unanswered plans of this stay will give."""
    stay = int(worker.stay[request.slot])
    return sum(
        1
        for step in worker.in_flight
        for row, other in enumerate(step.requests)
        if other is request and int(step.stays[row]) == stay
    )


def _promises(worker: Worker) -> Iterator[str]:
    for block_hash, request in worker.promises.items():
        if request.worker is not worker:
            yield f"{request.request_id} promises a block and does not run here"
            continue
        hashes = request.block_hashes(worker.spec.block_size, request.prefill_blocks)
        if block_hash not in hashes[request.registered : request.prefill_blocks]:
            yield f"{request.request_id} promises a block that it is not going to compute"


def _queues(lifecycle: Lifecycle) -> Iterator[str]:
    queued = [request for model in lifecycle.models.values() for request in model.queue.live()]
    listed = [
        r for group in lifecycle.requests.values() for r in group if not r.finished and r.worker is None
    ]
    parked = [request for request in listed if request.parked]
    if len(queued) != len(set(queued)) or set(queued) | set(parked) != set(listed):
        yield f"{len(listed)} candidates wait, {len(queued)} are queued and {len(parked)} parked"
    if any(request in parked for request in queued):
        yield "a parked candidate is queued"
    load = lifecycle.load
    if load.num_waiting != len(listed) or load.num_tokens != sum(request.queue_charge for request in listed):
        yield f"the queue counts {load.num_waiting} candidates and {load.num_tokens} tokens, which it has not"
    for tenant in {r.spec.tenant for r in listed} | set(lifecycle.tenant_loads):
        charges = [r.queue_charge for r in listed if r.spec.tenant == tenant]
        if lifecycle.tenant_loads.get(tenant) != QueueLoad(len(charges), sum(charges)):
            yield f"the queue's count of a tenant with {len(charges)} waiting candidates is wrong"
    tally = QueueTally()
    for request in (r for group in lifecycle.requests.values() for r in group if not r.finished):
        waits = 0 if request.worker is not None else request.queue_charge
        tally.change(request.spec, column_of(request), 1, waits)
    if tally.figures() != lifecycle.tally.figures():
        yield "the counts by model, tenant and priority are not those of the live candidates"


def _request(request: Request, placed: set[Request], workers: Mapping[str, Worker]) -> Iterator[str]:
    if (request in placed) != (request.status is Status.RUNNING):
        yield f"it is {request.status.value} and its worker thinks otherwise"
    if request.stash is not None and (
        request.last_worker is None or request.last_worker.host.stashes.get(request) is not request.stash
    ):
        yield "what is kept of it is kept nowhere"
    if request.worker is None and not request.finished:
        if request.block_ids:
            yield "it waits and holds blocks"
        drains = sum(step.requests.count(request) for worker in workers.values() for step in worker.in_flight)
        if request.draining != drains:
            yield f"{request.draining} tokens are still to come by its count, {drains} by the plans"
        if request.parked and (request.index == 0 or request.was_admitted or request.siblings[0].finished):
            yield "it is parked without a reason"
    if len(request.output_ids) > request.spec.stopping.max_tokens:
        yield "it has more tokens than it asked for"
