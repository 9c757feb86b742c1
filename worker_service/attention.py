"""Owns the way from transformers' attention interface to a backend of tidegate_kernels.

A model's layers call `attend` by the name under which `model_checks` registers it; what it works on is the
step in progress, which `use` sets for the calling thread. No mask function is registered: transformers then
makes no mask, and batches of many sequences in one row are told apart by the step alone. Imports no
transformers.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tidegate_kernels.attention_batch import AttentionBatch
from worker_service.errors import UnsupportedModelError
from worker_service.kv_memory import KvMemory, LayerShape

ATTENTION_NAME = "tidegate"

# What a layer may hand to attention that changes its result in a way that no backend knows.
_UNKNOWN_TERMS = ("s_aux", "position_bias", "alibi", "head_mask", "block_mask", "chunk_size")


class Backend(Protocol):
    """A module of tidegate_kernels. See its reference backend for the meaning of both operations."""

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        *,
        key_scale: float,
        value_scale: float,
    ) -> None:
        """Stores new keys and values."""

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        key_scale: float,
        value_scale: float,
    ) -> Tensor:
        """Attention over cached keys and values."""


class AttentionStep(Protocol):
    """What layers' attention calls work on."""

    def layer(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> Tensor:
        """Attention of one layer: query `[T, H, D]`, key and value `[T, KVH, D]` -> `[T, H, D]`."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a layer says of its attention."""

    scale: float
    window: int | None
    softcap: float | None
    others: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """A step on KV memory."""

    backend: Backend
    kv: KvMemory
    batch: AttentionBatch

    def layer(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> Tensor:
        """Writes the layer's new keys and values, then attends over all."""
        index = int(module.layer_idx)  # type: ignore[arg-type]
        keys, values = self.kv.keys[index], self.kv.values[index]
        key_scale, value_scale = self.kv.scales[index]
        self.backend.write_kv(
            key, value, keys, values, self.batch.slot_mapping, key_scale=key_scale, value_scale=value_scale
        )
        return self.backend.paged_attention(
            query, keys, values, self.batch, scale=terms.scale, window=terms.window, softcap=terms.softcap,
            key_scale=key_scale, value_scale=value_scale,
        )  # fmt: skip


@dataclass(slots=True)
class RecordingStep:
    """Learns the shapes of a model's layers, and refuses what no backend can compute. Attends to nothing."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)

    def layer(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> Tensor:
        """Records one layer and returns a tensor of the right shape."""
        unknown = [name for name in _UNKNOWN_TERMS if terms.others.get(name) is not None]
        if unknown:
            raise UnsupportedModelError(f"its attention uses {', '.join(unknown)}, which no backend computes")
        if not getattr(module, "is_causal", True):
            raise UnsupportedModelError("its attention is not causal")
        index = getattr(module, "layer_idx", None)
        if index is None or index in self.shapes:
            raise UnsupportedModelError(f"attention of layer {index} runs twice, or the layer has no index")
        if key.shape != value.shape:
            raise UnsupportedModelError(
                f"keys of {key.shape[-1]} and values of {value.shape[-1]} dimensions differ in size"
            )
        scales = _fp8_scale(module, "k_scale"), _fp8_scale(module, "v_scale")
        self.shapes[index] = LayerShape(key.shape[1], key.shape[2], terms.window, *scales)
        return torch.zeros_like(query)


def _fp8_scale(module: nn.Module, name: str) -> float:
    """What a checkpoint that was calibrated for fp8 KV has beside a layer's weights; 1 without."""
    scale = getattr(module, name, None)
    if not isinstance(scale, Tensor):
        return 1.0
    value = float(scale) if scale.numel() == 1 else 0.0
    if not 0.0 < value < float("inf"):
        raise UnsupportedModelError(
            f"its {name} is not one positive number for a layer, but {scale.numel()} values"
        )
    return value


_step: ContextVar[AttentionStep] = ContextVar("attention_step")


@contextlib.contextmanager
def use(step: AttentionStep) -> Iterator[None]:
    """Makes `step` what this thread's attention calls work on."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def attend(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, KVH, T, D]
    value: Tensor,  # [1, KVH, T, D]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer: `[1, T, H, D]`."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = _step.get().layer(
        module,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        Terms(scale, sliding_window, softcap, others),
    )
    return output.unsqueeze(0), None


_MODULES = {"reference": "reference", "cpu": "cpu", "triton": "triton_backend"}


def load_backend(name: str, device: torch.device) -> tuple[str, Backend]:
    """The named backend of tidegate_kernels and its name; "auto" takes the fastest that the device has."""
    if name != "auto":
        return name, importlib.import_module(f"tidegate_kernels.{_MODULES[name]}")
    fastest = "triton" if device.type == "cuda" else "cpu"
    for candidate in (fastest, "reference"):
        with contextlib.suppress(ModuleNotFoundError):
            return candidate, importlib.import_module(f"tidegate_kernels.{_MODULES[candidate]}")
    raise ModuleNotFoundError("tidegate_kernels has no attention backend")
