"""Owns the quick way to a model: its weights from its files, all else from the record of an earlier start.

It is checked like any other: the fused decoder must answer as transformers' plain forward did then. Imports
no transformers.
"""

from __future__ import annotations

import torch

from worker_service import attention, sampler
from worker_service.checkpoint import CheckpointWeights
from worker_service.config import WorkerConfig
from worker_service.forward import FusedForward
from worker_service.fused.decoder import FusedDecoder
from worker_service.kv_memory import choose_kv_dtype
from worker_service.model import Model, Progress
from worker_service.model_files import ModelFiles
from worker_service.model_record import ModelRecord
from worker_service.tokenizer_files import read_tokenizer


def load_recorded(config: WorkerConfig, files: ModelFiles, record: ModelRecord, progress: Progress) -> Model:
    """Loads and checks the model.

    Raises CheckpointError or UnsupportedModelError where the record does not fit the files.
    """
    device = torch.device("cpu")
    backend_name, backend = attention.load_backend(config.attention_backend, device)
    dtype = getattr(torch, record.dtype)
    kv_dtype = choose_kv_dtype(config, dtype, device, backend_name, "fused")
    megabytes = sum(files.weight_sizes.values()) / 1e6

    def report(share: float) -> None:
        progress(0.05 + 0.85 * share, f"packing weights {share * megabytes:.0f} of {megabytes:.0f} MB")

    decoder = FusedDecoder(
        CheckpointWeights(files.folder, record.outline, record.shapes, dtype, report),
        torch.int8 if config.quantization == "int8" else dtype,
        threads=torch.get_num_threads(),
    )
    forward = FusedForward(decoder)
    progress(0.9, "loading compiled code, or compiling it if that was never done")
    sampler.warm_up(device)
    progress(0.95, "comparing the fused forward with the plain one of an earlier start")
    record.probe().check(forward, record.layers, backend, config.block_size, config.quantization, kv_dtype)
    return Model(
        name=config.model_name,
        module=None,
        forward=forward,
        decoder_name="fused",
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        backend=backend,
        backend_name=backend_name,
        layers=record.layers,
        vocab_size=record.vocab_size,
        max_model_len=record.max_model_len,
        eos_token_ids=record.eos_token_ids,
        fingerprint=record.fingerprint,
        tokenizer=read_tokenizer(files.folder, files.gguf_file),
    )
