"""Owns the question of room: what blocks a waiting candidate would take on a worker, and whether it may.

Looks, and moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from scheduler_service.core.block_pool import NULL_BLOCK
from scheduler_service.core.forecast import peak_blocks
from scheduler_service.core.host_tier import Stash
from scheduler_service.core.model import find_hit
from scheduler_service.core.request import Request
from scheduler_service.core.worker import Worker

_TOKENS_PER_RUNNING = 128
"""Tokens to compute again that are as dear as to wait for a worker that runs one more candidate."""


class Hold(Enum):
    """Why a waiting candidate is not placed on a worker now."""

    NO_ROOM = "no_room"  # blocks
    IN_FLIGHT = "in_flight"  # tokens of a stay that is over are still to come
    SUSPECT = "suspect"  # it and one that runs here have both lost workers, and either may be why
    MISFIT = "misfit"  # this worker is too small for it
    PREFIX_COMING = "prefix_coming"  # a running prefill is about to compute its next prefix block here
    BETTER_ELSEWHERE = "better_elsewhere"  # another worker is cheaper for it and could take it now
    KEPT_ELSEWHERE = "kept_elsewhere"  # the worker that it was preempted on keeps its KV for it


@dataclass(frozen=True, slots=True)
class StashTable:
    """A block table of which the worker keeps the beginning."""

    blocks: list[int]  # the null block where a fresh one goes
    reads: dict[int, int]  # host block to copy to the block at an index of the table
    num_hits: int  # leading blocks that were found by their hashes

    def fill(self, fresh: list[int]) -> list[int]:
        """The table, with the fresh blocks in their places."""
        supply = iter(fresh)
        return [block if block != NULL_BLOCK else next(supply) for block in self.blocks]


@dataclass(frozen=True, slots=True)
class Placement:
    """What a candidate would take on a worker."""

    shared: list[int]  # blocks that it takes by reference
    num_computed: int  # tokens that it need not compute
    num_fresh: int  # blocks to allocate
    needed_blocks: int  # what the free list loses: fresh ones, and shared ones that nobody holds now
    copy_from: int | None  # block whose contents the first fresh one starts with
    by_fork: bool
    from_stash: StashTable | None = None

    def table(self, fresh: list[int]) -> list[int]:
        """The block table, once the fresh blocks are there."""
        return self.shared + fresh if self.from_stash is None else self.from_stash.fill(fresh)

    @property
    def num_registered(self) -> int:
        """Leading blocks whose prefixes are registered."""
        return len(self.shared) if self.from_stash is None else self.from_stash.num_hits


def has_room(worker: Worker, request: Request, placement: Placement) -> bool:
    """The watermark: admission leaves a reserve free wherever something runs. Where outputs are forecast, all
    that would run must be able to finish, too."""
    if placement.needed_blocks + worker.reserve_blocks > worker.pool.num_free:
        return False
    if worker.forecast is None or not worker.num_running:
        return True
    held = len(placement.shared) + placement.num_fresh
    peak = peak_blocks(worker, worker.forecast, request, held, placement.needed_blocks)
    return peak < worker.spec.num_blocks


def find(worker: Worker, request: Request) -> Placement | Hold:
    """What `request` would take on `worker`: what that keeps of it, else by fork from its first
    candidate, else by prefix."""
    if request.stash is not None:
        return _of_preempted(worker, request, request.stash)
    if request.awaits is not None:
        # Asked again each plan, so the answer is kept as long as it holds.
        where, block_hash = request.awaits
        if where is worker and block_hash in worker.promises:
            return Hold.PREFIX_COMING
        request.awaits = None
    return _fork(worker, request) or _by_prefix(worker, request)


def _of_preempted(worker: Worker, request: Request, stash: Stash) -> Placement | Hold:
    """The same for one whose KV a worker keeps. That is the one to take it, unless so much more runs there
    that it is dearer to wait for than to compute the KV again."""
    keeper = request.last_worker
    hits = find_hit(worker, request)
    num_lacking = stash.num_computed - len(hits) * worker.spec.block_size
    if keeper is worker and num_lacking > 0:
        return _by_stash(worker, request, stash, hits)
    if keeper is not None and keeper is not worker:
        busier = keeper.num_running - worker.num_running
        if num_lacking > busier * _TOKENS_PER_RUNNING:
            return Hold.KEPT_ELSEWHERE
    return _by_prefix(worker, request)


def _by_stash(worker: Worker, request: Request, stash: Stash, hits: list[int]) -> Placement:
    """Each kept block is taken where it is: on the device, by its hash or by itself, else in host memory."""
    blocks: list[int] = []
    reads: dict[int, int] = {}
    for index, kept in enumerate(stash.blocks):
        if index < len(hits):
            blocks.append(hits[index])
        elif kept.device is not None:
            blocks.append(kept.device)
        else:
            reads[index] = kept.host
            blocks.append(NULL_BLOCK)
    blocks += [NULL_BLOCK] * (worker.spec.blocks_for(request.num_known) - len(blocks))
    shared = [block for block in blocks if block != NULL_BLOCK]
    fresh = len(blocks) - len(shared)
    needed = fresh + worker.pool.count_free(shared)
    table = StashTable(blocks, reads, len(hits))
    return Placement(shared, stash.num_computed, fresh, needed, None, by_fork=False, from_stash=table)


def _by_prefix(worker: Worker, request: Request) -> Placement | Hold:
    shared = find_hit(worker, request)
    block_size = worker.spec.block_size
    if worker.promises and len(shared) < (request.num_known - 1) // block_size:
        following = request.block_hashes(block_size, request.num_known // block_size)[len(shared)]
        if following in worker.promises:
            request.awaits = (worker, following)
            return Hold.PREFIX_COMING
    fresh = worker.spec.blocks_for(request.num_known) - len(shared)
    needed = fresh + worker.pool.count_free(shared)
    return Placement(shared, len(shared) * block_size, fresh, needed, None, by_fork=False)


def _fork(worker: Worker, request: Request) -> Placement | None:
    """Takes over candidate 0's prompt. Its last prompt token is computed again, in a copy of its block, for
    its logits. The copy runs before the step, so a plan that was sent must have computed what it reads."""
    parent = request.siblings[0]
    if request.index == 0 or request.output_ids:
        return None
    if parent.worker is not worker or not parent.prompt_planned:
        return None
    num_computed = request.num_prompt - 1
    num_shared, in_tail = divmod(num_computed, worker.spec.block_size)
    shared = parent.block_ids[:num_shared]
    fresh = worker.spec.blocks_for(request.num_prompt) - num_shared
    copy_from = parent.block_ids[num_shared] if in_tail else None
    return Placement(shared, num_computed, fresh, fresh, copy_from, by_fork=True)


def can_take(worker: Worker, request: Request) -> Placement | None:
    """The place that `worker` would give the candidate if it planned now."""
    if worker.num_running >= worker.seats or not worker.spec.fits(request.max_total):
        return None
    if request.is_suspect and worker.suspect is not None:
        return None
    awaits = request.awaits
    found = find(worker, request)
    request.awaits = awaits
    return found if isinstance(found, Placement) and has_room(worker, request, found) else None
