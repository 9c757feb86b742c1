"""Paged attention as items of work: a few new tokens of one row, one KV head and its query heads.

Owns the flash-attention loop over a row's keys, 64 at a time, with running maxima and sums in fp32. Decodes
take dot products; chunks of a prompt take the matrix kernel over transposed keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from worker_service.fused import isa
from worker_service.fused.lanes import LANES
from worker_service.fused.memory import (
    floats,
    from_cache_order,
    integers,
    prefetch_line,
    read_cached,
    read_int32,
    read_row,
    to_cache_order,
)
from worker_service.fused.scores import MAX_VECTORS, score_tokens
from worker_service.fused.tile import add_cache_rows, multiply_panel
from worker_service.fused.vectors import exponentiate, max_visible

# Keys that share one update of the running maxima.
CHUNK = 64
# Floats from one vector's scores to the next one's: dot products write a little beyond a row.
_STRIDE = CHUNK + LANES
# Query vectors (tokens x query heads of a KV head) of an item: enough to repay transposing the keys.
MAX_UNIT_VECTORS = 96
# Up to so many, dot products are quicker.
_FEW_VECTORS = 12
_FP32 = np.empty(0, np.float32)


def scratch_bytes(group: int, head_dim: int) -> int:
    """What an item needs of its thread's scratch, for all that `attend_unit` lays out there."""
    vectors = max(MAX_UNIT_VECTORS, group)
    panel = head_dim * LANES + LANES * isa.MAX_TILE_ROWS + head_dim
    return 4 * (2 * vectors * head_dim + vectors * _STRIDE + 2 * vectors + panel) + 64


@njit(nogil=True)
def attend_unit(kind: Any, model: Any, layer: Any, step: Any, unit: int, head: int, scratch: int) -> None:
    """Attention of one unit's tokens over KV head `head`, from `projected` to `mixed`."""
    row = carray(integers(step.unit_rows), (step.units,))[unit]
    first = carray(integers(step.unit_firsts), (step.units,))[unit]
    tokens = carray(integers(step.unit_tokens), (step.units,))[unit]
    begin = read_int32(step.query_starts + 4 * row)
    query_tokens = read_int32(step.query_starts + 4 * row + 4) - begin
    position = read_int32(step.seq_lens + 4 * row) - query_tokens + first  # of the unit's first token
    table = step.tables + 4 * row * step.table_width

    dim = model.head_dim
    group = model.heads // model.kv_heads
    vectors = tokens * group
    queries = scratch
    sums = queries + 4 * vectors * dim
    scores = sums + 4 * vectors * dim
    maxima = carray(floats(scores + 4 * vectors * _STRIDE), (vectors,))
    totals = carray(floats(scores + 4 * vectors * (_STRIDE + 1)), (vectors,))
    panel = scores + 4 * vectors * (_STRIDE + 2)
    maxima[:] = -np.inf
    totals[:] = 0.0
    carray(floats(sums), (vectors * dim,))[:] = 0.0
    _copy_queries(kind, model, step, begin + first, tokens, head, queries)

    last_key = position + tokens  # exclusive
    first_key = 0
    if layer.window > 0:
        first_key = max(0, position - layer.window + 1)
    for start in range(first_key, last_key, CHUNK):
        count = min(CHUNK, last_key - start)
        _score_keys(kind, model, layer, step, table, head, start, count, vectors, queries, scores, panel)
        _weigh_keys(layer, position, group, dim, start, count, vectors, scores, maxima, totals, sums)
        _mix_values(kind, model, layer, step, table, head, start, count, last_key, vectors, scores, sums)
    _write_mixed(kind, model, step, begin + first, tokens, head, sums, totals)


@njit(nogil=True, inline="always")
def _copy_queries(kind: Any, model: Any, step: Any, first: int, tokens: int, head: int, queries: int) -> None:
    dim = model.head_dim
    group = model.heads // model.kv_heads
    width = (model.heads + 2 * model.kv_heads) * dim
    scale = np.float32(model.scale)
    for token in range(tokens):
        source = step.projected + 4 * ((first + token) * width + head * group * dim)
        target = queries + 4 * token * group * dim
        for index in range(0, group * dim, LANES):
            to_cache_order(kind, source + 4 * index, scale, target + 4 * index)


@njit(nogil=True, inline="always")
def _write_mixed(
    kind: Any, model: Any, step: Any, first: int, tokens: int, head: int, sums: int, totals: Any
) -> None:
    dim = model.head_dim
    group = model.heads // model.kv_heads
    for token in range(tokens):
        for member in range(group):
            vector = token * group + member
            column = ((first + token) * model.heads + head * group + member) * dim
            factor = np.float32(1.0) / totals[vector]
            for index in range(0, dim, LANES):
                from_cache_order(
                    kind, sums + 4 * (vector * dim + index), factor, step.mixed + 4 * (column + index)
                )


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
            multiply_panel(_FP32, rows, queries + 4 * vector * dim, 4 * dim, panel, dim, results)
            for index in range(rows):
                target = scores + 4 * ((vector + index) * _STRIDE + lane)
                read_row(_FP32, results + 4 * LANES * index, target)


@njit(nogil=True, inline="always")
def _transpose_keys(
    kind: Any, model: Any, layer: Any, step: Any, table: int, head: int, start: int, count: int, panel: int
) -> None:
    """Puts up to 16 keys side by side, `[head_dim, 16]`. Nobody reads the lanes beyond."""
    dim = model.head_dim
    target = carray(floats(panel), (dim, LANES))
    row = panel + 4 * (dim * LANES + LANES * isa.MAX_TILE_ROWS)
    source = carray(floats(row), (dim,))
    for lane in range(count):
        place, _ = _run(step, table, head, model.kv_heads, start + lane, 1)
        address = layer.key_cache + place * dim * kind.itemsize
        for index in range(0, dim, LANES):
            read_cached(kind, address + index * kind.itemsize, row + 4 * index)
        for index in range(dim):
            target[index, lane] = source[index]


@njit(nogil=True, inline="always")
def _weigh_keys(
    layer: Any,
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
    lanes = -(-count // LANES)
    for vector in range(vectors):
        query = position + vector // group - start  # its own key's place in this chunk
        last = min(count, query + 1)
        first = 0
        if layer.window > 0:
            first = max(0, query - layer.window + 1)
        row = scores + 4 * vector * _STRIDE
        largest = maxima[vector]
        for lane in range(lanes):
            found = max_visible(row + 4 * LANES * lane, first - LANES * lane, last - LANES * lane)
            if found > largest:
                largest = found
        if largest > maxima[vector]:
            _rescale(vector, dim, largest, maxima, totals, sums)
        total = np.float32(0.0)
        for lane in range(lanes):
            total += exponentiate(row + 4 * LANES * lane, largest, first - LANES * lane, last - LANES * lane)
        totals[vector] += total


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
