"""Owns the second tier of KV: blocks in host memory, for requests that the scheduler has preempted.

Copies run in the order of the steps, on the stream of the step: a copy out sees all that earlier steps have
written, and what a step computes comes after its copies. So nothing has to wait for a copy to be done.
"""

from __future__ import annotations

import time

import numpy as np
import psutil
import torch

from worker_service.errors import KvMemoryError
from worker_service.kv_memory import KvMemory
from worker_service.plan import Int32

_CHUNK_BLOCKS = 16
"""Blocks that are gathered before they are copied: a GPU copies a block as one piece, not layer by layer."""
_PROBE_BLOCKS = 8
_PROBE_ROUNDS = 3


def count_host_blocks(host_memory: int, block_bytes: int) -> int:
    """Blocks that so many bytes hold. Raises KvMemoryError where that is none, or the bytes are not there."""
    if host_memory == 0:
        return 0
    if host_memory < block_bytes:
        raise KvMemoryError(
            f"--host-memory of {host_memory:,} bytes holds no KV block: one takes {block_bytes:,} bytes. "
            "Raise it, or set it to 0"
        )
    available = psutil.virtual_memory().available
    if host_memory > available:
        raise KvMemoryError(
            f"--host-memory asks for {host_memory:,} bytes, and {available:,} are free on this machine. "
            "Lower it"
        )
    return host_memory // block_bytes


class HostMemory:
    """Blocks 0 to num_blocks - 1, each of which holds a KV block of every layer."""

    def __init__(self, kv: KvMemory, num_blocks: int) -> None:
        caches = [cache.view(kv.num_blocks, -1) for cache in kv.plain]  # [blocks, values]
        ends = np.cumsum([cache.shape[1] for cache in caches]).tolist()
        self.num_blocks = num_blocks
        self._parts = [
            (cache, slice(start, end)) for cache, start, end in zip(caches, [0, *ends], ends, strict=False)
        ]
        self._device = caches[0].device
        pinned = self._device.type == "cuda"
        dtype, width = caches[0].dtype, ends[-1]
        self._blocks = torch.empty(num_blocks, width, dtype=dtype, pin_memory=pinned)
        self._gathered = torch.empty(_CHUNK_BLOCKS, width, dtype=dtype, device=self._device)

    @torch.inference_mode()
    def swap_out(self, blocks: Int32, host_blocks: Int32) -> None:
        """Copies KV blocks to host blocks, pairwise."""
        for start in range(0, len(blocks), _CHUNK_BLOCKS):
            index = self._index(blocks[start : start + _CHUNK_BLOCKS])
            for cache, part in self._parts:
                self._gathered[: len(index), part] = cache[index]
            for place, host in enumerate(host_blocks[start : start + _CHUNK_BLOCKS].tolist()):
                self._blocks[host].copy_(self._gathered[place], non_blocking=True)

    @torch.inference_mode()
    def swap_in(self, host_blocks: Int32, blocks: Int32) -> None:
        """Copies host blocks to KV blocks, pairwise."""
        for start in range(0, len(blocks), _CHUNK_BLOCKS):
            index = self._index(blocks[start : start + _CHUNK_BLOCKS])
            for place, host in enumerate(host_blocks[start : start + _CHUNK_BLOCKS].tolist()):
                self._gathered[place].copy_(self._blocks[host], non_blocking=True)
            for cache, part in self._parts:
                cache[index] = self._gathered[: len(index), part]

    def measure_copy_ns(self) -> int:
        """Nanoseconds that a copy of one block takes, mean of both directions, in the best of a few rounds.
        Writes to host blocks, and leaves the KV as it was."""
        num = min(_PROBE_BLOCKS, self.num_blocks, len(self._parts[0][0]) - 1)
        blocks, host_blocks = np.arange(1, num + 1, dtype=np.int32), np.arange(num, dtype=np.int32)
        rounds = []
        for _ in range(_PROBE_ROUNDS):
            self._synchronize()
            began_ns = time.perf_counter_ns()
            self.swap_out(blocks, host_blocks)
            self.swap_in(host_blocks, blocks)
            self._synchronize()
            rounds.append(time.perf_counter_ns() - began_ns)
        return max(1, min(rounds) // (2 * num))

    def _index(self, blocks: Int32) -> torch.Tensor:
        return torch.from_numpy(blocks.astype(np.int64)).to(self._device)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
