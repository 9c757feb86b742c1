"""What the two Triton attention kernels share: where a tile of paged tokens lies, and one softmax step.

Owns device functions only; `paged_decode` and `paged_prefill` launch them.
"""

# ruff: noqa: ANN001, ANN201
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# The arguments of device functions have Triton's types, which Python has no names for.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


@triton.jit
def cache_offsets(
    block_table,
    positions,
    seen,
    kv_head,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Where the tokens at `positions` start in a cache [blocks, KVH, BLOCK_SIZE, D], in elements."""
    block = tl.load(block_table + positions // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    return block * block_stride + (kv_head * BLOCK_SIZE + positions % BLOCK_SIZE) * HEAD_DIM


@triton.jit
def attend_tile(
    query,
    keys,
    values,
    seen,
    output,
    maximum,
    total,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
):
    """One step of the online softmax: query [M, D], keys [D, N], values [N, D], seen [M, N] or [1, N].

    `scale` and `softcap` carry a factor log2(e), so that exp is exp2. tanh(x) is 1 - 2 / (e^2x + 1).
    """
    scores = tl.dot(query, keys.to(query.dtype), input_precision="ieee") * scale
    if SOFTCAP:
        grown = tl.exp2(scores * (2.8853900817779268 / softcap)) + 1.0
        scores = softcap * (1.0 - 2.0 / grown)
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(maximum, tl.max(scores, axis=1))
    # A query that has seen nothing yet: -inf minus -inf would be NaN.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(maximum - base)
    total = total * kept + tl.sum(weights, axis=1)
    output = output * kept[:, None]
    output = tl.dot(weights.to(query.dtype), values.to(query.dtype), output, input_precision="ieee")
    return output, highest, total


def check_operands(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor) -> None:
    """Raises ValueError, with numbers, for operands that the kernels do not take."""
    _, heads, head_dim = query.shape
    _, kv_heads, block_size, cache_dim = key_cache.shape
    if key_cache.shape != value_cache.shape or key_cache.dtype != value_cache.dtype:
        raise ValueError(f"caches {tuple(key_cache.shape)} and {tuple(value_cache.shape)} must match")
    if head_dim != cache_dim or heads % kv_heads:
        raise ValueError(
            f"queries of {heads} heads of {head_dim} do not fit caches of {kv_heads} heads of {cache_dim}"
        )
    if head_dim > 256 or head_dim % 8 or block_size % 8:
        raise ValueError(
            f"head size {head_dim} must be a multiple of 8 up to 256, block size {block_size} a multiple of 8"
        )
    for name, cache in (("key", key_cache), ("value", value_cache)):
        if cache.stride()[1:] != (block_size * head_dim, head_dim, 1):
            raise ValueError(f"the {name} cache must be contiguous within a block, not {cache.stride()}")
    if query.stride(2) != 1 or block_tables.stride(1) != 1:
        raise ValueError("queries and block tables must be contiguous in their last dimension")
