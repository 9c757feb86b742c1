"""Owns the faults: what is done to a worker or its network, and how it is made good again.

Each leaves its worker serving, or on its way to it.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from e2e.chaos.cluster import Cluster, Node

from tidegate.admin.v1 import admin_pb2


async def kill(cluster: Cluster, node: Node, rng: random.Random) -> None:
    """kill -9, and a restart after a while."""
    await node.process.kill()
    await asyncio.sleep(rng.uniform(0.0, 0.5))
    node.process.start()


async def stop_briefly(cluster: Cluster, node: Node, rng: random.Random) -> None:
    """SIGSTOP for less than the step timeout: a pause."""
    await _stop(node, rng.uniform(0.05, 0.5))


async def stop_long(cluster: Cluster, node: Node, rng: random.Random) -> None:
    """SIGSTOP beyond the step timeout: the worker is fenced, and wakes up with the work of an old stream."""
    await _stop(node, rng.uniform(1.5, 2.5))


async def _stop(node: Node, pause_s: float) -> None:
    node.process.send(signal.SIGSTOP)
    await asyncio.sleep(pause_s)
    node.process.send(signal.SIGCONT)


async def cut(cluster: Cluster, node: Node, rng: random.Random) -> None:
    """The connection is reset, up to three times in a row."""
    for _ in range(rng.randint(1, 3)):
        node.proxy.cut()
        await asyncio.sleep(rng.uniform(0.0, 0.3))


async def slow(cluster: Cluster, node: Node, rng: random.Random) -> None:
    """Delay and loss for a while."""
    node.proxy.delay_s, node.proxy.loss = rng.uniform(0.002, 0.04), rng.uniform(0.0, 0.1)
    await asyncio.sleep(rng.uniform(0.5, 1.5))
    node.proxy.delay_s = node.proxy.loss = 0.0


async def silence(cluster: Cluster, node: Node, rng: random.Random) -> None:
    """Nothing passes, and nobody is told. Then all of it arrives, late, or the connection is reset."""
    node.proxy.hold()
    await asyncio.sleep(rng.uniform(0.2, 2.5))
    if rng.random() < 0.5:
        node.proxy.cut()
    node.proxy.resume()


async def restart(cluster: Cluster, node: Node, rng: random.Random) -> None:
    """SIGTERM: the worker leaves in good order, with status 0, also if it is still loading."""
    await node.process.listening()
    node.process.send(signal.SIGTERM)
    status = await node.process.ended()
    assert status == 0, f"a worker ended with status {status} after SIGTERM"
    await asyncio.sleep(rng.uniform(0.0, 0.3))
    node.process.start()


async def drain(cluster: Cluster, node: Node, rng: random.Random) -> None:
    """An operator drains the worker; it is restarted a little later."""
    try:
        await cluster.admin.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id=node.worker_id), timeout=30)
    except Exception as error:
        if "NOT_FOUND" not in str(error):  # it was just restarted, and has not registered yet
            raise
    await asyncio.sleep(rng.uniform(0.1, 0.5))
    await restart(cluster, node, rng)


Fault = Callable[[Cluster, Node, random.Random], Awaitable[None]]
FAULTS: tuple[Fault, ...] = (kill, kill, stop_briefly, stop_long, cut, cut, slow, silence, restart, drain)


@dataclass
class Chaos:
    """Hurts workers at random, never the same one twice at a time, but all of them if it so happens."""

    cluster: Cluster
    rng: random.Random
    pause_s: tuple[float, float] = (0.1, 1.0)
    history: list[str] = field(default_factory=list)

    async def run(self, num_faults: int, after_each: Callable[[], Awaitable[None]]) -> None:
        """Injects faults, some of them at the same time, and waits until all are made good."""
        started_s = time.monotonic()
        busy = {node.worker_id: asyncio.Lock() for node in self.cluster.nodes}
        kinds = [FAULTS[i % len(FAULTS)] for i in range(num_faults)]
        self.rng.shuffle(kinds)

        async def inflict(fault: Fault, node: Node) -> None:
            async with busy[node.worker_id]:
                at_s = time.monotonic() - started_s
                self.history.append(f"{at_s:.2f} s: {fault.__name__} {node.process.log.stem}")
                await fault(self.cluster, node, self.rng)

        async with asyncio.TaskGroup() as group:
            for fault in kinds:
                free = [node for node in self.cluster.nodes if not busy[node.worker_id].locked()]
                while not free:
                    await asyncio.sleep(0.02)
                    free = [node for node in self.cluster.nodes if not busy[node.worker_id].locked()]
                group.create_task(inflict(fault, self.rng.choice(free)))
                await asyncio.sleep(self.rng.uniform(*self.pause_s))
                await after_each()
