"""Two short sequences that a model's paged forward must answer as its plain one did.

Owns the comparison. Where the plain forward's logits come from, the model just loaded or a record of it, is
nothing to it. Imports no transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tidegate_kernels.attention_batch import AttentionBatch
from worker_service.attention import Backend, PagedStep
from worker_service.errors import UnsupportedModelError
from worker_service.forward import Forward
from worker_service.kv_memory import KvMemory, LayerShape

_PROBE_CHUNK = 17  # tokens of each that the first of two steps computes
# Relative error of logits by the type of weights or KV. int8 is that of weights, fp8 that of KV.
_PROBE_TOLERANCE = {
    torch.float32: 1e-3,
    torch.float16: 0.05,
    torch.bfloat16: 0.1,
    torch.int8: 0.3,
    torch.float8_e4m3fn: 0.3,
}


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Two short sequences, and the logits that the model's own forward has after each: `[2, V]` in fp32."""

    sequences: list[Tensor]
    expected: Tensor
    dtype: torch.dtype
    device: torch.device

    @torch.inference_mode()
    def check(
        self,
        forward: Forward,
        layers: tuple[LayerShape, ...],
        backend: Backend,
        block_size: int,
        quantization: str = "none",
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Runs the sequences through KV memory in two mixed steps and compares with what is expected.

        It warms up too: kernels that are compiled for a block size are compiled here, not at the first
        request. Raises UnsupportedModelError where they differ.
        """
        if not self.expected.isfinite().all():
            raise UnsupportedModelError(
                "its plain forward has logits that are NaN or infinite: weights are damaged, or too "
                f"large for {str(self.dtype).removeprefix('torch.')} (see --dtype)"
            )
        kv_dtype = kv_dtype or self.dtype
        paged = self._paged_logits(forward, layers, backend, block_size, kv_dtype).float()
        error = float((paged - self.expected).norm() / self.expected.norm())
        weights = torch.int8 if quantization == "int8" else self.dtype
        most = max(_PROBE_TOLERANCE[weights], _PROBE_TOLERANCE[kv_dtype])
        if not error <= most:
            raise UnsupportedModelError(f"its paged forward differs from its plain one by {error:.1%}")

    def _paged_logits(
        self,
        forward: Forward,
        layers: tuple[LayerShape, ...],
        backend: Backend,
        block_size: int,
        kv_dtype: torch.dtype,
    ) -> Tensor:
        """Logits after each sequence's last token: `[2, V]`."""
        lengths = np.array([len(s) for s in self.sequences], np.int32)
        blocks = -(-lengths // block_size)
        tables = np.zeros((2, blocks.max()), np.int32)
        tables[0, : blocks[0]] = np.arange(blocks[0]) + 1
        tables[1, : blocks[1]] = np.arange(blocks[1]) + 1 + blocks[0]
        kv = KvMemory(layers, int(blocks.sum()) + 1, block_size, kv_dtype, self.device)
        # Both steps have at least a token of each sequence.
        chunks = np.minimum(_PROBE_CHUNK, np.maximum(lengths - 1, 1))
        logits = torch.empty(0)
        for begin, end in ((np.zeros(2, np.int32), chunks), (chunks, lengths)):
            if (end <= begin).any():
                continue
            positions = np.concatenate([np.arange(b, e) for b, e in zip(begin, end, strict=True)])
            rows = np.repeat([0, 1], end - begin)
            batch = AttentionBatch.from_host(
                query_starts=np.array([0, end[0] - begin[0], (end - begin).sum()], np.int32),
                seq_lens=end.astype(np.int32),
                block_tables=tables,
                slot_mapping=tables[rows, positions // block_size].astype(np.int64) * block_size
                + positions % block_size,
                device=self.device,
            )
            tokens = torch.cat([s[b:e] for s, b, e in zip(self.sequences, begin, end, strict=True)])
            keep = batch.query_starts[1:].long() - 1
            step = PagedStep(backend, kv, batch)
            at = torch.from_numpy(positions).to(self.device)
            logits = forward(step, tokens.to(self.device), at, keep)
        return logits
