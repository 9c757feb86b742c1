"""What sampling on CPUs is built from: rows shared out over threads, and passes over a row.

Owns no rule of sampling. The compiled functions run as vector code on whatever the processor has, so their
loops are plain. Floats are compared as integers where the largest is wanted: there the compiler finds
vector code for it.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float32]

GROUP = 64  # values whose largest is known, so that passes over the large ones skip the rest
CHUNK = 512  # values that are summed together
ROWS_PER_THREAD = 4  # waking another thread pays from about this many rows

_INFINITE = np.int32(0x7F800000)  # as bits; NaN is above it
_LOWEST, _HIGHEST = np.int32(-0x80000000), np.int32(0x7FFFFFFF)
_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts: the first has few bits, so that multiples of it are exact.
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
# exp(r) on |r| <= ln(2) / 2, as 1 + r + r^2 * polynomial (Cephes' expf).
_E0, _E1, _E2, _E3, _E4, _E5 = (
    np.float32(x)
    for x in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)
_SMALLEST = np.float32(-87.0)  # exp of less counts as 0
_ROUNDING = np.float32(1.5 * 2**23)  # a sum with it has no room for fractions, and ends in the whole number
_ONE, _ZERO = np.float32(1), np.float32(0)


def on_threads(function: Any, logits: Array, shared: tuple[Any, ...], *columns: Array) -> None:
    """Calls `function(logits, *shared, *columns)` for shares of the columns, a thread each."""
    count = len(columns[0])
    threads = min(torch.get_num_threads(), -(-count // ROWS_PER_THREAD))
    if threads <= 1:
        function(logits, *shared, *columns)
        return
    bounds = np.linspace(0, count, threads + 1).astype(int)
    shares = [[column[begin:end] for column in columns] for begin, end in itertools.pairwise(bounds)]
    others = [_pool().submit(function, logits, *shared, *share) for share in shares[1:]]
    function(logits, *shared, *shares[0])
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), thread_name_prefix="tidegate-sampling")


@intrinsic
def _bits_of(_context: Any, value: Any) -> Any:
    return types.int32(types.float32), lambda _, builder, __, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def _float_of(_context: Any, bits: Any) -> Any:
    return types.float32(types.int32), lambda _, builder, __, args: builder.bitcast(args[0], ir.FloatType())


@njit(cache=True, nogil=True)
def in_order(bits: np.int32) -> np.int32:
    """The bits of a float as an integer that orders as floats do, NaN at the ends; and back."""
    # numba would go on in 64 bits, and find half as much vector code.
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & _HIGHEST))


@njit(cache=True, nogil=True)
def _bounds(bits: NDArray[np.int32]) -> tuple[np.int32, np.int32]:
    """The largest and the smallest, as integers that are in order."""
    largest, smallest = _LOWEST, _HIGHEST
    for i in range(len(bits)):
        order = in_order(bits[i])
        largest, smallest = max(largest, order), min(smallest, order)
    return largest, smallest


@njit(cache=True, nogil=True)
def scan(row: Floats, maxima: Floats) -> tuple[np.float32, bool]:
    """`maxima` becomes the largest of each group. Returns the row's largest, and whether all are finite."""
    bits, group_bits = row.view(np.int32), maxima.view(np.int32)
    largest, smallest = _LOWEST, _HIGHEST
    for group in range(len(maxima)):
        high, low = _bounds(bits[group * GROUP : min((group + 1) * GROUP, len(row))])
        group_bits[group] = in_order(high)
        largest, smallest = max(largest, high), min(smallest, low)
    finite = largest < _INFINITE and smallest > ~_INFINITE
    return _float_of(in_order(largest)), bool(finite)


@njit(cache=True, nogil=True, fastmath={"contract", "nsz"})
def _exp(x: np.float32) -> np.float32:
    """Of x <= 0; 0 below 1e-38 and for NaN."""
    kept = x > _SMALLEST
    x = x if kept else _SMALLEST
    shifted = x * _LOG2_E + _ROUNDING
    n = shifted - _ROUNDING
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
    p = p * r * r + r + _ONE
    power = np.int32(_bits_of(shifted) << np.int32(23))
    return _float_of(np.int32(_bits_of(p) + power)) if kept else _ZERO


@njit(cache=True, nogil=True, fastmath={"reassoc", "nsz"})
def _exponentiate(logits: Floats, highest: np.float32, inverse: np.float32, weights: Floats) -> np.float32:
    total = _ZERO
    for i in range(len(logits)):
        weight = _exp((logits[i] - highest) * inverse)
        weights[i] = weight
        total += weight
    return total


@njit(cache=True, nogil=True)
def exponentiate(
    row: Floats, highest: np.float32, inverse: np.float32, weights: Floats, sums: Floats
) -> float:
    """`weights` becomes exp((row - highest) * inverse), 0 where that is below 1e-38, and `sums` the sum of
    each chunk. Returns their sum.
    """
    total = 0.0
    for chunk in range(len(sums)):
        part = slice(chunk * CHUNK, min((chunk + 1) * CHUNK, len(row)))
        sums[chunk] = _exponentiate(row[part], highest, inverse, weights[part])
        total += sums[chunk]
    return total


@njit(cache=True, nogil=True)
def list_from(values: Floats, maxima: Floats, floor: np.float32, ids: NDArray[np.int32], kept: Floats) -> int:
    """How many values are at least `floor`: their places go to `ids`, rising, and they to `kept`.

    Both must have room for one more than there are values.
    """
    count = 0
    for group in range(len(maxima)):
        if maxima[group] >= floor:
            for i in range(group * GROUP, min((group + 1) * GROUP, len(values))):
                ids[count] = i
                kept[count] = values[i]
                count += values[i] >= floor  # no branch: the processor could not foresee it
    return count


@njit(cache=True, nogil=True, fastmath={"reassoc", "nsz"})
def mass_from(values: Floats, floor: np.float32) -> float:
    """The sum of those that are at least `floor`."""
    mass = 0.0
    for i in range(len(values)):
        mass += np.float64(values[i] if values[i] >= floor else _ZERO)
    return mass


@njit(cache=True, nogil=True)
def _count_from(values: Floats, floor: np.float32) -> np.int32:
    count = np.int32(0)
    for i in range(len(values)):
        count = np.int32(count + np.int32(values[i] >= floor))
    return count


@njit(cache=True, nogil=True)
def find_edge(values: Floats, by_mass: bool, wanted: float) -> tuple[np.float32, float]:
    """The largest of `values` from which on there are `wanted` of them, or of their mass; else the smallest.

    Also returns the number, or the mass, of those above it. Halves the range of floats: no sort.
    """
    largest, smallest = _bounds(values.view(np.int32))
    low, high, above = np.int64(smallest), np.int64(largest), 0.0
    while low < high:
        middle = (low + high + 1) >> 1
        floor = _float_of(in_order(np.int32(middle)))
        reached = mass_from(values, floor) if by_mass else float(_count_from(values, floor))
        if reached >= wanted:
            low = middle
        else:
            high, above = middle - 1, reached
    return _float_of(in_order(np.int32(low))), above
