"""Arithmetic on 16 lanes that numba would not turn into vector code by itself.

Owns exponentials, masks, rounding and what follows a matrix kernel's sums. Everything is found by address.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from worker_service.fused.lanes import (
    I16,
    I32,
    I64,
    LANES,
    VECTOR_F32,
    VECTOR_I32,
    call,
    constant,
    exp,
    load,
    reduce_lanes,
    splat,
    store,
    to_bf16,
)
from worker_service.fused.tile import KERNELS


@intrinsic
def silu_multiply(typing_context: Any, gate: Any, up: Any, out: Any) -> Any:
    """out = gate / (1 + e^-gate) * up, on 16 floats."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        gate, up = (load(builder, address, VECTOR_F32, 4) for address in arguments[:2])
        one = constant(VECTOR_F32, 1.0)
        divisor = builder.fadd(one, exp(builder, builder.fneg(gate)))
        store(builder, builder.fmul(builder.fdiv(gate, divisor), up), arguments[2])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def max_visible(typing_context: Any, scores: Any, first: Any, last: Any) -> Any:
    """The largest of 16 scores, of which lanes first to last - 1 count; -inf when none does."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        address, first, last = arguments
        visible = _visible(builder, first, last)
        hidden = constant(VECTOR_F32, float("-inf"))
        scores = builder.select(visible, load(builder, address, VECTOR_F32, 4), hidden)
        return reduce_lanes(builder, "fmax", scores)

    return types.float32(types.int64, types.int64, types.int64), emit


@intrinsic
def exponentiate(typing_context: Any, scores: Any, largest: Any, first: Any, last: Any) -> Any:
    """Replaces 16 scores by e^(score - largest), 0 in lanes that do not count, and returns their sum."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        address, largest, first, last = arguments
        scores = builder.fsub(load(builder, address, VECTOR_F32, 4), splat(builder, largest))
        weights = builder.select(
            _visible(builder, first, last), exp(builder, scores), constant(VECTOR_F32, 0.0)
        )
        store(builder, weights, address)
        return reduce_lanes(builder, "fadd", weights)

    return types.float32(types.int64, types.float32, types.int64, types.int64), emit


def _visible(builder: ir.IRBuilder, first: Any, last: Any) -> Any:
    lanes = _lane_numbers()
    first, last = (splat(builder, builder.trunc(bound, I32)) for bound in (first, last))
    after = builder.icmp_signed(">=", lanes, first)
    return builder.and_(after, builder.icmp_signed("<", lanes, last))


def _lane_numbers() -> ir.Constant:
    return ir.Constant(VECTOR_I32, list(range(LANES)))


@intrinsic
def settle_row(
    typing_context: Any,
    kind: Any,
    sums: Any,
    input_scale: Any,
    scales: Any,
    bias: Any,
    add: Any,
    out: Any,
) -> Any:
    """Turns 16 sums of a matrix kernel into 16 floats: scaled (int8), plus a bias, plus what `out` held.

    `bias` may be 0: none.
    """
    int8 = str(kind.dtype) == "int8"

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, sums, input_scale, scales, bias, add, out = arguments
        if int8:
            total = load(builder, sums, VECTOR_I32, 4)
            scale = builder.fmul(load(builder, scales, VECTOR_F32, 4), splat(builder, input_scale))
            values = builder.fmul(builder.sitofp(total, VECTOR_F32), scale)
        else:
            values = load(builder, sums, VECTOR_F32, 4)
        for address, present in ((bias, bias), (out, add)):
            before = builder.block
            with builder.if_then(builder.icmp_signed("!=", present, I64(0))):
                more = builder.fadd(values, load(builder, address, VECTOR_F32, 4))
                inside = builder.block
            merged = builder.phi(VECTOR_F32)
            merged.add_incoming(values, before)
            merged.add_incoming(more, inside)
            values = merged
        store(builder, values, out)
        return context.get_dummy_value()

    signature = types.void(kind, types.int64, types.float32, *[types.int64] * 4)
    return signature, emit


@intrinsic
def converts(typing_context: Any, kind: Any) -> Any:
    """Whether weights of the type of the array `kind` want activations other than fp32."""
    answer = KERNELS[str(kind.dtype)].converts

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return ir.Constant(ir.IntType(1), answer)

    return types.boolean(kind), emit


@intrinsic
def largest_magnitude(typing_context: Any, row: Any) -> Any:
    """The largest absolute value of 16 floats; NaN when one is."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        values = load(builder, arguments[0], VECTOR_F32, 4)
        return reduce_lanes(builder, "fmaximum", call(builder, "llvm.fabs.v16f32", VECTOR_F32, values))

    return types.float32(types.int64), emit


@intrinsic
def round_row(typing_context: Any, kind: Any, row: Any, factor: Any, out: Any) -> Any:
    """Writes 16 floats, times `factor`, as the activations that weights of the array `kind`'s type want."""
    name = KERNELS[str(kind.dtype)].name

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, row, factor, out = arguments
        values = load(builder, row, VECTOR_F32, 4)
        if name == "bf16_dot":
            store(builder, to_bf16(builder, values), out, 2)
        elif name == "int8":
            scaled = builder.fmul(values, splat(builder, factor))
            whole = builder.fptosi(call(builder, "llvm.rint.v16f32", VECTOR_F32, scaled), VECTOR_I32)
            store(builder, builder.trunc(whole, ir.VectorType(I16, LANES)), out, 2)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.float32, types.int64), emit


@intrinsic
def group_inputs(typing_context: Any, kind: Any) -> Any:
    """Inputs that a lane of a panel of the array `kind`'s type holds."""
    group = KERNELS[str(kind.dtype)].group

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return I64(group)

    return types.int64(kind), emit
