"""Arithmetic on 16 lanes that numba would not turn into vector code by itself.

Owns exponentials, masks, rounding and what follows a matrix kernel's sums. Everything is found by address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from worker_service.fused.lanes import (
    I16,
    I32,
    I64,
    LANES,
    REGISTER_F32,
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
def max_visible(typing_context: Any, scores: Any, groups: Any, first: Any, last: Any) -> Any:
    """The largest of 16 * groups scores, of which numbers first to last - 1 count; -inf when none does.

    It is not NaN.
    """

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        scores, groups, first, last = arguments

        hidden = constant(REGISTER_F32, float("-inf"))

        def visit(builder: ir.IRBuilder, address: Any, visible: Any, so_far: Any) -> Any:
            values = builder.select(visible, load(builder, address, REGISTER_F32, 4), hidden)
            return builder.select(builder.fcmp_ordered(">", values, so_far), values, so_far)

        found = _visit_scores(builder, scores, groups, (first, last), hidden, visit)
        return reduce_lanes(builder, "fmax", found)

    return types.float32(*[types.int64] * 4), emit


@intrinsic
def exponentiate(typing_context: Any, scores: Any, groups: Any, largest: Any, first: Any, last: Any) -> Any:
    """Replaces 16 * groups scores by e^(score - largest), 0 for those that don't count; returns their sum."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        scores, groups, largest, first, last = arguments
        most = splat(builder, largest, REGISTER_F32.count)
        zero = constant(REGISTER_F32, 0.0)

        def visit(builder: ir.IRBuilder, address: Any, visible: Any, so_far: Any) -> Any:
            values = exp(builder, builder.fsub(load(builder, address, REGISTER_F32, 4), most))
            weights = builder.select(visible, values, zero)
            store(builder, weights, address)
            return builder.fadd(so_far, weights)

        totals = _visit_scores(builder, scores, groups, (first, last), zero, visit)
        return reduce_lanes(builder, "fadd", totals)

    return types.float32(types.int64, types.int64, types.float32, types.int64, types.int64), emit


def _visit_scores(
    builder: ir.IRBuilder,
    address: Any,
    groups: Any,
    bounds: tuple[Any, Any],
    initial: Any,
    visit: Callable[[ir.IRBuilder, Any, Any, Any], Any],
) -> Any:
    """A loop over 16 * groups floats, at least one group, that carries one register on.

    `visit` gets an address, which of the floats there are within the bounds, and the register so far.
    """
    width = REGISTER_F32.count
    numbers = ir.VectorType(I32, width)
    first, last = (splat(builder, builder.trunc(bound, I32), width) for bound in bounds)
    end = builder.add(address, builder.mul(groups, I64(4 * LANES)))
    entry = builder.block
    body, done = (builder.append_basic_block(label) for label in ("scores", "scores.done"))
    builder.branch(body)
    builder.position_at_end(body)
    place, number, so_far = builder.phi(I64), builder.phi(numbers), builder.phi(REGISTER_F32)
    after = builder.icmp_signed(">=", number, first)
    visible = builder.and_(after, builder.icmp_signed("<", number, last))
    result = visit(builder, place, visible, so_far)
    following = builder.add(place, I64(4 * width))
    for phi, start, value in (
        (place, address, following),
        (number, ir.Constant(numbers, list(range(width))), builder.add(number, constant(numbers, width))),
        (so_far, initial, result),
    ):
        phi.add_incoming(start, entry)
        phi.add_incoming(value, body)
    builder.cbranch(builder.icmp_signed("<", following, end), body, done)
    builder.position_at_end(done)
    return result


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
