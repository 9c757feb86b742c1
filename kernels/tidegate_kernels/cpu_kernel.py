"""Attention on CPUs over paged keys and values: the compiled function that every thread runs.

Owns the walk over tasks, tokens and blocks. The arithmetic of one block is cpu_tile's, the cut into tasks
cpu_layout's.

Threads take tasks from a counter until none is left, so that one that loses its core holds up no more than
its own task. Long contexts are cut into stretches and merged at the end (flash-decoding, Dao et al. 2023).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types
from numba.extending import register_jitable

from tidegate_kernels.cpu_layout import BUNDLE, first_key
from tidegate_kernels.cpu_tile import SOURCE_VERSION, attend_block
from tidegate_kernels.cpu_vectors import atomic_add, float32_at, int32_at, int64_at, place, uint16_at

# What the int64 arguments mean, by index. Strides are in elements, everything else that is not a number of
# something is an address. NEXT_TASK is the counter.
(
    NEXT_TASK, FIRST_TASK, FIRST_STATE, STARTS, LENGTHS, TABLES, TABLE_STRIDE, ROWS, STRETCH, WINDOW,
    KV_HEADS, GROUP, QUERY, QUERY_TOKEN_STRIDE, QUERY_HEAD_STRIDE, KEYS, VALUES, KEY_BLOCK_STRIDE,
    VALUE_BLOCK_STRIDE, OUTPUT, STATES, FINISHED, FACTORS, ARGUMENTS,
) = range(24)  # fmt: skip
# What a task is, by index.
(
    ROW,
    TOKEN,
    TOKENS,
    POSITION,
    KV_HEAD,
    LOW,
    HIGH,
    FIRST_STRETCH,
    STRETCHES,
    OWN_STATE,
    ROW_STATES,
    TASK_FIELDS,
) = range(12)

_FAST = {"reassoc", "contract", "nsz"}
_jit = njit(cache=True, fastmath=_FAST, error_model="numpy")


@register_jitable
def state_floats(padded: int, head_dim: int) -> int:
    """Floats that hold outputs, maxima and sums of `padded` query heads, rounded up to a cache line."""
    return (padded * (head_dim + 2) + 15) // 16 * 16


@_jit
def _find(a: Any, number: int, block_size: int, task: Any) -> None:
    """Fills in what task `number` is."""
    first_task = carray(int64_at(a[FIRST_TASK]), (a[ROWS] + 1,))
    row = np.searchsorted(first_task, number, side="right") - 1
    starts = carray(int32_at(a[STARTS]), (a[ROWS] + 1,))
    length = np.int64(carray(int32_at(a[LENGTHS]), (a[ROWS],))[row])
    queries = np.int64(starts[row + 1] - starts[row])
    bundles = (queries + BUNDLE - 1) // BUNDLE
    base = first_key(length, queries, a[WINDOW], block_size)
    stretches = (length - base + a[STRETCH] - 1) // a[STRETCH]
    # Bundles of the same keys follow each other, so that threads share what is in the cache.
    local = number - first_task[row]
    bundle = local % bundles
    kv_head = local // bundles % a[KV_HEADS]
    stretch = local // (bundles * a[KV_HEADS])
    task[ROW], task[KV_HEAD], task[STRETCHES] = row, kv_head, stretches
    task[TOKEN] = starts[row] + bundle * BUNDLE
    task[TOKENS] = min(BUNDLE, queries - bundle * BUNDLE)
    task[POSITION] = length - queries + bundle * BUNDLE
    task[LOW], task[HIGH] = base + stretch * a[STRETCH], base + (stretch + 1) * a[STRETCH]
    task[FIRST_STRETCH] = first_task[row] + kv_head * bundles + bundle
    # A row's states are [KV head, new token, stretch].
    first_state = carray(int64_at(a[FIRST_STATE]), (a[ROWS] + 1,))[row]
    task[ROW_STATES] = first_state + (kv_head * queries + bundle * BUNDLE) * stretches
    task[OWN_STATE] = task[ROW_STATES] + stretch


@_jit
def _load_query(a: Any, token: int, kv_head: int, scale: float, bf16: bool, order: Any, query: Any) -> None:
    """The group's query heads, scaled, into `query` [padded group, D]. The padding is 0."""
    query[:] = 0
    bits = query.view(np.uint32)
    width = query.shape[1]
    for head in range(a[GROUP]):
        start = token * a[QUERY_TOKEN_STRIDE] + (kv_head * a[GROUP] + head) * a[QUERY_HEAD_STRIDE]
        if bf16:
            halves = carray(uint16_at(a[QUERY] + start * 2), (width,))
            for i in range(width):
                bits[head, order[i]] = np.uint32(halves[i]) << np.uint32(16)
        else:
            floats = carray(float32_at(a[QUERY] + start * 4), (width,))
            for i in range(width):
                query[head, order[i]] = floats[i]
        for i in range(width):
            query[head, i] *= scale


@_jit
def _store_output(a: Any, token: int, kv_head: int, bf16: bool, order: Any, output: Any) -> None:
    """The group's outputs [padded group, D] to their place; bf16 is rounded to nearest, ties to even."""
    bits = output.view(np.uint32)
    width = output.shape[1]
    for head in range(a[GROUP]):
        start = ((token * a[KV_HEADS] + kv_head) * a[GROUP] + head) * width
        if bf16:
            halves = carray(uint16_at(a[OUTPUT] + start * 2), (width,))
            for i in range(width):
                word = bits[head, order[i]]
                even = (word >> np.uint32(16)) & np.uint32(1)
                halves[i] = np.uint16((word + np.uint32(0x7FFF) + even) >> np.uint32(16))
        else:
            floats = carray(float32_at(a[OUTPUT] + start * 4), (width,))
            for i in range(width):
                floats[i] = output[head, order[i]]


