"""Normalisation, activation and rotary kernels do what their plain formulas say."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tidegate_kernels import reference
from tidegate_kernels.activation import Activation, gated_activation
from tidegate_kernels.rms_norm import rms_norm
from tidegate_kernels.rope import rope_and_write


def close(result: Tensor, expected: Tensor) -> None:
    """To a rounding of the type."""
    bound = {torch.float32: 5e-6, torch.float16: 2e-3}[result.dtype]
    torch.testing.assert_close(result, expected.to(result.dtype), atol=bound, rtol=bound)


@pytest.mark.parametrize("width", [64, 576, 1000])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("one_plus", [False, True])
def test_rms_norm(
    width: int, with_residual: bool, one_plus: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(5, 2 * width, device=device).to(dtype)[:, :width]
    weight = torch.randn(width, device=device).to(dtype)
    residual = torch.randn(5, width, device=device).to(dtype) if with_residual else None
    summed = x + residual if residual is not None else x
    normal = summed.float() * torch.rsqrt(summed.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    expected = normal * (1 + weight.float()) if one_plus else normal.to(dtype) * weight
    close(rms_norm(x, weight, 1e-5, residual, one_plus=one_plus), expected)
    if residual is not None:
        assert torch.equal(residual, summed)


@pytest.mark.parametrize("kind", Activation)
@pytest.mark.parametrize("width", [48, 1536])
def test_gated_activation(kind: Activation, width: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = (torch.randn(3, 2 * width, device=device) * 4).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    active = {
        Activation.SILU: F.silu(gate),
        Activation.GELU: F.gelu(gate),
        Activation.GELU_TANH: F.gelu(gate, approximate="tanh"),
    }[kind]
    close(gated_activation(gate_up, kind), active.to(dtype).float() * up)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
    """x [T, H, D], tables [T, rotary / 2], as complex products."""
    half = cosines.shape[1]
    turned, kept = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    pairs = (
        turned.unflatten(-1, (half, 2)) if interleaved else turned.unflatten(-1, (2, half)).transpose(-1, -2)
    )
    turn = torch.complex(cosines.double(), sines.double())[:, None]
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat([turned, kept], dim=-1)


@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (80, 80), (64, 32), (80, 20)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_and_write(
    head_dim: int, rotary: int, interleaved: bool, dtype: torch.dtype, device: torch.device
) -> None:
    tokens, heads, kv_heads = 5, 3, 2
    fused = torch.randn(tokens, heads + 2 * kv_heads, head_dim, device=device).to(dtype)
    query, key, value = fused.split([heads, kv_heads, kv_heads], dim=1)
    angles = torch.rand(40, rotary // 2, device=device) * 6
    positions = torch.tensor([3, 39, 0, 17, 4], dtype=torch.int32, device=device)
    slots = torch.tensor([9, 2, -1, 30, 31], device=device)
    caches = torch.zeros(2, 4, kv_heads, 8, head_dim, dtype=dtype, device=device)
    expected = torch.zeros_like(caches)
    cosines, sines = angles.cos(), angles.sin()
    turned = {
        name: rotate(tensor, cosines[positions.long()], sines[positions.long()], interleaved)
        for name, tensor in (("query", query), ("key", key))
    }
    written = slots >= 0
    reference.write_kv(turned["key"][written], value[written], expected[0], expected[1], slots[written])
    before = fused.clone()
    rope_and_write(
        query, key, value, cosines, sines, positions, caches[0], caches[1], slots, interleaved=interleaved
    )
    close(query, turned["query"])
    close(caches[0], expected[0])
    assert torch.equal(caches[1], expected[1])
    assert torch.equal(fused[:, heads:], before[:, heads:])


def test_operands_that_do_not_fit_are_refused(device: torch.device) -> None:
    x = torch.zeros(2, 64, device=device)
    with pytest.raises(ValueError, match="need as many weights"):
        rms_norm(x, torch.zeros(32, device=device), 1e-5)
    with pytest.raises(ValueError, match="two contiguous halves"):
        gated_activation(x[:, :63])
    q = torch.zeros(2, 1, 64, device=device)
    cache, table = torch.zeros(2, 1, 8, 64, device=device), torch.zeros(4, 64, device=device)
    slots = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="do not fit heads of 64"):
        rope_and_write(q, q, q, table, table, slots, cache, cache, slots)
