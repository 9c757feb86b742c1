"""Scores of a few query vectors against consecutive keys of a cache.

Owns the LLVM IR of the dot products. The sums of a token are reduced across lanes, so it suits few vectors;
many are quicker as a matrix product (`tile.py`) over transposed keys.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from worker_service.fused.lanes import (
    I64,
    LANES,
    VECTOR_F32,
    constant,
    fma,
    load,
    load_wide,
    reduce_lanes,
    store,
)

# Query vectors whose sums stay in registers.
MAX_VECTORS = 6


def _define(module: ir.Module, bf16: bool, vectors: int) -> ir.Function:
    """`void scores(queries, keys, tokens, head_dim, out, out_stride)`, as the intrinsic has them."""
    name = f"tidegate_scores_{'bf16' if bf16 else 'fp32'}_{vectors}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 6), name)
    function.linkage = "internal"
    queries, keys, tokens, head_dim, out, out_stride = function.args
    entry, per_token, per_lanes, sums_done, done = (
        function.append_basic_block(label) for label in ("entry", "token", "lanes", "sums", "done")
    )
    builder = ir.IRBuilder(entry)
    query_bytes = builder.mul(head_dim, I64(4))
    key_bytes = builder.mul(head_dim, I64(2 if bf16 else 4))
    builder.branch(per_token)

    builder.position_at_end(per_token)
    token = builder.phi(I64)
    token.add_incoming(I64(0), entry)
    key = builder.add(keys, builder.mul(token, key_bytes))
    builder.branch(per_lanes)

    builder.position_at_end(per_lanes)
    index = builder.phi(I64)
    sums = [builder.phi(VECTOR_F32) for _ in range(vectors)]
    key_lanes = load_wide(builder, builder.add(key, builder.mul(index, I64(2 if bf16 else 4))), bf16)
    results = []
    for vector, total in enumerate(sums):
        address = builder.add(queries, builder.mul(query_bytes, I64(vector)))
        lanes = load(builder, builder.add(address, builder.mul(index, I64(4))), VECTOR_F32, 4)
        results.append(fma(builder, lanes, key_lanes, total))
    for total, result in zip(sums, results, strict=True):
        total.add_incoming(constant(VECTOR_F32, 0), per_token)
        total.add_incoming(result, per_lanes)
    following = builder.add(index, I64(LANES))
    index.add_incoming(I64(0), per_token)
    index.add_incoming(following, per_lanes)
    builder.cbranch(builder.icmp_signed("<", following, head_dim), per_lanes, sums_done)

    builder.position_at_end(sums_done)
    for vector, result in enumerate(results):
        address = builder.add(out, builder.mul(out_stride, I64(vector)))
        address = builder.add(address, builder.mul(token, I64(4)))
        total = reduce_lanes(builder, "fadd", result)
        store(builder, total, address)
    next_token = builder.add(token, I64(1))
    token.add_incoming(next_token, sums_done)
    builder.cbranch(builder.icmp_signed("<", next_token, tokens), per_token, done)
    builder.position_at_end(done)
    builder.ret_void()
    return function


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
) -> Any:
    """out[v, t] = queries[v] . keys[t], for 1 to MAX_VECTORS fp32 queries and at least one token.

    `kind` is any array of the cache's type. `out_stride` in bytes.
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

    return types.void(kind, *[types.int64] * 7), emit
