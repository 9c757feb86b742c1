"""Memory by address: what numba code reads and writes through plain integers.

Owns loads and stores of single values and of 16 at a time, with bf16 widened and rounded on the way.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from worker_service.fused.lanes import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    VECTOR_F32,
    VECTOR_I32,
    load,
    load_wide,
    prefetch,
    splat,
    store,
    to_bf16,
)

HALF = LANES // 2


@intrinsic
def floats(typing_context: Any, address: Any) -> Any:
    """An address as a pointer to fp32, for `carray`."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], F32.as_pointer())

    return types.CPointer(types.float32)(types.int64), emit


@intrinsic
def integers(typing_context: Any, address: Any) -> Any:
    """An address as a pointer to int64, for `carray`."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], I64.as_pointer())

    return types.CPointer(types.int64)(types.int64), emit


@intrinsic
def read_int32(typing_context: Any, address: Any) -> Any:
    """The int32 at an address."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.sext(load(builder, arguments[0], I32, 4), I64)

    return types.int64(types.int64), emit


@intrinsic
def read_element(typing_context: Any, kind: Any, address: Any) -> Any:
    """One value of the type of the array `kind` (fp32, uint16 for bf16, int8) as a float."""
    name = str(kind.dtype)

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        address = arguments[1]
        if name == "int8":
            return builder.sitofp(load(builder, address, I8, 1), F32)
        if name == "uint16":
            wide = builder.zext(load(builder, address, I16, 2), I32)
            return builder.bitcast(builder.shl(wide, I32(16)), F32)
        return load(builder, address, F32, 4)

    return types.float32(kind, types.int64), emit


@intrinsic
def read_row(typing_context: Any, kind: Any, row: Any, out: Any) -> Any:
    """Reads 16 values of the type of the array `kind` as floats: the reverse of `write_row`."""
    bf16 = str(kind.dtype) == "uint16"

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        store(builder, load_wide(builder, arguments[1], bf16), arguments[2])
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64), emit


@intrinsic
def write_row(typing_context: Any, kind: Any, row: Any, out: Any) -> Any:
    """Writes 16 floats in the type of the array `kind`: fp32, or uint16 for bf16."""
    bf16 = str(kind.dtype) == "uint16"

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        values = load(builder, arguments[1], VECTOR_F32, 4)
        store(builder, to_bf16(builder, values) if bf16 else values, arguments[2], 2 if bf16 else 4)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64), emit


_CACHE_ORDER = [*range(0, 2 * HALF, 2), *range(1, 2 * HALF, 2)]
_PLAIN_ORDER = [place for index in range(HALF) for place in (index, index + HALF)]


def _scaled_copy(kind: Any, order: list[int]) -> Any:
    """Code that copies 16 floats, times a factor, and puts those of a bf16 cache into another order."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, row, factor, out = arguments
        values = builder.fmul(load(builder, row, VECTOR_F32, 4), splat(builder, factor))
        if str(kind.dtype) == "uint16":
            mask = ir.Constant(VECTOR_I32, order)
            values = builder.shuffle_vector(values, ir.Constant(VECTOR_F32, ir.Undefined), mask)
        store(builder, values, out)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.float32, types.int64), emit


@intrinsic
def to_cache_order(typing_context: Any, kind: Any, row: Any, factor: Any, out: Any) -> Any:
    """Writes 16 floats, times `factor`, in the order in which a cache of the array `kind`'s type is read."""
    return _scaled_copy(kind, _CACHE_ORDER)


@intrinsic
def from_cache_order(typing_context: Any, kind: Any, row: Any, factor: Any, out: Any) -> Any:
    """The reverse of `to_cache_order`."""
    return _scaled_copy(kind, _PLAIN_ORDER)


@intrinsic
def prefetch_line(typing_context: Any, address: Any) -> Any:
    """See `lanes.prefetch`."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), emit
