"""Owns what belongs to one model: its waiting queue and the workers that serve it."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_service.core.request import Request
from scheduler_service.core.waiting import WaitingQueue
from scheduler_service.core.worker import Worker, WorkerSpec


class Model:
    """One model. It is known from its first worker on, also while it has none."""

    def __init__(self, name: str, queue: WaitingQueue) -> None:
        self.name = name
        self.queue = queue
        self.workers: dict[str, Worker] = {}
        self._last_spec: WorkerSpec | None = None

    def add(self, worker: Worker) -> None:
        """A worker was connected."""
        self.workers[worker.spec.worker_id] = worker
        self._last_spec = worker.spec

    def remove(self, worker: Worker) -> None:
        """A worker is gone. The last one's limits go on to say what can ever fit."""
        del self.workers[worker.spec.worker_id]
        self._last_spec = worker.spec

    def specs(self) -> list[WorkerSpec]:
        """Specs of the connected workers, or the last one's."""
        if self.workers:
            return [worker.spec for worker in self.workers.values()]
        return [self._last_spec] if self._last_spec else []

    def best_hit_tokens(self, request: Request) -> int:
        """Tokens of the longest prefix of `request` that a worker holds."""
        return max((hit_tokens(worker, request) for worker in self._ready()), default=0)

    def others(self, worker: Worker) -> Iterable[Worker]:
        """Ready workers beside `worker`."""
        return (other for other in self._ready() if other is not worker)

    def _ready(self) -> Iterable[Worker]:
        return (worker for worker in self.workers.values() if not worker.draining)


def find_hit(worker: Worker, request: Request) -> list[int]:
    """Blocks of the longest prefix of `request` that `worker` holds. The last known token is always computed,
    since its logits give the next one."""
    block_size = worker.spec.block_size
    num_known = request.num_known
    hashes = request.block_hashes(block_size, num_known // block_size)
    return worker.pool.lookup(hashes, (num_known - 1) // block_size)


def hit_tokens(worker: Worker, request: Request) -> int:
    """Tokens of that prefix."""
    return len(find_hit(worker, request)) * worker.spec.block_size
