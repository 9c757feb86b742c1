"""A decoder's layers, embedding and logits, packed from wherever their weights lie.

Owns which weights become which matrix. A layer's weights are forgotten before the next is packed, so that
there are never two copies of more than one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_service.fused.llama import ATTENTION_LINEARS, MLP_LINEARS, Weights
from worker_service.fused.packing import PackedMatrix, interleave, pack

_EMBEDDING, _HEAD, _FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer, packed."""

    matrices: tuple[PackedMatrix, PackedMatrix, PackedMatrix, PackedMatrix]  # as in records.py
    input_norm: Tensor  # [hidden] fp32, like the others
    attention_norm: Tensor
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None
    window: int  # tokens; 0 sees all


def take_layers(weights: Weights, dtype: torch.dtype) -> Iterator[Layer]:
    """Packs layer by layer. Each layer's weights are forgotten when the next is asked for."""
    for index, window in enumerate(weights.outline.windows):
        prefix = f"model.layers.{index}."
        yield _pack_layer(weights, prefix, window, dtype)
        weights.forget(prefix)


def _pack_layer(weights: Weights, prefix: str, window: int, dtype: torch.dtype) -> Layer:
    *projections, out = (f"{prefix}{name}" for name in ATTENTION_LINEARS)
    gate, up, down = (f"{prefix}{name}" for name in MLP_LINEARS)
    weight, bias = functools.partial(_weight, weights), functools.partial(_bias, weights)
    return Layer(
        matrices=(
            pack([weight(p) for p in projections], _joined_bias(weights, projections), dtype),
            pack([weight(out)], bias(out), dtype),
            pack([weight(gate), weight(up)], _interleaved_bias(weights, gate, up), dtype, in_turns=True),
            pack([weight(down)], bias(down), dtype),
        ),
        input_norm=_vector(weight(f"{prefix}input_layernorm")),
        attention_norm=_vector(weight(f"{prefix}post_attention_layernorm")),
        query_norm=_optional_vector(weights, f"{prefix}self_attn.q_norm.weight"),
        key_norm=_optional_vector(weights, f"{prefix}self_attn.k_norm.weight"),
        window=window,
    )


def take_vocabulary(weights: Weights, dtype: torch.dtype) -> tuple[PackedMatrix, Tensor | None, Tensor]:
    """The logits' matrix, the plain embedding unless the two share weights, and the final norm's weights."""
    tied = weights.outline.tied
    final_norm = _vector(_present(weights, _FINAL_NORM))
    # It may be half of a small model, so its pages go as they are packed.
    head = _present(weights, _EMBEDDING if tied else _HEAD)
    packed = pack([head], _bias(weights, "lm_head"), dtype, spend=True)
    plain = None
    if not tied:
        plain = _present(weights, _EMBEDDING).to(embedding_dtype(dtype), copy=True).contiguous()
    weights.forget("")
    return packed, plain, final_norm


def embedding_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of a plain embedding beside matrices of `dtype`."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def _present(weights: Weights, name: str) -> Tensor:
    found = weights.get(name)
    if found is None:
        raise KeyError(f"the model has no {name}")
    return found


def _weight(weights: Weights, module: str) -> Tensor:
    return _present(weights, f"{module}.weight")


def _bias(weights: Weights, module: str) -> Tensor | None:
    found = weights.get(f"{module}.bias")
    return None if found is None else found.float()


def _joined_bias(weights: Weights, modules: list[str]) -> Tensor | None:
    biases = [_bias(weights, module) for module in modules]
    found = [bias for bias in biases if bias is not None]
    return torch.cat(found) if len(found) == len(biases) else None


def _interleaved_bias(weights: Weights, gate: str, up: str) -> Tensor | None:
    halves = _bias(weights, gate), _bias(weights, up)
    return None if halves[0] is None or halves[1] is None else interleave(halves[0], halves[1])


def _vector(weight: Tensor) -> Tensor:
    """A norm's weights in fp32, a copy of their own."""
    return weight.to(torch.float32, copy=True)


def _optional_vector(weights: Weights, name: str) -> Tensor | None:
    found = weights.get(name)
    return None if found is None else _vector(found)
