"""The console over a real scheduler: its page, its data, and a load for it to show."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))

from e2e.deployment import Deployment, deploy

VOCAB_SIZE = 251
TENANTS = (("chat", 0), ("batch", 5), ("search", 2))


@dataclass(frozen=True, slots=True)
class LiveConsole:
    """A deployment with a console, and requests that come and go."""

    deployment: Deployment
    url: str


def save_model(folder: Path) -> Path:
    """A small random model."""
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
async def live_console(folder: Path, num_clients: int = 30) -> AsyncIterator[LiveConsole]:
    """Two workers whose memory is short, so that requests wait, share prefixes and are preempted."""
    worker = {"kv_memory": "1MiB", "block_size": 16, "max_num_seqs": 12, "max_model_len": 512}
    scheduler = {
        "console_port": 0,
        "scheduling_policy": "priority",
        "max_num_batched_tokens": 128,
        "max_num_seqs": 12,
    }
    async with deploy(save_model(folder), worker, scheduler, num_workers=2) as deployment:
        clients = [asyncio.create_task(_client(deployment, seed)) for seed in range(num_clients)]
        try:
            yield LiveConsole(deployment, f"http://127.0.0.1:{deployment.service.console_port}")
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def _client(deployment: Deployment, seed: int) -> None:
    """Asks again and again."""
    chance = random.Random(seed)
    tenant, priority = TENANTS[seed % len(TENANTS)]
    shared = [(seed % 3 + 3 + i) % (VOCAB_SIZE - 3) + 3 for i in range(64)]
    number = 0
    while True:
        number += 1
        own = [chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randrange(8, 200))]
        stream = deployment.client.generate(
            shared + own,
            request_id=f"{tenant}-{seed:02}-{number:03}",
            tenant=tenant,
            priority=priority,
            max_tokens=chance.randrange(40, 200),
            temperature=0.0,
            ignore_eos=True,
        )
        async for _ in stream:
            pass
