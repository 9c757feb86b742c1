"""Owns a whole Tidegate in one process: a real scheduler service, real workers, real gRPC on loopback.

One process, since importing torch for each of many settings would take longer than the tests. The services
are those of the entry points; tests of processes start those instead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_service.config import ServiceConfig
from scheduler_service.server import Service
from scheduler_service.telemetry import Telemetry
from tidegate_client import AsyncClient
from worker_service.config import WorkerConfig
from worker_service.server import serve


@dataclass(slots=True)
class Deployment:
    """A running scheduler, its workers and a client."""

    service: Service
    client: AsyncClient
    workers: list[tuple[asyncio.Event, asyncio.Task[None]]]

    async def generate(self, prompt: Sequence[int], **options: Any) -> list[list[int]]:
        """Token ids of each candidate; checks that the stream is well formed."""
        n = options.get("n", 1)
        outputs: list[list[int]] = [[] for _ in range(n)]
        stream = self.client.generate(list(prompt), **{"temperature": 0.0, "ignore_eos": True, **options})
        async for delta in stream:
            outputs[delta.index].extend(delta.token_ids)
        assert [g.finished.usage.output_tokens for g in stream.generations()] == [len(o) for o in outputs]
        return outputs

    async def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        options: Sequence[Mapping[str, Any]] | None = None,
        **common: Any,
    ) -> list[list[list[int]]]:
        """Token ids of each candidate of each prompt, all prompts at once."""
        options = options or [{}] * len(prompts)
        calls = (self.generate(p, **common, **o) for p, o in zip(prompts, options, strict=True))
        return list(await asyncio.gather(*calls))

    def counters(self) -> Any:
        """Counters of the core since the start."""
        return self.service.engine.state().counters

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds; at most half a minute."""
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - the services have no event for it
                await asyncio.sleep(0.001)

    async def stop_worker(self, index: int) -> None:
        """What SIGTERM does to a worker."""
        stop, task = self.workers[index]
        stop.set()
        await task

    def check_empty(self) -> None:
        """Every invariant holds, and nothing is left of any request."""
        state = self.service.engine.state()
        assert self.service.engine.violations() == []
        assert (state.waiting_requests, state.running_requests) == (0, 0)
        assert [(w.blocks_used, w.host_blocks_used) for w in state.workers] == [(0, 0)] * len(state.workers)


@contextlib.asynccontextmanager
async def deploy(
    model: Path,
    worker: Mapping[str, Any] | None = None,
    scheduler: Mapping[str, Any] | None = None,
    num_workers: int = 1,
) -> AsyncIterator[Deployment]:
    """Starts everything on free ports, yields when all workers are ready, and stops everything in order."""
    config = ServiceConfig(
        port=0, drain_window=0.0, drain_timeout=5.0, queue_timeout=600.0, **(scheduler or {})
    )
    service = Service(config, Telemetry())
    await service.start()
    address = f"127.0.0.1:{service.admin_port}"
    workers = []
    try:
        for _ in range(num_workers):
            stop = asyncio.Event()
            options = {"dtype": "float32", "port": 0, "scheduler": address, "threads": 1, **(worker or {})}
            task = asyncio.create_task(serve(WorkerConfig(model=str(model), **options), stop))
            workers.append((stop, task))
        await _ready(service, workers)
        async with AsyncClient(f"127.0.0.1:{service.port}") as client:
            yield Deployment(service, client, workers)
    finally:
        for stop, _ in workers:
            stop.set()
        await asyncio.gather(*(task for _, task in workers), return_exceptions=True)
        await service.stop(grace_s=0.5)


async def _ready(service: Service, workers: list[tuple[asyncio.Event, asyncio.Task[None]]]) -> None:
    async with asyncio.timeout(120):
        while len([w for w in service.engine.state().workers if w.num_slots]) < len(workers):
            for _, task in workers:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)


def random_prompts(count: int, longest: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to `longest` token ids; some share their first half with the one before."""
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    for length in np.linspace(1, longest, count).astype(int):
        prompt = rng.integers(3, vocab_size, length).tolist()
        if prompts and rng.random() < 0.3:
            head = prompts[-1][: length // 2]
            prompt[: len(head)] = head
        prompts.append(prompt)
    return prompts
