"""Owns a deployment of processes: a scheduler, workers that each sit behind a bad network, and a client."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from e2e.chaos.processes import SchedulerProcess, WorkerProcess, free_port
from e2e.chaos.proxy import FaultyProxy

from tidegate.admin.v1 import admin_pb2, admin_pb2_grpc
from tidegate_client import AsyncClient

READY = admin_pb2.WORKER_STATUS_READY


@dataclass(frozen=True)
class Node:
    """A worker and the network in front of it. The scheduler knows it by the proxy's address."""

    process: WorkerProcess
    proxy: FaultyProxy

    @property
    def worker_id(self) -> str:
        """The scheduler's name for it."""
        return self.proxy.address


@dataclass(frozen=True)
class Cluster:
    """What runs."""

    scheduler: SchedulerProcess
    nodes: list[Node]
    client: AsyncClient
    admin: Any  # AdminServiceStub

    async def state(self) -> admin_pb2.GetStateResponse:
        """The scheduler's state; every invariant holds."""
        state = await self.admin.GetState(admin_pb2.GetStateRequest(verify=True), timeout=60)
        assert list(state.violations) == []
        return state

    async def until(
        self, holds: Callable[[admin_pb2.GetStateResponse], bool], timeout_s: float = 60.0
    ) -> admin_pb2.GetStateResponse:
        """Waits until something holds of the state."""
        async with asyncio.timeout(timeout_s):
            while True:
                state = await self.state()
                if holds(state):
                    return state
                await asyncio.sleep(0.02)

    async def ready(self, count: int | None = None) -> None:
        """Waits until so many workers are ready: by default, all."""
        count = len(self.nodes) if count is None else count
        await self.until(lambda state: sum(w.status == READY for w in state.workers) >= count)

    async def check_empty(self) -> admin_pb2.GetStateResponse:
        """Waits until no block is held. Fails where a request is left behind."""
        state = await self.until(lambda state: not any(w.blocks_used for w in state.workers))
        assert (state.waiting_requests, state.running_requests) == (0, 0)
        return state


@contextlib.asynccontextmanager
async def launch(
    folder: Path,
    model: Path,
    num_workers: int,
    worker: Mapping[str, Any] | None = None,
    scheduler: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> AsyncIterator[Cluster]:
    """Starts everything, yields when all workers are ready, and leaves no process behind."""
    async with contextlib.AsyncExitStack() as stack:
        process = SchedulerProcess(
            folder, _flags({"drain_window": 0, "queue_timeout": 600, **(scheduler or {})})
        )
        stack.push_async_callback(process.close)
        await process.start()
        nodes = []
        for i in range(num_workers):
            proxy = FaultyProxy(free_port(), rng=random.Random(f"{seed}/{i}"))
            stack.push_async_callback(proxy.stop)
            await proxy.start()
            options = {
                "model": model,
                "dtype": "float32",
                "device": "cpu",
                "threads": 1,
                "scheduler": process.admin_address,
                "advertise_address": proxy.address,
                **(worker or {}),
            }
            node = Node(WorkerProcess(folder / f"worker-{i}.log", proxy.target_port, _flags(options)), proxy)
            stack.push_async_callback(node.process.kill)
            node.process.start()
            nodes.append(node)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(process.admin_address))
        client = await stack.enter_async_context(AsyncClient(process.address, retry=None))
        cluster = Cluster(process, nodes, client, admin_pb2_grpc.AdminServiceStub(channel))
        await cluster.ready()
        yield cluster


async def restart(cluster: Cluster, node: Node) -> None:
    """Replaces a worker in good order, and waits until the new one serves."""
    node.process.send(signal.SIGTERM)
    assert await node.process.ended() == 0
    node.process.start()
    await cluster.until(lambda state: _status(state, node) == READY)


def _status(state: admin_pb2.GetStateResponse, node: Node) -> int:
    return next((w.status for w in state.workers if w.worker_id == node.worker_id), 0)


def _flags(options: Mapping[str, Any]) -> Sequence[str]:
    return [part for name, value in options.items() for part in ("--" + name.replace("_", "-"), str(value))]
