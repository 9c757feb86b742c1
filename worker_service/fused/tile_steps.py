"""One step of the matrix kernel, for each weight type: a group of inputs of a panel and of each row.

Owns the instructions that multiply. `tile.py` puts the loop around them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from worker_service.fused import isa
from worker_service.fused.lanes import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    VECTOR_F32,
    VECTOR_I32,
    call,
    constant,
    fma,
    join,
    load,
    load_cached,
    splat,
)

# (builder, address in the panel, address in each row, the rows' sums) -> the new sums.
Step = Callable[[ir.IRBuilder, Any, list[Any], list[Any]], list[Any]]


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def step_fp32(builder: ir.IRBuilder, weights: Any, rows: list[Any], sums: list[Any]) -> list[Any]:
    """Of fp32 weights, also rows of a cache."""
    vector = load(builder, weights, VECTOR_F32, 4)
    return [
        fma(builder, splat(builder, load(builder, row, F32, 4)), vector, total)
        for row, total in zip(rows, sums, strict=True)
    ]


def step_bf16(builder: ir.IRBuilder, weights: Any, rows: list[Any], sums: list[Any]) -> list[Any]:
    """A bf16 is the upper half of an fp32, so a pair widens by a shift and by a mask."""
    pairs = load(builder, weights, VECTOR_I32, 4)
    even = builder.bitcast(builder.shl(pairs, constant(VECTOR_I32, 16)), VECTOR_F32)
    odd = builder.bitcast(builder.and_(pairs, constant(VECTOR_I32, 0xFFFF0000)), VECTOR_F32)
    sums = [
        fma(builder, splat(builder, load(builder, row, F32, 4)), even, total)
        for row, total in zip(rows, sums, strict=True)
    ]
    return [
        fma(builder, splat(builder, load(builder, builder.add(row, I64(4)), F32, 4)), odd, total)
        for row, total in zip(rows, sums, strict=True)
    ]


def step_bf16_dot(builder: ir.IRBuilder, weights: Any, rows: list[Any], sums: list[Any]) -> list[Any]:
    """Of bf16 weights and activations, a pair at a time, where the processor multiplies those."""
    kind = ir.VectorType(_BFloat(), 2 * LANES)
    pairs = builder.bitcast(load(builder, weights, VECTOR_I32, 4), kind)
    return [
        call(
            builder,
            "llvm.x86.avx512bf16.dpbf16ps.512",
            VECTOR_F32,
            total,
            builder.bitcast(splat(builder, load(builder, row, I32, 4)), kind),
            pairs,
        )
        for row, total in zip(rows, sums, strict=True)
    ]


def step_int8_dot(builder: ir.IRBuilder, weights: Any, rows: list[Any], sums: list[Any]) -> list[Any]:
    """Pairs of int8 weights, widened, and int16 activations, by one multiply-add (VNNI)."""
    kind = ir.VectorType(I16, 2 * LANES)
    pairs = builder.sext(load(builder, weights, ir.VectorType(I8, 2 * LANES), 2), kind)
    results = []
    for row, total in zip(rows, sums, strict=True):
        pair = builder.bitcast(splat(builder, load(builder, row, I32, 4)), kind)
        results.append(call(builder, "llvm.x86.avx512.vpdpwssd.512", VECTOR_I32, total, pair, pairs))
    return results


def step_int8_pairs(builder: ir.IRBuilder, weights: Any, rows: list[Any], sums: list[Any]) -> list[Any]:
    """The same with AVX2. (Products of 8-bit pairs would be quicker, but saturate at 16 bits.)"""
    half = ir.VectorType(I16, LANES)
    halves = [
        builder.sext(load(builder, builder.add(weights, I64(offset)), ir.VectorType(I8, LANES), 2), half)
        for offset in (0, LANES)
    ]
    results = []
    for row, total in zip(rows, sums, strict=True):
        pair = builder.bitcast(splat(builder, load(builder, row, I32, 4), LANES // 2), half)
        products = [
            call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, LANES // 2), part, pair)
            for part in halves
        ]
        joined = ir.Constant(VECTOR_I32, list(range(LANES)))
        results.append(builder.add(total, builder.shuffle_vector(*products, joined)))
    return results


def step_int8(builder: ir.IRBuilder, weights: Any, rows: list[Any], sums: list[Any]) -> list[Any]:
    """The same for a processor without a multiply-add of pairs."""
    pairs = load(builder, weights, ir.VectorType(I16, LANES), 2)
    eight = constant(pairs.type, 8)
    even = builder.sext(builder.ashr(builder.shl(pairs, eight), eight), VECTOR_I32)
    odd = builder.sext(builder.ashr(pairs, eight), VECTOR_I32)
    for offset, part in ((0, even), (2, odd)):
        values = [load(builder, builder.add(row, I64(offset)), I16, 2) for row in rows]
        sums = [
            builder.add(total, builder.mul(splat(builder, builder.sext(value, I32)), part))
            for value, total in zip(values, sums, strict=True)
        ]
    return sums


def step_cached_bf16(builder: ir.IRBuilder, weights: Any, rows: list[Any], sums: list[Any]) -> list[Any]:
    """Of 16 columns of a cache, which come in cache order."""
    vector = join(builder, load_cached(builder, weights, bf16=True))
    return [
        fma(builder, splat(builder, load(builder, row, F32, 4)), vector, total)
        for row, total in zip(rows, sums, strict=True)
    ]


def choose_int8() -> Step:
    """The quickest that this processor has; all give the same sums."""
    if isa.HAS_INT8_DOT:
        return step_int8_dot
    return step_int8_pairs if isa.HAS_AVX2 else step_int8
