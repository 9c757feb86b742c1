"""Which rows of a step begin with the same blocks, and the units of attention that read those once.

Owns the search, on the host, in the block tables alone. A step in which nothing is
shared pays for a look at one column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tidegate_kernels.attention_batch import AttentionBatch

Int64 = npt.NDArray[np.int64]

# Fewer shared tokens are read as quickly by each row for itself.
MIN_TOKENS = 128
# Keys of a unit, and how many items (units x KV heads) are enough for the threads to share evenly. Both are
# the same for any number of threads, so that results are.
_RANGE_TOKENS = 128
_ENOUGH_ITEMS = 64
# Rows of so many keys are cut when they are few: when they make no more items than that. On 2 threads it pays
# from about here, on more of them sooner.
_LONG_ROW = 6 * _RANGE_TOKENS
_FEW_ITEMS = 8


@dataclass(frozen=True, slots=True)
class Edge:
    """Rows `low` to `high - 1`, by tables in order, share blocks `first` to `last - 1`."""

    low: int
    high: int
    first: int
    last: int


@dataclass(slots=True)
class Prefixes:
    """Prefix units as columns, and for each row the parts of its attention that they compute."""

    rows: list[int] = field(default_factory=list)  # of each unit, a row whose table has the blocks
    starts: list[int] = field(default_factory=list)  # its keys
    ends: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)  # where its tokens begin in `tokens`
    counts: list[int] = field(default_factory=list)  # of its tokens
    tokens: list[int] = field(default_factory=list)  # flat indices in the batch
    parts: list[tuple[int, int, int]] = field(
        default_factory=list
    )  # row, unit, row's first token in the unit

    def columns(self, rows: int) -> dict[str, Int64]:
        """What the step's record points at, by field."""
        parts = np.array(self.parts, np.int64).reshape(-1, 3)
        parts = parts[np.argsort(parts[:, 0], kind="stable")]
        counts = np.array(self.counts, np.int64)
        lengths = np.zeros(rows, np.int64)
        np.maximum.at(lengths, parts[:, 0], np.array(self.ends, np.int64)[parts[:, 1]])
        return {
            "prefix_rows": np.array(self.rows, np.int64),
            "prefix_starts": np.array(self.starts, np.int64),
            "prefix_ends": np.array(self.ends, np.int64),
            "prefix_firsts": np.array(self.firsts, np.int64),
            "prefix_counts": counts,
            "prefix_states": np.cumsum(counts) - counts,
            "prefix_tokens": np.array(self.tokens, np.int64),
            "prefix_lengths": lengths,
            "part_starts": np.searchsorted(parts[:, 0], np.arange(rows + 1)),
            "part_units": parts[:, 1].copy(),
            "part_tokens": parts[:, 2].copy(),
        }


