"""Cosines and sines of the rotary embedding, for as many positions as were needed so far.

Owns the table. The angles are transformers' own, so every scaling by the position alone is right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_GROWTH_POSITIONS = 2048


class RotaryTable:
    """Grows in steps; what was computed stays as it is."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self._cosines = self._sines = torch.empty(0)

    def addresses(self, positions: int) -> tuple[int, int]:
        """Where cosines and sines `[positions or more, head_dim / 2]` lie, until the table grows."""
        if positions > len(self._cosines):
            self._grow(-(-positions // _GROWTH_POSITIONS) * _GROWTH_POSITIONS)
        return self._cosines.data_ptr(), self._sines.data_ptr()

    def _grow(self, positions: int) -> None:
        ids = torch.arange(positions)[None]
        cosines, sines = self._rotary(torch.empty(0, dtype=torch.float32), ids)
        self._cosines, self._sines = (_half(table[0]) for table in (cosines, sines))


def _half(table: Tensor) -> Tensor:
    """Both halves of a row are equal."""
    return table[:, : table.shape[1] // 2].contiguous()
