"""Measures what target_itl_ms does to the gaps between tokens while long prompts arrive, and what it costs.

A scheduler service and a worker process serve streams that decode all the time, into which prompts of 1,500
tokens come. The ways take turns: the fixed budget, then the target. Gaps are those that clients see.

    python benchmarks/elastic_budget.py --target-ms 250 --seconds 60 --rounds 1
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.one_worker import FIRST_ID, LAST_ID, scheduler_of, worker_process
from tidegate_client import AsyncClient
from tidegate_client.cli.demo_model import DEMO
from tidegate_client.cli.service_process import ServiceProcess

_PROMPT_TOKENS = 1500
_SHORT_TOKENS = 32
_ANSWER_TOKENS = 8


@dataclass(slots=True)
class Seen:
    """What the clients of one run saw."""

    gaps_ms: list[float] = field(default_factory=list)  # of the decoding streams, while prompts arrive
    waits_ms: list[float] = field(default_factory=list)  # of the long prompts, for their first token
    output_tokens: int = 0
    prompt_tokens: int = 0  # of long prompts that got their first token
    duration_s: float = 0.0


class Run:
    """One way of serving the load."""

    def __init__(self, client: AsyncClient, options: argparse.Namespace, seed: int) -> None:
        self._client = client
        self._options = options
        self._random = random.Random(seed)
        self._seen = Seen()
        self._counting = False

    async def measure(self) -> Seen:
        """Warms up with two long prompts, then counts."""
        options = self._options
        streams = [asyncio.create_task(self._decode()) for _ in range(options.streams)]
        for _ in range(2):
            await self._long_prompt()
        self._counting, began = True, time.monotonic()
        prompts = []
        while time.monotonic() - began < options.seconds:
            prompts.append(asyncio.create_task(self._long_prompt()))
            await asyncio.sleep(options.every)
        self._counting, self._seen.duration_s = False, time.monotonic() - began
        for task in (*streams, *prompts):
            task.cancel()
        await asyncio.gather(*streams, *prompts, return_exceptions=True)
        return self._seen

    async def _decode(self) -> None:
        """Streams without an end: one request after the other, each of a few hundred tokens."""
        while True:
            last = None
            async for delta in self._generate(_SHORT_TOKENS, self._random.randint(200, 400)):
                now = time.monotonic()
                if self._counting:
                    self._seen.output_tokens += len(delta.token_ids)
                    if last is not None:
                        self._seen.gaps_ms.append(1e3 * (now - last))
                last = now

    async def _long_prompt(self) -> None:
        began, first = time.monotonic(), True
        async for delta in self._generate(_PROMPT_TOKENS, _ANSWER_TOKENS):
            if self._counting:
                self._seen.output_tokens += len(delta.token_ids)
                if first:
                    self._seen.waits_ms.append(1e3 * (time.monotonic() - began))
                    self._seen.prompt_tokens += _PROMPT_TOKENS
            first = False

    def _generate(self, prompt_tokens: int, max_tokens: int) -> Any:
        prompt = self._random.choices(range(FIRST_ID, LAST_ID), k=prompt_tokens)
        return self._client.generate(
            prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, text=False
        )


async def serve(worker: ServiceProcess, target_ms: float, options: argparse.Namespace, seed: int) -> Seen:
    """Starts a scheduler in front of the worker, and runs the load."""
    settings = {"max_num_batched_tokens": options.budget, "target_itl_ms": target_ms}
    async with scheduler_of(worker, **settings) as (_, client):
        return await Run(client, options, seed).measure()


def table(runs: dict[float, list[Seen]]) -> Table:
    """All runs of a way together. `above` is the share of gaps that are longer than 1.15 times the target."""
    limit_ms = 1.15 * max(runs)
    columns = ("way", "gaps", "p50 ms", "p95 ms", "p99 ms", "longest ms", "above", "first token p50 ms")
    rows = Table(*columns, "output tokens/s", "prompt tokens/s")
    for target_ms, seen in runs.items():
        gaps = np.concatenate([run.gaps_ms for run in seen])
        waits = np.concatenate([run.waits_ms for run in seen])
        seconds = sum(run.duration_s for run in seen)
        rows.add_row(
            f"target {target_ms:g} ms" if target_ms else "fixed budget",
            f"{len(gaps)}",
            *(f"{np.quantile(gaps, share):.0f}" for share in (0.5, 0.95, 0.99)),
            f"{gaps.max():.0f}",
            f"{np.mean(gaps > limit_ms):.2%}",
            f"{np.median(waits):.0f}" if len(waits) else "-",
            f"{sum(run.output_tokens for run in seen) / seconds:.1f}",
            f"{sum(run.prompt_tokens for run in seen) / seconds:.1f}",
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare the fixed budget with target_itl_ms.")
    parser.add_argument("--model", default=DEMO, help="model to serve (default: demo)")
    parser.add_argument("--quantization", default="int8", help="of the fused decoder (default: int8)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the forward (default: 1)")
    parser.add_argument("--budget", type=int, default=512, help="max_num_batched_tokens (default: 512)")
    parser.add_argument("--target-ms", type=float, default=250.0, help="target_itl_ms (default: 250)")
    parser.add_argument("--streams", type=int, default=4, help="streams that decode (default: 4)")
    parser.add_argument("--every", type=float, default=8.0, help="seconds between prompts (default: 8)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a run (default: 60)")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each way (default: 1)")
    options = parser.parse_args(arguments)
    runs: dict[float, list[Seen]] = {0.0: [], options.target_ms: []}
    worker_options = {
        "decoder": "auto",
        "quantization": options.quantization,
        "threads": options.threads,
        "num_blocks": 2048,
        "max_num_batched_tokens": options.budget,
    }
    with worker_process(options.model, **worker_options) as worker:
        for seed in range(options.rounds):
            for target_ms, seen in runs.items():
                seen.append(uvloop.run(serve(worker, target_ms, options, seed)))
                print(f"{target_ms:g}: {len(seen[-1].gaps_ms)} gaps", file=sys.stderr, flush=True)
    Console(width=140).print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
