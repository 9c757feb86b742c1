"""The stages of a step beside the matrices, each shared by the crew: norms, rotary and KV write, attention.

Owns how a stage is cut into items. Each function is called by every thread with the same arguments but
`scratch`, and returns when the stage is done.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from worker_service.fused.attention import attend_prefix, attend_unit
from worker_service.fused.crew import finish, take, wait
from worker_service.fused.lanes import LANES
from worker_service.fused.memory import floats, integers, read_row, write_row
from worker_service.fused.rows import convert_row, copy_floats, norm_row, read_panel_column, rotate_row
from worker_service.fused.vectors import converts


@njit(nogil=True, inline="always")
def rows_per_item(rows: int, threads: int) -> int:
    """Rows that an item of a row-wise stage takes."""
    return max(1, min(16, rows // (2 * threads)))


@njit(nogil=True)
def norm_rows(
    kind: Any,
    words: int,
    stage: int,
    model: Any,
    step: Any,
    weights: int,
    source: int,
    rows: int,
    scratch: int,
) -> int:
    """RMSNorm of `rows` rows of `source`, as the next matrix's input."""
    size = rows_per_item(rows, step.threads)
    items = -(-rows // size)
    while True:
        item = take(words, stage)
        if item >= items:
            break
        for row in range(item * size, min(rows, (item + 1) * size)):
            target = step.input + row * step.input_stride
            values = source + 4 * row * model.hidden
            if converts(kind):
                norm_row(values, weights, model.hidden, model.epsilon, scratch)
                _convert(kind, step, row, scratch, model.hidden)
            else:
                norm_row(values, weights, model.hidden, model.epsilon, target)
        finish(words, stage, items)
    wait(words, stage, items)
    return stage + 1


@njit(nogil=True, inline="always")
def _convert(kind: Any, step: Any, row: int, source: int, count: int) -> None:
    scales = carray(floats(step.input_scales), (row + 1,))
    scales[row] = convert_row(kind, source, count, step.input + row * step.input_stride)


@njit(nogil=True)
def convert_rows(kind: Any, words: int, stage: int, step: Any, source: int, count: int, rows: int) -> int:
    """Rows of fp32 become the next matrix's input, where that is not fp32."""
    size = rows_per_item(rows, step.threads)
    items = -(-rows // size)
    while True:
        item = take(words, stage)
        if item >= items:
            break
        for row in range(item * size, min(rows, (item + 1) * size)):
            _convert(kind, step, row, source + 4 * row * count, count)
        finish(words, stage, items)
    wait(words, stage, items)
    return stage + 1


@njit(nogil=True, inline="always")
def rotate_and_write(cache_kind: Any, words: int, stage: int, model: Any, layer: Any, step: Any) -> int:
    """Query and key norms, rotary embedding, and keys and values into their slots of the cache."""
    size = rows_per_item(step.tokens, step.threads)
    items = -(-step.tokens // size)
    while True:
        item = take(words, stage)
        if item >= items:
            break
        for token in range(item * size, min(step.tokens, (item + 1) * size)):
            _rotate_token(model, layer, step, token)
            _write_token(cache_kind, model, layer, step, token)
        finish(words, stage, items)
    wait(words, stage, items)
    return stage + 1


@njit(nogil=True, inline="always")
def _rotate_token(model: Any, layer: Any, step: Any, token: int) -> None:
    dim = model.head_dim
    position = carray(integers(step.positions), (step.tokens,))[token]
    row = step.projected + 4 * token * (model.heads + 2 * model.kv_heads) * dim
    for head in range(model.heads + model.kv_heads):
        vector = row + 4 * head * dim
        weights = layer.query_norm if head < model.heads else layer.key_norm
        if weights != 0:
            norm_row(vector, weights, dim, model.epsilon, vector)
        offset = 4 * position * (dim // 2)
        rotate_row(vector, model.cosines + offset, model.sines + offset, dim // 2)


@njit(nogil=True, inline="always")
def _write_token(kind: Any, model: Any, layer: Any, step: Any, token: int) -> None:
    dim = model.head_dim
    slot = carray(integers(step.slots), (step.tokens,))[token]
    block = slot // step.block_size
    row = step.projected + 4 * (token * (model.heads + 2 * model.kv_heads) + model.heads) * dim
    for head in range(model.kv_heads):
        place = (block * model.kv_heads + head) * step.block_size + slot - block * step.block_size
        key = row + 4 * head * dim
        for index in range(0, dim, LANES):
            offset = (place * dim + index) * kind.itemsize
            write_row(kind, key + 4 * index, layer.key_cache + offset)
            write_row(kind, key + 4 * (model.kv_heads * dim + index), layer.value_cache + offset)


@njit(nogil=True, inline="always")
def attend_prefixes(
    cache_kind: Any, words: int, stage: int, model: Any, layer: Any, step: Any, scratch: int
) -> int:
    """Attention over the blocks that rows share, before each row's own."""
    items = step.prefix_units * model.kv_heads
    while True:
        item = take(words, stage)
        if item >= items:
            break
        attend_prefix(cache_kind, model, layer, step, item // model.kv_heads, item % model.kv_heads, scratch)
        finish(words, stage, items)
    wait(words, stage, items)
    return stage + 1


@njit(nogil=True, inline="always")
def attend(cache_kind: Any, words: int, stage: int, model: Any, layer: Any, step: Any, scratch: int) -> int:
    """Paged attention of all rows."""
    items = step.units * model.kv_heads
    while True:
        item = take(words, stage)
        if item >= items:
            break
        attend_unit(cache_kind, model, layer, step, item // model.kv_heads, item % model.kv_heads, scratch)
        finish(words, stage, items)
    wait(words, stage, items)
    return stage + 1


@njit(nogil=True, inline="always")
def embed(kind: Any, embedding_kind: Any, words: int, stage: int, model: Any, step: Any, logits: Any) -> int:
    """Token ids become rows of `hidden`, from the embedding, or from the logits' panels if they share."""
    size = rows_per_item(step.tokens, step.threads)
    items = -(-step.tokens // size)
    ids = carray(integers(step.token_ids), (step.tokens,))
    while True:
        item = take(words, stage)
        if item >= items:
            break
        for token in range(item * size, min(step.tokens, (item + 1) * size)):
            target = step.hidden + 4 * token * model.hidden
            if model.embedding != 0:
                source = model.embedding + ids[token] * model.hidden * embedding_kind.itemsize
                for index in range(0, model.hidden, LANES):
                    read_row(embedding_kind, source + index * embedding_kind.itemsize, target + 4 * index)
            else:
                read_panel_column(kind, logits, ids[token], model.hidden, target)
        finish(words, stage, items)
    wait(words, stage, items)
    return stage + 1


@njit(nogil=True, inline="always")
def pick_rows(words: int, stage: int, model: Any, step: Any) -> int:
    """Copies the rows that sample: what follows is computed for them alone."""
    ids = carray(integers(step.logit_rows), (step.sampled,))
    width = model.heads * model.head_dim
    items = min(step.sampled, np.int64(1))
    if take(words, stage) == 0:
        for index in range(step.sampled):
            copy_floats(
                step.hidden + 4 * ids[index] * model.hidden,
                step.picked_hidden + 4 * index * model.hidden,
                model.hidden,
            )
            copy_floats(step.mixed + 4 * ids[index] * width, step.picked_mixed + 4 * index * width, width)
        finish(words, stage, items)
    wait(words, stage, items)
    return stage + 1
