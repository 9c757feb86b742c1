"""What happens to one token's row between the matrices: norm, conversion, rotary embedding, embedding lookup.

Owns the numba code for a single row. Knows nothing of threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, njit

from worker_service.fused.lanes import LANES
from worker_service.fused.memory import floats, read_element
from worker_service.fused.vectors import group_inputs, largest_magnitude, round_row

# Sums may be reordered, so that they become vectors. NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "nsz"}
# Sums of int8 weights and int16 activations stay within 32 bits: inputs x levels x 127 < 2^31.
_MAX_LEVELS = 32767
_LEVELS_TIMES_INPUTS = (2**31 - 1) // 127


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def norm_row(row: int, weights: int, count: int, epsilon: float, out: int) -> None:
    """RMSNorm: out = row / sqrt(mean(row^2) + epsilon) * weights; `out` may be `row`."""
    source = carray(floats(row), (count,))
    factors = carray(floats(weights), (count,))
    target = carray(floats(out), (count,))
    total = np.float32(0.0)
    for index in range(count):
        total += source[index] * source[index]
    scale = np.float32(1.0 / math.sqrt(total / count + epsilon))
    for index in range(count):
        target[index] = source[index] * scale * factors[index]


@njit(nogil=True, error_model="numpy")
def convert_row(kind: Any, row: int, count: int, out: int) -> float:
    """Writes a row as the activations that weights of this kind want, and returns the scale to undo it.

    For int8 weights that is int16 with as many levels as can't overflow: 8 bits would cost ten times the
    accuracy that 8-bit weights do.
    """
    factor = np.float32(1.0)
    scale = np.float32(1.0)
    if kind.itemsize == 1:
        largest = np.float32(0.0)
        for index in range(0, count, LANES):
            value = largest_magnitude(row + 4 * index)
            if value > largest or value != value:  # a NaN stays, so that a broken row shows
                largest = value
        if largest != 0.0:
            levels = np.float32(min(_MAX_LEVELS, _LEVELS_TIMES_INPUTS // count))
            scale = np.float32(largest / levels)
            factor = np.float32(levels / largest)
    for index in range(0, count, LANES):
        round_row(kind, row + 4 * index, factor, out + 2 * index)
    return float(scale)


@njit(nogil=True, fastmath=_FAST)
def rotate_row(row: int, cosines: int, sines: int, half: int) -> None:
    """Rotates one head's vector: element i together with element i + half."""
    first = carray(floats(row), (half,))
    second = carray(floats(row + 4 * half), (half,))
    cosine = carray(floats(cosines), (half,))
    sine = carray(floats(sines), (half,))
    for index in range(half):
        a = first[index]
        b = second[index]
        first[index] = a * cosine[index] - b * sine[index]
        second[index] = b * cosine[index] + a * sine[index]


@njit(nogil=True)
def read_panel_column(kind: Any, matrix: Any, output: int, inputs: int, out: int) -> None:
    """The weights of one output of a packed matrix, as fp32."""
    target = carray(floats(out), (inputs,))
    group = group_inputs(kind)
    lane = output % LANES
    panel = matrix.address + (output // LANES) * matrix.panel_bytes
    scale = np.float32(1.0)
    if matrix.scales != 0:
        scale = carray(floats(matrix.scales), (output + 1,))[output]
    for index in range(inputs):
        element = (index // group * LANES + lane) * group + index % group
        target[index] = read_element(kind, panel + element * kind.itemsize) * scale


@njit(nogil=True)
def copy_floats(source: int, out: int, count: int) -> None:
    """Copies `count` fp32."""
    values = carray(floats(source), (count,))
    target = carray(floats(out), (count,))
    for index in range(count):
        target[index] = values[index]
