"""Owns the model: where its files are, how it is loaded through transformers, and what it is."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from worker_service import attention, model_checks, quantized, sampler
from worker_service.attention import ATTENTION_NAME, Backend
from worker_service.config import WorkerConfig
from worker_service.errors import UnsupportedModelError
from worker_service.forward import Forward, FusedForward, GenericForward
from worker_service.fused.decoder import FusedDecoder
from worker_service.fused.llama import unsupported_reason as fused_unsupported_reason
from worker_service.kv_memory import LayerShape
from worker_service.tokenizer_files import TokenizerFiles, read_tokenizer

# Told how far loading is: a share of 0 to 1, and a line for people.
Progress = Callable[[float, str], None]

_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies: a folder, and its GGUF file where it is one."""

    folder: Path
    gguf_file: str | None

    @property
    def weight_sizes(self) -> dict[str, int]:
        """Bytes of each file of weights."""
        if self.gguf_file is not None:
            return {self.gguf_file: (self.folder / self.gguf_file).stat().st_size}
        return {path.name: path.stat().st_size for path in sorted(self.folder.glob("*.safetensors"))}


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A loaded model and what the worker needs to know of it."""

    name: str
    module: PreTrainedModel  # without weights, where the fused decoder has taken them
    forward: Forward
    decoder_name: str  # "fused" or "generic"
    device: torch.device
    dtype: torch.dtype  # of activations and KV
    backend: Backend
    backend_name: str
    layers: tuple[LayerShape, ...]
    vocab_size: int
    max_model_len: int  # tokens, before KV memory may lower it
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    tokenizer: TokenizerFiles


def load_model(config: WorkerConfig, progress: Progress) -> Model:
    """Loads and checks the model.

    Raises UnsupportedModelError where it can't be served rightly, FileNotFoundError where there is none.
    """
    progress(0.0, "looking for the model's files")
    files = find_files(config)
    device = choose_device(config.device)
    settings: dict[str, Any] = {"gguf_file": files.gguf_file} if files.gguf_file else {}
    model_config = AutoConfig.from_pretrained(files.folder, local_files_only=True, **settings)
    model_checks.check_config(model_config)
    quantized.check_quantized(model_config, device, config.quantization)
    max_model_len = model_checks.resolve_max_model_len(model_config, config.max_model_len)
    backend_name, backend = attention.load_backend(config.attention_backend, device)
    megabytes = sum(files.weight_sizes.values()) / 1e6
    with _loading_progress(progress, megabytes), quantized.refusals(model_config, device):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            files.folder,
            config=model_config,
            dtype=_choose_dtype(config.dtype, files, device),
            attn_implementation=ATTENTION_NAME,
            device_map=None if device.type == "cpu" else str(device),
            local_files_only=True,
            output_loading_info=True,
            **settings,
        )
    module: PreTrainedModel = loaded[0]
    model_checks.check_loaded(loaded[1])
    module.train(False).requires_grad_(False)
    layers, logits_width = model_checks.record_layers(module)
    vocab_size = min(logits_width, model_checks.embedding_rows(module))
    fingerprint = _fingerprint(module, files, config.quantization)
    dtype = module.dtype
    probe = model_checks.make_probe(module, max_model_len)
    forward, decoder_name = _choose_forward(config, module, progress)
    sampler.warm_up(device)
    progress(0.95, f"comparing the {decoder_name} forward with the plain one")
    probe.check(forward, layers, backend, config.block_size, config.quantization)
    return Model(
        name=config.model_name,
        module=module,
        forward=forward,
        decoder_name=decoder_name,
        device=device,
        dtype=dtype,
        backend=backend,
        backend_name=backend_name,
        layers=layers,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=tuple(i for i in _eos_token_ids(module) if i < logits_width),
        fingerprint=fingerprint,
        tokenizer=read_tokenizer(files.folder, files.gguf_file),
    )


def _choose_forward(config: WorkerConfig, module: PreTrainedModel, progress: Progress) -> tuple[Forward, str]:
    """The forward that the options ask for, and its name. Raises UnsupportedModelError."""
    must = config.decoder == "fused" or config.quantization != "none"
    if config.decoder == "generic":
        if must:
            raise UnsupportedModelError(f"--quantization {config.quantization} needs --decoder fused or auto")
        return GenericForward(module), "generic"
    method = quantized.quantization_method(module.config)
    reason = f"its weights are quantised ({method})" if method else fused_unsupported_reason(module)
    if reason is not None:
        if must:
            raise UnsupportedModelError(f"the fused decoder can't compute this model: {reason}")
        return GenericForward(module), "generic"
    progress(0.9, "packing weights, and compiling the fused decoder if that was never done")
    dtype = torch.int8 if config.quantization == "int8" else module.dtype
    return FusedForward(FusedDecoder(module, dtype, threads=torch.get_num_threads())), "fused"


def find_files(config: WorkerConfig) -> ModelFiles:
    """The model's files on this machine; a hub model is fetched unless --offline is set."""
    path = Path(config.model).expanduser()
    if path.is_dir():
        return ModelFiles(path, None)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModelError(f"{path} is a file but not a .gguf one: give the model's folder")
        return ModelFiles(path.parent, path.name)
    if path.is_absolute() or config.model.count("/") != 1:
        raise FileNotFoundError(f"there is no model at {path}, and that is no hub id (owner/name) either")
    from huggingface_hub import snapshot_download  # here, so that local models need no network library

    folder = snapshot_download(
        config.model,
        revision=config.revision,
        local_files_only=config.offline,
        allow_patterns=_HUB_FILES,
    )
    return ModelFiles(Path(folder), None)


