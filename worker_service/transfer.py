"""Owns the way of a step's small columns to the device: all of them in one copy.

A copy costs a GPU's queue some microseconds however small it is, and a step has a dozen columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16  # bytes, so that kernels may load vectors from each column


def to_device(columns: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Contiguous CPU tensors of any types and shapes on the device; on a CPU they are returned as they are.

    The host does not wait. Nobody waits for the copy either: it is ordered before what the stream gets next.
    """
    if device.type == "cpu":
        return list(columns)
    packed = pack(columns, pinned=device.type == "cuda")
    return unpack(packed.to(device, non_blocking=True), columns)


def put(target: Tensor, at: NDArray[np.integer], values: Tensor) -> None:
    """target[at] = values, both on one device. On a CPU by numpy, which has less to do before it starts."""
    if target.device.type == "cpu":
        target.numpy()[at] = values.numpy()
    else:
        target[torch.from_numpy(at.astype(np.int64)).to(target.device)] = values


def pack(columns: Sequence[Tensor], *, pinned: bool = False) -> Tensor:
    """The columns' bytes one after the other, each aligned: `[bytes]` uint8."""
    packed = torch.empty(sum(map(_room, columns)), dtype=torch.uint8, pin_memory=pinned)
    for column, place in zip(columns, unpack(packed, columns), strict=True):
        place.copy_(column)
    return packed


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of packed bytes with the types and shapes of the columns that they came from."""
    views, start = [], 0
    for column in like:
        size = column.numel() * column.element_size()
        views.append(packed[start : start + size].view(column.dtype).view(column.shape))
        start += _room(column)
    return views


def _room(column: Tensor) -> int:
    size = column.numel() * column.element_size()
    return -(-size // _ALIGNMENT) * _ALIGNMENT
