"""The attention backend for CUDA: the Triton kernels behind the two operations that every backend has."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tidegate_kernels.attention_batch import AttentionBatch
from tidegate_kernels.kv_write import write_kv
from tidegate_kernels.paged_decode import paged_decode
from tidegate_kernels.paged_prefill import paged_prefill

__all__ = ["paged_attention", "write_kv"]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """As `reference.paged_attention`: decodes by the one kernel, rows with more new tokens by the other."""
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    longer = batch.max_query_len > 1
    mixed = longer and bool((np.diff(batch.query_starts_host) == 1).any())
    if longer:
        paged_prefill(
            query, key_cache, value_cache, batch, output,
            scale=scale, window=window, softcap=softcap, skip_decodes=mixed,
        )  # fmt: skip
    if mixed or not longer:
        paged_decode(
            query, key_cache, value_cache, batch, output, scale=scale, window=window, softcap=softcap
        )
    return output
