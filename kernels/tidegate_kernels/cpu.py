"""The attention backend for CPUs: checks operands, and hands them to the compiled kernels or to `reference`.

Owns the choice between them, and the call. The kernels take fp32 and bf16, head sizes and block sizes that
are multiples of 8; all else goes to `reference`, which is slow but right. They are compiled by numba when
first needed, which takes seconds, and kept in its cache on disk: `warm_up` does it ahead of the first
request.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from tidegate_kernels import cpu_kernel, cpu_threads, cpu_write, reference
from tidegate_kernels.attention_batch import AttentionBatch
from tidegate_kernels.cpu_layout import NO_WINDOW, Layout, layout_of
from tidegate_kernels.cpu_tile import LOG2_E

BYTES_PER_THREAD = 128 * 1024  # waking another thread pays from about this much to read
_NARROW, _WIDE = torch.bfloat16, torch.float32


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """As `reference.write_kv`."""
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        if not _supported(tokens, cache) or (tokens.dtype == _NARROW and cache.dtype == _WIDE):
            reference.write_kv(
                key, value, key_cache, value_cache, slot_mapping, key_scale=key_scale, value_scale=value_scale
            )
            return
    slots = slot_mapping.contiguous()
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        count, kv_heads, head_dim = tokens.shape
        cpu_write.write_slots(
            tokens.data_ptr(), tokens.stride(0), tokens.stride(1), cache.data_ptr(), cache.stride(0),
            slots.data_ptr(), count, kv_heads, cache.shape[2], head_dim,
            tokens.dtype == _NARROW, cache.dtype == _NARROW,
        )  # fmt: skip


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """As `reference.paged_attention`. One thread at a time may use a batch."""
    same = value_cache.dtype == key_cache.dtype and value_cache.shape == key_cache.shape
    if not (same and _supported(query, key_cache) and _supported(query, value_cache)):
        return reference.paged_attention(
            query, key_cache, value_cache, batch, scale=scale, window=window, softcap=softcap,
            key_scale=key_scale, value_scale=value_scale,
        )  # fmt: skip
    _, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = key_cache.shape
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads can't share {kv_heads} KV heads evenly")
    together = heads_together(heads // kv_heads)
    padded = -(-heads // kv_heads // together) * together
    threads = torch.get_num_threads()
    size = cpu_kernel.state_floats(padded, head_dim)
    layout = layout_of(batch, window, kv_heads, block_size, size, threads)
    output = torch.empty(query.shape, dtype=query.dtype)
    factors = (ctypes.c_float * 2)(scale * LOG2_E, (softcap or 0.0) * LOG2_E)
    arguments = _arguments(query, key_cache, value_cache, batch, layout, window, output, factors)
    bf16 = key_cache.dtype == _NARROW
    kernel = cpu_kernel.compiled(head_dim, block_size, together, bf16, query.dtype == _NARROW)
    work_bytes = layout.work_tokens * head_dim * 2 * key_cache.element_size()
    threads = min(threads, 1 + work_bytes // BYTES_PER_THREAD)
    cpu_threads.run(kernel.address, ctypes.addressof(arguments), threads)
    return output


def heads_together(group: int) -> int:
    """Query heads to compute at a time, of a group that shares a KV head. More than 4 spill registers."""
    return min(group, 4)


def warm_up(head_dim: int, block_size: int, dtype: torch.dtype, group: int = 1) -> None:
    """Compiles, or loads from numba's cache, what a model with these shapes needs, and runs it once.

    `group` is query heads per KV head; `dtype` is that of queries and caches.
    """
    tokens = np.array([0, 1], dtype=np.int32)
    one = np.ones(1, dtype=np.int32)
    batch = AttentionBatch.from_host(
        tokens, one, np.zeros((1, 1), dtype=np.int32), np.zeros(1, dtype=np.int64)
    )
    caches = torch.zeros(2, 1, 1, block_size, head_dim, dtype=dtype)
    key = torch.zeros(1, 1, head_dim, dtype=dtype)
    write_kv(key, key, caches[0], caches[1], batch.slot_mapping)
    query = torch.zeros(1, group, head_dim, dtype=dtype)
    paged_attention(query, caches[0], caches[1], batch, scale=1.0, window=None, softcap=None)


def _supported(tokens: Tensor, cache: Tensor) -> bool:
    """Whether the kernels take `tokens` [T, heads, D] together with `cache` [blocks, KVH, block_size, D]."""
    block_size, head_dim = cache.shape[2:]
    inner = cache.stride()[1:] == (block_size * head_dim, head_dim, 1)
    types = tokens.dtype in (_NARROW, _WIDE) and cache.dtype in (_NARROW, _WIDE)
    return types and inner and tokens.stride(2) == 1 and head_dim % 8 == 0 and block_size % 8 == 0


def _arguments(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    layout: Layout,
    window: int | None,
    output: Tensor,
    factors: ctypes.Array[ctypes.c_float],
) -> ctypes.Array[ctypes.c_int64]:
    """The kernel's arguments, in cpu_kernel's order. They hold addresses, and keep no memory alive."""
    kv_heads = key_cache.shape[1]
    return (ctypes.c_int64 * cpu_kernel.ARGUMENTS)(
        0, layout.first_task_at, layout.first_state_at,
        batch.query_starts.data_ptr(), batch.seq_lens.data_ptr(),
        batch.block_tables.data_ptr(), batch.block_tables.stride(0), len(batch.seq_lens_host),
        layout.stretch, window or NO_WINDOW, kv_heads, query.shape[1] // kv_heads,
        query.data_ptr(), query.stride(0), query.stride(1),
        key_cache.data_ptr(), value_cache.data_ptr(), key_cache.stride(0), value_cache.stride(0),
        output.data_ptr(), layout.states.data_ptr(), layout.finished.data_ptr(), ctypes.addressof(factors),
    )  # fmt: skip