def find(batch: AttentionBatch, block_size: int, unit_tokens: int, kv_heads: int) -> Prefixes | None:
    """Units of up to `unit_tokens` tokens for all that rows share; None when that is nothing.

    Where there are too few rows to keep many threads busy, also for ranges of a long row's own blocks
    (flash-decoding). Rows with more than half of that many new tokens are left alone: they read a key for
    many tokens anyway.
    """
    num_rows = len(batch.seq_lens_host)
    if unit_tokens < 2 or (num_rows == 1 and batch.max_seq_len < _LONG_ROW):
        return None
    counts = batch.query_starts_host[1:] - batch.query_starts_host[:-1]
    blocks = (batch.seq_lens_host - counts) // block_size  # those that all of a row's tokens see whole
    least = -(-MIN_TOKENS // block_size)
    rows = np.flatnonzero((blocks >= least) & (counts <= max(1, unit_tokens // 2)))
    found = Prefixes()
    for edge, members in _shared(batch.block_tables.numpy(), rows, blocks, least):
        _add_units(found, edge, members, batch, block_size, unit_tokens, kv_heads)
    if not found.rows and num_rows * kv_heads <= _FEW_ITEMS:
        for row in rows[blocks[rows] * block_size >= _LONG_ROW]:
            alone = Edge(0, 1, 0, int(blocks[row]))
            _add_units(found, alone, row[None], batch, block_size, unit_tokens, kv_heads)
    return found if found.rows else None


def _shared(
    tables: npt.NDArray[np.int32], rows: npt.NDArray[np.intp], blocks: npt.NDArray[np.int32], least: int
) -> Iterator[tuple[Edge, npt.NDArray[np.intp]]]:
    """The edges of the tree of common beginnings, each with its rows; none of fewer than `least` blocks."""
    if len(rows) < 2:
        return
    column = np.sort(tables[rows, least - 1])
    if (column[1:] != column[:-1]).all():
        return
    # Any order will do in which equal beginnings are neighbours, and that of the bytes is one.
    keys = np.ascontiguousarray(tables[rows, : int(blocks[rows].max())])
    order = np.argsort(keys.view(f"V{keys.itemsize * keys.shape[1]}").ravel(), kind="stable")
    rows, keys = rows[order], keys[order]
    equal = keys[1:] == keys[:-1]
    shared = np.where(equal.all(1), keys.shape[1], equal.argmin(1))
    shared = np.minimum(shared, np.minimum(blocks[rows[1:]], blocks[rows[:-1]]))
    for edge in _edges(shared, least):
        yield edge, rows[edge.low : edge.high]


def _edges(shared: npt.NDArray[np.integer], least: int) -> Iterator[Edge]:
    """The tree of common beginnings: `shared[i]` blocks are common to the i-th row and the next.

    An edge that would be shorter than `least` is left to those below it, or to the rows.
    """
    pending = [(0, len(shared) + 1, 0)]
    while pending:
        low, high, covered = pending.pop()
        between = shared[low : high - 1]
        depth = int(between.min())
        if depth - covered >= least:
            yield Edge(low, high, covered, depth)
            covered = depth
        cuts = (np.flatnonzero(between == depth) + low + 1).tolist()
        pending += [(a, b, covered) for a, b in pairwise([low, *cuts, high]) if b - a > 1]


def _add_units(
    found: Prefixes,
    edge: Edge,
    rows: npt.NDArray[np.integer],
    batch: AttentionBatch,
    block_size: int,
    unit_tokens: int,
    kv_heads: int,
) -> None:
    """An edge's rows, some at a time, by ranges of its blocks."""
    begins = batch.query_starts_host[rows].tolist()
    counts = (batch.query_starts_host[rows + 1] - batch.query_starts_host[rows]).tolist()
    groups = _pack(counts, unit_tokens)
    size = edge.last - edge.first
    most = max(1, size * block_size // _RANGE_TOKENS)
    ranges = min(most, -(-_ENOUGH_ITEMS // (len(groups) * kv_heads)))
    bounds = [edge.first + size * index // ranges for index in range(ranges + 1)]
    for low, high in groups:
        first = len(found.tokens)
        places = []
        for begin, count in zip(begins[low:high], counts[low:high], strict=True):
            places.append(len(found.tokens) - first)
            found.tokens += range(begin, begin + count)
        members = rows[low:high].tolist()
        for start, end in pairwise(bounds):
            unit = len(found.rows)
            found.rows.append(members[0])
            found.starts.append(start * block_size)
            found.ends.append(end * block_size)
            found.firsts.append(first)
            found.counts.append(len(found.tokens) - first)
            found.parts += [(row, unit, place) for row, place in zip(members, places, strict=True)]


def _pack(counts: list[int], unit_tokens: int) -> list[tuple[int, int]]:
    """Neighbouring rows, as evenly as whole rows allow, in groups of up to `unit_tokens` tokens."""
    total = sum(counts)
    target = -(-total // -(-total // unit_tokens))
    groups, low, size = [], 0, 0
    for index, count in enumerate(counts):
        if size and size + count > target:
            groups.append((low, index))
            low, size = index, 0
        size += count
    return [*groups, (low, len(counts))]
