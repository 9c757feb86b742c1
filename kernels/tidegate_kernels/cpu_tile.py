"""The inner step of CPU attention: a few query heads against one block of keys and values, in registers.

Owns the vector code of one block. Which blocks, heads and threads is decided elsewhere.

For each query head it keeps a running maximum m, sum l and output `[D]` (online softmax, Milakov and
Gimelshein 2018): a block's scores s raise m to m', and everything kept is scaled by 2^(m - m'). Scores carry
a factor log2(e), so that exp is exp2.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tidegate_kernels import cpu_vectors as vec
from tidegate_kernels.cpu_vectors import FLOAT, INTS, LANES, VECTOR, integer

CACHE_LINE = 64
LOG2_E = 1.4426950408889634


# A caller has this in its closure, so that numba's cache of it is renewed when these files change.
SOURCE_VERSION = zlib.crc32(
    b"".join(
        (Path(__file__).parent / f"cpu_{name}.py").read_bytes() for name in ("tile", "vectors", "layout")
    )
)


@dataclass(frozen=True)
class Tile:
    """What the code is specialised for, and its operands: i64 addresses and token indices."""

    builder: ir.IRBuilder
    head_dim: int
    block_size: int
    heads: int  # query heads taken together
    bf16: bool  # keys and values
    query: Any  # fp32 [heads, D], scaled
    keys: Any  # [block_size, D]
    values: Any  # [block_size, D]
    next_keys: Any  # the block to come, fetched meanwhile
    next_values: Any
    low: Any  # tokens low <= t < high are seen
    high: Any
    scores: Any  # fp32 [heads, block_size], scratch
    output: Any  # fp32 [heads, D], in and out
    maxima: Any  # fp32 [heads], in and out
    sums: Any  # fp32 [heads], in and out
    softcap: Any  # fp32, in units of the scores; 0 is none

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key or value."""
        return self.head_dim * (2 if self.bf16 else 4)


