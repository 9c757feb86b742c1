"""Gated activations in Triton: the activation of one half of a projection times the other half."""

# ruff: noqa: ANN001, ANN201
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# The arguments of device functions have Triton's types, which Python has no names for.

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024


class Activation(IntEnum):
    """What is applied to the gate."""

    SILU = 0  # Elfwing, Uchibe, Doya 2017
    GELU = 1  # exact, by erf: Hendrycks and Gimpel 2016
    GELU_TANH = 2  # its approximation by tanh


@triton.jit
def gated_kernel(
    gate_up,  # [T, 2 * N]: gate, then up
    output,  # [T, N]
    stride,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    KIND: tl.constexpr,
):
    """One chunk of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    here = columns < N
    gate = tl.load(gate_up + row * stride + columns, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + N + columns, mask=here, other=0.0)
    if KIND == 0:
        active = gate / (1.0 + tl.exp(-gate))
    elif KIND == 1:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
    # Rounded before the product, as it is when the two are separate.
    result = active.to(output.dtype.element_ty) * up
    tl.store(output + row * N + columns, result, mask=here)


def gated_activation(gate_up: Tensor, kind: Activation = Activation.SILU) -> Tensor:
    """`activation(gate) * up` for `gate_up` `[T, 2 * N]`, gate first: `[T, N]`. Activations are in fp32.

    Raises ValueError for an odd or a strided width.
    """
    tokens, double = gate_up.shape
    if double % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate and up must be two contiguous halves of a row, not {double} columns")
    output = torch.empty(tokens, double // 2, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        gated_kernel[(tokens, triton.cdiv(double // 2, CHUNK))](
            gate_up, output, gate_up.stride(0), N=double // 2, CHUNK=CHUNK, KIND=int(kind), num_warps=4
        )
    return output
