"""Writing keys and values into their slots on CPUs.

On one thread: it moves kilobytes where attention reads megabytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types

from tidegate_kernels.cpu_vectors import int64_at, uint16_at, uint32_at

_i = types.int64


@njit(
    types.void(_i, _i, _i, _i, _i, _i, _i, _i, _i, _i, types.boolean, types.boolean), cache=True, nogil=True
)
def write_slots(
    source: int,
    token_stride: int,
    head_stride: int,
    cache: int,
    block_stride: int,
    slots_at: int,
    tokens: int,
    kv_heads: int,
    block_size: int,
    head_dim: int,
    source_bf16: bool,
    cache_bf16: bool,
) -> None:
    """Copies `source` [T, KVH, D] into `cache` [blocks, KVH, block_size, D]. Strides are in elements.

    fp32 goes into bf16 rounded to nearest, ties to even.
    """
    slots: Any = carray(int64_at(slots_at), (tokens,))
    for token in range(tokens):
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(kv_heads):
            begin = token * token_stride + head * head_stride
            target = block * block_stride + (head * block_size + offset) * head_dim
            if source_bf16:
                halves = carray(uint16_at(source + begin * 2), (head_dim,))
                to_halves = carray(uint16_at(cache + target * 2), (head_dim,))
                for i in range(head_dim):
                    to_halves[i] = halves[i]
            elif cache_bf16:
                words = carray(uint32_at(source + begin * 4), (head_dim,))
                to_halves = carray(uint16_at(cache + target * 2), (head_dim,))
                for i in range(head_dim):
                    even = (words[i] >> np.uint32(16)) & np.uint32(1)
                    to_halves[i] = np.uint16((words[i] + np.uint32(0x7FFF) + even) >> np.uint32(16))
            else:
                words = carray(uint32_at(source + begin * 4), (head_dim,))
                to_words = carray(uint32_at(cache + target * 4), (head_dim,))
                for i in range(head_dim):
                    to_words[i] = words[i]