@intrinsic(prefer_literal=True)
def attend_block(
    _context: Any,
    head_dim: Any,
    block_size: Any,
    heads: Any,
    bf16: Any,
    addresses: Any,
    low: Any,
    high: Any,
    softcap: Any,
    version: Any,
) -> Any:
    """Takes one block into the running softmax. `addresses` are Tile's from `query` to `sums`, in order.

    `version` is SOURCE_VERSION.
    """

    def emit(_: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        query, keys, values, next_keys, next_values, scores, output, maxima, sums = cgutils.unpack_tuple(
            builder, args[4]
        )
        constants = (
            head_dim.literal_value,
            block_size.literal_value,
            heads.literal_value,
            bool(bf16.literal_value),
        )
        tile = Tile(
            builder,
            *constants,
            query,
            keys,
            values,
            next_keys,
            next_values,
            args[5],
            args[6],
            scores,
            output,
            maxima,
            sums,
            args[7],
        )
        _emit_scores(tile)
        _emit_output(tile, _emit_softmax(tile))
        return ir.Constant(ir.IntType(64), 0)

    signature = types.int64(
        head_dim, block_size, heads, bf16, addresses, types.int64, types.int64, types.float32, version
    )
    return signature, emit


def _emit_scores(tile: Tile) -> None:
    """scores[h, t] = query[h] . keys[t], for a few tokens at a time."""
    builder = tile.builder
    together = 4 if tile.heads <= 2 else 2
    start = builder.and_(tile.low, integer(-together))
    with cgutils.for_range_slice(builder, start, tile.high, integer(together), inc=True) as (token, _):
        keys = vec.at(builder, tile.keys, token, tile.row_bytes)
        coming = vec.at(builder, tile.next_keys, token, tile.row_bytes)
        for line in range(0, together * tile.row_bytes, CACHE_LINE):
            vec.prefetch(builder, builder.add(coming, integer(line)))
        dots: list[list[Any]] = [[vec.splat_constant(0.0)] * together for _ in range(tile.heads)]
        for column in range(0, tile.head_dim, 2 * LANES):
            count = min(2, (tile.head_dim - column) // LANES)
            queries = [_load_columns(tile, tile.query, head, column, count) for head in range(tile.heads)]
            for step in range(together):
                key = vec.load_wide(builder, _element(tile, keys, step, column), tile.bf16, count)
                for head in range(tile.heads):
                    for a, b in zip(queries[head], key, strict=True):
                        dots[head][step] = vec.fma(builder, a, b, dots[head][step])
        for head in range(tile.heads):
            sums = vec.sum_lanes(builder, dots[head])
            target = vec.at(builder, tile.scores, builder.add(token, integer(head * tile.block_size)), 4)
            vec.store(builder, vec.pick(builder, (sums, sums), range(together)), target)


def _emit_softmax(tile: Tile) -> list[Any]:
    """Turns scores into weights 2^(s - m') and updates maxima and sums. Returns each head's 2^(m - m')."""
    builder = tile.builder
    heads = range(tile.heads)
    start = builder.and_(tile.low, integer(-LANES))
    rows = [builder.add(tile.scores, integer(head * tile.block_size * 4)) for head in heads]
    highest = [cgutils.alloca_once_value(builder, vec.splat_constant(float("-inf"))) for _ in heads]
    with cgutils.for_range_slice(builder, start, tile.high, integer(LANES), inc=True) as (token, _):
        seen = _emit_seen(tile, token)
        for head in heads:
            address = vec.at(builder, rows[head], token, 4)
            score = _emit_softcap(tile, vec.load(builder, address, VECTOR))
            score = builder.select(seen, score, vec.splat_constant(float("-inf")))
            vec.store(builder, score, address)
            builder.store(vec.maximum(builder, score, builder.load(highest[head])), highest[head])
    old = vec.load_floats(builder, tile.maxima, tile.heads)
    new = vec.maximum(builder, vec.max_lanes(builder, [builder.load(slot) for slot in highest]), old)
    maxima = [vec.splat_lane(builder, new, head) for head in heads]
    totals = [cgutils.alloca_once_value(builder, vec.splat_constant(0.0)) for _ in heads]
    with cgutils.for_range_slice(builder, start, tile.high, integer(LANES), inc=True) as (token, _):
        for head in heads:
            address = vec.at(builder, rows[head], token, 4)
            weight = vec.exp2(builder, builder.fsub(vec.load(builder, address, VECTOR), maxima[head]))
            vec.store(builder, weight, address)
            builder.store(builder.fadd(builder.load(totals[head]), weight), totals[head])
    scales = vec.exp2(builder, builder.fsub(old, new))
    gained = vec.sum_lanes(builder, [builder.load(slot) for slot in totals])
    kept = vec.load_floats(builder, tile.sums, tile.heads)
    vec.store_floats(builder, vec.fma(builder, kept, scales, gained), tile.sums, tile.heads)
    vec.store_floats(builder, new, tile.maxima, tile.heads)
    return [vec.splat_lane(builder, scales, head) for head in heads]


def _emit_seen(tile: Tile, token: Any) -> Any:
    """Which of the 8 tokens from `token` on lie in low <= t < high."""
    builder = tile.builder
    ids = builder.add(
        vec.splat(builder, builder.trunc(token, ir.IntType(32))), ir.Constant(INTS, list(range(LANES)))
    )
    low, high = (vec.splat(builder, builder.trunc(bound, ir.IntType(32))) for bound in (tile.low, tile.high))
    return builder.and_(builder.icmp_signed(">=", ids, low), builder.icmp_signed("<", ids, high))


def _emit_softcap(tile: Tile, score: Any) -> Any:
    """cap * tanh(score / cap), where tanh(x) = 1 - 2 / (e^2x + 1); the score itself without a cap."""
    builder = tile.builder
    result = cgutils.alloca_once_value(builder, score)
    with builder.if_then(builder.fcmp_ordered(">", tile.softcap, FLOAT(0.0)), likely=False):
        cap = vec.splat(builder, tile.softcap)
        ratio = builder.fmul(builder.fdiv(score, cap), vec.splat_constant(2.0 * LOG2_E))
        ratio = builder.select(
            builder.fcmp_ordered("<", ratio, vec.splat_constant(60.0)), ratio, vec.splat_constant(60.0)
        )
        grown = builder.fadd(vec.exp2(builder, ratio), vec.splat_constant(1.0))
        tanh = builder.fsub(vec.splat_constant(1.0), builder.fdiv(vec.splat_constant(2.0), grown))
        builder.store(builder.fmul(cap, tanh), result)
    return builder.load(result)


def _load_columns(tile: Tile, base: Any, head: int, column: int, count: int) -> list[Any]:
    """Vectors of an fp32 [heads, D] array."""
    start = tile.builder.add(base, integer((head * tile.head_dim + column) * 4))
    return vec.load_wide(tile.builder, start, False, count)


def _element(tile: Tile, row: Any, step: int, column: int) -> Any:
    """The address of a column `step` tokens after the one at `row`, in keys or values."""
    return tile.builder.add(row, integer(step * tile.row_bytes + column * tile.row_bytes // tile.head_dim))


def _emit_output(tile: Tile, scales: list[Any]) -> None:
    """output[h] = scale[h] * output[h] + sum of weight[h, t] * values[t], a strip of columns at a time."""
    strip = 4 * LANES if tile.heads <= 2 else 2 * LANES
    for first in range(0, tile.head_dim, strip):
        _emit_strip(tile, scales, range(first, min(first + strip, tile.head_dim), LANES))


def _emit_strip(tile: Tile, scales: list[Any], columns: range) -> None:
    builder = tile.builder
    heads, count = range(tile.heads), len(columns)
    slots = []
    for head in heads:
        before = _load_columns(tile, tile.output, head, columns.start, count)
        slots.append(
            [cgutils.alloca_once_value(builder, builder.fmul(part, scales[head])) for part in before]
        )
    with cgutils.for_range_slice(builder, tile.low, tile.high, integer(1), inc=True) as (token, _):
        row = vec.at(builder, tile.values, token, tile.row_bytes)
        if columns.start == 0:
            coming = vec.at(builder, tile.next_values, token, tile.row_bytes)
            for line in range(0, tile.row_bytes, CACHE_LINE):
                vec.prefetch(builder, builder.add(coming, integer(line)))
        values = []
        for first in range(0, count, 2):
            address = _element(tile, row, 0, columns[first])
            values += vec.load_wide(builder, address, tile.bf16, min(2, count - first))
        for head in heads:
            index = builder.add(token, integer(head * tile.block_size))
            weight = vec.splat(builder, vec.load(builder, vec.at(builder, tile.scores, index, 4), FLOAT))
            for slot, value in zip(slots[head], values, strict=True):
                builder.store(vec.fma(builder, weight, value, builder.load(slot)), slot)
    for head in heads:
        for column, slot in zip(columns, slots[head], strict=True):
            address = builder.add(tile.output, integer((head * tile.head_dim + column) * 4))
            vec.store(builder, builder.load(slot), address)
