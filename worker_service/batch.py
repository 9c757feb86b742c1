"""Owns the flat inputs of one step: built from the slot table with array arithmetic alone, then uploaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tidegate_kernels.attention_batch import AttentionBatch
from worker_service.plan import Int32, Int64, Plan
from worker_service.slots import SlotTable
from worker_service.transfer import to_device


@dataclass(frozen=True, slots=True, eq=False)
class HostBatch:
    """One step on the host: R rows of T tokens in all, S of which sample."""

    token_ids: Int64  # [T], those that were sampled here excepted
    positions: Int64  # [T]
    attention: AttentionBatch  # its tensors are on the CPU
    sampled_tokens: Int64  # [S], flat index of the last token of each row that samples
    fed_back_tokens: Int64  # [F], flat index of tokens that were sampled here
    fed_back_slots: Int64  # [F], the slots that sampled them

    @property
    def rows(self) -> int:
        """R."""
        return len(self.attention.seq_lens_host)

    @property
    def decodes(self) -> bool:
        """Whether every row has one token."""
        return self.attention.max_query_len == 1


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step for the model. Tensors are on the device."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attention: AttentionBatch
    sampled_tokens: Tensor  # [S] int64


def lay_out(table: SlotTable, plan: Plan, sampling_rows: Int32, block_size: int) -> HostBatch:
    """The inputs of a plan that has just been applied to the table (`SlotTable.advance`)."""
    slots, counts = plan.slots, plan.num_tokens
    starts = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    seq_lens = table.num_computed[slots]
    if starts[-1] == len(slots):  # one token a row, as in most steps
        positions, token_slots = seq_lens.astype(np.int64) - 1, slots
    else:
        # Position of token t in row r: seq_lens[r] - counts[r] + (t - starts[r]).
        first = np.repeat(seq_lens - counts - starts[:-1], counts)  # [T]
        positions = first + np.arange(starts[-1], dtype=np.int64)
        token_slots = np.repeat(slots, counts)  # [T]
    in_row, in_block = np.divmod(positions, block_size)
    blocks = table.block_table[token_slots, in_row].astype(np.int64)
    width = -(-int(seq_lens.max()) // block_size)
    # A sampled token is always the only one of its row: the row could not go on without its value.
    fed_back = np.flatnonzero(seq_lens > table.num_admitted[slots])
    return HostBatch(
        token_ids=table.token_ids[token_slots, positions].astype(np.int64),
        positions=positions,
        attention=AttentionBatch.from_host(
            query_starts=starts,
            seq_lens=seq_lens,
            block_tables=table.block_table[slots, :width],
            slot_mapping=blocks * block_size + in_block,
        ),
        sampled_tokens=starts[sampling_rows + 1].astype(np.int64) - 1,
        fed_back_tokens=starts[fed_back].astype(np.int64),
        fed_back_slots=slots[fed_back].astype(np.int64),
    )


def upload(
    batch: HostBatch,
    last_tokens: Tensor,  # [slots] int64 on the device: the token that each slot sampled last
) -> Batch:
    """The batch on the device of `last_tokens`, by one copy; on a CPU without any.

    A token that was sampled here is taken from `last_tokens`, so nothing waits for its value.
    """
    attention = batch.attention
    if last_tokens.device.type == "cpu":
        batch.token_ids[batch.fed_back_tokens] = last_tokens.numpy()[batch.fed_back_slots]
        token_ids, positions, sampled_tokens = map(
            torch.from_numpy, (batch.token_ids, batch.positions, batch.sampled_tokens)
        )
        return Batch(token_ids, positions, attention, sampled_tokens)
    columns = to_device(
        (
            torch.from_numpy(batch.token_ids),
            torch.from_numpy(batch.positions),
            torch.from_numpy(batch.sampled_tokens),
            torch.from_numpy(batch.fed_back_tokens),
            torch.from_numpy(batch.fed_back_slots),
            attention.query_starts,
            attention.seq_lens,
            attention.block_tables,
            attention.slot_mapping,
        ),
        last_tokens.device,
    )
    token_ids, at, sampled_tokens, fed_back_tokens, fed_back_slots, *moved = columns
    query_starts, lengths, block_tables, slot_mapping = moved
    if len(batch.fed_back_tokens):
        token_ids[fed_back_tokens] = last_tokens[fed_back_slots]
    return Batch(
        token_ids=token_ids,
        positions=at,
        attention=replace(
            attention,
            query_starts=query_starts,
            seq_lens=lengths,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
        ),
        sampled_tokens=sampled_tokens,
    )
