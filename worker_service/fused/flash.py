"""The flash-attention loop: a few query vectors over a range of one row's keys.

Owns the running state of the vectors and the loop that carries it on, 64 keys at a time, in fp32. Few vectors
take dot products, many the matrix kernel over transposed keys. Knows nothing of rows, units or prefixes.

A state lies at one address: sums of values `[V, D]` in cache order, then maxima `[V]`, then totals `[V]`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from worker_service.fused import isa
from worker_service.fused.lanes import LANES
from worker_service.fused.memory import floats, integers, prefetch_line, read_int32, read_row
from worker_service.fused.scores import MAX_VECTORS, read_square, score_tokens
from worker_service.fused.tile import add_cache_rows, multiply_panel
from worker_service.fused.vectors import exponentiate, max_visible

# Keys that share one update of the running maxima.
CHUNK = 64
# Floats from one vector's scores to the next one's: dot products write a little beyond a row.
_STRIDE = CHUNK + LANES
# Up to so many vectors, dot products are quicker.
_FEW_VECTORS = 12
_FP32 = np.empty(0, np.float32)


def scratch_floats(vectors: int, head_dim: int) -> int:
    """What `attend_keys` needs of its thread's scratch for so many vectors."""
    panel = head_dim * LANES + LANES * isa.MAX_TILE_ROWS + 2 * LANES
    return vectors * _STRIDE + panel


@njit(nogil=True, inline="always")
def clear_state(state: int, vectors: int, dim: int) -> None:
    """The state of vectors that have seen no key."""
    carray(floats(state), (vectors * dim,))[:] = 0.0
    carray(floats(state + 4 * vectors * dim), (vectors,))[:] = -np.inf
    carray(floats(state + 4 * vectors * (dim + 1)), (vectors,))[:] = 0.0


@njit(nogil=True)
def attend_keys(
    kind: Any,
    model: Any,
    layer: Any,
    step: Any,
    table: int,
    head: int,
    first_key: int,
    last_key: int,
    position: int,
    window: int,
    vectors: int,
    queries: int,
    state: int,
    scratch: int,
) -> None:
    """Carries the state on over keys first_key to last_key - 1 of KV head `head`, of the row at `table`.

    Vectors are tokens x query heads of the KV head, the first token at `position`: each sees the keys up to
    its own position, of those the last `window` (0: all). Queries are scaled and in cache order.
    """
    dim = model.head_dim
    group = model.heads // model.kv_heads
    sums = state
    maxima = carray(floats(state + 4 * vectors * dim), (vectors,))
    totals = carray(floats(state + 4 * vectors * (dim + 1)), (vectors,))
    scores = scratch
    panel = scores + 4 * vectors * _STRIDE
    for start in range(first_key, last_key, CHUNK):
        count = min(CHUNK, last_key - start)
        _score_keys(kind, model, layer, step, table, head, start, count, vectors, queries, scores, panel)
        _weigh_keys(window, position, group, dim, start, count, vectors, scores, maxima, totals, sums)
        _mix_values(kind, model, layer, step, table, head, start, count, last_key, vectors, scores, sums)


@njit(nogil=True, inline="always")
def _run(step: Any, table: int, head: int, heads: int, token: int, most: int) -> tuple[int, int]:
    """Where a cached token lies, in tokens from the cache's start, and how many lie there in a row."""
    block = token // step.block_size
    offset = token - block * step.block_size
    place = (read_int32(table + 4 * block) * heads + head) * step.block_size + offset
    return place, min(most, step.block_size - offset)


@njit(nogil=True, inline="always")
def _keys_ahead(
    kind: Any,
    model: Any,
    layer: Any,
    step: Any,
    table: int,
    head: int,
    token: int,
    last_key: int,
    vectors: int,
) -> tuple[int, int]:
    """Where the next chunk's keys lie, and how many tokens of them; none for many vectors."""
    if vectors > _FEW_VECTORS or token >= last_key:
        return 0, 0
    place, run = _run(step, table, head, model.kv_heads, token, last_key - token)
    return layer.key_cache + place * model.head_dim * kind.itemsize, run


@njit(nogil=True, inline="always")
def _prefetch(address: int, count: int) -> None:
    """Asks for bytes half a chunk before they are read, a few lines at a time."""
    for offset in range(0, count, 64):
        prefetch_line(address + offset)


