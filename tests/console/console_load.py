"""A console, and a load for it to show."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from e2e.deployment import deploy
from fake_worker import FakeWorker

from scheduler_service.config import ServiceConfig
from scheduler_service.server import Service
from scheduler_service.telemetry import Telemetry
from tidegate_client import AsyncClient

VOCAB_SIZE = 251
TENANTS = (("chat", 0), ("batch", 5), ("search", 2))


@dataclass(frozen=True, slots=True)
class LiveConsole:
    """A scheduler with a console, and requests that come and go."""

    service: Service

    @property
    def url(self) -> str:
        """Of the page."""
        return f"http://127.0.0.1:{self.service.console_port}"

    def hold(self) -> None:
        """Lets the scheduler make no more plans, so that what is live stays as it is."""
        self.service.engine._exchange._round = lambda: None  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def live_console(folder: Path, num_clients: int = 30) -> AsyncIterator[LiveConsole]:
    """A worker with a small model and little memory: requests wait, share prefixes and are preempted."""
    worker = {"kv_memory": "1MiB", "host_memory": "1MiB", "block_size": 16}
    worker |= {"max_num_seqs": 12, "max_model_len": 512}
    scheduler = {
        "console_port": 0,
        "scheduling_policy": "priority",
        "max_num_batched_tokens": 128,
        "max_num_seqs": 12,
    }
    async with (
        deploy(_save_model(folder), worker, scheduler) as deployment,
        _clients(deployment.client, num_clients, max_prompt=200),
    ):
        yield LiveConsole(deployment.service)


@contextlib.asynccontextmanager
async def fake_console(num_clients: int) -> AsyncIterator[LiveConsole]:
    """Two workers without models, of which all can be told that is told of real ones."""
    workers = [
        FakeWorker(num_slots=24, num_blocks=blocks, block_size=8, step_delay_s=0.05) for blocks in (1100, 900)
    ]
    config = ServiceConfig(
        port=0,
        console_port=0,
        scheduling_policy="priority",
        max_num_batched_tokens=256,
        max_num_seqs=24,
        queue_timeout=600.0,
        worker=tuple([await worker.start() for worker in workers]),
    )
    service = Service(config, Telemetry())
    await service.start()
    async with AsyncClient(f"127.0.0.1:{service.port}") as client:
        while not service.engine.ready:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.05)
        async with _clients(client, num_clients, max_prompt=260):
            yield LiveConsole(service)
    await service.stop(0.1)
    for worker in workers:
        await worker.stop()


def _save_model(folder: Path) -> Path:
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@contextlib.asynccontextmanager
async def _clients(client: AsyncClient, count: int, max_prompt: int) -> AsyncIterator[None]:
    """So many requests at a time, without an end."""
    tasks = [asyncio.create_task(_ask(client, seed, max_prompt)) for seed in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ask(client: AsyncClient, seed: int, max_prompt: int) -> None:
    chance = random.Random(seed)
    tenant, priority = TENANTS[seed % len(TENANTS)]
    shared = [(7 * (seed % 3) + i) % 240 + 3 for i in range(64)]
    number = 0
    while True:
        number += 1
        own = [chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randrange(8, max_prompt))]
        stream = client.generate(
            shared + own,
            request_id=f"{tenant}-{seed:03}-{number:02}",
            tenant=tenant,
            priority=priority,
            max_tokens=chance.randrange(40, 160),
            temperature=0.0,
            ignore_eos=True,
        )
        async for _ in stream:
            pass
