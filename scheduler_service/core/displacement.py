"""Owns making room for a waiting candidate that the policy puts above running ones. Frees nothing in vain."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.model import Model
from scheduler_service.core.placement import Placement, can_take, find
from scheduler_service.core.policy import Policy
from scheduler_service.core.request import Request
from scheduler_service.core.worker import Worker


class Displacement:
    """Chooses running candidates that must go so that the head of the queue can come."""

    def __init__(self, config: SchedulerConfig, policy: Policy) -> None:
        self._config = config
        self._policy = policy
        # The worst candidate of each worker's running order, which mostly stays the same between two plans.
        self._worst: WeakKeyDictionary[Worker, tuple[list[Request], Request | None]] = WeakKeyDictionary()

    def choose(self, worker: Worker, model: Model) -> list[Request]:
        """Victims, worst first. None where the head has room, or would have none even so."""
        head = model.queue.head() if self._policy.can_displace and not worker.draining else None
        if head is None or head.draining or not worker.spec.fits(head.max_total):
            return []
        worst = self._worst_running(worker)
        if worst is None or not self._policy.displaces(head, worst):
            return []
        if any(can_take(other, head) for other in model.others(worker)):
            return []
        found = find(worker, head)
        return self._victims(worker, head, found) if isinstance(found, Placement) else []

    def _victims(self, worker: Worker, head: Request, found: Placement) -> list[Request]:
        missing_seats = worker.num_running + 1 - worker.seats
        reserve = worker.watermark_blocks + _next_decode_blocks(worker)
        missing_blocks = found.needed_blocks + reserve - worker.pool.num_free
        left = self._unpinned(worker)
        victims: list[Request] = []
        while missing_seats > 0 or missing_blocks > 0:
            victim = self._policy.victim(left) if left else None
            if victim is None or not self._policy.displaces(head, victim):
                return []
            left.remove(victim)
            victims.append(victim)
            missing_seats -= 1
            missing_blocks -= worker.pool.count_unshared(set(victim.block_ids) - set(found.shared))
        return victims

    def _worst_running(self, worker: Worker) -> Request | None:
        known = self._worst.get(worker)
        if known is None or known[0] is not worker.running:
            unpinned = self._unpinned(worker)
            known = (worker.running, self._policy.victim(unpinned) if unpinned else None)
            self._worst[worker] = known
        return known[1]

    def _unpinned(self, worker: Worker) -> list[Request]:
        return [r for r in worker.running if r.num_preemptions < self._config.max_preemptions]


def _next_decode_blocks(worker: Worker) -> int:
    """Blocks that the running candidates take in this step."""
    rows = worker.rows
    full = worker.computed[rows] >= worker.held[rows] << worker.shift
    return int(np.count_nonzero(full & (worker.computed[rows] < worker.last[rows])))
