"""Owns the list of workers: who they are, how they are, which models they serve. No gRPC, no scheduling."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from scheduler_service.core.errors import ConfigError
from scheduler_service.core.worker import WorkerSpec
from scheduler_service.served_model import ServedModel


class WorkerRefusedError(Exception):
    """A worker's hello cannot be accepted. The message tells people why."""


class DuplicateWorkerError(WorkerRefusedError):
    """The same start of a worker is already connected under another name."""


class WorkerStatus(Enum):
    """What the service thinks of a worker."""

    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker told in its hello."""

    incarnation: str  # random name of this start of the worker
    model: ServedModel
    block_size: int  # tokens
    num_blocks: int  # the null block included
    num_slots: int
    max_batched_tokens: int
    max_in_flight: int  # plans
    num_host_blocks: int = 0
    block_copy_ms: float = 0.0  # to host memory or back; 0: not measured

    def to_core(self, worker_id: str) -> WorkerSpec:
        """What the core needs of it. Raises WorkerRefusedError."""
        try:
            return WorkerSpec(
                worker_id=worker_id,
                model=self.model.name,
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                num_slots=self.num_slots,
                max_batched_tokens=self.max_batched_tokens,
                max_in_flight=self.max_in_flight,
                max_model_len=self.model.max_model_len,
                vocab_size=self.model.vocab_size,
                num_host_blocks=self.num_host_blocks,
                block_copy_ms=self.block_copy_ms,
            )
        except ConfigError as error:
            raise WorkerRefusedError(f"its hello: {error}") from None


@dataclass(slots=True)
class WorkerRecord:
    """One worker that the service was told of."""

    worker_id: str
    address: str  # host:port
    status: WorkerStatus = WorkerStatus.CONNECTING
    info: WorkerInfo | None = None  # of the last hello
    last_error: str = ""  # why the last stream ended, for people
    drained: bool = False  # an operator wants nothing new there
    drained_incarnation: str | None = None  # the start that this holds for; None: the next one
    duplicate_of: str = ""  # another name of the same worker, where that was found out


@dataclass(slots=True)
class WorkerRegistry:
    """Workers by name, in the order in which they came."""

    on_change: Callable[[], None] = lambda: None
    """Called when models, or their numbers of ready workers, may have changed."""
    on_epoch: Callable[[int], None] = lambda epoch: None
    """Called with each epoch that is used."""
    _records: dict[str, WorkerRecord] = field(default_factory=dict)
    _models: dict[str, ServedModel] = field(default_factory=dict)
    _last_epoch: int = 0

    def next_epoch(self) -> int:
        """A number that is higher for each stream, also across restarts of this service: by the clock, and
        by what was noted of them, since a clock can jump back."""
        self._last_epoch = max(self._last_epoch + 1, time.time_ns())
        self.on_epoch(self._last_epoch)
        return self._last_epoch

    def continue_epochs(self, last: int) -> None:
        """An earlier process of this service has used epochs up to `last`."""
        self._last_epoch = max(self._last_epoch, last)

    def add(self, worker_id: str, address: str) -> WorkerRecord:
        """Notes a worker. Its name is new or free again."""
        record = WorkerRecord(worker_id, address)
        self._records[worker_id] = record
        return record

    def remove(self, worker_id: str) -> WorkerRecord | None:
        """Forgets a worker."""
        record = self._records.pop(worker_id, None)
        if record is not None:
            self._count_ready()
        return record

    def get(self, worker_id: str) -> WorkerRecord | None:
        """The worker of that name."""
        return self._records.get(worker_id)

    def by_address(self, address: str) -> WorkerRecord | None:
        """The worker at that address."""
        return next((record for record in self._records.values() if record.address == address), None)

    def records(self) -> list[WorkerRecord]:
        """Every worker."""
        return list(self._records.values())

    def states(self) -> dict[str, str]:
        """The status of every worker by name. May be called from any thread."""
        return {record.worker_id: record.status.value for record in self.records()}

    def models(self) -> dict[str, ServedModel]:
        """Models by name. The mapping is replaced, not changed, when workers come and go."""
        return self._models

    def accept(self, worker_id: str, info: WorkerInfo, model_in_use: bool) -> WorkerRecord:
        """Takes a worker's hello. `model_in_use`: requests for its model are live, so that its weights and
        tokenizer may not change. Raises WorkerRefusedError."""
        record = self._records[worker_id]
        self._check_duplicate(record, info)
        self._check_fingerprint(info.model, model_in_use)
        record.drained = record.drained and record.drained_incarnation in (None, info.incarnation)
        record.drained_incarnation = info.incarnation
        record.status = WorkerStatus.DRAINING if record.drained else WorkerStatus.READY
        record.info = info
        self._models = {**self._models, info.model.name: info.model}
        self._count_ready()
        return record

    def lost(self, worker_id: str, reason: str) -> None:
        """Notes that a worker's stream has ended, or was never opened."""
        record = self._records.get(worker_id)
        if record is not None:
            record.status = WorkerStatus.CONNECTING
            record.last_error = reason
            self._count_ready()

    def drain(self, worker_id: str) -> None:
        """Notes that a worker gets nothing new for as long as it is not restarted. Raises KeyError."""
        record = self._records[worker_id]
        record.drained = True
        record.drained_incarnation = None if record.info is None else record.info.incarnation
        if record.status is WorkerStatus.READY:
            record.status = WorkerStatus.DRAINING
            self._count_ready()

    def _check_duplicate(self, record: WorkerRecord, info: WorkerInfo) -> None:
        record.duplicate_of = ""
        for other in self._records.values():
            if other is record or other.info is None or other.status is WorkerStatus.CONNECTING:
                continue
            if other.info.incarnation == info.incarnation:
                record.duplicate_of = other.worker_id
                raise DuplicateWorkerError(
                    f"this worker is already connected as {other.worker_id!r} ({other.address})"
                )

    def _check_fingerprint(self, model: ServedModel, model_in_use: bool) -> None:
        known = self._models.get(model.name)
        if known is None or known.fingerprint == model.fingerprint:
            return
        if known.ready_workers or model_in_use:
            raise WorkerRefusedError(
                f"its model {model.name!r} has fingerprint {model.fingerprint!r}, but other workers or live "
                f"requests use {known.fingerprint!r}; give the other model another name"
            )

    def _count_ready(self) -> None:
        ready = [
            record.info.model.name
            for record in self._records.values()
            if record.status is WorkerStatus.READY and record.info is not None
        ]
        self._models = {
            name: replace(model, ready_workers=ready.count(name)) for name, model in self._models.items()
        }
        self.on_change()
