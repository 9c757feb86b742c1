"""16 lanes of LLVM IR: the building blocks of everything here that must run as vector code.

Owns no algorithm. numba compiles the code for the processor at hand: 16 fp32 are two registers of AVX2, one
of AVX-512, four of NEON.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from worker_service.fused import isa

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
LANES = isa.LANES
VECTOR_F32 = ir.VectorType(F32, LANES)
VECTOR_I32 = ir.VectorType(I32, LANES)
HALF_F32 = ir.VectorType(F32, LANES // 2)
HALF_I32 = ir.VectorType(I32, LANES // 2)
# As many lanes as a register has, for code that needs most registers for its constants.
REGISTER_F32 = VECTOR_F32 if isa.HAS_AVX512 else HALF_F32

_LOG2_E = 1.4426950408889634
_ROUNDING = 1.5 * 2**23
# ln 2 in two parts: the first has few bits, so that multiples of it are exact.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# exp(r) on |r| <= ln(2) / 2, as 1 + r + r^2 * polynomial (Cephes' expf).
_EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


def load(builder: ir.IRBuilder, address: Any, kind: ir.Type, align: int) -> Any:
    """A value of type `kind` at an integer address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align, typ=kind)


def store(builder: ir.IRBuilder, value: Any, address: Any, align: int = 4) -> None:
    """Writes a value to an integer address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def splat(builder: ir.IRBuilder, scalar: Any, lanes: int = LANES) -> Any:
    """The scalar in every lane."""
    vector = ir.VectorType(scalar.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
    zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def constant(kind: ir.VectorType, value: float) -> ir.Constant:
    """The number in every lane."""
    return ir.Constant(kind, [value] * kind.count)


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: Any) -> Any:
    """A call of an LLVM intrinsic or an external function."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def fma(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """a * b + c on 8 or 16 floats, fused where the processor can."""
    return call(builder, f"llvm.fmuladd.v{a.type.count}f32", a.type, a, b, c)


def load_wide(builder: ir.IRBuilder, address: Any, bf16: bool) -> Any:
    """16 values in a row as floats."""
    if not bf16:
        return load(builder, address, VECTOR_F32, 4)
    halves = load(builder, address, ir.VectorType(I16, LANES), 2)
    wide = builder.shl(builder.zext(halves, VECTOR_I32), constant(VECTOR_I32, 16))
    return builder.bitcast(wide, VECTOR_F32)


def load_cached(builder: ir.IRBuilder, address: Any, bf16: bool) -> tuple[Any, Any]:
    """16 values of a KV cache as two halves of 8 fp32, in cache order.

    fp32 keeps its order. bf16 comes as the even values, then the odd ones: a pair in a 32-bit lane widens by
    a shift and by a mask, in half the instructions that keeping the order would take.
    """
    if not bf16:
        second = builder.add(address, I64(32))
        return load(builder, address, HALF_F32, 4), load(builder, second, HALF_F32, 4)
    pairs = load(builder, address, HALF_I32, 4)
    even = builder.shl(pairs, constant(HALF_I32, 16))
    odd = builder.and_(pairs, constant(HALF_I32, 0xFFFF0000))
    return builder.bitcast(even, HALF_F32), builder.bitcast(odd, HALF_F32)


def join(builder: ir.IRBuilder, halves: tuple[Any, Any]) -> Any:
    """Two halves of 8 as 16 lanes."""
    return builder.shuffle_vector(*halves, ir.Constant(VECTOR_I32, list(range(LANES))))


def reduce_lanes(builder: ir.IRBuilder, operation: str, vector: Any) -> Any:
    """All lanes as one float: `fadd` (in any order), `fmax` (of no NaN) or `fmaximum` (which keeps NaN)."""
    name = f"llvm.vector.reduce.{operation}.v{vector.type.count}f32"
    start = [ir.Constant(F32, 0.0)] if operation == "fadd" else []
    kind = ir.FunctionType(F32, [*(value.type for value in start), vector.type])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    flags = {"fadd": ("reassoc",), "fmax": ("nnan", "nsz")}.get(operation, ())
    return builder.call(function, [*start, vector], fastmath=flags)


def exp(builder: ir.IRBuilder, x: Any) -> Any:
    """e^x to 1 ulp; 0 below -87, that of 88 above it, NaN for NaN."""

    def number(value: float) -> ir.Constant:
        return constant(x.type, value)

    low, high = number(-87.0), number(88.0)
    is_low = builder.fcmp_ordered("<", x, low)
    # One instruction each; LLVM's minnum takes three, to drop a NaN.
    clamped = builder.select(builder.fcmp_ordered(">", low, x), low, x)
    clamped = builder.select(builder.fcmp_ordered("<", high, clamped), high, clamped)
    # The sum with 1.5 * 2^23 has no room for fractions: it ends in the whole number.
    shifted = fma(builder, clamped, number(_LOG2_E), number(_ROUNDING))
    power = builder.fsub(shifted, number(_ROUNDING))
    rest = fma(builder, power, number(-_LN2_HIGH), clamped)
    rest = fma(builder, power, number(-_LN2_LOW), rest)
    square = builder.fmul(rest, rest)
    pairs = [
        fma(builder, number(high), rest, number(low))
        for high, low in zip(_EXP_COEFFICIENTS[::2], _EXP_COEFFICIENTS[1::2], strict=True)
    ]
    value = fma(builder, fma(builder, pairs[0], square, pairs[1]), square, pairs[2])
    value = builder.fadd(fma(builder, value, square, rest), number(1.0))
    whole = ir.VectorType(I32, x.type.count)
    exponent = builder.shl(builder.bitcast(shifted, whole), constant(whole, 23))
    scale = builder.bitcast(builder.add(exponent, constant(whole, 127 << 23)), x.type)
    return builder.select(is_low, number(0.0), builder.fmul(value, scale))


def to_bf16(builder: ir.IRBuilder, values: Any) -> Any:
    """Rounded to nearest, ties to even. NaN stays NaN: its upper half is kept, and made quiet."""
    bits = builder.bitcast(values, VECTOR_I32)
    odd = builder.and_(builder.lshr(bits, constant(VECTOR_I32, 16)), constant(VECTOR_I32, 1))
    rounded = builder.add(bits, builder.add(odd, constant(VECTOR_I32, 0x7FFF)))
    quiet = builder.or_(bits, constant(VECTOR_I32, 0x400000))
    chosen = builder.select(builder.fcmp_unordered("uno", values, values), quiet, rounded)
    return builder.trunc(builder.lshr(chosen, constant(VECTOR_I32, 16)), ir.VectorType(I16, LANES))


def prefetch(builder: ir.IRBuilder, address: Any, *, level: int = 1) -> None:
    """Asks for the cache line at an address, to be read soon, into the cache of that level.

    Any address will do.
    """
    pointer = builder.inttoptr(address, I8.as_pointer())
    for_reading, locality, data = I32(0), I32(4 - level), I32(1)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, for_reading, locality, data)
