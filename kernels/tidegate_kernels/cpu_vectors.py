"""Vector code that numba cannot be asked for in Python, emitted as LLVM IR: 8 fp32 lanes on any machine.

Owns loads that widen bf16, exp2, horizontal sums, atomics and pointers. Knows nothing of attention.
The functions with a `builder` emit code; the intrinsics are called from numba's Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

LANES = 8
INT = ir.IntType(64)
FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
QUAD = ir.VectorType(FLOAT, 4)
INTS = ir.VectorType(ir.IntType(32), LANES)
# Sums may be reordered and fused. NaN and infinity keep their meaning: a broken input must show.
FAST = ("reassoc", "contract", "nsz")


def integer(value: int) -> ir.Constant:
    """A constant offset or count."""
    return ir.Constant(INT, value)


def at(builder: ir.IRBuilder, address: Any, index: Any, size: int) -> Any:
    """The address of element `index` of an array of elements of `size` bytes."""
    return builder.add(address, builder.mul(index, integer(size)))


def load(builder: ir.IRBuilder, address: Any, kind: ir.Type, align: int = 4) -> Any:
    """A value of type `kind` from an address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align, typ=kind)


def store(builder: ir.IRBuilder, value: Any, address: Any) -> None:
    """Writes floats to an address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def load_wide(builder: ir.IRBuilder, address: Any, bf16: bool, count: int) -> list[Any]:
    """1 or 2 vectors of 8 fp32 from consecutive elements. A bf16 is widened: it is the upper half of an fp32.

    16 bf16 give those of even places first, then those of odd ones: widening in place takes one instruction a
    vector, keeping the order takes two. `place` tells where an element ends up.
    """
    if not bf16:
        return [load(builder, builder.add(address, integer(32 * i)), VECTOR) for i in range(count)]
    half = ir.Constant(INTS, [16] * LANES)
    if count == 1:
        narrow = load(builder, address, ir.VectorType(ir.IntType(16), LANES), align=2)
        return [builder.bitcast(builder.shl(builder.zext(narrow, INTS), half), VECTOR)]
    pairs = load(builder, address, INTS, align=2)
    upper = ir.Constant(INTS, [0xFFFF0000] * LANES)
    return [
        builder.bitcast(builder.shl(pairs, half), VECTOR),
        builder.bitcast(builder.and_(pairs, upper), VECTOR),
    ]


@register_jitable
def place(element: int, length: int, bf16: bool) -> int:
    """Where `load_wide`, called for 16 elements at a time and then for the last 8, puts an element."""
    if not bf16 or element >= length // 16 * 16:
        return element
    return element // 16 * 16 + element % 2 * LANES + element % 16 // 2


def splat(builder: ir.IRBuilder, value: Any) -> Any:
    """The scalar in every lane."""
    vector = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(INTS, [0] * LANES))


def splat_constant(value: float) -> ir.Constant:
    """The number in every lane."""
    return ir.Constant(VECTOR, [value] * LANES)


def fma(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, fused where the machine can."""
    return builder.fadd(builder.fmul(a, b, flags=FAST), c, flags=FAST)


