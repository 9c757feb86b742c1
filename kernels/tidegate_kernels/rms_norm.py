"""Residual addition and RMS normalisation in one Triton kernel (Zhang and Sennrich 2019)."""

# ruff: noqa: ANN001, ANN201
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# The arguments of device functions have Triton's types, which Python has no names for.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 65536  # elements of a row, which one program holds in registers


@triton.jit
def rms_norm_kernel(
    x,  # [T, N]
    residual,  # [T, N], updated in place
    weight,  # [N]
    output,  # [T, N]
    epsilon,
    x_stride,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ONE_PLUS: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, N_PAD)
    here = columns < N
    value = tl.load(x + row * x_stride + columns, mask=here, other=0.0)
    if RESIDUAL:
        # The sum is rounded to the model's type before it is used, as it is when the two are separate.
        value += tl.load(residual + row * N + columns, mask=here, other=0.0)
        value = value.to(residual.dtype.element_ty)
        tl.store(residual + row * N + columns, value, mask=here)
    value = value.to(tl.float32)
    normal = value * tl.rsqrt(tl.sum(value * value, axis=0) / N + epsilon)
    scale = tl.load(weight + columns, mask=here, other=0.0)
    kind: tl.constexpr = output.dtype.element_ty
    result = normal * (1.0 + scale.to(tl.float32)) if ONE_PLUS else normal.to(kind) * scale
    tl.store(output + row * N + columns, result.to(kind), mask=here)


def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None, *, one_plus: bool = False
) -> Tensor:
    """`(x + residual) / rms * weight` for `x` `[T, N]`; `residual` `[T, N]` becomes the sum.

    The mean square is in fp32. The result is rounded before the weight is applied, as Llama does it; with
    `one_plus` the weight is 1 + weight and all is in fp32, as Gemma does it. Raises ValueError for operands
    that do not fit.
    """
    tokens, width = x.shape
    if weight.shape != (width,) or width > LARGEST or x.stride(1) != 1:
        raise ValueError(
            f"rows of {width} (at most {LARGEST}, contiguous) need as many weights, not {tuple(weight.shape)}"
        )
    if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
        raise ValueError(f"residual {tuple(residual.shape)} must be contiguous and like x {tuple(x.shape)}")
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        padded = triton.next_power_of_2(width)
        rms_norm_kernel[(tokens,)](
            x, x if residual is None else residual, weight, output, epsilon, x.stride(0),
            N=width, N_PAD=padded, RESIDUAL=residual is not None, ONE_PLUS=one_plus,
            num_warps=warps_for(padded),
        )  # fmt: skip
    return output


def warps_for(padded: int) -> int:
    """Warps for a row, at up to 16 elements a thread where that many warps exist."""
    return min(32, max(1, padded // 512))