@_jit
def _merge(states: Any, output: Any) -> None:
    """The weighted mean of the stretches' outputs: states [stretches, state_floats] -> [padded group, D]."""
    padded, width = output.shape
    for head in range(padded):
        top = np.float32(-np.inf)
        for stretch in range(states.shape[0]):
            top = max(top, states[stretch, padded * width + head])
        total = np.float32(0)
        output[head, :] = 0
        for stretch in range(states.shape[0]):
            weight = np.exp2(states[stretch, padded * width + head] - top)
            total += weight * states[stretch, padded * (width + 1) + head]
            for i in range(width):
                output[head, i] += weight * states[stretch, head * width + i]
        share = np.float32(1) / total
        for i in range(width):
            output[head, i] *= share


@_jit
def _finish(a: Any, task: Any, bf16: bool, order: Any, own_states: Any, output: Any) -> None:
    """Writes the outputs of the task's tokens, unless other stretches of them are still to come."""
    stretches = task[STRETCHES]
    size = own_states.shape[1]
    if stretches > 1:
        address = a[FINISHED] + task[FIRST_STRETCH] * 8
        if atomic_add(address, 1) < stretches - 1:
            return
        atomic_add(address, -stretches)  # for the next layer
    for token in range(task[TOKENS]):
        states = own_states[token : token + 1]
        if stretches > 1:
            first = task[ROW_STATES] + token * stretches
            states = carray(float32_at(a[STATES] + first * size * 4), (stretches, size))
        _merge(states, output)
        _store_output(a, task[TOKEN] + token, task[KV_HEAD], bf16, order, output)


@functools.cache
def compiled(head_dim: int, block_size: int, together: int, kv_bf16: bool, query_bf16: bool) -> Any:
    """The kernel for these shapes, from numba's cache or compiled in seconds: `void kernel(int64 *)`.

    `together` query heads are computed at a time; a group is padded to a multiple of that.
    """
    kv_bytes = 2 if kv_bf16 else 4
    version = SOURCE_VERSION

    def kernel(arguments: Any) -> None:
        a = carray(arguments, (ARGUMENTS,))
        factors = carray(float32_at(a[FACTORS]), (2,))  # scale, softcap
        total = carray(int64_at(a[FIRST_TASK]), (a[ROWS] + 1,))[a[ROWS]]
        padded = (a[GROUP] + together - 1) // together * together
        task = np.empty(TASK_FIELDS, np.int64)
        query = np.empty((BUNDLE, padded, head_dim), np.float32)
        scores = np.empty((together, block_size), np.float32)
        own_states = np.empty((BUNDLE, state_floats(padded, head_dim)), np.float32)
        output = np.empty((padded, head_dim), np.float32)
        order = np.empty(head_dim, np.int64)
        state_at = np.empty(BUNDLE, np.int64)
        for i in range(head_dim):
            order[i] = place(i, head_dim, kv_bf16)
        query_at, scores_at, counter = query.ctypes.data, scores.ctypes.data, a.ctypes.data
        while True:
            number = atomic_add(counter, 1)
            if number >= total:
                break
            _find(a, number, block_size, task)
            for token in range(task[TOKENS]):
                state = own_states[token]
                if task[STRETCHES] > 1:
                    index = task[OWN_STATE] + token * task[STRETCHES]
                    state = carray(float32_at(a[STATES] + index * state.size * 4), (state.size,))
                state[: padded * head_dim] = 0
                state[padded * head_dim : padded * (head_dim + 1)] = -np.inf
                state[padded * (head_dim + 1) :] = 0
                state_at[token] = state.ctypes.data
                _load_query(
                    a, task[TOKEN] + token, task[KV_HEAD], factors[0], query_bf16, order, query[token]
                )
            table = carray(int32_at(a[TABLES] + task[ROW] * a[TABLE_STRIDE] * 4), (a[TABLE_STRIDE],))
            first = max(task[LOW], task[POSITION] + 1 - a[WINDOW]) // block_size
            last = (min(task[HIGH], task[POSITION] + task[TOKENS]) - 1) // block_size
            inner = task[KV_HEAD] * block_size * head_dim
            for block in range(first, last + 1):
                start = block * block_size
                here = np.int64(table[block])
                coming = np.int64(table[min(block + 1, last)])
                for token in range(task[TOKENS]):
                    high = min(task[HIGH], task[POSITION] + token + 1) - start
                    low = max(task[LOW], task[POSITION] + token + 1 - a[WINDOW]) - start
                    if high <= 0 or low >= min(high, block_size):
                        continue
                    for part in range(0, padded, together):
                        addresses = (
                            query_at + (token * padded + part) * head_dim * 4,
                            a[KEYS] + (here * a[KEY_BLOCK_STRIDE] + inner) * kv_bytes,
                            a[VALUES] + (here * a[VALUE_BLOCK_STRIDE] + inner) * kv_bytes,
                            a[KEYS] + (coming * a[KEY_BLOCK_STRIDE] + inner) * kv_bytes,
                            a[VALUES] + (coming * a[VALUE_BLOCK_STRIDE] + inner) * kv_bytes,
                            scores_at,
                            state_at[token] + part * head_dim * 4,
                            state_at[token] + (padded * head_dim + part) * 4,
                            state_at[token] + (padded * (head_dim + 1) + part) * 4,
                        )
                        attend_block(
                            head_dim, block_size, together, kv_bf16, addresses,
                            max(0, low), min(block_size, high), factors[1], version,
                        )  # fmt: skip
                    coming = here
            _finish(a, task, query_bf16, order, own_states, output)

    signature = types.void(types.CPointer(types.int64))
    return cfunc(signature, cache=True, fastmath=_FAST, error_model="numpy")(kernel)
