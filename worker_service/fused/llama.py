"""The Llama family as transformers has it: which models the fused decoder computes, and their weights.

Owns the reading of configuration and modules. `layers.py` packs the weights; those of a model are taken out
of it on the way, so that there are never two copies of all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worker_service.fused.lanes import LANES
from worker_service.fused.pages import release

_CLASSES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
# Rotary embeddings whose angles depend on the position alone.
_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
ATTENTION_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP_LINEARS = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


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


@dataclass(frozen=True, slots=True)
class Outline:
    """All that a decoder is but for its weights."""

    shape: Shape
    windows: tuple[int, ...]  # of each layer, in tokens; 0 sees all
    tied: bool  # logits share the embedding's weights
    frequencies: tuple[float, ...]  # of the rotary embedding, radians a position: [head_dim / 2]
    rotary_scale: float  # of its cosines and sines


class Weights(ABC):
    """A decoder's weights, wherever they lie, by the names that transformers gives them."""

    outline: Outline

    @abstractmethod
    def get(self, name: str) -> Tensor | None:
        """One of them in the model's own type; None where the model has none by this name."""

    @abstractmethod
    def forget(self, prefix: str) -> None:
        """Gives back the memory of those whose names begin so. Nobody will read them again."""


class ModuleWeights(Weights):
    """The weights of a model of transformers, which loses them as they are forgotten."""

    def __init__(self, model: Any) -> None:
        reason = unsupported_reason(model)
        if reason is not None:
            raise ValueError(f"the fused decoder can't compute this model: {reason}")
        self.outline = read_outline(model)
        self._parameters = dict(model.named_parameters(remove_duplicate=False))

    def get(self, name: str) -> Tensor | None:
        """See Weights."""
        parameter = self._parameters.get(name)
        return None if parameter is None else parameter.data

    def forget(self, prefix: str) -> None:
        """See Weights."""
        for name, parameter in self._parameters.items():
            if name.startswith(prefix):
                release(parameter.data)
                parameter.data = torch.empty(0, dtype=parameter.dtype)


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
    for path in (*ATTENTION_LINEARS, *MLP_LINEARS):
        module = model.model.layers[0].get_submodule(path)
        if type(module) is not nn.Linear or not module.weight.dtype.is_floating_point:
            return (
                f"its {path} is a {type(module).__name__} of {module.weight.dtype}, not a plain linear layer"
            )
    return None


def read_outline(model: Any) -> Outline:
    """From configuration and modules."""
    config, attention, rotary = model.config, model.model.layers[0].self_attn, model.model.rotary_emb
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    layers = len(model.model.layers)
    return Outline(
        shape=Shape(
            layers=layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            inner=config.intermediate_size,
            vocab=head.shape[0],
            epsilon=config.rms_norm_eps,
            scale=float(attention.scaling),
        ),
        windows=tuple(_window(config, index) for index in range(layers)),
        tied=head.data_ptr() == embedding.data_ptr(),
        frequencies=tuple(rotary.inv_freq.tolist()),
        rotary_scale=float(rotary.attention_scaling),
    )


def _window(config: Any, index: int) -> int:
    """Mistral slides in all layers, Qwen in those that its configuration names."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[index] != "sliding_attention":
        return 0
    return getattr(config, "sliding_window", None) or 0
