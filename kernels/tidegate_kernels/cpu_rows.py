"""What sampling on CPUs is built from: rows shared out over threads, and passes over blocks of a row.

Owns no rule of sampling. The compiled functions run as vector code on whatever the processor has.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]

BLOCK = 256  # tokens that are summed, and whose largest is known, together
ROWS_PER_THREAD = 4  # waking another thread pays from about this many rows

_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts: the first has few bits, so that multiples of it are exact.
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
# exp(r) on |r| <= ln(2) / 2, as 1 + r + r^2 * polynomial (Cephes' expf).
_E0, _E1, _E2, _E3, _E4, _E5 = (
    np.float32(x)
    for x in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)
_SMALLEST = np.float32(-87.0)  # exp of less counts as 0
_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1), np.float32(0)


def on_threads(function: Any, logits: Array, shared: tuple[Any, ...], *columns: Array) -> None:
    """Calls `function(logits, *shared, *columns)` for shares of the columns, a thread each."""
    count = len(columns[0])
    threads = min(torch.get_num_threads(), -(-count // ROWS_PER_THREAD))
    bounds = np.linspace(0, count, max(threads, 1) + 1).astype(int)
    shares = [[column[begin:end] for column in columns] for begin, end in itertools.pairwise(bounds)]
    others = [_pool().submit(function, logits, *shared, *share) for share in shares[1:]]
    function(logits, *shared, *shares[0])
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), thread_name_prefix="tidegate-sampling")


@njit(cache=True, nogil=True, fastmath=True)
def largest(values: NDArray[np.float32]) -> np.float32:
    """Of at least one finite value."""
    highest = values[0]
    for i in range(len(values)):
        highest = max(highest, values[i])
    return highest


@njit(cache=True, nogil=True, fastmath={"contract", "nsz", "arcp"})
def exponentiate(
    logits: NDArray[np.float32],
    highest: np.float32,
    temperature: np.float32,
    weights: NDArray[np.float32],
    exponents: NDArray[np.int32],
) -> None:
    """`weights` becomes exp((logits - highest) / temperature), 0 where that is below 1e-38."""
    bits = weights.view(np.int32)
    for i in range(len(logits)):
        x = min((logits[i] - highest) / temperature, _ZERO)  # above 0 only where `highest` met a NaN
        kept = x > _SMALLEST
        x = x if kept else _ZERO
        n = np.floor(x * _LOG2_E + _HALF)
        r = x - n * _LN2_HIGH - n * _LN2_LOW
        p = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
        p = p * r * r + r + _ONE
        weights[i] = p if kept else _ZERO
        exponents[i] = np.int32(n)
    for i in range(len(logits)):
        bits[i] += exponents[i] << np.int32(23)


@njit(cache=True, nogil=True, fastmath=True)
def total_of(values: NDArray[np.float32]) -> np.float32:
    """Their sum, in no particular order."""
    total = _ZERO
    for i in range(len(values)):
        total += values[i]
    return total
