"""Weights packed into panels of 16 outputs, as the matrix kernel reads them.

Owns the layout that `tile.py` describes. The packed form is the only one kept: the kernel serves one row and
many from it, and the embedding is read from it where logits share its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from worker_service.fused.lanes import LANES
from worker_service.fused.pages import release
from worker_service.fused.records import MATRIX, OUTCOMES, STORE
from worker_service.fused.tile import KERNELS

INT8_LARGEST = 127
# Outputs that are packed at a time.
_ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A linear layer's weights in panels; the tensors keep alive what `record` points to."""

    panels: Tensor  # [panels, inputs / group, 16, group]
    scales: Tensor | None  # [panels * 16] fp32, of int8
    bias: Tensor | None  # [panels * 16] fp32

    def record(self) -> tuple[int, ...]:
        """The fields of a MATRIX record, but for the outcome."""
        panels = self.panels
        panel_bytes = panels[0].numel() * panels.element_size()
        extras = (self.scales, self.bias)
        fields = (panels.data_ptr(), panels.shape[0], panel_bytes, panels.shape[1])
        return (*fields, *(0 if extra is None else extra.data_ptr() for extra in extras))

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        tensors = (self.panels, self.scales, self.bias)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def kind_of(dtype: torch.dtype) -> npt.NDArray[Any]:
    """The empty array by which compiled code knows a type. numpy has no bf16: its bits go as uint16."""
    types = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.int8: np.int8}
    return np.empty(0, types[dtype])


def converts_activations(dtype: torch.dtype) -> bool:
    """Whether matrices of this type want activations other than fp32."""
    return KERNELS[str(kind_of(dtype).dtype)].converts


def pack(
    weights: Sequence[Tensor],
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    in_turns: bool = False,
    spend: bool = False,
) -> PackedMatrix:
    """Packs matrices `[outputs, inputs]` into one; int8 gets a scale an output. Inputs: a multiple of 16.

    They follow one another or, `in_turns`, alternate panel by panel, so that a pair of panels gives both
    halves of 16 outputs. All but the last have a multiple of 16 outputs. `bias` is that of the packed
    outputs. `spend`: nobody will read the weights again, and their memory is given back on the way.
    """
    counts = [-(-len(weight) // LANES) for weight in weights]
    group = KERNELS[str(kind_of(dtype).dtype)].group
    panels = torch.empty(sum(counts), weights[0].shape[1] // group, LANES, group, dtype=dtype)
    scales = torch.ones(sum(counts), LANES) if dtype == torch.int8 else None
    for index, weight in enumerate(weights):
        first = sum(counts[:index])
        part = slice(index, None, len(weights)) if in_turns else slice(first, first + counts[index])
        _fill(panels[part], None if scales is None else scales[part], weight, spend)
    if bias is not None:
        bias = functional.pad(bias.float(), (0, -len(bias) % LANES))
    return PackedMatrix(panels, None if scales is None else scales.flatten(), bias)


def _fill(panels: Tensor, scales: Tensor | None, weight: Tensor, spend: bool) -> None:
    """Packs one matrix into its panels, some rows at a time, so that temporary copies stay small."""
    for start in range(0, len(weight), _ROWS_AT_ONCE):
        rows = original = weight[start : start + _ROWS_AT_ONCE]
        missing = -len(rows) % LANES
        if missing:
            rows = functional.pad(rows, (0, 0, 0, missing))
        first, count = start // LANES, len(rows) // LANES
        if scales is not None:
            rows, row_scales = quantize(rows)
            scales[first : first + count] = row_scales.view(count, LANES)
        panels[first : first + count] = rows.view(count, LANES, *panels.shape[1::2]).transpose(1, 2)
        if spend:
            release(original)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 with one scale an output: `[N, K]` -> int8 `[N, K]`, fp32 `[N]`."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / INT8_LARGEST
    return torch.round(weight / scales[:, None]).to(torch.int8), scales


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Biases of matrices that are packed in turns, in their order."""
    return torch.stack((gate.view(-1, LANES), up.view(-1, LANES)), dim=1).flatten()


def table(layers: list[tuple[PackedMatrix, ...]], logits: PackedMatrix) -> npt.NDArray[np.void]:
    """The records of all matrices, layer by layer, the logits' last."""
    rows = [
        (*matrix.record(), outcome)
        for matrices in layers
        for matrix, outcome in zip(matrices, OUTCOMES, strict=True)
    ]
    return np.array([*rows, (*logits.record(), STORE)], MATRIX)
