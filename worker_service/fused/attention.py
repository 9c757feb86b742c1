"""Paged attention as items of work: a few tokens, one KV head and its query heads.

Owns what an item is. A unit is a few new tokens of one row, from its first key to its last. A prefix unit is
tokens of several rows whose tables begin with the same blocks, over a range of those blocks: it leaves its
state, from which the rows' own units go on. `prefixes.py` finds them, `flash.py` has the loop over keys.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, njit

from worker_service.fused.flash import attend_keys, clear_state, scratch_floats
from worker_service.fused.lanes import LANES
from worker_service.fused.memory import floats, from_cache_order, integers, read_int32, to_cache_order

# Query vectors (tokens x query heads of a KV head) of an item: enough to repay transposing the keys.
MAX_UNIT_VECTORS = 96


def scratch_bytes(group: int, head_dim: int) -> int:
    """What an item needs of its thread's scratch: queries, a state, and what the loop over keys needs."""
    vectors = max(MAX_UNIT_VECTORS, group)
    return 4 * (vectors * (2 * head_dim + 2) + scratch_floats(vectors, head_dim)) + 64


@njit(nogil=True, inline="always")
def live_window(layer: Any, step: Any) -> int:
    """Tokens that a token of this layer sees; 0 where that is more than any row has."""
    return layer.window if layer.window < step.longest else 0


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
    vectors = tokens * (model.heads // model.kv_heads)
    queries = scratch
    state = queries + 4 * vectors * dim
    rest = state + 4 * vectors * (dim + 2)
    for token in range(tokens):
        _copy_queries(kind, model, step, begin + first + token, token, head, queries)
    clear_state(state, vectors, dim)
    window = live_window(layer, step)
    first_key = 0
    if window > 0:
        first_key = max(0, position - window + 1)
    elif step.prefix_units > 0:
        first_key = _join_parts(model, step, row, first, vectors, head, state)
    attend_keys(
        kind,
        model,
        layer,
        step,
        table,
        head,
        first_key,
        position + tokens,
        position,
        window,
        vectors,
        queries,
        state,
        rest,
    )
    _write_mixed(kind, model, step, begin + first, tokens, head, state)


@njit(nogil=True)
def attend_prefix(kind: Any, model: Any, layer: Any, step: Any, unit: int, head: int, scratch: int) -> None:
    """The state of a prefix unit's tokens after its range of keys, all of which they see."""
    row = carray(integers(step.prefix_rows), (step.prefix_units,))[unit]
    first = carray(integers(step.prefix_firsts), (step.prefix_units,))[unit]
    tokens = carray(integers(step.prefix_counts), (step.prefix_units,))[unit]
    first_key = carray(integers(step.prefix_starts), (step.prefix_units,))[unit]
    last_key = carray(integers(step.prefix_ends), (step.prefix_units,))[unit]
    members = carray(integers(step.prefix_tokens), (first + tokens,))
    for token in range(tokens):
        _copy_queries(kind, model, step, members[first + token], token, head, scratch)
    vectors = tokens * (model.heads // model.kv_heads)
    state = _state(model, step, unit, head)
    clear_state(state, vectors, model.head_dim)
    attend_keys(
        kind,
        model,
        layer,
        step,
        step.tables + 4 * row * step.table_width,
        head,
        first_key,
        last_key,
        last_key,
        0,
        vectors,
        scratch,
        state,
        scratch + 4 * vectors * model.head_dim,
    )


@njit(nogil=True, inline="always")
def _state(model: Any, step: Any, unit: int, head: int) -> int:
    """Where a prefix unit leaves its state for a KV head."""
    tokens = carray(integers(step.prefix_counts), (step.prefix_units,))[unit]
    before = carray(integers(step.prefix_states), (step.prefix_units,))[unit]
    group = model.heads // model.kv_heads
    return step.states + 4 * (before * model.kv_heads + head * tokens) * group * (model.head_dim + 2)


@njit(nogil=True, inline="always")
def _join_parts(model: Any, step: Any, row: int, first: int, vectors: int, head: int, state: int) -> int:
    """Joins what prefix units left for a row's tokens into one state. Returns the first key not in it."""
    dim = model.head_dim
    group = model.heads // model.kv_heads
    begin = _read(step.part_starts, row)
    end = _read(step.part_starts, row + 1)
    maxima = state + 4 * vectors * dim
    largest = carray(floats(maxima), (vectors,))
    totals = carray(floats(maxima + 4 * vectors), (vectors,))
    for part in range(begin, end):
        unit = _read(step.part_units, part)
        offset = (_read(step.part_tokens, part) + first) * group
        size = _read(step.prefix_counts, unit) * group
        source = _state(model, step, unit, head)
        their_largest = carray(floats(source + 4 * size * dim), (size,))
        their_totals = carray(floats(source + 4 * size * (dim + 1)), (size,))
        for vector in range(vectors):
            theirs = their_largest[offset + vector]
            most = max(largest[vector], theirs)
            keep, take = np.float32(math.exp(largest[vector] - most)), np.float32(math.exp(theirs - most))
            largest[vector] = most
            totals[vector] = totals[vector] * keep + their_totals[offset + vector] * take
            sums = carray(floats(state + 4 * vector * dim), (dim,))
            more = carray(floats(source + 4 * (offset + vector) * dim), (dim,))
            for index in range(dim):
                sums[index] = sums[index] * keep + more[index] * take
    return _read(step.prefix_lengths, row)


@njit(nogil=True, inline="always")
def _read(address: int, index: int) -> int:
    """An int64 of a column."""
    return carray(integers(address), (index + 1,))[index]


@njit(nogil=True, inline="always")
def _copy_queries(kind: Any, model: Any, step: Any, source: int, token: int, head: int, queries: int) -> None:
    """The queries of the batch's token `source` become those of the item's token `token`, scaled."""
    group = model.heads // model.kv_heads
    width = (model.heads + 2 * model.kv_heads) * model.head_dim
    size = group * model.head_dim
    row = step.projected + 4 * (source * width + head * size)
    target = queries + 4 * token * size
    scale = np.float32(model.scale)
    for index in range(0, size, LANES):
        to_cache_order(kind, row + 4 * index, scale, target + 4 * index)


@njit(nogil=True, inline="always")
def _write_mixed(kind: Any, model: Any, step: Any, first: int, tokens: int, head: int, state: int) -> None:
    dim = model.head_dim
    group = model.heads // model.kv_heads
    totals = carray(floats(state + 4 * tokens * group * (dim + 1)), (tokens * group,))
    for token in range(tokens):
        for member in range(group):
            vector = token * group + member
            column = ((first + token) * model.heads + head * group + member) * dim
            factor = np.float32(1.0) / totals[vector]
            for index in range(0, dim, LANES):
                source = state + 4 * (vector * dim + index)
                from_cache_order(kind, source, factor, step.mixed + 4 * (column + index))
