"""Measures what becomes of preempted requests: computed again, kept in host memory, or whichever costs less.

A scheduler service in front of one worker process gets more requests at once than KV memory holds to their
end. The modes take turns on the same worker and the same prompts. Tokens must be the same in all of them.

    python benchmarks/preemption.py --requests 8 --prompt-tokens 192 --output-tokens 96
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.one_worker import FIRST_ID, LAST_ID, scheduler_of, worker_process
from scheduler_service.core.state import Counters
from tidegate_client.cli.demo_model import DEMO
from tidegate_client.cli.service_process import ServiceProcess

_MODES = ("recompute", "swap", "auto")
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one mode."""

    duration_s: float
    preempted_s: float  # all requests together
    counters: Counters
    tokens: list[list[int]]


async def run(
    worker: ServiceProcess, mode: str, prompts: list[list[int]], options: argparse.Namespace
) -> Outcome:
    """Starts a scheduler in front of the worker, and sends all prompts at once."""
    async with scheduler_of(worker, preemption_mode=mode) as (service, client):

        async def generate(prompt: list[int]) -> tuple[list[int], float]:
            tokens: list[int] = []
            stream = client.generate(
                prompt,
                max_tokens=options.output_tokens,
                temperature=0.0,
                ignore_eos=True,
                text=False,
                queue_timeout_s=3600.0,
            )
            async for delta in stream:
                tokens += delta.token_ids
            return tokens, stream.generations()[0].finished.timings.preempted_s

        began = time.monotonic()
        outcomes = await asyncio.gather(*map(generate, prompts))
        duration_s = time.monotonic() - began
        return Outcome(
            duration_s,
            sum(preempted_s for _, preempted_s in outcomes),
            service.engine.state().counters,
            [tokens for tokens, _ in outcomes],
        )


def table(runs: dict[str, list[Outcome]]) -> Table:
    """The means of each mode, and its time against that of the first."""
    rows = Table(
        *("mode", "seconds", "of recompute", "output tokens/s", "preempted s", "preemptions", "kept"),
        *("blocks out", "blocks in", "prefill tokens"),
    )
    base_s = sum(outcome.duration_s for outcome in runs[_MODES[0]])
    for mode, outcomes in runs.items():
        num, total_s = len(outcomes), sum(outcome.duration_s for outcome in outcomes)
        counts = [outcome.counters for outcome in outcomes]
        rows.add_row(
            mode,
            f"{total_s / num:.1f}",
            f"{total_s / base_s:.2f}",
            f"{sum(c.output_tokens for c in counts) / total_s:.1f}",
            f"{sum(outcome.preempted_s for outcome in outcomes) / num:.1f}",
            f"{sum(c.preemptions for c in counts) / num:.1f}",
            f"{sum(c.preemptions_kept for c in counts) / num:.1f}",
            f"{sum(c.swapped_out_blocks for c in counts) / num:.1f}",
            f"{sum(c.swapped_in_blocks for c in counts) / num:.1f}",
            f"{sum(c.prefill_tokens for c in counts) / num:.0f}",
        )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints. Returns the exit code: 1 where modes gave different tokens."""
    parser = argparse.ArgumentParser(description="Compare the ways to preempt.")
    parser.add_argument("--model", default=DEMO, help="model to serve (default: demo)")
    parser.add_argument("--decoder", default="auto", help="the worker's forward (default: auto)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the forward (default: 1)")
    parser.add_argument("--requests", type=int, default=8, help="requests at once (default: 8)")
    parser.add_argument("--prompt-tokens", type=int, default=192, help="of each (default: 192)")
    parser.add_argument("--output-tokens", type=int, default=96, help="of each (default: 96)")
    parser.add_argument(
        "--memory", type=float, default=0.75, help="share of all KV that fits (default: 0.75)"
    )
    parser.add_argument("--host-memory", default="512MiB", help="of the worker (default: 512MiB)")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each mode (default: 1)")
    options = parser.parse_args(arguments)
    chosen = random.Random(0)
    prompts = [
        chosen.choices(range(FIRST_ID, LAST_ID), k=options.prompt_tokens) for _ in range(options.requests)
    ]
    runs: dict[str, list[Outcome]] = {mode: [] for mode in _MODES}
    total = options.requests * -(-(options.prompt_tokens + options.output_tokens) // _BLOCK_SIZE)
    worker_options = {
        "decoder": options.decoder,
        "threads": options.threads,
        "block_size": _BLOCK_SIZE,
        "num_blocks": int(total * options.memory) + 1,
        "host_memory": options.host_memory,
    }
    with worker_process(options.model, **worker_options) as worker:
        uvloop.run(run(worker, "swap", prompts[:1], options))  # warms the worker up
        for _ in range(options.rounds):
            for mode, outcomes in runs.items():
                outcomes.append(uvloop.run(run(worker, mode, prompts, options)))
                print(f"{mode}: {outcomes[-1].duration_s:.1f} s", file=sys.stderr, flush=True)
    Console(width=140).print(table(runs))
    same = all(
        outcome.tokens == runs[_MODES[0]][0].tokens for outcomes in runs.values() for outcome in outcomes
    )
    print("tokens: the same in all" if same else "tokens: DIFFERENT")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
