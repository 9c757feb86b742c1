"""Giving memory back to the system at once, while something still holds on to it.

A checkpoint's file stays mapped as long as any of its tensors lives. Without this, packing the last layer
would find all layers before it in memory twice.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def release(tensor: Tensor) -> None:
    """Drops the whole pages of a tensor whose contents nobody will read again. Does nothing but on Linux."""
    if _LIBC is None or not tensor.is_contiguous():
        return
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
