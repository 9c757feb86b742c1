"""The matrix kernel: a few rows of activations times one panel of 16 output features.

Owns the LLVM IR of the kernel for each weight type; numba compiles it for the processor at hand, so nobody
needs a compiler. Knows nothing of layers, threads or memory management: it is given addresses.

A panel holds 16 outputs, inputs outermost, grouped so that 16 lanes of 32 bits are one load:

| weights | a lane holds       | activations of a row                               |
| ------- | ------------------ | -------------------------------------------------- |
| fp32    | 1 input            | fp32                                               |
| bf16    | 2 inputs           | fp32, or bf16 where the processor multiplies those |
| int8    | 2 inputs (16 bits) | int16                                              |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from worker_service.fused import isa, tile_steps
from worker_service.fused.lanes import I64, LANES, VECTOR_F32, VECTOR_I32, constant, load, prefetch, store
from worker_service.fused.tile_steps import Step

# The loop over inputs may be unrolled so far: steps come in multiples of it.
STEPS_MULTIPLE = 4


@dataclass(frozen=True, slots=True)
class Kernel:
    """How one weight type is multiplied: a step reads `group` inputs of a panel and of each row."""

    name: str
    step: Step
    group: int  # inputs per lane
    panel_bytes: int  # of a panel's weights per step
    row_bytes: int  # of a row's activations per step
    sums: ir.VectorType

    @property
    def converts(self) -> bool:
        """Whether it wants activations other than fp32."""
        return self.name not in {"fp32", "bf16"}


FP32 = Kernel("fp32", tile_steps.step_fp32, 1, 64, 4, VECTOR_F32)
BF16 = (
    Kernel("bf16_dot", tile_steps.step_bf16_dot, 2, 64, 4, VECTOR_F32)
    if isa.HAS_BF16_DOT
    else Kernel("bf16", tile_steps.step_bf16, 2, 64, 8, VECTOR_F32)
)
INT8 = Kernel("int8", tile_steps.choose_int8(), 2, 32, 4, VECTOR_I32)
# By the element type of the packed weights: numpy has no bf16.
KERNELS = {"float32": FP32, "uint16": BF16, "int8": INT8}
# Rows of a KV cache are no panels: inputs (tokens) lie apart, and are not grouped.
_CACHE_KERNELS = {
    "float32": Kernel("cache_fp32", tile_steps.step_fp32, 1, 0, 4, VECTOR_F32),
    "uint16": Kernel("cache_bf16", tile_steps.step_cached_bf16, 1, 0, 4, VECTOR_F32),
}


def _define(module: ir.Module, kernel: Kernel, rows: int) -> ir.Function:
    """`void tile(x, x_stride, panel, panel_stride, steps, out, out_stride, ahead, ahead_stride)`, in bytes.

    Panels of weights overwrite `out`, 16 values a row; cache rows add to it. Each step on a panel asks for
    what it will find at `ahead`, `ahead_stride` bytes further each time.
    """
    name = f"tidegate_tile_{kernel.name}_{rows}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 9), name)
    function.linkage = "internal"
    function.attributes.add("noinline")  # once is enough to compile
    x, x_stride, panel, panel_stride, steps, out, out_stride, *ahead = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    x_rows = [builder.add(x, builder.mul(x_stride, I64(row))) for row in range(rows)]
    out_rows = [builder.add(out, builder.mul(out_stride, I64(row))) for row in range(rows)]
    adds = kernel.panel_bytes == 0
    stride = panel_stride if adds else I64(kernel.panel_bytes)
    sums = _emit_sums(builder, kernel, x_rows, (panel, stride), (ahead[0], ahead[1]), steps)
    for row, total in zip(out_rows, sums, strict=True):
        result = builder.fadd(load(builder, row, VECTOR_F32, 4), total) if adds else total
        store(builder, result, row)
    builder.ret_void()
    return function


def _emit_sums(
    builder: ir.IRBuilder,
    kernel: Kernel,
    x_rows: list[Any],
    panel: tuple[Any, Any],
    ahead: tuple[Any, Any],
    steps: Any,
) -> list[Any]:
    """The loop over the inputs. Leaves `builder` behind it."""
    rows = len(x_rows)
    # One or two rows alone would wait for each sum's latency, so they get several sums each.
    chains = {1: STEPS_MULTIPLE, 2: STEPS_MULTIPLE // 2}.get(rows, 1) if kernel.panel_bytes else 1
    entry = builder.block
    body, done = (builder.append_basic_block(label) for label in ("body", "done"))
    builder.branch(body)
    builder.position_at_end(body)
    index = builder.phi(I64)
    sums = [builder.phi(kernel.sums) for _ in range(chains * rows)]
    results = []
    for chain in range(chains):
        step = builder.add(index, I64(chain))
        weights = builder.add(panel[0], builder.mul(step, panel[1]))
        if kernel.panel_bytes:
            prefetch(builder, builder.add(ahead[0], builder.mul(step, ahead[1])), level=1 if rows <= 2 else 2)
        offset = builder.mul(step, I64(kernel.row_bytes))
        values = [builder.add(row, offset) for row in x_rows]
        results += kernel.step(builder, weights, values, sums[chain * rows : (chain + 1) * rows])
    for total, result in zip(sums, results, strict=True):
        total.add_incoming(constant(kernel.sums, 0), entry)
        total.add_incoming(result, body)
    following = builder.add(index, I64(chains))
    index.add_incoming(I64(0), entry)
    index.add_incoming(following, body)
    builder.cbranch(builder.icmp_signed("<", following, steps), body, done)
    builder.position_at_end(done)
    return [reduce(partial(_plus, builder), results[row::rows]) for row in range(rows)]


def _plus(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    return builder.fadd(a, b) if a.type == VECTOR_F32 else builder.add(a, b)


def _emit_by_rows(builder: ir.IRBuilder, kernel: Kernel, count: Any, arguments: list[Any]) -> None:
    """Calls the tile for the number of rows that is known only when it runs."""
    end = builder.append_basic_block("tile.end")
    switch = builder.switch(count, end)
    for number in range(1, isa.MAX_TILE_ROWS + 1):
        block = builder.append_basic_block(f"tile.{number}")
        switch.add_case(I64(number), block)
        with builder.goto_block(block):
            builder.call(_define(builder.module, kernel, number), arguments)
            builder.branch(end)
    builder.position_at_end(end)


@intrinsic
def multiply_panel(
    typing_context: Any,
    kind: Any,
    rows: Any,
    x: Any,
    x_stride: Any,
    panel: Any,
    steps: Any,
    out: Any,
    ahead: Any,
    ahead_stride: Any,
) -> Any:
    """Multiplies 1 to MAX_TILE_ROWS rows by a panel; `kind` is any array of the packed weights' type.

    Writes `[rows, 16]` sums to `out`: fp32, or int32 for int8 weights. `steps`: a multiple of STEPS_MULTIPLE.
    Meanwhile asks for weights from `ahead` on, `ahead_stride` bytes a step.
    """
    kernel = KERNELS[str(kind.dtype)]

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _, count, x, x_stride, panel, steps, out, ahead, ahead_stride = arguments
        rest = [x, x_stride, panel, I64(0), steps, out, I64(4 * LANES), ahead, ahead_stride]
        _emit_by_rows(builder, kernel, count, rest)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 8), emit


@intrinsic
def add_cache_rows(
    typing_context: Any,
    kind: Any,
    rows: Any,
    x: Any,
    x_stride: Any,
    cache: Any,
    cache_stride: Any,
    tokens: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """Adds to `[rows, 16]` of `out` the sum over `tokens` of x[row, token] * cache[token, :16].

    `kind` is any array of the cache's type; `x` is fp32. The 16 columns come out in cache order (`lanes.py`).
    """
    kernel = _CACHE_KERNELS[str(kind.dtype)]

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        _emit_by_rows(builder, kernel, arguments[1], [*arguments[2:], I64(0), I64(0)])
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 8), emit
