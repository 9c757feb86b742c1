"""Tiny random models, what transformers generates with them, and executors to compare with it."""

from __future__ import annotations

import functools
import os

os.environ.setdefault("TQDM_DISABLE", "1")

import pytest
import torch
import transformers

from worker_service import demo_model
from worker_service.config import WorkerConfig
from worker_service.executor import Executor
from worker_service.kv_memory import KvMemory
from worker_service.model import Model, load_model
from worker_service.plan import Limits

VOCAB_SIZE = 199
MAX_MODEL_LEN = 160
WINDOW = 16  # smaller than most prompts

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # so that outputs vary
}
# Gemma scales its embeddings up: with tied weights a model repeats its input.
_GEMMA = {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": False}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS = {
    "llama": functools.partial(transformers.LlamaConfig, **_COMMON),
    "qwen2": functools.partial(transformers.Qwen2Config, **_COMMON),
    "qwen3": functools.partial(transformers.Qwen3Config, **_COMMON, head_dim=16),
    "mistral": functools.partial(transformers.MistralConfig, **_COMMON, sliding_window=WINDOW),
    "glm": functools.partial(transformers.GlmConfig, **_COMMON, head_dim=16),
    "phi3": functools.partial(transformers.Phi3Config, **_COMMON),
    "gemma2": functools.partial(transformers.Gemma2Config, **_COMMON, **_GEMMA, attn_logit_softcapping=2.0),
    "gemma3": functools.partial(
        transformers.Gemma3TextConfig,
        **_COMMON,
        **_GEMMA,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3_moe": functools.partial(transformers.Qwen3MoeConfig, **_COMMON, **_EXPERTS, head_dim=16),
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_records(tmp_path_factory):
    """Records of tests' models stay out of the user's cache. The demo model is made once for both."""
    cache = tmp_path_factory.mktemp("cache")
    models = demo_model.default_folder().parent
    models.mkdir(parents=True, exist_ok=True)
    (cache / "models").symlink_to(models)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEGATE_CACHE", str(cache))
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Saves a random model of an architecture once, and returns its folder."""

    @functools.cache
    def make(architecture: str):
        folder = tmp_path_factory.mktemp(architecture)
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[architecture](), dtype=torch.float32)
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def loaded(tiny_model):
    """The architecture's model as the worker loads it."""

    @functools.cache
    def load(architecture: str) -> Model:
        options = {"attention_backend": "reference", "decoder": "generic"}
        config = WorkerConfig(model=str(tiny_model(architecture)), **options)
        return load_model(config, lambda share, detail: None)

    return load


@pytest.fixture(scope="session")
def generate(tiny_model):
    """What transformers generates, greedily, by itself."""

    @functools.cache
    def plain_model(architecture: str):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tiny_model(architecture), attn_implementation="eager", dtype=torch.float32
        )
        model.generation_config.eos_token_id = None
        return model

    @functools.cache
    def run(architecture: str, prompt: tuple[int, ...], max_new: int) -> list[int]:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        model = plain_model(architecture)
        output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new)
        return output[0, len(prompt) :].tolist()

    return run


@pytest.fixture(scope="session")
def make_executor(loaded):
    """A fresh executor on a loaded model."""

    def make(architecture: str = "llama", block_size: int = 16, num_blocks: int = 80, num_slots: int = 8):
        model = loaded(architecture)
        limits = Limits(
            num_slots=num_slots,
            num_blocks=num_blocks,
            block_size=block_size,
            max_batched_tokens=512,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=model.vocab_size,
        )
        kv = KvMemory(model.layers, num_blocks, block_size, model.kv_dtype, model.device)
        return Executor(model, kv, limits)

    return make
