"""Weights packed into panels of 16 outputs, as the matrix kernel reads them.

Owns the layout that `tile.py` describes. The packed form is the only one kept: the kernel serves one row and
many from it, and the embedding is read from it where logits share its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_service.fused.lanes import LANES
from worker_service.fused.pages import release
from worker_service.fused.records import MATRIX, OUTCOMES, STORE
from worker_service.fused.tile import KERNELS

INT8_LARGEST = 127
# Outputs that are packed at a time, so that temporary copies stay small.
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


def pack(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, spend: bool = False) -> PackedMatrix:
    """Packs `[outputs, inputs]` in the given type; int8 gets a scale an output. Inputs: a multiple of 16.

    `spend`: nobody will read `weight` again, and its memory is given back on the way.
    """
    outputs, inputs = weight.shape
    count = -(-outputs // LANES)
    group = KERNELS[str(kind_of(dtype).dtype)].group
    panels = torch.zeros(count, inputs // group, LANES, group, dtype=dtype)
    scales = torch.ones(count * LANES) if dtype == torch.int8 else None
    for start in range(0, outputs, _ROWS_AT_ONCE):
        rows = weight[start : start + _ROWS_AT_ONCE]
        if scales is not None:
            rows, scales[start : start + len(rows)] = quantize(rows)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % LANES)).view(
            -1, LANES, *panels.shape[1::2]
        )
        first = start // LANES
        panels[first : first + len(padded)] = padded.transpose(1, 2)
        if spend:
            release(weight[start : start + _ROWS_AT_ONCE])
    if bias is not None:
        bias = torch.nn.functional.pad(bias.float(), (0, -outputs % LANES))
    return PackedMatrix(panels, scales, bias)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 with one scale an output: `[N, K]` -> int8 `[N, K]`, fp32 `[N]`."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / INT8_LARGEST
    return torch.round(weight / scales[:, None]).to(torch.int8), scales


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of gate and up in turns of 16, so that a pair of panels gives both halves of 16 outputs."""
    inner = gate.shape[0]
    pair = (gate.view(inner // LANES, LANES, *gate.shape[1:]), up.view(inner // LANES, LANES, *up.shape[1:]))
    return torch.stack(pair, dim=1).reshape(2 * inner, *gate.shape[1:])


def table(layers: list[tuple[PackedMatrix, ...]], logits: PackedMatrix) -> npt.NDArray[np.void]:
    """The records of all matrices, layer by layer, the logits' last."""
    rows = [
        (*matrix.record(), outcome)
        for matrices in layers
        for matrix, outcome in zip(matrices, OUTCOMES, strict=True)
    ]
    return np.array([*rows, (*logits.record(), STORE)], MATRIX)
