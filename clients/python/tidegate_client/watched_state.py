"""What a watcher knows of a scheduler: the updates of WatchState, put together. Owns no connection."""

from __future__ import annotations

from tidegate.admin.v1 import admin_pb2 as pb

QueueName = tuple[str, str, int]
"""Model, tenant and priority."""


class WatchedState:
    """The state after the last update. Rows are the protocol's own messages."""

    def __init__(self) -> None:
        self.totals = pb.WatchStateResponse()
        """The last update: its totals, time and sequence number hold whatever else is in it."""
        self._forget()

    def _forget(self) -> None:
        self.version = ""
        self.counters = pb.Counters()
        self.workers: dict[str, pb.WorkerState] = {}
        self.queues: dict[QueueName, pb.QueueState] = {}
        self.heads: dict[str, pb.QueueHead] = {}
        self.requests: dict[int, pb.RequestState] = {}

    def apply(self, update: pb.WatchStateResponse) -> None:
        """Takes in the next update of a stream."""
        if update.snapshot:
            self._forget()
            self.version = update.version
        self.totals = update
        if update.HasField("counters"):
            self.counters = update.counters
        for worker_id in update.removed_worker_ids:
            self.workers.pop(worker_id, None)
        self.workers.update((worker.worker_id, worker) for worker in update.workers)
        self._apply_queues(update)
        self._apply_requests(update)

    def _apply_queues(self, update: pb.WatchStateResponse) -> None:
        for queue in update.queues:
            name = (queue.model, queue.tenant, queue.priority)
            if queue.waiting_requests or queue.preempted_requests or queue.running_requests:
                self.queues[name] = queue
            else:
                self.queues.pop(name, None)
        self.heads.update((head.model, head) for head in update.heads)

    def _apply_requests(self, update: pb.WatchStateResponse) -> None:
        for key in update.ended_keys:
            self.requests.pop(key, None)
        self.requests.update((request.key, request) for request in update.requests)
        told = update.progress
        columns = zip(told.keys, told.output_tokens, told.computed_tokens, told.blocks, strict=True)
        for key, output_tokens, computed_tokens, blocks in columns:
            request = self.requests[key]
            request.output_tokens = output_tokens
            request.computed_tokens = computed_tokens
            request.blocks = blocks
