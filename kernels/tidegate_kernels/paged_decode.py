"""Decode attention over paged keys and values in Triton: rows with one new token, the context split.

Split KV after flash-decoding (Dao, Haziza, Massa, Sizov 2023); online softmax after Milakov and Gimelshein
(2018). A program takes one row, one KV head with all its query heads, and one split of the context, so that
keys and values are read once. With more than one split, a second kernel merges the partial results.
"""

# ruff: noqa: ANN001, ANN201
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# The arguments of device functions have Triton's types, which Python has no names for.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidegate_kernels.attention_batch import AttentionBatch
from tidegate_kernels.attention_tile import LOG2_E, attend_tile, cache_offsets, check_operands

SHORTEST_SPLIT = 256  # tokens


@triton.jit
def decode_kernel(
    query,  # [T, H, D]
    key_cache,  # [blocks, KVH, BLOCK_SIZE, D]
    value_cache,
    output,  # [T, H, D]
    partial_output,  # fp32 [R, H, splits, D]
    partial_stats,  # fp32 [R, H, splits, 2]: maximum, sum
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
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One row, one KV head and its query heads, one split of the context."""
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_starts + row)
    if tl.load(query_starts + row + 1) - token != 1:
        return
    length = tl.load(seq_lens + row)
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0)
    share = tl.cdiv(tl.cdiv(length - first, TILE), tl.num_programs(2)) * TILE
    low = first + split * share
    high = tl.minimum(low + share, length)

    group = tl.arange(0, GROUP_PAD)
    heads = kv_head * GROUP + group
    dims = tl.arange(0, DIM_PAD)
    query_at = token.to(tl.int64) * query_token_stride + heads[:, None] * query_head_stride + dims[None, :]
    here = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(query + query_at, mask=here, other=0.0)  # [GROUP_PAD, DIM_PAD]

    mixed = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    maximum = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    table = block_tables + row.to(tl.int64) * table_stride
    for start in range(low, high, TILE):
        positions = start + tl.arange(0, TILE)
        seen = positions < high
        key_at = cache_offsets(table, positions, seen, kv_head, key_block_stride, BLOCK_SIZE, HEAD_DIM)
        value_at = cache_offsets(table, positions, seen, kv_head, value_block_stride, BLOCK_SIZE, HEAD_DIM)
        key_mask = (dims < HEAD_DIM)[:, None] & seen[None, :]
        value_mask = seen[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(key_cache + key_at[None, :] + dims[:, None], mask=key_mask, other=0.0)
        values = tl.load(value_cache + value_at[:, None] + dims[None, :], mask=value_mask, other=0.0)
        mixed, maximum, total = attend_tile(
            q, keys, values, seen[None, :], mixed, maximum, total, scale, softcap, SOFTCAP
        )

    if SPLIT:
        place = (row * tl.num_programs(1) * GROUP + heads).to(tl.int64) * tl.num_programs(2) + split
        tl.store(partial_output + place[:, None] * HEAD_DIM + dims[None, :], mixed * value_scale, mask=here)
        tl.store(partial_stats + place * 2, maximum, mask=group < GROUP)
        tl.store(partial_stats + place * 2 + 1, total, mask=group < GROUP)
    else:
        result = mixed * (value_scale / total)[:, None]
        token = tl.load(query_starts + row)  # again, rather than in registers all the while: they are full
        output_at = (token.to(tl.int64) * tl.num_programs(1) * GROUP + heads)[:, None] * HEAD_DIM + dims[
            None, :
        ]
        tl.store(output + output_at, result.to(output.dtype.element_ty), mask=here)


@triton.jit
def merge_kernel(
    partial_output,  # fp32 [R, H, splits, D]
    partial_stats,  # fp32 [R, H, splits, 2]
    output,  # [T, H, D]
    query_starts,  # [R + 1]
    splits,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    """One row and one query head: the weighted mean of its splits."""
    row, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_starts + row)
    if tl.load(query_starts + row + 1) - token != 1:
        return
    ids = tl.arange(0, SPLITS_PAD)
    dims = tl.arange(0, DIM_PAD)
    place = (row * tl.num_programs(1) + head).to(tl.int64) * splits + ids
    maxima = tl.load(partial_stats + place * 2, mask=ids < splits, other=float("-inf"))
    totals = tl.load(partial_stats + place * 2 + 1, mask=ids < splits, other=0.0)
    weights = tl.exp2(maxima - tl.max(maxima, axis=0))  # a split that saw nothing has -inf: weight 0
    here = (ids < splits)[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(partial_output + place[:, None] * HEAD_DIM + dims[None, :], mask=here, other=0.0)
    result = tl.sum(parts * weights[:, None], axis=0) / tl.sum(totals * weights, axis=0)
    output_at = (token.to(tl.int64) * tl.num_programs(1) + head) * HEAD_DIM + dims
    tl.store(output + output_at, result.to(output.dtype.element_ty), mask=dims < HEAD_DIM)


def tile_shape(head_dim: int, element_bytes: int) -> tuple[int, int]:
    """Tokens of a tile, and warps, so that nothing spills. Sizes are of the query's type.

    fp32 is multiplied without tensor cores, which takes many registers.
    """
    row_bytes = triton.next_power_of_2(head_dim) * element_bytes
    if row_bytes <= 256:
        return (32 if element_bytes == 4 else 128 if row_bytes <= 128 else 64), 4
    return (16, 8) if element_bytes == 4 else (32, 8)


def processor_count(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 under the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def split_count(rows: int, kv_heads: int, most_seen: int, processors: int) -> int:
    """Splits of the context, so that there are about two programs for each multiprocessor. A power of 2.

    `most_seen`: keys that the longest row sees.
    """
    wanted = max(1, 2 * processors // (rows * kv_heads))
    most = min(wanted, triton.cdiv(most_seen, SHORTEST_SPLIT), 64)
    return 1 << (most.bit_length() - 1)


def paged_decode(
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
    splits: int | None = None,
) -> None:
    """Attention of the rows with one new token, from query `[T, H, D]` into output `[T, H, D]`.

    Other rows are left alone.

    Caches are `[blocks, KVH, block_size, D]`, of the query's type or fp8 e4m3: `key_scale` and `value_scale`
    are then what a stored number times gives the true one. Raises ValueError for operands that do not fit.
    """
    check_operands(query, key_cache, value_cache, batch.block_tables)
    rows = len(batch.seq_lens_host)
    _, heads, head_dim = query.shape
    _, kv_heads, block_size, _ = key_cache.shape
    group = heads // kv_heads
    if splits is None:
        seen = batch.max_seq_len if window is None else min(window, batch.max_seq_len)
        splits = split_count(rows, kv_heads, seen, processor_count(query.device))
    partial_output = torch.empty(rows, heads, splits, head_dim, dtype=torch.float32, device=query.device)
    partial_stats = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=query.device)
    dim_pad = triton.next_power_of_2(head_dim)
    tile, warps = tile_shape(head_dim, query.element_size())
    decode_kernel[(rows, kv_heads, splits)](
        query, key_cache, value_cache, output, partial_output, partial_stats, batch.query_starts,
        batch.seq_lens, batch.block_tables, scale * key_scale * LOG2_E, (softcap or 1.0) * LOG2_E,
        value_scale, window or 0, query.stride(0), query.stride(1), key_cache.stride(0),
        value_cache.stride(0), batch.block_tables.stride(0), GROUP=group, GROUP_PAD=max(16,
        triton.next_power_of_2(group)), HEAD_DIM=head_dim, DIM_PAD=dim_pad, BLOCK_SIZE=block_size, TILE=tile,
        WINDOW=window is not None, SOFTCAP=softcap is not None, SPLIT=splits > 1, num_warps=warps,
        num_stages=2,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(rows, heads)](
            partial_output, partial_stats, output, batch.query_starts, splits,
            HEAD_DIM=head_dim, DIM_PAD=dim_pad, SPLITS_PAD=splits, num_warps=4,
        )  # fmt: skip
