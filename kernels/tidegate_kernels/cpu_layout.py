"""How one step's attention is cut into tasks for CPU threads: computed once a step, used by every layer.

Owns task numbering and the scratch memory that tasks share. Attends to nothing itself.

A task is a few consecutive new tokens of one row (a bundle), one KV head with its query heads, and a stretch
of the keys that they see. Only long contexts with too few tasks to keep the threads busy have several
stretches; those leave partial results, which the thread that finishes the last of them merges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from numba.extending import register_jitable
from torch import Tensor

from tidegate_kernels.attention_batch import AttentionBatch

Int64Array = npt.NDArray[np.int64]

BUNDLE = 16  # new tokens that share a block of keys and values while it is in the L1 cache
TASKS_PER_THREAD = 8  # so that a thread that loses its core for a while leaves its share to the others
SHORTEST_STRETCH = 256  # tokens: below this a task's own cost shows
NO_WINDOW = 1 << 40


@dataclass(frozen=True, slots=True)
class Layout:
    """The tasks of one step for one kind of layer. The scratch memory serves one layer at a time."""

    first_task: Int64Array  # [R + 1]
    first_state: Int64Array  # [R + 1]
    stretch: int  # most keys of a task, a multiple of the block size
    work_tokens: int  # keys times KV heads over all bundles
    states: Tensor  # fp32, a state for each new token, KV head and stretch of rows with several stretches
    finished: Tensor  # int64, stretches finished for each of those bundles and KV heads; all 0 between layers
    first_task_at: int  # addresses, since asking numpy for one takes a microsecond
    first_state_at: int


_layouts: WeakKeyDictionary[AttentionBatch, dict[tuple[int, ...], Layout]] = WeakKeyDictionary()


def layout_of(
    batch: AttentionBatch, window: int | None, kv_heads: int, block_size: int, state_size: int, threads: int
) -> Layout:
    """The batch's layout, made at the first call. `state_size` is in floats."""
    known = _layouts.setdefault(batch, {})
    key = (window or NO_WINDOW, kv_heads, block_size, state_size, threads)
    layout = known.get(key)
    if layout is None:
        layout = known[key] = _lay_out(batch, *key)
    return layout


def _lay_out(
    batch: AttentionBatch, window: int, kv_heads: int, block_size: int, state_size: int, threads: int
) -> Layout:
    starts, lengths = batch.query_starts_host, batch.seq_lens_host
    work_tokens = int(_count_keys(starts, lengths, window)) * kv_heads
    stretch = max(SHORTEST_STRETCH, -(-work_tokens // (threads * TASKS_PER_THREAD)))
    stretch = -(-stretch // block_size) * block_size
    first_task, first_state = _number(starts, lengths, window, kv_heads, block_size, stretch)
    return Layout(
        first_task=first_task,
        first_state=first_state,
        stretch=stretch,
        work_tokens=work_tokens,
        states=torch.empty(int(first_state[-1]) * state_size),
        finished=torch.zeros(int(first_task[-1]), dtype=torch.int64),
        first_task_at=first_task.ctypes.data,
        first_state_at=first_state.ctypes.data,
    )


@register_jitable
def first_key(length: int, queries: int, window: int, block_size: int) -> int:
    """The first key that the oldest of a row's new tokens sees, rounded down to a block."""
    return max(0, length - queries - window + 1) // block_size * block_size


@njit(cache=True)
def _count_keys(starts: Any, lengths: Any, window: int) -> int:
    """Keys that are read, over all bundles."""
    keys = 0
    for row in range(len(lengths)):
        queries = starts[row + 1] - starts[row]
        bundles = (queries + BUNDLE - 1) // BUNDLE
        keys += bundles * min(lengths[row], window + queries)
    return keys


@njit(cache=True)
def _number(starts: Any, lengths: Any, window: int, kv_heads: int, block_size: int, stretch: int) -> Any:
    """The first task and the first state of each row, and their totals."""
    first_task = np.zeros(len(lengths) + 1, np.int64)
    first_state = np.zeros(len(lengths) + 1, np.int64)
    for row in range(len(lengths)):
        queries = starts[row + 1] - starts[row]
        keys = lengths[row] - first_key(lengths[row], queries, window, block_size)
        stretches = (keys + stretch - 1) // stretch
        bundles = (queries + BUNDLE - 1) // BUNDLE
        first_task[row + 1] = first_task[row] + bundles * kv_heads * stretches
        first_state[row + 1] = first_state[row] + (queries * kv_heads * stretches if stretches > 1 else 0)
    return first_task, first_state
