"""The memory that a step computes in, and the step's record.

Owns buffers that grow to the largest step so far, and how attention's work is cut into units.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidegate_kernels.attention_batch import AttentionBatch
from worker_service.fused import attention, isa, prefixes
from worker_service.fused.lanes import LANES
from worker_service.fused.llama import Shape
from worker_service.fused.packing import kind_of
from worker_service.fused.tile import KERNELS

_LINE = 64


class Workspace:
    """Buffers for T tokens of which S sample."""

    def __init__(self, shape: Shape, dtype: torch.dtype, threads: int) -> None:
        self.threads = threads
        self._shape = shape
        self._units_tokens = max(1, attention.MAX_UNIT_VECTORS // (shape.heads // shape.kv_heads))
        mixed = shape.heads * shape.head_dim
        kernel = KERNELS[str(kind_of(dtype).dtype)]
        stride = 2 * max(shape.hidden, mixed, shape.inner) if kernel.converts else 4 * shape.hidden
        stride = -(-stride // _LINE) * _LINE
        # Rows that lie a multiple of 4 KiB apart would share the same few lines of the L1 cache.
        self._input_stride = stride + _LINE if stride % 4096 == 0 else stride
        scratch = max(
            attention.scratch_bytes(shape.heads // shape.kv_heads, shape.head_dim),
            4 * 2 * LANES * isa.MAX_TILE_ROWS,
            4 * max(shape.hidden, mixed, shape.inner),
        )
        self._scratch_bytes = -(-scratch // 128) * 128 + 128
        self._scratch = torch.empty(threads * self._scratch_bytes, dtype=torch.uint8)
        self._tokens = self._sampled = 0
        self._buffers: dict[str, Tensor] = {}
        self._states = torch.empty(0, dtype=torch.float32)
        self._logits: dict[int, Tensor] = {}

    def fill(
        self, step: Any, input_ids: Tensor, positions: Tensor, batch: AttentionBatch, logit_rows: Tensor
    ) -> tuple[Any, ...]:
        """Writes the step's record. Returns what must stay alive until the step is over."""
        tokens, sampled = len(input_ids), len(logit_rows)
        if tokens > self._tokens or sampled > self._sampled:
            self._reserve(step, tokens, sampled)
        shared = prefixes.find(batch, int(step["block_size"]), self._units_tokens, self._shape.kv_heads)
        prefix_columns = {} if shared is None else shared.columns(len(batch.seq_lens))
        rows, firsts, counts = self._cut(batch, prefix_columns.get("prefix_lengths"))
        tables = batch.block_tables
        if tables.stride(1) != 1:
            tables = tables.contiguous()
        columns: dict[str, Any] = {
            "token_ids": input_ids.contiguous(),
            "positions": positions.contiguous(),
            "slots": batch.slot_mapping.contiguous(),
            "logit_rows": logit_rows.contiguous(),
            "query_starts": batch.query_starts,
            "seq_lens": batch.seq_lens,
            "tables": tables,
            "unit_rows": torch.from_numpy(rows),
            "unit_firsts": torch.from_numpy(firsts),
            "unit_tokens": torch.from_numpy(counts),
            **{name: torch.from_numpy(column) for name, column in prefix_columns.items()},
        }
        step["prefix_units"], step["longest"] = 0, batch.max_seq_len
        if shared is not None:
            step["prefix_units"] = len(shared.rows)
            step["states"] = self._reserve_states(sum(shared.counts)).data_ptr()
        for name, tensor in columns.items():
            step[name] = tensor.data_ptr()
        step["tokens"], step["sampled"], step["units"] = tokens, sampled, len(rows)
        step["table_width"] = tables.stride(0)
        return tuple(columns.values())

    def logits(self, sampled: int) -> Tensor:
        """Those of the last step, `[sampled, vocab]`. A view that was made before is at hand at once."""
        view = self._logits.get(sampled)
        if view is None:
            view = self._buffers["logits"][:sampled, : self._shape.vocab]
            self._logits[sampled] = view
        return view

    def _cut(self, batch: AttentionBatch, skipped: Any) -> tuple[Any, Any, Any]:
        """Rows into units of a few tokens each; the longest come first, so that the last items are short.

        `skipped`: of each row, the keys that prefix units take care of; None for none.
        """
        size = self._units_tokens
        if batch.max_query_len == 1:
            keys = batch.seq_lens_host if skipped is None else batch.seq_lens_host - skipped
            order = np.argsort(-keys, kind="stable")
            return order, np.zeros(len(order), np.int64), np.ones(len(order), np.int64)
        lengths = np.diff(batch.query_starts_host)
        per_row = -(-lengths // size)
        rows = np.repeat(np.arange(len(lengths)), per_row)
        firsts = (np.arange(len(rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)) * size
        counts = np.minimum(size, lengths[rows] - firsts)
        keys = batch.seq_lens_host[rows] - lengths[rows] + firsts + counts
        cost = counts * (keys if skipped is None else keys - skipped[rows])
        order = np.argsort(-cost, kind="stable")
        return rows[order], firsts[order], counts[order].astype(np.int64)

    def _reserve_states(self, tokens: int) -> Tensor:
        """Room for the states that prefix units of so many tokens, in all, leave."""
        floats = tokens * self._shape.heads * (self._shape.head_dim + 2)
        if floats > len(self._states):
            self._states = torch.empty(floats, dtype=torch.float32)
        return self._states

    def _reserve(self, step: Any, tokens: int, sampled: int) -> None:
        self._tokens, self._sampled = max(tokens, self._tokens), max(sampled, self._sampled)
        shape = self._shape
        mixed = shape.heads * shape.head_dim
        rows = {
            "hidden": (self._tokens, shape.hidden),
            "projected": (self._tokens, mixed + 2 * shape.kv_heads * shape.head_dim),
            "mixed": (self._tokens, mixed),
            "inner": (self._tokens, shape.inner),
            "input_scales": (self._tokens, 1),
            "picked_hidden": (self._sampled, shape.hidden),
            "picked_mixed": (self._sampled, mixed),
            "logits": (self._sampled, -(-shape.vocab // LANES) * LANES),
        }
        self._buffers = {name: torch.empty(size, dtype=torch.float32) for name, size in rows.items()}
        # int8's scales stay 1 for the other types.
        self._buffers["input_scales"].fill_(1.0)
        self._buffers["input"] = torch.empty(self._tokens * self._input_stride, dtype=torch.uint8)
        self._logits = {}
        for name, buffer in self._buffers.items():
            step[name] = buffer.data_ptr()
        step["input_stride"] = self._input_stride
        step["threads"], step["scratch_bytes"] = self.threads, self._scratch_bytes
        step["scratch"] = -(-self._scratch.data_ptr() // _LINE) * _LINE
