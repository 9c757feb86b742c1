"""Paged inputs of any size for the GPU's checks, made on the device, and clocks for what runs on it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tidegate_kernels.attention_batch import AttentionBatch


@dataclass(frozen=True)
class Heads:
    """A layer's heads."""

    query: int
    kv: int
    dim: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} heads of {self.dim}"


@dataclass(frozen=True, eq=False)
class Paged:
    """Queries `[T, H, D]`, the step's keys and values `[T, KVH, D]`, caches, and the batch."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor  # [blocks, KVH, block_size, D]
    value_cache: Tensor
    batch: AttentionBatch


def make_paged(
    rows: list[tuple[int, int]],  # tokens cached, new tokens
    heads: Heads,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Paged:
    """Random tensors, with blocks scattered over the caches."""
    rng = np.random.default_rng(0)
    lengths = np.array([old + new for old, new in rows], np.int32)
    counts = np.array([new for _, new in rows])
    width = -(-int(lengths.max()) // block_size)
    tables = (1 + rng.permutation(len(rows) * width)).reshape(len(rows), width).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.concatenate([np.arange(old, old + new) for old, new in rows])
    blocks = tables[np.repeat(np.arange(len(rows)), counts), positions // block_size].astype(np.int64)
    slots = blocks * block_size + positions % block_size
    cache = (len(rows) * width + 1, heads.kv, block_size, heads.dim)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    return Paged(
        query=random(len(positions), heads.query, heads.dim),
        key=random(len(positions), heads.kv, heads.dim),
        value=random(len(positions), heads.kv, heads.dim),
        key_cache=random(*cache),
        value_cache=random(*cache),
        batch=AttentionBatch.from_host(starts, lengths, tables, slots, device),
    )


def median_ms(run: Callable[[int], object], device: torch.device, times: int = 20) -> float:
    """Of calls with 0, 1, 2, ..., by the device's own clock where it has one."""
    for index in range(3):
        run(index)
    if device.type != "cuda":
        walls = []
        for index in range(times):
            started = time.perf_counter()
            run(index)
            walls.append(1e3 * (time.perf_counter() - started))
        return statistics.median(walls)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for index in range(times):
        run(index)
        marks[index + 1].record()
    torch.cuda.synchronize(device)
    return float(statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)))
