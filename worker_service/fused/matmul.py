"""The matrix stage: rows of activations times a packed matrix, shared by the crew.

Owns how the work is cut into items, and what becomes of the outputs.
"""

from __future__ import annotations

from typing import Any

from numba import carray, njit

from worker_service.fused import isa
from worker_service.fused.crew import finish, take, wait
from worker_service.fused.lanes import LANES
from worker_service.fused.memory import floats
from worker_service.fused.records import ADD, SILU
from worker_service.fused.tile import multiply_panel
from worker_service.fused.vectors import settle_row, silu_multiply

# Activations of a block of rows that stays in a core's L2 while panels pass by.
_BLOCK_BYTES = 192 * 1024
# A stage has about so many items a thread: few enough to be cheap, enough to share evenly.
_ITEMS_PER_THREAD = 10
_MAX_PANELS = 8
# A tile that is alone on its panel reads it from memory, and asks for so many bytes ahead.
_AHEAD_BYTES = 2048


@njit(nogil=True)
def multiply(
    kind: Any,
    words: int,
    stage: int,
    step: Any,
    matrix: Any,
    source: int,
    stride: int,
    rows: int,
    out: int,
    out_stride: int,
    scratch: int,
) -> int:
    """Rows times a matrix. Items are a group of panels by a block of rows; strides in bytes."""
    block = max(isa.MAX_TILE_ROWS, _BLOCK_BYTES // stride)
    blocks = -(-rows // block)
    block = -(-rows // blocks)
    together = 2 if matrix.outcome == SILU else 1
    columns = matrix.panels // together
    size = max(1, min(_MAX_PANELS, columns // (_ITEMS_PER_THREAD * step.threads)))
    items = -(-columns // size) * blocks
    while True:
        item = take(words, stage)
        if item >= items:
            break
        first = (item % blocks) * block
        last = min(rows, first + block)
        column = (item // blocks) * size
        for index in range(column, min(columns, column + size)):
            # Where threads take items by turns, the panel that this one has next.
            following = index + 1 if index + 1 < column + size else index + 1 + size * (step.threads - 1)
            _multiply_block(
                kind,
                step,
                matrix,
                index * together,
                following * together,
                first,
                last,
                source,
                stride,
                out + 4 * LANES * index,
                out_stride,
                scratch,
            )
        finish(words, stage, items)
    wait(words, stage, items)
    return stage + 1


@njit(nogil=True)
def _multiply_block(
    kind: Any,
    step: Any,
    matrix: Any,
    panel: int,
    following: int,
    first: int,
    last: int,
    source: int,
    stride: int,
    out: int,
    out_stride: int,
    scratch: int,
) -> None:
    """Rows first to last - 1 times one panel, or a pair of them, in tiles of even height.

    Each tile asks for its share of the `following` panel, so that memory is never idle while tiles compute on
    what is in the cache.
    """
    tiles = -(-(last - first) // isa.MAX_TILE_ROWS)
    row = first
    weights = matrix.address + panel * matrix.panel_bytes
    ahead, ahead_bytes = weights + _AHEAD_BYTES, matrix.panel_bytes
    if tiles > 1:
        ahead, ahead_bytes = matrix.address + following * matrix.panel_bytes, matrix.panel_bytes // tiles
    ahead_stride = ahead_bytes // matrix.steps
    for tile in range(tiles):
        count = (last - row + tiles - tile - 1) // (tiles - tile)
        values = source + row * stride
        target = out + row * out_stride
        multiply_panel(kind, count, values, stride, weights, matrix.steps, scratch, ahead, ahead_stride)
        ahead += ahead_bytes
        if matrix.outcome == SILU:
            up = scratch + 4 * LANES * isa.MAX_TILE_ROWS
            second = weights + matrix.panel_bytes
            multiply_panel(kind, count, values, stride, second, matrix.steps, up, ahead, ahead_stride)
            ahead += ahead_bytes
            _settle(kind, step, matrix, panel, row, count, scratch, scratch, 4 * LANES, 0)
            _settle(kind, step, matrix, panel + 1, row, count, up, up, 4 * LANES, 0)
            for index in range(count):
                offset = 4 * LANES * index
                silu_multiply(scratch + offset, up + offset, target + index * out_stride)
        else:
            add = 1 if matrix.outcome == ADD else 0
            _settle(kind, step, matrix, panel, row, count, scratch, target, out_stride, add)
        row += count


@njit(nogil=True)
def _settle(
    kind: Any,
    step: Any,
    matrix: Any,
    panel: int,
    row: int,
    count: int,
    sums: int,
    out: int,
    out_stride: int,
    add: int,
) -> None:
    column = 4 * LANES * panel
    scales = carray(floats(step.input_scales), (row + count,))
    bias = matrix.bias + column if matrix.bias != 0 else 0
    for index in range(count):
        settle_row(
            kind,
            sums + 4 * LANES * index,
            scales[row + index],
            matrix.scales + column,
            bias,
            add,
            out + index * out_stride,
        )
