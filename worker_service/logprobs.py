"""Owns log-probabilities: of sampled tokens and of the most likely ones, by the model's own distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidegate_kernels.cpu_logprobs import logprob_rows
from worker_service.plan import Int32, LogprobColumns


@dataclass(frozen=True, slots=True, eq=False)
class SampledLogprobs:
    """Log-probabilities of M rows, before temperature, penalties and filters; tensors on the device."""

    rows: Int32  # [M]
    counts: Int32  # [M] how many of the most likely each row wants
    sampled: Tensor  # [M] fp32
    top_values: Tensor  # [M, K] fp32
    top_token_ids: Tensor  # [M, K] int64

    def to_columns(self) -> LogprobColumns:
        """As the wire has them. Waits for the device."""
        offsets = np.zeros(len(self.rows) + 1, np.int32)
        np.cumsum(self.counts, out=offsets[1:])
        wanted = np.arange(self.top_values.shape[-1]) < self.counts[:, None]  # [M, K]
        return LogprobColumns(
            rows=self.rows,
            sampled=self.sampled.cpu().numpy(),
            top_offsets=offsets,
            top_token_ids=self.top_token_ids.cpu().numpy()[wanted].astype(np.int32),
            top_values=self.top_values.cpu().numpy()[wanted],
        )


def take_logprobs(
    logits: Tensor, at: NDArray[np.intp], token_ids: Tensor, rows: Int32, counts: Int32
) -> SampledLogprobs:
    """Of the rows `at` `[M]` of logits `[S, V]` fp32 before anything was done to them: of `token_ids` `[M]`,
    and the most likely.

    `rows` `[M]` is what they are called in the result, `counts` `[M]` how many of the most likely each wants.
    """
    num_top = int(counts.max())
    if logits.device.type == "cpu":
        columns = logprob_rows(logits, at, token_ids.numpy(), num_top)
        return SampledLogprobs(rows, counts, *(torch.from_numpy(column) for column in columns))
    logprobs = logits[torch.from_numpy(at).to(logits.device)].log_softmax(-1)  # [M, V]
    top = logprobs.topk(num_top)
    return SampledLogprobs(
        rows, counts, logprobs.gather(-1, token_ids[:, None]).squeeze(-1), top.values, top.indices
    )
