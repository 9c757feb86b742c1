"""The kernel variants that `check` compiles: each family over its types, head sizes and options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import triton

from tidegate_kernels import paged_decode, paged_prefill
from tidegate_kernels.activation import CHUNK as ACTIVATION_CHUNK
from tidegate_kernels.activation import Activation, gated_kernel
from tidegate_kernels.apply_plan import CHUNK as PLAN_CHUNK
from tidegate_kernels.apply_plan import apply_kernel
from tidegate_kernels.kv_write import write_kernel
from tidegate_kernels.paged_decode import decode_kernel, merge_kernel
from tidegate_kernels.paged_prefill import prefill_kernel
from tidegate_kernels.rms_norm import rms_norm_kernel, warps_for
from tidegate_kernels.rope import rope_kernel

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8e4nv": 1}
# fp8 e4m3 came with sm_89.
ARCHITECTURES = {"fp8e4nv": (90,)}
HEAD_DIMS = (64, 80, 128, 256)
# Of queries, keys and values on the one hand, of the cache on the other.
TYPES = (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "fp8e4nv"))


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel with its types and constants."""

    name: str
    kernel: Any
    signature: Mapping[str, str]  # Triton type of each argument that is not a constant
    constants: Mapping[str, Any]
    warps: int
    architectures: tuple[int, ...] = (80, 90)


def _signature(kernel: Any, constants: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, str]:
    """Types by argument: those given, i32 for strides and counts."""
    return {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}


def _attention_types(dtype: str, cache: str) -> dict[str, str]:
    indices = dict.fromkeys(("query_starts", "seq_lens", "block_tables"), "*i32")
    return indices | {
        "query": f"*{dtype}", "output": f"*{dtype}", "key_cache": f"*{cache}", "value_cache": f"*{cache}",
        "partial_output": "*fp32", "partial_stats": "*fp32",
        "scale": "fp32", "softcap": "fp32", "value_scale": "fp32",
    }  # fmt: skip


def _variant(
    name: str,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    warps: int,
    cache: str = "",
) -> Variant:
    architectures = ARCHITECTURES.get(cache, (80, 90))
    return Variant(name, kernel, _signature(kernel, constants, types), constants, warps, architectures)


def _decode() -> Iterator[Variant]:
    for dtype, cache in TYPES:
        for head_dim in HEAD_DIMS:
            for special, split in ((False, True), (True, True), (False, False)):
                tile, warps = paged_decode.tile_shape(head_dim, BYTES[dtype])
                constants = {
                    "GROUP": 4, "GROUP_PAD": 16,
                    "HEAD_DIM": head_dim, "DIM_PAD": triton.next_power_of_2(head_dim),
                    "BLOCK_SIZE": 16, "TILE": tile,
                    "WINDOW": special, "SOFTCAP": special, "SPLIT": split,
                }  # fmt: skip
                options = " window softcap" if special else "" if split else " whole"
                name = f"decode {dtype} cache={cache} D={head_dim}{options}"
                yield _variant(name, decode_kernel, _attention_types(dtype, cache), constants, warps, cache)
    for head_dim in HEAD_DIMS:
        constants = {"HEAD_DIM": head_dim, "DIM_PAD": triton.next_power_of_2(head_dim), "SPLITS_PAD": 64}
        types = _attention_types("bf16", "bf16")
        yield _variant(f"decode merge bf16 D={head_dim} splits=64", merge_kernel, types, constants, 4)


def _prefill() -> Iterator[Variant]:
    for dtype, cache in TYPES:
        for head_dim in HEAD_DIMS:
            for special in (False, True):
                queries, tile, warps = paged_prefill.tile_shape(head_dim, BYTES[dtype])
                constants = {
                    "GROUP": 4, "BLOCK_SIZE": 16,
                    "HEAD_DIM": head_dim, "DIM_PAD": triton.next_power_of_2(head_dim),
                    "QUERIES": queries, "TILE": tile,
                    "WINDOW": special, "SOFTCAP": special, "SKIP_DECODES": True,
                }  # fmt: skip
                name = f"prefill {dtype} cache={cache} D={head_dim}{' window softcap' if special else ''}"
                yield _variant(name, prefill_kernel, _attention_types(dtype, cache), constants, warps, cache)


def _writes() -> Iterator[Variant]:
    scales = dict.fromkeys(("key_inverse_scale", "value_inverse_scale"), "fp32")
    for dtype, cache in TYPES:
        told = cache if cache == dtype else f"{dtype} to {cache}"
        types = scales | {
            "query": f"*{dtype}", "key": f"*{dtype}", "value": f"*{dtype}", "slot_mapping": "*i64",
            "key_cache": f"*{cache}", "value_cache": f"*{cache}",
            "cosines": "*fp32", "sines": "*fp32", "positions": "*i32",
        }  # fmt: skip
        for head_dim in (80, 128):
            padded = triton.next_power_of_2(head_dim)
            common = {"BLOCK_SIZE": 16, "HEAD_DIM": head_dim, "DIM_PAD": padded, "FP8": cache == "fp8e4nv"}
            yield _variant(f"kv write {told} D={head_dim}", write_kernel, types, common, 1, cache)
            for rotary, interleaved in ((head_dim, False), (head_dim // 2, True)):
                constants = common | {
                    "ROTARY": rotary, "HALF_PAD": triton.next_power_of_2(rotary // 2),
                    "REST_PAD": triton.next_power_of_2(max(1, head_dim - rotary)), "INTERLEAVED": interleaved,
                }  # fmt: skip
                style = " interleaved" if interleaved else ""
                name = f"rope {told} D={head_dim} rotary={rotary}{style}"
                yield _variant(name, rope_kernel, types, constants, 1, cache)


def _layers() -> Iterator[Variant]:
    for dtype in ("bf16", "fp16", "fp32"):
        types = dict.fromkeys(("x", "residual", "weight", "output", "gate_up"), f"*{dtype}") | {
            "epsilon": "fp32"
        }
        for width in (576, 4096, 16384):
            padded = triton.next_power_of_2(width)
            constants = {"N": width, "N_PAD": padded, "RESIDUAL": True, "ONE_PLUS": False}
            yield _variant(
                f"rms norm {dtype} N={width}", rms_norm_kernel, types, constants, warps_for(padded)
            )
        for kind in Activation:
            constants = {"N": 14336, "CHUNK": ACTIVATION_CHUNK, "KIND": int(kind)}
            yield _variant(f"activation {dtype} {kind.name.lower()}", gated_kernel, types, constants, 4)
    plan_types = dict.fromkeys(apply_kernel.arg_names[:12], "*i32") | {"slot_mapping": "*i64"}
    yield _variant("apply plan", apply_kernel, plan_types, {"BLOCK_SIZE": 16, "CHUNK": PLAN_CHUNK}, 1)


VARIANTS = (*_decode(), *_prefill(), *_writes(), *_layers())
