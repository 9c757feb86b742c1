"""Owns the choice between the two ways to preempt: to keep a victim's KV in host memory, or to recompute it.

Looks, and moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.core.request import Request
from scheduler_service.core.worker import Worker

MODES = ("auto", "recompute", "swap")
"""What the option `preemption_mode` can be."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of a victim's KV, and why, in numbers. Nothing is said where there is no host memory."""

    num_tokens: int = 0  # whose KV is kept. 0: it is recomputed
    why: str = ""


NOT_KEPT = Choice()


def choose(mode: str, worker: Worker, request: Request) -> Choice:
    """Whether the KV of a candidate that must leave `worker` is kept. `auto` compares what it takes to copy
    the blocks that nobody else holds out and in again with what it takes to compute their tokens again. It
    keeps them where the worker has not told what a copy takes."""
    host, spec = worker.host, worker.spec
    num_computed = int(worker.computed[request.slot])
    if mode == "recompute" or not host.num_blocks or not num_computed:
        return NOT_KEPT
    blocks = request.block_ids[: spec.blocks_for(num_computed)]
    if not host.has_room(blocks):
        needed = host.count_needed(blocks)
        return Choice(why=f"recompute: {needed} host blocks needed, {host.num_free} free")
    if mode == "swap" or not spec.block_copy_ms:
        return Choice(num_computed, f"kept: {len(blocks)} blocks")
    lost = worker.pool.count_unshared(blocks)
    copy_ms = 2 * lost * spec.block_copy_ms
    num_lost = min(num_computed, lost * spec.block_size)
    compute_ms = worker.step_time.prefill_ms(num_lost, num_computed - num_lost)
    numbers = f"{lost} of {len(blocks)} blocks, {copy_ms:.2f} ms to copy, {compute_ms:.2f} ms to compute"
    if copy_ms > compute_ms:
        return Choice(why=f"recompute: {numbers}")
    return Choice(num_computed, f"kept: {numbers}")
