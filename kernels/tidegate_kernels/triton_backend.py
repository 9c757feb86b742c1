"""The attention backend for CUDA: the Triton kernels behind the two operations that every backend has."""

from __future__ import annotations

from typing import Any

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
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """As `reference.paged_attention`: decodes by the one kernel, rows with more new tokens by the other.

    What is launched for a batch of decodes follows from its number of rows and its `max_seq_len` alone, so
    that it can be captured: all else is read on the device.
    """
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    terms: dict[str, Any] = {
        "scale": scale, "window": window, "softcap": softcap,
        "key_scale": key_scale, "value_scale": value_scale,
    }  # fmt: skip
    longer = batch.max_query_len > 1
    mixed = longer and bool((np.diff(batch.query_starts_host) == 1).any())
    if longer:
        paged_prefill(query, key_cache, value_cache, batch, output, skip_decodes=mixed, **terms)
    if mixed or not longer:
        paged_decode(query, key_cache, value_cache, batch, output, **terms)
    return output
