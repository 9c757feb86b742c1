"""Owns the forecast of memory: the most blocks that a worker's candidates will hold until all have ended."""

from __future__ import annotations

import numpy as np

from scheduler_service.core.estimates import Estimates
from scheduler_service.core.request import Request
from scheduler_service.core.worker import Worker


def expected_total(estimates: Estimates, request: Request) -> int:
    """Prompt and output tokens that a candidate will have; its longest possible total once it has had more
    outputs than its tenant's requests usually have."""
    max_tokens = request.spec.stopping.max_tokens
    num_outputs = estimates.num_outputs(request.spec.tenant, max_tokens)
    if num_outputs <= len(request.output_ids):
        num_outputs = max_tokens
    return request.num_prompt + num_outputs


def peak_blocks(
    worker: Worker, estimates: Estimates, request: Request, held_blocks: int, needed_blocks: int
) -> int:
    """Most blocks in use from now on if `request` joins, with a table of `held_blocks` of which the free list
    gives `needed_blocks`. All gain a token a step, so use is highest just before one of them finishes: it is
    what those hold then that finish no sooner. What they share now is taken as shared evenly."""
    spec, pool = worker.spec, worker.pool
    slots = np.flatnonzero(worker.active)
    total, computed, longest = worker.total[slots], worker.computed[slots], worker.last[slots] + 1
    # Tokens with KV after this step. Decodes are planned before anybody is admitted, and count the token that
    # they are about to sample.
    stored = np.where((computed == total - 1) & (worker.pending[slots] > 0), computed, total)
    stored = np.append(np.minimum(stored, longest - 1), request.num_known)
    expected = np.where(worker.expected[slots] > total, worker.expected[slots], longest)
    # The KV of a last token is never computed.
    remaining = np.append(expected, expected_total(estimates, request)) - 1 - stored
    np.maximum(remaining, 0, out=remaining)
    order = np.argsort(-remaining, kind="stable")
    stored, remaining = stored[order], remaining[order]
    alive = np.arange(1, len(order) + 1)
    blocks = (stored.cumsum() + alive * (remaining + spec.block_size - 1)) >> worker.shift
    in_use = spec.num_blocks - 1 - pool.num_free + needed_blocks
    num_shared = max(0, int(worker.held[slots].sum()) + held_blocks - in_use)
    blocks -= num_shared * (alive - 1) // max(1, len(slots))
    return max(in_use, int(blocks.max()))
