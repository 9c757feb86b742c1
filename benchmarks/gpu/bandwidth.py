"""Decode attention's share of the memory's bandwidth, which bounds it: each key and value is read once.

The yardstick is a copy on the same device, measured in the same run. Layers take turns, as they do in a
model, so that no cache holds what is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.inputs import Heads, make_paged, median_ms
from tidegate_kernels.paged_decode import paged_decode

HEADS = Heads(32, 8, 128)  # of Llama 8B
CASES = ((1, 8192), (1, 65_536), (16, 1024), (16, 8192), (64, 1024), (64, 4096), (256, 1024))
LEAST_BYTES = 1 << 30  # of all layers together, many times any L2 cache


@dataclass(frozen=True)
class Reading:
    """One case: rows that decode after as many tokens each."""

    rows: int
    context: int
    ms: float
    bytes_per_s: float


def copy_bytes_per_s(device: torch.device, size: int) -> float:
    """Bytes that a copy reads and writes in a second."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (median_ms(lambda index: target.copy_(source), device) / 1e3)


def measure_decodes(device: torch.device, dry_run: bool) -> Iterator[Reading]:
    """Each case as soon as it is measured."""
    for rows, context in ((2, 40),) if dry_run else CASES:
        yield _measure(rows, context, device, dry_run)


def _measure(rows: int, context: int, device: torch.device, dry_run: bool) -> Reading:
    heads = Heads(2, 1, 64) if dry_run else HEADS
    dtype = torch.float32 if dry_run else torch.bfloat16
    read = 2 * rows * context * heads.kv * heads.dim * dtype.itemsize
    layers = 2 if dry_run else max(2, -(-LEAST_BYTES // read))
    paged = make_paged([(context - 1, 1)] * rows, heads, 16, dtype, device)
    caches = [(paged.key_cache, paged.value_cache)]
    caches += [(torch.randn_like(keys), torch.randn_like(values)) for keys, values in caches * (layers - 1)]
    output = torch.empty_like(paged.query)
    scale = heads.dim**-0.5

    def attend(index: int) -> None:
        paged_decode(paged.query, *caches[index % layers], paged.batch, output, scale=scale)

    ms = median_ms(attend, device, times=2 if dry_run else 50)
    return Reading(rows, context, ms, read / (ms / 1e3))
