"""Owns the draw of one token from each row's filtered distribution, given one uniform number for each row.

A row's token depends on that row alone: nothing here mixes rows, whatever the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_service.plan import Float32, Int32


@dataclass(frozen=True, slots=True, eq=False)
class DrawColumns:
    """How N rows draw. Filters apply in this order: top_k, top_p, min_p, each to what the one before left."""

    temperature: Float32  # [N] above 0
    top_k: Int32  # [N] 0 keeps all
    top_p: Float32  # [N] 1 keeps all
    min_p: Float32  # [N] 0 keeps all
    uniform: NDArray[np.float64]  # [N] in [0, 1)

    def take(self, rows: NDArray[np.intp]) -> DrawColumns:
        """Those rows."""
        return DrawColumns(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows]
        )


def draw(logits: Tensor, columns: DrawColumns) -> Tensor:
    """A token for each row of finite logits `[N, V]` fp32: `[N]` int64.

    Rows without top_k and top_p draw by inverse CDF in the order of token ids, which needs no sort; the
    others in the order of falling probability, equal ones by token id.
    """
    ranked = (columns.top_k > 0) | (columns.top_p < 1)
    if not ranked.any():
        return _draw_by_id(logits, columns)
    if ranked.all():
        return _draw_by_rank(logits, columns)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for rows, method in ((np.flatnonzero(~ranked), _draw_by_id), (np.flatnonzero(ranked), _draw_by_rank)):
        at = torch.from_numpy(rows).to(logits.device)
        tokens[at] = method(logits[at], columns.take(rows))
    return tokens


def _draw_by_id(logits: Tensor, columns: DrawColumns) -> Tensor:
    weights = _weights(logits, columns)
    if (columns.min_p > 0).any():
        weights = weights.masked_fill(weights < _column(columns.min_p, logits), 0.0)
    return _inverse_cdf(weights.cumsum(-1, dtype=torch.float64), columns).squeeze(-1)


def _draw_by_rank(logits: Tensor, columns: DrawColumns) -> Tensor:
    vocab_size = logits.shape[-1]
    weights = _weights(logits, columns)  # [N, V]
    top_k = _column(np.where(columns.top_k > 0, columns.top_k, vocab_size).astype(np.int64), logits)
    top_p = _column(columns.top_p, logits)
    ids, weights, total = _candidates(weights, columns, top_p)
    weights, order = weights.sort(dim=-1, descending=True, stable=True)  # ids rise, so equal ones stay by id
    rank = torch.arange(weights.shape[-1], device=logits.device)
    weights = weights.masked_fill(rank >= top_k, 0.0)
    cdf = weights.cumsum(-1, dtype=torch.float64)  # [N, W]
    # The mass of a top_k row is what its k tokens have; the candidates hold all of them.
    total = torch.where(top_k < vocab_size, cdf[:, -1:], total)
    weights = weights.masked_fill(cdf - weights >= top_p * total, 0.0)
    weights = weights.masked_fill(weights < _column(columns.min_p, logits), 0.0)
    chosen = _inverse_cdf(weights.cumsum(-1, dtype=torch.float64), columns)  # [N, 1]
    return ids.gather(-1, order.gather(-1, chosen)).squeeze(-1)


def _candidates(weights: Tensor, columns: DrawColumns, top_p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids and weights that can survive the filters, ids rising, and the mass of whole rows (`[N, 1]`).

    Sorting a vocabulary is slow on a CPU. A token below (1 - top_p) / V of the mass is never in the nucleus,
    since all such tokens together have less than 1 - top_p; a token below the k-th largest is never in the
    top k. On a GPU the sort is cheap, and finding the widest row would wait for the device.
    """
    vocab_size = weights.shape[-1]
    total = weights.sum(-1, dtype=torch.float64, keepdim=True)
    if weights.device.type != "cpu":
        return torch.arange(vocab_size, device=weights.device).expand_as(weights), weights, total
    # The margin covers the rounding of sums.
    floor = ((1 - top_p.double()) / vocab_size * total * 0.999).float()  # [N, 1]
    largest_k = int(columns.top_k.max())
    if 0 < largest_k < vocab_size:
        leaders = weights.topk(largest_k).values  # [N, K]
        kth = _column(np.maximum(columns.top_k, 1).astype(np.int64) - 1, weights)
        has_k = _column(columns.top_k > 0, weights)
        floor = torch.where(has_k, leaders.gather(-1, kth), floor)
    kept = weights >= floor
    rows, ids = kept.nonzero(as_tuple=True)
    counts = kept.sum(-1)
    column = torch.arange(len(ids)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    width = max(1, int(counts.max()))
    packed_ids = torch.zeros((len(weights), width), dtype=torch.int64)
    packed_weights = torch.zeros((len(weights), width))
    packed_ids[rows, column] = ids
    packed_weights[rows, column] = weights[rows, ids]
    return packed_ids, packed_weights, total


def _weights(logits: Tensor, columns: DrawColumns) -> Tensor:
    """Probabilities times a factor of the row that makes the largest one 1, as min_p wants them."""
    highest = logits.amax(-1, keepdim=True)
    return ((logits - highest) / _column(columns.temperature, logits)).exp()


def _inverse_cdf(cdf: Tensor, columns: DrawColumns) -> Tensor:
    """Index of the first entry above the uniform's share of the mass: `[N, 1]`. Never one without mass."""
    target = _column(columns.uniform, cdf) * cdf[:, -1:]
    return torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[-1] - 1)


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device).unsqueeze(-1)
