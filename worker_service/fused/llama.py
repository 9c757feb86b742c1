"""The Llama family as transformers has it: which models the fused decoder computes, and their weights.

Owns the reading of configuration and modules. It takes the weights out of the model as they are packed, so
that there are never two copies of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worker_service.fused.lanes import LANES
from worker_service.fused.packing import PackedMatrix, interleave, pack
from worker_service.fused.pages import release

_CLASSES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
# Rotary embeddings whose angles depend on the position alone.
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP_LINEARS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    epsilon: float
    scale: float  # of attention scores


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer, packed."""

    matrices: tuple[PackedMatrix, PackedMatrix, PackedMatrix, PackedMatrix]  # as in records.py
    input_norm: Tensor  # [hidden] fp32, like the others
    attention_norm: Tensor
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None
    window: int  # tokens; 0 sees all


def unsupported_reason(model: Any) -> str | None:
    """Why the fused decoder can't compute this model, for a log line; None when it can."""
    config = model.config
    name = type(model).__name__
    if name not in _CLASSES:
        return f"{name} is not one of {', '.join(sorted(_CLASSES))}"
    if model.device.type != "cpu":
        return f"its weights are on {model.device}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    rope_type = config.rope_parameters["rope_type"]
    if rope_type not in _ROPE_TYPES or config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return f"its rotary embedding ({rope_type}) depends on more than the position, or is partial"
    sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    sizes["head_dim"] = model.model.layers[0].self_attn.head_dim
    for field, size in sizes.items():
        if size % LANES:
            return f"its {field} of {size} is no multiple of {LANES}"
    for path in (*_LINEARS, *_MLP_LINEARS):
        module = model.model.layers[0].get_submodule(path)
        if type(module) is not nn.Linear or not module.weight.dtype.is_floating_point:
            return (
                f"its {path} is a {type(module).__name__} of {module.weight.dtype}, not a plain linear layer"
            )
    return None


def read_shape(model: Any) -> Shape:
    """Sizes from the configuration."""
    config, attention = model.config, model.model.layers[0].self_attn
    return Shape(
        layers=len(model.model.layers),
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        inner=config.intermediate_size,
        vocab=model.lm_head.weight.shape[0],
        epsilon=config.rms_norm_eps,
        scale=float(attention.scaling),
    )


def take_layers(model: Any, dtype: torch.dtype) -> Iterator[Layer]:
    """Packs layer by layer. Each layer's weights are gone from the model when the next is asked for."""
    for index, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        matrices = (
            pack(_joined(projections), _joined_bias(projections), dtype),
            pack(attention.o_proj.weight.data, _bias(attention.o_proj), dtype),
            pack(
                interleave(mlp.gate_proj.weight.data, mlp.up_proj.weight.data),
                _interleaved_bias(mlp),
                dtype,
            ),
            pack(mlp.down_proj.weight.data, _bias(mlp.down_proj), dtype),
        )
        packed = Layer(
            matrices=matrices,
            input_norm=_vector(layer.input_layernorm),
            attention_norm=_vector(layer.post_attention_layernorm),
            query_norm=_vector(getattr(attention, "q_norm", None)),
            key_norm=_vector(getattr(attention, "k_norm", None)),
            window=_window(model.config, index),
        )
        forget(layer)
        yield packed


def take_vocabulary(model: Any, dtype: torch.dtype) -> tuple[PackedMatrix, Tensor | None, Tensor]:
    """The logits' matrix, the plain embedding unless the two share weights, and the final norm's weights."""
    head, embedding = model.lm_head.weight.data, model.model.embed_tokens.weight.data
    tied = head.data_ptr() == embedding.data_ptr()
    final_norm = _vector(model.model.norm)
    packed = pack(head, _bias(model.lm_head), dtype)
    plain = None
    if not tied:
        plain = embedding.to(embedding_dtype(dtype), copy=True).contiguous()
    forget(model)
    return packed, plain, final_norm


def embedding_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of a plain embedding beside matrices of `dtype`."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def forget(module: nn.Module) -> None:
    """Drops a module's weights, so that their memory is free."""
    for parameter in module.parameters():
        release(parameter.data)
        parameter.data = torch.empty(0, dtype=parameter.dtype)


def _window(config: Any, index: int) -> int:
    """Mistral slides in all layers, Qwen in those that its configuration names."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[index] != "sliding_attention":
        return 0
    return getattr(config, "sliding_window", None) or 0


def _joined(linears: tuple[nn.Linear, ...]) -> Tensor:
    return torch.cat([linear.weight.data for linear in linears])


def _joined_bias(linears: tuple[nn.Linear, ...]) -> Tensor | None:
    biases = [_bias(linear) for linear in linears]
    found = [bias for bias in biases if bias is not None]
    return torch.cat(found) if len(found) == len(biases) else None


def _interleaved_bias(mlp: Any) -> Tensor | None:
    gate, up = _bias(mlp.gate_proj), _bias(mlp.up_proj)
    return None if gate is None or up is None else interleave(gate, up)


def _bias(linear: nn.Linear) -> Tensor | None:
    return None if linear.bias is None else linear.bias.data.float()


def _vector(norm: Any) -> Any:
    """A norm's weights in fp32, a copy of their own."""
    return None if norm is None else norm.weight.data.to(torch.float32, copy=True)
