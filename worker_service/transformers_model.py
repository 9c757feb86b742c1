"""Owns the way to a model that is right for every one: through transformers, with all checks.

What it learned of a model that the fused decoder computes, it records for later starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from worker_service import attention, model_checks, quantized, sampler
from worker_service.attention import ATTENTION_NAME
from worker_service.checkpoint import CheckpointError, CheckpointWeights
from worker_service.config import WorkerConfig
from worker_service.errors import UnsupportedModelError
from worker_service.forward import Forward, FusedForward, GenericForward
from worker_service.fused.decoder import FusedDecoder
from worker_service.fused.llama import read_outline
from worker_service.fused.llama import unsupported_reason as fused_unsupported_reason
from worker_service.kv_memory import choose_kv_dtype
from worker_service.model import Model, Progress
from worker_service.model_files import ModelFiles
from worker_service.model_record import ModelRecord, encode_logits, keep_record
from worker_service.tokenizer_files import read_tokenizer


def load_through_transformers(
    config: WorkerConfig,
    files: ModelFiles,
    device: torch.device,
    record_file: Path | None,
    progress: Progress,
) -> Model:
    """Loads and checks the model, and writes its record to the file, where there is to be one.

    Raises UnsupportedModelError where it can't be served rightly, OSError where its files can't be read.
    """
    settings: dict[str, Any] = {"gguf_file": files.gguf_file} if files.gguf_file else {}
    settings |= {"local_files_only": True, "trust_remote_code": False}
    with model_checks.refusing("its configuration can't be used"):
        model_config = AutoConfig.from_pretrained(files.folder, **settings)
    model_checks.check_config(model_config)
    quantized.check_quantized(model_config, device, config.quantization)
    max_model_len = model_checks.resolve_max_model_len(model_config, config.max_model_len)
    backend_name, backend = attention.load_backend(config.attention_backend, device)
    megabytes = sum(files.weight_sizes.values()) / 1e6
    settings |= {"dtype": _choose_dtype(config.dtype, files, device)}
    with _loading_progress(progress, megabytes):
        module = _load_module(files, model_config, device, settings)
    layers, logits_width = model_checks.record_layers(module)
    vocab_size = min(logits_width, model_checks.embedding_rows(module))
    fingerprint = _fingerprint(module, files, config.quantization)
    dtype = module.dtype
    probe = model_checks.make_probe(module, max_model_len)
    eos_token_ids = tuple(i for i in _eos_token_ids(module) if 0 <= i < logits_width)
    record = None
    refusal = _fused_refusal(module, config.quantization)
    if record_file is not None and refusal is None and _is_as_stored(module, files.folder):
        record = ModelRecord(
            outline=read_outline(module),
            shapes=_shapes(module),
            dtype=str(dtype).removeprefix("torch."),
            layers=layers,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            fingerprint=fingerprint,
            probe_tokens=tuple(tuple(sequence.tolist()) for sequence in probe.sequences),
            probe_logits=encode_logits(probe.expected),
        )
    forward, decoder_name = _choose_forward(config, module, progress)
    kv_dtype = choose_kv_dtype(config, dtype, device, backend_name, decoder_name)
    sampler.warm_up(device)
    progress(0.95, f"comparing the {decoder_name} forward with the plain one")
    probe.check(forward, layers, backend, config.block_size, config.quantization, kv_dtype)
    if record is not None and record_file is not None:
        keep_record(record_file, record)
    return Model(
        name=config.model_name,
        module=module,
        forward=forward,
        decoder_name=decoder_name,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        backend=backend,
        backend_name=backend_name,
        layers=layers,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        fingerprint=fingerprint,
        tokenizer=read_tokenizer(files.folder, files.gguf_file),
    )


def _load_module(
    files: ModelFiles, model_config: PretrainedConfig, device: torch.device, settings: dict[str, Any]
) -> PreTrainedModel:
    """The model with all of its weights. Raises UnsupportedModelError, OSError."""
    is_plain = files.gguf_file is None and quantized.quantization_method(model_config) is None
    with model_checks.refusing("transformers can't make it"), quantized.refusals(model_config, device):
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                files.folder,
                config=model_config,
                attn_implementation=ATTENTION_NAME,
                device_map=None if device.type == "cpu" else str(device),
                output_loading_info=True,
                **settings,
            )
        except RuntimeError:
            if is_plain:
                model_checks.check_shapes(model_config, files.folder)
            raise
    module: PreTrainedModel = loaded[0]
    model_checks.check_loaded(loaded[1])
    if is_plain:
        model_checks.check_types(module, files.folder)
    module.train(False).requires_grad_(False)
    return module


def _choose_forward(config: WorkerConfig, module: PreTrainedModel, progress: Progress) -> tuple[Forward, str]:
    """The forward that the options ask for, and its name. Raises UnsupportedModelError."""
    must = config.decoder == "fused" or config.quantization != "none"
    if config.decoder == "generic":
        if must:
            raise UnsupportedModelError(f"--quantization {config.quantization} needs --decoder fused or auto")
        return GenericForward(module), "generic"
    reason = _fused_refusal(module, config.quantization)
    if reason is not None:
        if must:
            raise UnsupportedModelError(f"the fused decoder can't compute this model: {reason}")
        return GenericForward(module), "generic"
    progress(0.9, "packing weights, and compiling the fused decoder if that was never done")
    dtype = torch.int8 if config.quantization == "int8" else module.dtype
    return FusedForward(FusedDecoder(module, dtype, threads=torch.get_num_threads())), "fused"


def _fused_refusal(module: PreTrainedModel, quantization: str) -> str | None:
    """Why the fused decoder can't compute the model; None when it can."""
    method = quantized.quantization_method(module.config)
    if method:
        return f"its weights are quantised ({method})"
    if quantization == "none" and module.dtype not in (torch.float32, torch.bfloat16):
        name = str(module.dtype).removeprefix("torch.")
        return f"its weights are {name}, and it packs float32 and bfloat16 (see --dtype)"
    return fused_unsupported_reason(module)


def _shapes(module: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _is_as_stored(module: PreTrainedModel, folder: Path) -> bool:
    """Whether each weight is a tensor of the folder's files by the same name, not changed on its way."""
    outline, dtype = read_outline(module), module.dtype
    try:
        stored = CheckpointWeights(folder, outline, _shapes(module), dtype)
    except CheckpointError:
        return False
    for name, parameter in module.named_parameters():
        found = stored.get(name)
        if found is None or parameter.dtype != dtype or not torch.equal(found, parameter):
            return False
        stored.forget(name)
    return True


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
        ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        if not all(isinstance(i, int) for i in ids):
            raise UnsupportedModelError(f"its eos_token_id is {value!r}, neither an id nor a list of ids")
        found.update(ids)
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
