"""Scores of a few query vectors against consecutive keys of a cache.

Owns the LLVM IR of the dot products. The sums of a token are reduced across lanes, so it suits few vectors;
many are quicker as a matrix product (`tile.py`) over transposed keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from worker_service.fused.lanes import (
    HALF_F32,
    I32,
    I64,
    LANES,
    constant,
    fma,
    load,
    load_cached,
    prefetch,
    store,
)

# Query vectors that are multiplied together, and the tokens that they are multiplied by at a time: as many as
# AVX2's 16 registers hold sums and, for more than one token, queries. Sums that do not fit cost the most.
MAX_VECTORS = 6
_TOKENS_TOGETHER = {1: 4, 2: 4, 3: 2, 4: 1, 5: 1, 6: 1}
# Lanes of two vectors by turns: single ones and pairs in each 128 bits, then whole 128 bits.
_NEIGHBOURS = ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15])
_PAIRS = ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
_FOURS = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])


def _define(module: ir.Module, bf16: bool, vectors: int) -> ir.Function:
    """`void scores(queries, keys, tokens, head_dim, out, out_stride, ahead)`, as the intrinsic has them."""
    name = f"tidegate_scores_{'bf16' if bf16 else 'fp32'}_{vectors}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 7), name)
    function.linkage = "internal"
    function.attributes.add("noinline")  # once is enough to compile
    queries, keys, tokens, head_dim, out, out_stride, ahead = function.args
    together = _TOKENS_TOGETHER[vectors]
    entry, per_group, done = (function.append_basic_block(label) for label in ("entry", "group", "done"))
    builder = ir.IRBuilder(entry)
    query_rows = [builder.add(queries, builder.mul(head_dim, I64(4 * vector))) for vector in range(vectors)]
    key_bytes = builder.mul(head_dim, I64(2 if bf16 else 4))
    last_key = builder.add(keys, builder.mul(builder.sub(tokens, I64(1)), key_bytes))
    builder.branch(per_group)

    builder.position_at_end(per_group)
    token = builder.phi(I64)
    key = builder.add(keys, builder.mul(token, key_bytes))
    # A last group that is not full reads its last key again.
    key_rows = [
        _smaller(builder, builder.add(key, builder.mul(key_bytes, I64(index))), last_key)
        for index in range(together)
    ]
    ahead = builder.add(ahead, builder.mul(token, key_bytes))
    sums = _emit_products(builder, bf16, query_rows, key_rows, head_dim, ahead)
    for vector in range(vectors):
        address = builder.add(out, builder.mul(out_stride, I64(vector)))
        totals = _sum_each(builder, sums[vector])
        store(builder, totals, builder.add(address, builder.mul(token, I64(4))))
    following = builder.add(token, I64(together))
    token.add_incoming(I64(0), entry)
    token.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, tokens), per_group, done)
    builder.position_at_end(done)
    builder.ret_void()
    return function


def _emit_products(
    builder: ir.IRBuilder, bf16: bool, queries: list[Any], keys: list[Any], head_dim: Any, ahead: Any
) -> list[list[Any]]:
    """The loop over a head's dimensions: 8 partial sums of each query and key, not yet added up."""
    entry = builder.block
    body, done = (builder.append_basic_block(label) for label in ("dimensions", "products"))
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(I64)
    sums = [[builder.phi(HALF_F32) for _ in keys] for _ in queries]
    results: list[list[Any]] = [list(row) for row in sums]
    query_offset = builder.mul(index, I64(4))
    key_offset = builder.mul(index, I64(2 if bf16 else 4))
    for line in range(0, len(keys) * LANES * (2 if bf16 else 4), 64):
        offset = builder.add(builder.mul(key_offset, I64(len(keys))), I64(line))
        prefetch(builder, builder.add(ahead, offset))
    for column, key in enumerate(keys):
        halves = load_cached(builder, builder.add(key, key_offset), bf16)
        for row, query in enumerate(queries):
            for half, lanes in enumerate(halves):
                address = builder.add(builder.add(query, query_offset), I64(32 * half))
                values = load(builder, address, HALF_F32, 4)
                results[row][column] = fma(builder, values, lanes, results[row][column])
    for totals, finals in zip(sums, results, strict=True):
        for total, final in zip(totals, finals, strict=True):
            total.add_incoming(constant(HALF_F32, 0), entry)
            total.add_incoming(final, body)
    following = builder.add(index, I64(LANES))
    index.add_incoming(I64(0), entry)
    index.add_incoming(following, body)
    builder.cbranch(builder.icmp_signed("<", following, head_dim), body, done)
    builder.position_at_end(done)
    return results


