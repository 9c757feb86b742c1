"""From the columns of a step plan to the inputs of the forward, on the device.

The worker keeps what it knows of each slot in device tables; a plan names rows by slot. One program takes one
row. Nothing here waits for a sampled token to reach the host: it is read from where the sampler left it.
"""

# ruff: noqa: ANN001, ANN201
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# The arguments of device functions have Triton's types, which Python has no names for.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 256


@dataclass(frozen=True, slots=True, eq=False)
class SlotTables:
    """What the worker knows of its slots, on the device. All contiguous."""

    token_ids: Tensor  # [slots, max_len] int32, tokens that came with the request
    known: Tensor  # [slots] int32, how many of those there are
    last_token: Tensor  # [slots] int32, what the slot sampled last
    computed: Tensor  # [slots] int32, tokens in the KV cache; brought up to date here
    block_table: Tensor  # [slots, max_blocks] int32


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """The forward's inputs."""

    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    slot_mapping: Tensor  # [T] int64
    seq_lens: Tensor  # [R] int32
    block_tables: Tensor  # [R, width] int32


@triton.jit
def apply_kernel(
    slots,  # [R]
    query_starts,  # [R + 1]
    token_ids,  # [slots, max_len]
    known,  # [slots]
    last_token,
    computed,
    block_table,  # [slots, max_blocks]
    input_ids,  # [T]
    positions,
    slot_mapping,
    seq_lens,  # [R]
    block_tables,  # [R, width]
    token_stride,
    table_stride,
    width,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One row of the plan."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    begin = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - begin
    before = tl.load(computed + slot)
    told = tl.load(known + slot)
    sampled = tl.load(last_token + slot)
    for start in range(0, count, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        here = ids < count
        position = before + ids
        token = tl.load(token_ids + slot * token_stride + position, mask=here & (position < told), other=0)
        token = tl.where(position < told, token, sampled)
        block = tl.load(block_table + slot * table_stride + position // BLOCK_SIZE, mask=here, other=0).to(
            tl.int64
        )
        tl.store(input_ids + begin + ids, token, mask=here)
        tl.store(positions + begin + ids, position, mask=here)
        tl.store(slot_mapping + begin + ids, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=here)
    after = before + count
    used = tl.cdiv(after, BLOCK_SIZE)
    for start in range(0, width, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        blocks = tl.load(block_table + slot * table_stride + ids, mask=ids < used, other=0)
        tl.store(block_tables + row.to(tl.int64) * width + ids, blocks, mask=ids < width)
    tl.store(seq_lens + row, after)
    tl.store(computed + slot, after)


def apply_plan(
    tables: SlotTables, slots: Tensor, query_starts: Tensor, num_tokens: int, width: int, block_size: int
) -> StepInputs:
    """The inputs for rows `slots` `[R]` with new tokens by `query_starts` `[R + 1]`, `num_tokens` in all.

    `width` is blocks of the longest row after the step. A position that the request did not bring is the
    slot's last sampled token. `tables.computed` grows by each row's new tokens. Raises ValueError for columns
    that do not fit.
    """
    rows = len(slots)
    if query_starts.shape != (rows + 1,) or not 0 < width <= tables.block_table.shape[1]:
        raise ValueError(
            f"{rows} rows need {rows + 1} query_starts, not {len(query_starts)}; "
            f"width {width} must lie within 1 to {tables.block_table.shape[1]}"
        )

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=slots.device)

    inputs = StepInputs(
        input_ids=empty(num_tokens),
        positions=empty(num_tokens),
        slot_mapping=empty(num_tokens, dtype=torch.int64),
        seq_lens=empty(rows),
        block_tables=empty(rows, width),
    )
    apply_kernel[(rows,)](
        slots, query_starts, tables.token_ids, tables.known, tables.last_token, tables.computed,
        tables.block_table, inputs.input_ids, inputs.positions, inputs.slot_mapping, inputs.seq_lens,
        inputs.block_tables, tables.token_ids.stride(0), tables.block_table.stride(0), width,
        BLOCK_SIZE=block_size, CHUNK=CHUNK, num_warps=1,
    )  # fmt: skip
    return inputs