def maximum(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """The larger of the two, lane by lane."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def pick(builder: ir.IRBuilder, vectors: tuple[Any, Any], lanes: Sequence[int]) -> Any:
    """The named lanes of two vectors laid end to end."""
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
    return builder.shuffle_vector(vectors[0], vectors[1], mask)


def sum_lanes(builder: ir.IRBuilder, vectors: list[Any]) -> Any:
    """The lane sums of 1 to 4 vectors, as one vector of 4 floats that starts with them."""
    return _reduce(vectors, builder, lambda a, b: builder.fadd(a, b, flags=FAST))


def max_lanes(builder: ir.IRBuilder, vectors: list[Any]) -> Any:
    """The largest lanes of 1 to 4 vectors, as one vector of 4 floats that starts with them."""
    return _reduce(vectors, builder, lambda a, b: maximum(builder, a, b))


def _reduce(vectors: list[Any], builder: ir.IRBuilder, combine: Callable[[Any, Any], Any]) -> Any:
    a, b, c, d = (vectors * 4)[:4] if len(vectors) < 3 else (*vectors, *vectors)[:4]
    quarters = _fold(builder, combine, _fold(builder, combine, a, b), _fold(builder, combine, c, d))
    low = pick(builder, (quarters, quarters), range(4))
    high = pick(builder, (quarters, quarters), range(4, 8))
    return combine(low, high)


def _fold(builder: ir.IRBuilder, combine: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Combines neighbours, in the order of x86's horizontal add: it stays within halves of a register."""
    even = pick(builder, (left, right), (0, 2, 8, 10, 4, 6, 12, 14))
    odd = pick(builder, (left, right), (1, 3, 9, 11, 5, 7, 13, 15))
    return combine(even, odd)


def load_floats(builder: ir.IRBuilder, address: Any, count: int) -> Any:
    """Up to 4 floats, and no byte more, as a vector of 4."""
    vector = ir.Constant(QUAD, [0.0] * 4)
    for lane in range(count):
        value = load(builder, builder.add(address, integer(lane * 4)), FLOAT)
        vector = builder.insert_element(vector, value, ir.Constant(ir.IntType(32), lane))
    return vector


def store_floats(builder: ir.IRBuilder, vector: Any, address: Any, count: int) -> None:
    """Writes the first `count` lanes."""
    for lane in range(count):
        value = builder.extract_element(vector, ir.Constant(ir.IntType(32), lane))
        store(builder, value, builder.add(address, integer(lane * 4)))


def splat_lane(builder: ir.IRBuilder, vector: Any, lane: int) -> Any:
    """One of the vector's lanes in all 8."""
    return pick(builder, (vector, vector), [lane] * LANES)


def exp2(builder: ir.IRBuilder, x: Any) -> Any:
    """2^x in every lane for x < 128, to about 1 ulp; 2^-126 for all below that.

    2^x = 2^n * 2^f with n = round(x): the first by the exponent's bits, the second by 7 terms of its series,
    whose remainder is below 1e-8 for |f| <= 1/2.
    """
    count = x.type.count
    ints = ir.VectorType(ir.IntType(32), count)

    def constant(value: float) -> ir.Constant:
        return ir.Constant(x.type, [value] * count)

    x = builder.select(builder.fcmp_ordered("<", x, constant(-126.0)), constant(-126.0), x)
    rint = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(x.type, [x.type]), f"llvm.rint.v{count}f32"
    )
    nearest = builder.call(rint, [x])
    fraction = builder.fsub(x, nearest)
    result = constant(math.log(2.0) ** 7 / math.factorial(7))
    for power in range(6, -1, -1):
        result = fma(builder, result, fraction, constant(math.log(2.0) ** power / math.factorial(power)))
    exponent = builder.shl(builder.fptosi(nearest, ints), ir.Constant(ints, [23] * count))
    return builder.bitcast(builder.add(builder.bitcast(result, ints), exponent), x.type)


def prefetch(builder: ir.IRBuilder, address: Any) -> None:
    """Asks for the cache line at an address, which may be any number at all, to come into the L2 cache."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [pointer, number(0), number(2), number(1)])


@intrinsic
def atomic_add(_context: Any, address: Any, value: Any) -> Any:
    """Adds to the int64 at an address and returns what was there, as one indivisible act."""

    def emit(_: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], INT.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def int32_at(_context: Any, address: Any) -> Any:
    """The address as a pointer to int32, for `numba.carray`."""
    return _pointer(types.int32)


@intrinsic
def int64_at(_context: Any, address: Any) -> Any:
    """The address as a pointer to int64, for `numba.carray`."""
    return _pointer(types.int64)


@intrinsic
def float32_at(_context: Any, address: Any) -> Any:
    """The address as a pointer to fp32, for `numba.carray`."""
    return _pointer(types.float32)


@intrinsic
def uint32_at(_context: Any, address: Any) -> Any:
    """The address as a pointer to 32 bits, such as those of an fp32, for `numba.carray`."""
    return _pointer(types.uint32)


@intrinsic
def uint16_at(_context: Any, address: Any) -> Any:
    """The address as a pointer to 16 bits, such as a bf16, for `numba.carray`."""
    return _pointer(types.uint16)


def _pointer(element: Any) -> Any:
    def emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(element)(types.int64), emit
