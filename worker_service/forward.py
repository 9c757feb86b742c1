"""Owns the ways to compute a step's logits: a model's own modules, or the fused decoder built from them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Protocol, cast

from torch import Tensor

from worker_service import attention
from worker_service.attention import AttentionStep, PagedStep
from worker_service.fused.decoder import FusedDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # seconds to import, and the fused decoder can do without


class Forward(Protocol):
    """Logits at the flat indices `keep` of a batch: token ids `[T]`, positions `[T]`, `[S]` -> `[S, V]`."""

    def __call__(self, step: AttentionStep, token_ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        """Computes them, writing the step's keys and values on the way."""


class GenericForward:
    """The modules of transformers, with their attention replaced by the step's."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self._takes_rows = "logits_to_keep" in inspect.signature(module.forward).parameters

    def __call__(self, step: AttentionStep, token_ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        """See Forward."""
        inputs = {"input_ids": token_ids[None], "position_ids": positions[None], "use_cache": False}
        with attention.use(step):
            if self._takes_rows:
                logits: Tensor = self._module(**inputs, logits_to_keep=keep).logits[0]
                return logits
            logits = self._module(**inputs).logits[0]
            return logits[keep]


class FusedForward:
    """The fused decoder of the Llama family on a CPU. Its logits are valid until the next call."""

    def __init__(self, decoder: FusedDecoder) -> None:
        self._decoder = decoder

    def __call__(self, step: AttentionStep, token_ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        """See Forward. `step` is a PagedStep: the decoder attends by itself, on the step's KV memory."""
        paged = cast(PagedStep, step)
        return self._decoder.forward(token_ids, positions, paged.batch, paged.kv.layers, keep)

    def profile(self) -> dict[str, float]:
        """Each part's share of the last call's time, summed over all layers: 1 in all."""
        return self._decoder.profile()
