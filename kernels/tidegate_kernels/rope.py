"""Rotary position embedding in Triton, fused with the KV write (Su et al. 2021).

A program takes one token and one head: it rotates a query head in place, or rotates a key head into the cache
and copies the value head beside it.
"""

# ruff: noqa: ANN001, ANN201
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# The arguments of device functions have Triton's types, which Python has no names for.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tidegate_kernels.kv_write import to_cache_type


@triton.jit
def rope_kernel(
    query,  # [T, H, D], in place
    key,  # [T, KVH, D]
    value,
    cosines,  # fp32 [positions, ROTARY / 2]
    sines,
    positions,  # [T]
    key_cache,  # [blocks, KVH, BLOCK_SIZE, D]
    value_cache,
    slot_mapping,  # [T]
    key_inverse_scale,
    value_inverse_scale,
    heads,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_block_stride,
    value_block_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
):
    """One token and one head: query heads come first, then KV heads."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, HALF_PAD)
    paired = pairs < ROTARY // 2
    first = pairs * 2 if INTERLEAVED else pairs
    second = first + 1 if INTERLEAVED else pairs + ROTARY // 2
    position = tl.load(positions + token).to(tl.int64)
    cosine = tl.load(cosines + position * (ROTARY // 2) + pairs, mask=paired, other=0.0)
    sine = tl.load(sines + position * (ROTARY // 2) + pairs, mask=paired, other=0.0)
    is_query = head < heads
    kv_head = head - heads
    source = query + token * query_token_stride + head * query_head_stride
    if not is_query:
        source = key + token * key_token_stride + kv_head * key_head_stride
    a = tl.load(source + first, mask=paired, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=paired, other=0.0).to(tl.float32)
    turned_a = a * cosine - b * sine
    turned_b = b * cosine + a * sine
    if is_query:
        tl.store(source + first, turned_a.to(query.dtype.element_ty), mask=paired)
        tl.store(source + second, turned_b.to(query.dtype.element_ty), mask=paired)
    else:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            kind: tl.constexpr = key_cache.dtype.element_ty
            inner = (kv_head * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
            target = key_cache + slot // BLOCK_SIZE * key_block_stride + inner
            tl.store(target + first, to_cache_type(turned_a, key_inverse_scale, kind, FP8), mask=paired)
            tl.store(target + second, to_cache_type(turned_b, key_inverse_scale, kind, FP8), mask=paired)
            if ROTARY < HEAD_DIM:
                rest = ROTARY + tl.arange(0, REST_PAD)
                kept = tl.load(source + rest, mask=rest < HEAD_DIM, other=0.0)
                kept = to_cache_type(kept, key_inverse_scale, kind, FP8)
                tl.store(target + rest, kept, mask=rest < HEAD_DIM)
            dims = tl.arange(0, DIM_PAD)
            here = dims < HEAD_DIM
            v = tl.load(value + token * value_token_stride + kv_head * value_head_stride + dims, mask=here)
            v = to_cache_type(v, value_inverse_scale, kind, FP8)
            tl.store(value_cache + slot // BLOCK_SIZE * value_block_stride + inner + dims, v, mask=here)


def rope_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Rotates `query` `[T, H, D]` in place; writes rotated keys and values as they are to the caches.

    Keys and values are `[T, KVH, D]`.

    `cosines` and `sines` are fp32 `[positions, rotary / 2]`; where rotary < D the rest of each head is kept.
    The pairs are (i, i + rotary / 2), or (2i, 2i + 1) if `interleaved`. The rotation is in fp32, rounded
    once. A negative slot writes nothing. `key` itself is left as it is. Raises ValueError for operands that
    do not fit.
    """
    tokens, heads, head_dim = query.shape
    kv_heads, block_size = key_cache.shape[1:3]
    rotary = 2 * cosines.shape[1]
    if key.shape != (tokens, kv_heads, head_dim) or value.shape != key.shape:
        raise ValueError(
            f"keys {tuple(key.shape)} and values {tuple(value.shape)} do not fit {tokens} tokens "
            f"of {kv_heads} KV heads of {head_dim}"
        )
    whole = cosines.is_contiguous() and sines.is_contiguous()
    if rotary > head_dim or sines.shape != cosines.shape or not whole:
        raise ValueError(
            f"tables of {cosines.shape[1]} and {sines.shape[1]} pairs do not fit heads of {head_dim}"
        )
    if key_cache.shape[3] != head_dim or value_cache.shape != key_cache.shape:
        raise ValueError(f"caches {tuple(key_cache.shape)} and {tuple(value_cache.shape)} do not fit")
    if any(tensor.stride(2) != 1 for tensor in (query, key, value)):
        raise ValueError("queries, keys and values must be contiguous in their last dimension")
    if tokens == 0:
        return
    rope_kernel[(tokens, heads + kv_heads)](
        query, key, value, cosines, sines, positions, key_cache, value_cache, slot_mapping,
        1.0 / key_scale, 1.0 / value_scale, heads,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        key_cache.stride(0), value_cache.stride(0),
        BLOCK_SIZE=block_size, HEAD_DIM=head_dim, ROTARY=rotary,
        HALF_PAD=triton.next_power_of_2(rotary // 2),
        REST_PAD=triton.next_power_of_2(max(1, head_dim - rotary)), DIM_PAD=triton.next_power_of_2(head_dim),
        INTERLEAVED=interleaved, FP8=key_cache.element_size() == 1, num_warps=1,
    )  # fmt: skip
