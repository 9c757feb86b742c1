"""What watching costs the scheduler: time of each update, of a first look, and of a worker's block map.

The core is real, workers are formulas; every update follows a step of each worker, so that all that runs has
moved. The event loop is busy for as long as a line says, once for each update, however many watch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from scheduler_service import admin_codec as codec
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.engine import Engine
from scheduler_service.simulation.modelled_worker import ModelledWorker, StepTime
from scheduler_service.simulation.simulator import fleet
from scheduler_service.simulation.workload import Workload
from scheduler_service.state_feed import StateReader
from scheduler_service.workers import WorkerRegistry
from tidegate.admin.v1 import admin_pb2 as pb

_T = TypeVar("_T")
_UPDATES = 20


class Service:
    """An engine whose core is driven by hand."""

    def __init__(self, running: int, waiting: int) -> None:
        count = running + waiting
        tenants = [f"tenant{i % 8}" for i in range(count)]
        lengths = np.full(count, 40)
        load = Workload(np.zeros(count), lengths, lengths * 50, tenants, np.zeros(count, np.int64), 0, 0)
        config = SchedulerConfig(max_num_batched_tokens=1 << 16)
        specs = fleet(
            -(-running // config.max_num_seqs),
            num_blocks=65_536,
            block_size=16,
            num_slots=256,
            max_batched_tokens=1 << 16,
            max_in_flight=2,
            max_model_len=8_192,
            vocab_size=1 << 20,
        )
        registry = WorkerRegistry()
        self.core = Scheduler(config)
        self.engine = Engine(config, registry, new_core=lambda _: self.core)
        self.workers = [ModelledWorker(spec, StepTime(0.01, 0, 0), load.outputs) for spec in specs]
        for spec in specs:
            registry.add(spec.worker_id, "127.0.0.1:1")
            self.core.add_worker(spec, 0.0)
        for index in range(count):
            self.core.submit(load.request(index, 0), 0.0)
        self._registry = registry

    def new_reader(self) -> StateReader:
        """One who has not looked yet."""
        return StateReader(self.engine, self._registry, steps=True)

    def step(self) -> None:
        """A step of each worker."""
        for worker in self.workers:
            plan = self.core.plan(worker.spec.worker_id, 0.0)
            if plan is not None:
                _, result = worker.execute(plan, 0.0)
                self.core.apply(worker.spec.worker_id, result, 0.0)


def timed(call: Callable[[], _T]) -> tuple[float, _T]:
    """Milliseconds of a call, and what it gave."""
    start = time.perf_counter()
    value = call()
    return (time.perf_counter() - start) * 1e3, value


def read(reader: StateReader) -> pb.WatchStateResponse:
    """The update that there must be."""
    update = reader.read()
    if update is None:
        raise RuntimeError("nothing has changed")
    return update


def measure(running: int, waiting: int) -> None:
    """Prints a line for so many requests."""
    service = Service(running, waiting)
    for _ in range(3):
        service.step()
    reader = service.new_reader()
    first_ms, first = timed(lambda: read(reader))
    reading_ms, writing_ms, sizes = [], [], []
    for _ in range(_UPDATES):
        service.step()
        spent_ms, update = timed(lambda: read(reader))
        reading_ms.append(spent_ms)
        spent_ms, data = timed(update.SerializeToString)
        writing_ms.append(spent_ms)
        sizes.append(len(data))
    map_ms, _ = timed(lambda: codec.block_map_message("w0", service.engine.block_map("w0")))
    state = service.engine.state()
    print(
        f"{state.running_requests} running, {state.waiting_requests} waiting: "
        f"update {statistics.median(reading_ms):.2f} ms, and {statistics.median(writing_ms):.2f} ms for each "
        f"watcher, {statistics.median(sizes) / 1e3:.1f} kB; first look {first_ms:.1f} ms, "
        f"{len(first.SerializeToString()) / 1e3:.0f} kB; map of 65,536 blocks {map_ms:.1f} ms"
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for counts in ((900, 100), (1_024, 10_000), (4_096, 10_000)):
        measure(*counts)
