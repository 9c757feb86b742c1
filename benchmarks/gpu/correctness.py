"""Every Triton kernel against its reference: the kernels' own tests, and attention as real models have it.

The tests compare in fp32 and fp16. Here are the types that models are served in, bf16 and an fp8 cache with
scales, which Triton's interpreter does not compute rightly, with heads and contexts of real models.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.inputs import Heads, Paged, make_paged
from tidegate_kernels import reference, triton_backend
from tidegate_kernels.kv_write import write_kv
from tidegate_kernels.paged_decode import paged_decode
from tidegate_kernels.paged_prefill import paged_prefill

KERNEL_TESTS = Path(__file__).parents[2] / "tests" / "kernels" / "triton_kernels"
HEADS = (Heads(32, 8, 64), Heads(32, 8, 128), Heads(8, 4, 256), Heads(14, 2, 64))
DECODES = [(length, 1) for length in (1, 17, 1000, 4097, 16_000)]
MIXED = [(700, 1), (0, 513), (1500, 1), (2000, 300)]
FP8_SCALES = (0.02, 0.03)  # of keys and values

# Relative error of the whole output: a rounding of the type.
MOST = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}


@dataclass(frozen=True)
class Check:
    """What was compared, and how far off it was."""

    name: str
    error: float  # relative
    most: float

    @property
    def good(self) -> bool:
        """Whether the kernel is right; a NaN never is."""
        return self.error <= self.most


def run_tests(dry_run: bool) -> bool:
    """The kernels' tests, on the GPU or, in a dry run, some of them under the interpreter."""
    chosen = ["-k", "silu or a_negative_slot or next_step"] if dry_run else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, str(KERNEL_TESTS)]
    return subprocess.run(command, check=False).returncode == 0


def check_attention(device: torch.device, dry_run: bool) -> Iterator[Check]:
    """Attention and KV write, each case as soon as it is done."""
    dtypes = (torch.float32,) if dry_run else (torch.bfloat16, torch.float16)
    steps = {"decodes": DECODES, "mixed": MIXED}
    if dry_run:
        steps = {"decodes": [(5, 1), (40, 1)], "mixed": [(7, 1), (0, 19)]}
    for dtype in dtypes:
        for heads in HEADS[:1] if dry_run else HEADS:
            for name, rows in steps.items():
                for block_size in (16,) if dry_run else (16, 32):
                    paged = make_paged(rows, heads, block_size, dtype, device)
                    told = f"{name}, {heads}, blocks of {block_size}, {str(dtype).removeprefix('torch.')}"
                    yield _check(told, paged, None, None)
                    yield _check(f"{told}, window, soft cap", paged, 100, 30.0)
    if not dry_run and torch.cuda.get_device_capability(device) >= (8, 9):
        for heads in HEADS:
            for name, rows in steps.items():
                yield _check_fp8(f"{name}, {heads}, fp8 cache", make_paged(rows, heads, 16, dtype, device))


def _check(name: str, paged: Paged, window: int | None, softcap: float | None) -> Check:
    slots, scale = paged.batch.slot_mapping, paged.query.shape[-1] ** -0.5
    keys, values = paged.key_cache.clone(), paged.value_cache.clone()
    write_kv(paged.key, paged.value, keys, values, slots)
    right_keys, right_values = paged.key_cache.clone(), paged.value_cache.clone()
    reference.write_kv(paged.key, paged.value, right_keys, right_values, slots)
    if not (torch.equal(keys, right_keys) and torch.equal(values, right_values)):
        return Check(f"{name}: KV write", float("inf"), 0.0)
    found = triton_backend.paged_attention(
        paged.query, keys, values, paged.batch, scale=scale, window=window, softcap=softcap
    )
    expected = reference.paged_attention(
        paged.query.float(),
        keys.float(),
        values.float(),
        paged.batch,
        scale=scale,
        window=window,
        softcap=softcap,
    )
    return Check(name, _error(found, expected), MOST[found.dtype])


def _check_fp8(name: str, paged: Paged) -> Check:
    """Both kernels on fp8 caches that the write kernel has filled, against what those hold."""
    key_scale, value_scale = FP8_SCALES
    keys = (paged.key_cache.float() / key_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    values = (paged.value_cache.float() / value_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    batch, query, scale = paged.batch, paged.query, paged.query.shape[-1] ** -0.5
    write_kv(
        paged.key,
        paged.value,
        keys,
        values,
        batch.slot_mapping,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    expected = reference.paged_attention(
        query.float(),
        keys.float() * key_scale,
        values.float() * value_scale,
        batch,
        scale=scale,
        window=None,
        softcap=None,
    )
    found = torch.empty_like(query)
    scales = {"scale": scale, "key_scale": key_scale, "value_scale": value_scale}
    if batch.max_query_len > 1:
        paged_prefill(query, keys, values, batch, found, skip_decodes=True, **scales)
    paged_decode(query, keys, values, batch, found, **scales)
    return Check(name, _error(found, expected), 2 * MOST[found.dtype])


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())