def choose_device(name: str) -> torch.device:
    """The device by its name; "auto" takes CUDA where there is one. Raises UnsupportedModelError."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModelError("--device cuda: torch finds no CUDA device here")
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _choose_dtype(name: str, files: ModelFiles, device: torch.device) -> torch.dtype | str:
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if files.gguf_file is None:
        return "auto"
    # A GGUF file has no type of its own once it is dequantized.
    return torch.float32 if device.type == "cpu" else torch.bfloat16


@contextlib.contextmanager
def _loading_progress(progress: Progress, megabytes: float) -> Iterator[None]:
    """Turns the progress bar of transformers into calls of `progress`."""

    def report(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args or not hasattr(args[0], "__len__"):
            return factory(*args, **{**kwargs, "disable": True})
        return _counted(args[0], progress, megabytes)

    progress(0.05, f"loading weights, {megabytes:.0f} MB")
    previous = transformers_logging.set_tqdm_hook(report)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


def _counted(items: Any, progress: Progress, megabytes: float) -> Iterator[Any]:
    for index, item in enumerate(items):
        share = index / len(items)
        progress(0.05 + 0.85 * share, f"loading weights {share * megabytes:.0f} of {megabytes:.0f} MB")
        yield item


def _eos_token_ids(module: PreTrainedModel) -> tuple[int, ...]:
    """Ids that end the text by the generation configuration or the model's."""
    found: set[int] = set()
    for config in (module.generation_config, module.config.get_text_config()):
        value = getattr(config, "eos_token_id", None)
        found.update([] if value is None else [value] if isinstance(value, int) else value)
    return tuple(sorted(found))


def _fingerprint(module: PreTrainedModel, files: ModelFiles, quantization: str) -> str:
    """Hash of configuration, weights' names, shapes and types, and file sizes. Equal: may share requests."""
    settings: PretrainedConfig = module.config
    content = {
        k: v for k, v in settings.to_dict().items() if k not in ("_name_or_path", "transformers_version")
    }
    weights = [(name, list(w.shape), str(w.dtype)) for name, w in sorted(module.named_parameters())]
    told = json.dumps([content, weights, files.weight_sizes, quantization], sort_keys=True, default=str)
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()
