"""Owns the choice of one token for each row: the most likely, or a draw from its filtered distribution by one
uniform number.

A row's token depends on that row alone: nothing here mixes rows, whatever the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidegate_kernels import cpu_sampling
from worker_service.plan import Float32, Int32


@dataclass(frozen=True, slots=True, eq=False)
class DrawColumns:
    """How rows choose. Filters apply in this order: top_k, top_p, min_p, each to what the one before left."""

    temperature: Float32  # [N] 0 takes the most likely
    top_k: Int32  # [N] 0 keeps all
    top_p: Float32  # [N] 1 keeps all
    min_p: Float32  # [N] 0 keeps all
    uniform: NDArray[np.float64]  # [N] in [0, 1)

    def at(self, rows: NDArray[np.intp]) -> DrawColumns:
        """Those of some rows."""
        return DrawColumns(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows]
        )


def choose(logits: Tensor, columns: DrawColumns) -> tuple[Tensor, Tensor]:
    """A token for each row of logits `[S, V]` fp32, and whether all of the row is finite: `[S]` each.

    Temperature 0 takes the first most likely. A draw is by inverse CDF in the order of token ids: logits that
    differ a little, as they do between machines, change a token only where the uniform falls on an edge. Rows
    that are not finite get some token.
    """
    c = columns
    if logits.device.type == "cpu":
        tokens, finite = cpu_sampling.choose_rows(logits, c.temperature, c.top_k, c.top_p, c.min_p, c.uniform)
        return torch.from_numpy(tokens), torch.from_numpy(finite)
    token_ids = logits.argmax(-1)
    random = np.flatnonzero(c.temperature > 0)
    if len(random):
        at = torch.from_numpy(random).to(logits.device)
        token_ids[at] = draw_by_sort(logits[at], c.at(random))
    return token_ids, are_finite(logits, np.arange(len(logits)))


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """What `choose` gives where every temperature is 0."""
    if logits.device.type == "cpu":
        tokens, finite = cpu_sampling.most_likely_rows(logits)
        return torch.from_numpy(tokens), torch.from_numpy(finite)
    return logits.argmax(-1), are_finite(logits, np.arange(len(logits)))


def are_finite(logits: Tensor, rows: NDArray[np.intp]) -> Tensor:
    """Whether all is finite in `rows` `[N]` of logits `[S, V]` fp32: `[N]`."""
    if logits.device.type == "cpu":
        return torch.from_numpy(cpu_sampling.finite_rows(logits, rows))
    chosen = logits[torch.from_numpy(rows).to(logits.device)] if len(rows) < len(logits) else logits
    return chosen.sum(-1).isfinite()  # one pass: NaN and infinities survive a sum


def draw_by_sort(logits: Tensor, columns: DrawColumns) -> Tensor:
    """A drawn token for each row of logits `[N, V]` fp32, on any device, without waiting for it: `[N]`."""
    weights = _weights(logits, columns)
    if ((columns.top_k > 0) | (columns.top_p < 1)).any():
        weights = _filtered_by_rank(weights, columns)
    if (columns.min_p > 0).any():
        weights = weights.masked_fill(weights < _column(columns.min_p, logits), 0.0)
    cdf = weights.cumsum(-1, dtype=torch.float64)
    target = _column(columns.uniform, cdf) * cdf[:, -1:]
    # The first entry above the uniform's share of the mass: never one without mass.
    return torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[-1] - 1).squeeze(-1)


def _filtered_by_rank(weights: Tensor, columns: DrawColumns) -> Tensor:
    """Weights `[N, V]` with 0 for what top_k and top_p drop; equal ones rank by token id."""
    vocab_size = weights.shape[-1]
    top_k = _column(np.where(columns.top_k > 0, columns.top_k, vocab_size).astype(np.int64), weights)
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    ranked = ranked.masked_fill(torch.arange(vocab_size, device=weights.device) >= top_k, 0.0)
    cdf = ranked.cumsum(-1, dtype=torch.float64)
    nucleus = _column(columns.top_p, weights) * cdf[:, -1:]
    ranked = ranked.masked_fill(cdf - ranked >= nucleus, 0.0)
    return torch.empty_like(weights).scatter_(-1, order, ranked)


def _weights(logits: Tensor, columns: DrawColumns) -> Tensor:
    """Probabilities times a factor of the row that makes the largest one 1, as min_p wants them."""
    highest = logits.amax(-1, keepdim=True)
    return ((logits - highest) / _column(columns.temperature, logits)).exp()


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device).unsqueeze(-1)
