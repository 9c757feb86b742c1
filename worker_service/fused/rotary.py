"""Cosines and sines of the rotary embedding, for as many positions as were needed so far.

Owns the table. The frequencies are transformers' own, so every scaling by the position alone is right.
"""

from __future__ import annotations

import torch

from worker_service.fused.llama import Outline

_GROWTH_POSITIONS = 2048


class RotaryTable:
    """Grows in steps; what was computed stays as it is."""

    def __init__(self, outline: Outline) -> None:
        self._frequencies = torch.tensor(outline.frequencies)
        self._scale = outline.rotary_scale
        self._cosines = self._sines = torch.empty(0)

    def addresses(self, positions: int) -> tuple[int, int]:
        """Where cosines and sines `[positions or more, head_dim / 2]` lie, until the table grows."""
        if positions > len(self._cosines):
            self._grow(-(-positions // _GROWTH_POSITIONS) * _GROWTH_POSITIONS)
        return self._cosines.data_ptr(), self._sines.data_ptr()

    def _grow(self, positions: int) -> None:
        angles = torch.arange(positions)[:, None].float() * self._frequencies
        self._cosines, self._sines = angles.cos() * self._scale, angles.sin() * self._scale