def _sum_each(builder: ir.IRBuilder, vectors: list[Any]) -> Any:
    """The sums of the 8 lanes of 1, 2 or 4 vectors, as a vector of as many floats."""
    first, second, third, fourth = vectors * (4 // len(vectors))
    pairs = _add_neighbours(builder, first, second), _add_neighbours(builder, third, fourth)
    quads = _add_neighbours(builder, *pairs)
    lower, upper = (_pick(builder, (quads, quads), range(start, start + 4)) for start in (0, 4))
    total = builder.fadd(lower, upper)
    return total if len(vectors) == 4 else _pick(builder, (total, total), range(len(vectors)))


def _add_neighbours(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """Sums of neighbouring lanes, of a and b by turns in each 128 bits, as one AVX instruction would."""
    even = [0, 2, 8, 10, 4, 6, 12, 14]
    odd = [lane + 1 for lane in even]
    return builder.fadd(_pick(builder, (a, b), even), _pick(builder, (a, b), odd))


def _pick(builder: ir.IRBuilder, vectors: Sequence[Any], lanes: Iterable[int]) -> Any:
    chosen = list(lanes)
    mask = ir.Constant(ir.VectorType(I32, len(chosen)), chosen)
    return builder.shuffle_vector(*vectors, mask)


def _smaller(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed("<", a, b), a, b)


@intrinsic
def read_square(typing_context: Any, kind: Any, rows: Any, out: Any) -> Any:
    """Reads 16 columns of 16 cached rows, at 16 addresses, as floats `[column, row]`, in cache order."""
    bf16 = str(kind.dtype) == "uint16"

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, rows, out = arguments
        eight = LANES // 2
        for first in (0, eight):
            addresses = [builder.add(rows, I64(8 * (first + row))) for row in range(eight)]
            loaded = [load_cached(builder, load(builder, at, I64, 8), bf16) for at in addresses]
            for half, vectors in enumerate(zip(*loaded, strict=True)):
                for index, vector in enumerate(_transpose(builder, vectors)):
                    place = 4 * (LANES * (eight * half + index) + first)
                    store(builder, vector, builder.add(out, I64(place)))
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64), emit


def _transpose(builder: ir.IRBuilder, rows: Sequence[Any]) -> list[Any]:
    """8 rows of 8 lanes as 8 columns, by shuffles that are one instruction of AVX each."""
    pairs = [_pick(builder, rows[at : at + 2], mask) for at in (0, 2, 4, 6) for mask in _NEIGHBOURS]
    fours = [
        _pick(builder, (pairs[at + odd], pairs[at + odd + 2]), mask)
        for at in (0, 4)
        for odd in (0, 1)
        for mask in _PAIRS
    ]
    return [_pick(builder, (fours[at], fours[at + 4]), mask) for mask in _FOURS for at in range(4)]


@intrinsic
def score_tokens(
    typing_context: Any,
    kind: Any,
    vectors: Any,
    queries: Any,
    keys: Any,
    tokens: Any,
    head_dim: Any,
    out: Any,
    out_stride: Any,
    ahead: Any,
) -> Any:
    """out[v, t] = queries[v] . keys[t], for 1 to MAX_VECTORS fp32 queries and at least one token.

    `kind` is any array of the cache's type; the queries are in cache order (`lanes.py`). `out_stride` is in
    bytes. Up to 3 floats behind the last score of a row are overwritten. As many bytes as the keys have are
    asked for from `ahead`, to be read soon: where blocks lie, hardware can't guess.
    """
    bf16 = str(kind.dtype) == "uint16"

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, count, *rest = arguments
        end = builder.append_basic_block("scores.end")
        switch = builder.switch(count, end)
        for number in range(1, MAX_VECTORS + 1):
            block = builder.append_basic_block(f"scores.{number}")
            switch.add_case(I64(number), block)
            with builder.goto_block(block):
                builder.call(_define(builder.module, bf16, number), rest)
                builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 8), emit
