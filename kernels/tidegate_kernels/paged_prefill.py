"""Prefill attention over paged keys and values in Triton: rows of any number of new tokens after any context.

Tiled online softmax after FlashAttention-2 (Dao 2023), with keys and values found through block tables. A
program takes a tile of one row's new tokens and one query head, and walks over the keys that the tile sees.
"""

# ruff: noqa: ANN001, ANN201
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# The arguments of device functions have Triton's types, which Python has no names for.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tidegate_kernels.attention_batch import AttentionBatch
from tidegate_kernels.attention_tile import LOG2_E, attend_tile, cache_offsets, check_operands


@triton.jit
def prefill_kernel(
    query,  # [T, H, D]
    key_cache,  # [blocks, KVH, BLOCK_SIZE, D]
    value_cache,
    output,  # [T, H, D]
    query_starts,  # [R + 1]
    seq_lens,  # [R]
    block_tables,  # [R, max_blocks]
    scale,
    softcap,
    value_scale,
    window,
    query_token_stride,
    query_head_stride,
    key_block_stride,
    value_block_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SKIP_DECODES: tl.constexpr,
):
    """One tile of a row's new tokens and one query head."""
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - begin
    if tile * QUERIES >= count:
        return
    if SKIP_DECODES and count == 1:
        return
    length = tl.load(seq_lens + row)
    kv_head = head // GROUP
    ids = tile * QUERIES + tl.arange(0, QUERIES)
    dims = tl.arange(0, DIM_PAD)
    here = (ids < count)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (begin + ids).to(tl.int64)
    q = tl.load(
        query + tokens[:, None] * query_token_stride + head * query_head_stride + dims[None, :],
        mask=here,
        other=0.0,
    )  # [QUERIES, DIM_PAD]
    context = length - count
    query_positions = context + ids
    high = tl.minimum(context + (tile + 1) * QUERIES, length)
    low = 0
    if WINDOW:
        low = tl.maximum(context + tile * QUERIES - window + 1, 0) // TILE * TILE

    mixed = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    maximum = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    table = block_tables + row.to(tl.int64) * table_stride
    for start in range(low, high, TILE):
        positions = start + tl.arange(0, TILE)
        known = positions < high
        key_at = cache_offsets(table, positions, known, kv_head, key_block_stride, BLOCK_SIZE, HEAD_DIM)
        value_at = cache_offsets(table, positions, known, kv_head, value_block_stride, BLOCK_SIZE, HEAD_DIM)
        key_mask = (dims < HEAD_DIM)[:, None] & known[None, :]
        value_mask = known[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(key_cache + key_at[None, :] + dims[:, None], mask=key_mask, other=0.0)
        values = tl.load(value_cache + value_at[:, None] + dims[None, :], mask=value_mask, other=0.0)
        seen = positions[None, :] <= query_positions[:, None]
        if WINDOW:
            seen = seen & (positions[None, :] > query_positions[:, None] - window)
        mixed, maximum, total = attend_tile(
            q, keys, values, seen, mixed, maximum, total, scale, softcap, SOFTCAP
        )

    result = mixed * (value_scale / total)[:, None]
    output_at = (tokens * tl.num_programs(1) + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(output + output_at, result.to(output.dtype.element_ty), mask=here)


def tile_shape(head_dim: int, element_bytes: int) -> tuple[int, int, int]:
    """Queries and keys of a tile, and warps, so that nothing spills. Sizes are of the query's type.

    fp32 is multiplied without tensor cores, which takes many registers.
    """
    wide = triton.next_power_of_2(head_dim)
    if element_bytes == 4:
        return 16, 16, 4 if wide <= 128 else 8
    return (128, 64, 8) if wide <= 128 else (64, 32, 8)


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    output: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    skip_decodes: bool = False,
) -> None:
    """Attention of every row's new tokens, from query `[T, H, D]` into output `[T, H, D]`.

    `skip_decodes` leaves out rows with one new token, for `paged_decode`. Caches and scales are as there.
    Raises ValueError for operands that do not fit.
    """
    check_operands(query, key_cache, value_cache, batch.block_tables)
    _, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = key_cache.shape
    queries, tile, warps = tile_shape(head_dim, query.element_size())
    grid = (triton.cdiv(batch.max_query_len, queries), heads, len(batch.seq_lens_host))
    prefill_kernel[grid](
        query, key_cache, value_cache, output, batch.query_starts, batch.seq_lens, batch.block_tables, scale *
        key_scale * LOG2_E, (softcap or 1.0) * LOG2_E, value_scale, window or 0, query.stride(0),
        query.stride(1), key_cache.stride(0), value_cache.stride(0), batch.block_tables.stride(0), GROUP=heads
        // kv_heads, HEAD_DIM=head_dim, DIM_PAD=triton.next_power_of_2(head_dim), BLOCK_SIZE=block_size,
        QUERIES=queries, TILE=tile, WINDOW=window is not None, SOFTCAP=softcap is not None,
        SKIP_DECODES=skip_decodes, num_warps=warps, num_stages=2,
    )  # fmt: skip
