"""What attention needs to know of one step: which tokens belong to which row, and where their KV lies.

Owns the layout of that metadata, which every backend reads. Computes no attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AttentionBatch:
    """One step's metadata, built once and shared by all layers. R rows, T tokens; tensors are on the device.

    A row is a request's share of the step: its last `query_starts[r + 1] - query_starts[r]` tokens, at least
    one, are new, and attend to everything before them. A decode has one new token, a prefill chunk has many.
    Lengths are on the host as well, so that a backend can lay out its work without waiting for the device.
    """

    query_starts: Tensor  # [R + 1] int32, offsets of each row's tokens in the flat batch
    seq_lens: Tensor  # [R] int32, tokens in the KV cache after this step, the new ones included
    block_tables: Tensor  # [R, max_blocks] int32, padded with the null block 0
    slot_mapping: Tensor  # [T] int64, block * block_size + offset: where each token's keys and values go
    max_query_len: int  # most new tokens of a row
    max_seq_len: int  # most tokens of a row
    query_starts_host: Int32Array  # [R + 1]
    seq_lens_host: Int32Array  # [R]

    @classmethod
    def from_host(
        cls,
        query_starts: Int32Array,
        seq_lens: Int32Array,
        block_tables: Int32Array,
        slot_mapping: npt.NDArray[np.int64],
        device: torch.device | str = "cpu",
    ) -> AttentionBatch:
        """Copies the columns to the device. On a CPU the tensors share the arrays' memory.

        Raises ValueError when the columns do not fit together.
        """
        rows = len(seq_lens)
        query_lens = query_starts[1:] - query_starts[:-1]
        if len(query_starts) != rows + 1 or len(block_tables) != rows or rows == 0:
            raise ValueError(
                f"{rows} rows by seq_lens need {rows + 1} query_starts (got {len(query_starts)}) "
                f"and {rows} block tables (got {len(block_tables)}), and at least one row"
            )
        if query_starts[0] != 0 or query_starts[-1] != len(slot_mapping):
            raise ValueError(
                f"query_starts must run from 0 to the {len(slot_mapping)} tokens of slot_mapping"
            )
        if query_lens.min() < 1 or (query_lens > seq_lens).any():
            raise ValueError("every row needs at least one new token, and no more than its seq_len")
        return cls(
            query_starts=torch.from_numpy(query_starts).to(device),
            seq_lens=torch.from_numpy(seq_lens).to(device),
            block_tables=torch.from_numpy(block_tables).to(device),
            slot_mapping=torch.from_numpy(slot_mapping).to(device),
            max_query_len=int(query_lens.max()),
            max_seq_len=int(seq_lens.max()),
            query_starts_host=query_starts,
            seq_lens_host=seq_lens,
        )