@njit(nogil=True, inline="always")
def _score_keys(
    kind: Any,
    model: Any,
    layer: Any,
    step: Any,
    table: int,
    head: int,
    start: int,
    count: int,
    vectors: int,
    queries: int,
    scores: int,
    panel: int,
) -> None:
    dim = model.head_dim
    key_bytes = dim * kind.itemsize
    if vectors <= _FEW_VECTORS:
        token = 0
        while token < count:
            place, run = _run(step, table, head, model.kv_heads, start + token, count - token)
            for vector in range(0, vectors, MAX_VECTORS):
                score_tokens(
                    kind,
                    min(MAX_VECTORS, vectors - vector),
                    queries + 4 * vector * dim,
                    layer.key_cache + place * key_bytes,
                    run,
                    dim,
                    scores + 4 * (vector * _STRIDE + token),
                    4 * _STRIDE,
                    layer.value_cache + place * key_bytes,
                )
            token += run
        return
    results = panel + 4 * dim * LANES
    for lane in range(0, count, LANES):
        _transpose_keys(kind, model, layer, step, table, head, start + lane, min(LANES, count - lane), panel)
        for vector in range(0, vectors, isa.MAX_TILE_ROWS):
            rows = min(isa.MAX_TILE_ROWS, vectors - vector)
            multiply_panel(_FP32, rows, queries + 4 * vector * dim, 4 * dim, panel, dim, results, panel, 0)
            for index in range(rows):
                target = scores + 4 * ((vector + index) * _STRIDE + lane)
                read_row(_FP32, results + 4 * LANES * index, target)


@njit(nogil=True)
def _transpose_keys(
    kind: Any, model: Any, layer: Any, step: Any, table: int, head: int, start: int, count: int, panel: int
) -> None:
    """Puts up to 16 keys side by side, `[head_dim, 16]`. Lanes beyond have the last key again."""
    dim = model.head_dim
    rows = panel + 4 * (dim * LANES + LANES * isa.MAX_TILE_ROWS)
    addresses = carray(integers(rows), (LANES,))
    lane = 0
    while lane < count:
        place, run = _run(step, table, head, model.kv_heads, start + lane, count - lane)
        for index in range(run):
            addresses[lane + index] = layer.key_cache + (place + index) * dim * kind.itemsize
        lane += run
    addresses[count:] = addresses[count - 1]
    for index in range(0, dim, LANES):
        read_square(kind, rows, panel + 4 * index * LANES)
        for lane in range(LANES):
            addresses[lane] += LANES * kind.itemsize


@njit(nogil=True, inline="always")
def _weigh_keys(
    window: int,
    position: int,
    group: int,
    dim: int,
    start: int,
    count: int,
    vectors: int,
    scores: int,
    maxima: Any,
    totals: Any,
    sums: int,
) -> None:
    """Scores become weights e^(score - maximum); sums and totals of earlier keys follow a new maximum."""
    groups = -(-count // LANES)
    tokens = vectors // group
    # Maxima first, weights afterwards: nothing in either loop waits for the vector before.
    for token in range(tokens):
        first, last = _seen(window, position + token - start, count)
        for vector in range(token * group, (token + 1) * group):
            largest = max_visible(scores + 4 * vector * _STRIDE, groups, first, last)
            if largest > maxima[vector]:
                _rescale(vector, dim, largest, maxima, totals, sums)
    for token in range(tokens):
        first, last = _seen(window, position + token - start, count)
        for vector in range(token * group, (token + 1) * group):
            row = scores + 4 * vector * _STRIDE
            totals[vector] += exponentiate(row, groups, maxima[vector], first, last)


@njit(nogil=True, inline="always")
def _seen(window: int, query: int, count: int) -> tuple[int, int]:
    """The first of a chunk's keys that a token sees, and behind the last; its own has place `query`."""
    first = max(0, query - window + 1) if window > 0 else 0
    return first, min(count, query + 1)


@njit(nogil=True, inline="always")
def _rescale(vector: int, dim: int, largest: float, maxima: Any, totals: Any, sums: int) -> None:
    factor = np.float32(np.exp(maxima[vector] - largest))
    maxima[vector] = largest
    totals[vector] *= factor
    values = carray(floats(sums + 4 * vector * dim), (dim,))
    for index in range(dim):
        values[index] *= factor


@njit(nogil=True, inline="always")
def _mix_values(
    kind: Any,
    model: Any,
    layer: Any,
    step: Any,
    table: int,
    head: int,
    start: int,
    count: int,
    last_key: int,
    vectors: int,
    scores: int,
    sums: int,
) -> None:
    dim = model.head_dim
    token = 0
    while token < count:
        place, run = _run(step, table, head, model.kv_heads, start + token, count - token)
        values = layer.value_cache + place * dim * kind.itemsize
        ahead, next_run = _keys_ahead(
            kind, model, layer, step, table, head, start + token + CHUNK, last_key, vectors
        )
        for vector in range(0, vectors, isa.MAX_TILE_ROWS):
            rows = min(isa.MAX_TILE_ROWS, vectors - vector)
            for index in range(0, dim, LANES):
                _prefetch(ahead + index * next_run * kind.itemsize, LANES * next_run * kind.itemsize)
                add_cache_rows(
                    kind,
                    rows,
                    scores + 4 * (vector * _STRIDE + token),
                    4 * _STRIDE,
                    values + index * kind.itemsize,
                    dim * kind.itemsize,
                    run,
                    sums + 4 * (vector * dim + index),
                    4 * dim,
                )
        token += run
