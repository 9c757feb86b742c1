"""Writing keys and values into their slots in Triton: fp32, fp16, bf16, or fp8 e4m3 with scales."""

# ruff: noqa: ANN001, ANN201
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# The arguments of device functions have Triton's types, which Python has no names for.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def to_cache_type(x, inverse_scale, dtype: tl.constexpr, FP8: tl.constexpr):
    """A number as the cache stores it. e4m3 has no infinity: what is too large becomes its largest, 448."""
    if FP8:
        x = x.to(tl.float32) * inverse_scale
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    return x.to(dtype)


@triton.jit
def write_kernel(
    key,  # [T, KVH, D]
    value,
    key_cache,  # [blocks, KVH, BLOCK_SIZE, D]
    value_cache,
    slot_mapping,  # [T]
    key_inverse_scale,
    value_inverse_scale,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_block_stride,
    value_block_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    FP8: tl.constexpr,
):
    """One token and one KV head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    dims = tl.arange(0, DIM_PAD)
    here = dims < HEAD_DIM
    inner = (head * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + dims
    k = tl.load(key + token * key_token_stride + head * key_head_stride + dims, mask=here)
    v = tl.load(value + token * value_token_stride + head * value_head_stride + dims, mask=here)
    k = to_cache_type(k, key_inverse_scale, key_cache.dtype.element_ty, FP8)
    v = to_cache_type(v, value_inverse_scale, value_cache.dtype.element_ty, FP8)
    tl.store(key_cache + slot // BLOCK_SIZE * key_block_stride + inner, k, mask=here)
    tl.store(value_cache + slot // BLOCK_SIZE * value_block_stride + inner, v, mask=here)


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
    """Puts each token's key and value (`[T, KVH, D]`) into its slot of caches `[blocks, KVH, block_size, D]`.

    fp8 caches hold numbers divided by the scales. A negative slot writes nothing. Raises ValueError
    for operands that do not fit.
    """
    tokens, kv_heads, head_dim = key.shape
    block_size = key_cache.shape[2]
    expected = (kv_heads, block_size, head_dim)
    if value.shape != key.shape or key_cache.shape[1:] != expected or value_cache.shape != key_cache.shape:
        raise ValueError(
            f"keys {tuple(key.shape)} and values {tuple(value.shape)} do not fit caches "
            f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if slot_mapping.shape != (tokens,):
        raise ValueError(f"{tokens} tokens need as many slots, not {tuple(slot_mapping.shape)}")
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError("keys and values must be contiguous in their last dimension")
    if tokens == 0:
        return
    write_kernel[(tokens, kv_heads)](
        key, value, key_cache, value_cache, slot_mapping, 1.0 / key_scale, 1.0 / value_scale, key.stride(0),
        key.stride(1), value.stride(0), value.stride(1), key_cache.stride(0), value_cache.stride(0),
        BLOCK_SIZE=block_size, HEAD_DIM=head_dim, DIM_PAD=triton.next_power_of_2(head_dim),
        FP8=key_cache.element_size() == 1, num_warps=1,
    )  # fmt: skip
