"""Owns making room for a waiting candidate that the policy puts above running ones. Frees nothing in vain."""

from __future__ import annotations

import numpy as np

from scheduler_service.core import placement
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.model import Model
from scheduler_service.core.placement import Placement
from scheduler_service.core.policy import Policy
from scheduler_service.core.request import Request
from scheduler_service.core.worker import Worker


def choose_displaced(worker: Worker, model: Model, policy: Policy, config: SchedulerConfig) -> list[Request]:
    """Running candidates that must go so that the head of the queue can come, worst first.

    Empty where the head has room, or would have none even so.
    """
    head = model.queue.head()
    if head is None or head.draining or not worker.spec.fits(head.max_total):
        return []
    if any(placement.can_take(other, head) for other in model.others(worker)):
        return []
    found = placement.find(worker, head)
    if not isinstance(found, Placement):
        return []
    missing_seats = worker.num_running + 1 - worker.seats
    reserve = worker.watermark_blocks + _next_decode_blocks(worker) if worker.num_running else 0
    missing_blocks = found.needed_blocks + reserve - worker.pool.num_free
    if missing_seats <= 0 and missing_blocks <= 0:
        return []
    left = [r for r in worker.running if r.num_preemptions < config.max_preemptions]
    displaced: list[Request] = []
    while left and (missing_seats > 0 or missing_blocks > 0):
        victim = policy.victim(left)
        if not policy.displaces(head, victim):
            return []
        left.remove(victim)
        displaced.append(victim)
        missing_seats -= 1
        missing_blocks -= worker.pool.count_unshared(set(victim.block_ids) - set(found.shared))
    return displaced if missing_seats <= 0 and missing_blocks <= 0 else []


def _next_decode_blocks(worker: Worker) -> int:
    """Blocks that the running candidates take in this step."""
    rows = worker.rows
    full = worker.computed[rows] >= worker.held[rows] << worker.shift
    return int(np.count_nonzero(full & (worker.computed[rows] < worker.last[rows])))
