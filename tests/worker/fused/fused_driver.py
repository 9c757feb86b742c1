"""What the tests of the fused decoder share: tiny models, and a paged run of many sequences side by side."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tidegate_kernels.attention_batch import AttentionBatch
from worker_service.fused.decoder import FusedDecoder

_SIZES = {
    "vocab_size": 200,  # no multiple of a panel's 16
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # far from uniform logits, so that greedy choices are clear
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**_SIZES, tie_word_embeddings=False)),
    "llama-biased": (
        LlamaForCausalLM,
        LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True, rope_parameters=_LLAMA3_ROPE),
    ),
    "llama-one-kv-head": (
        LlamaForCausalLM,
        LlamaConfig(**{**_SIZES, "num_attention_heads": 16, "num_key_value_heads": 1}, head_dim=32),
    ),
    "mistral-window": (MistralForCausalLM, MistralConfig(**_SIZES, sliding_window=20)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**_SIZES, tie_word_embeddings=True)),
    "qwen2-mixed-window": (
        Qwen2ForCausalLM,
        Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=24, max_window_layers=1),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_SIZES, head_dim=32)),
}


def make_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A random model whose norms and biases are random as well, not ones and zeros."""
    torch.manual_seed(seed)
    cls, config = MODELS[name]
    model = cls(copy.deepcopy(config)).train(False).requires_grad_(False)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            parameter.uniform_(0.5, 1.5)
        elif parameter_name.endswith("bias"):
            parameter.normal_(0.0, 0.2)
    return model


def make_kv(decoder: FusedDecoder, num_blocks: int, block_size: int, dtype: torch.dtype) -> list:
    """KV memory full of NaN: whatever reads a slot that was never written shows."""
    shape = (num_blocks, decoder.shape.kv_heads, block_size, decoder.shape.head_dim)
    return [
        (torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
        for _ in range(decoder.shape.layers)
    ]


@dataclass
class PagedRun:
    """Sequences in a paged KV memory, each with its blocks scattered over it."""

    decoder: FusedDecoder
    block_size: int = 16
    max_tokens: int = 256
    max_rows: int = 8
    kv_dtype: torch.dtype = torch.float32
    tokens: list[list[int]] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        per_row = -(-self.max_tokens // self.block_size)
        blocks = np.random.default_rng(7).permutation(self.max_rows * per_row) + 1
        self.tables = blocks.reshape(self.max_rows, per_row).astype(np.int32)
        self.kv = make_kv(self.decoder, self.max_rows * per_row + 1, self.block_size, self.kv_dtype)

    def add(self, tokens: list[int]) -> int:
        """Takes a sequence on board and returns its row."""
        self.tokens.append(list(tokens))
        self.computed.append(0)
        return len(self.tokens) - 1

    def step(self, counts: dict[int, int], every_token: bool = False) -> Tensor:
        """Computes `counts[row]` more tokens of rows; logits of each row's last token, or of all."""
        rows = np.array(list(counts), np.int32)
        lengths = np.array(list(counts.values()), np.int32)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        first = np.array([self.computed[row] for row in rows], np.int32)
        positions = np.concatenate([np.arange(a, a + n) for a, n in zip(first, lengths, strict=True)])
        ids = np.concatenate(
            [self.tokens[r][a : a + n] for r, a, n in zip(rows, first, lengths, strict=True)]
        )
        blocks = self.tables[np.repeat(rows, lengths), positions // self.block_size].astype(np.int64)
        batch = AttentionBatch.from_host(
            starts, first + lengths, self.tables[rows], blocks * self.block_size + positions % self.block_size
        )
        wanted = torch.arange(len(ids)) if every_token else torch.from_numpy(starts[1:].astype(np.int64) - 1)
        for row, count in counts.items():
            self.computed[row] += count
        return self.decoder.forward(
            torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(positions), batch, self.kv, wanted
        ).clone()

    def generate(self, counts: dict[int, int]) -> None:
        """A step in which each row that has no more known tokens gets its likeliest next one."""
        logits = self.step(counts)
        for row, choice in zip(counts, logits.argmax(-1).tolist(), strict=True):
            if self.computed[row] == len(self.tokens[row]):
                self.tokens[row].append(choice)
