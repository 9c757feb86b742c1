"""Models of the end-to-end tests, and what transformers generates with them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as a worker's entry point does

import pytest
import torch
import transformers
from e2e.prompts import real_prompts

from worker_service.demo_model import prepare

VOCAB_SIZE = 251
torch.set_num_threads(1)  # tiny models gain nothing from more
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # so that outputs vary
}
ARCHITECTURES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**_COMMON),
    "qwen2": lambda: transformers.Qwen2Config(**_COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**_COMMON, sliding_window=40),
    "glm": lambda: transformers.GlmConfig(**_COMMON, head_dim=16),
    "phi3": lambda: transformers.Phi3Config(**_COMMON),
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Callable[[str], Path]:
    """Saves a random model of an architecture once, and returns its folder."""

    @functools.cache
    def make(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(f"e2e-{architecture}")
        torch.manual_seed(11)
        model = transformers.AutoModelForCausalLM.from_config(
            ARCHITECTURES[architecture](), dtype=torch.float32
        )
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo model, prepared once for all."""
    return prepare()


@pytest.fixture(scope="session")
def smollm2_prompts(smollm2) -> list[list[int]]:
    """32 prompts of 1 to 1,500 tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    return real_prompts(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="session")
def generated() -> Callable[[Path, Sequence[Sequence[int]], int], list[list[int]]]:
    """Greedy tokens of `model.generate` in fp32, one prompt at a time, end-of-text ignored."""

    @functools.cache
    def load(folder: Path) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        # Without an end-of-text id: min_new_tokens would forbid the token where the engine may choose it.
        model.generation_config.eos_token_id = None
        return model

    @functools.cache
    def one(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        with torch.inference_mode():
            out = load(folder).generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False)
        return out[0, len(prompt) :].tolist()

    return lambda folder, prompts, num_tokens: [one(folder, tuple(p), num_tokens) for p in prompts]
