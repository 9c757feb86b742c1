"""Owns what a loaded model is, and which of two ways loads it.

`transformers_model.py` is the way for every model. `recorded_model.py` is the quick one for those of which an
earlier start left a record. Imports no transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from worker_service.attention import Backend
from worker_service.config import WorkerConfig
from worker_service.errors import UnsupportedModelError
from worker_service.forward import Forward
from worker_service.kv_memory import LayerShape
from worker_service.logs import log_event
from worker_service.model_files import ModelFiles, find_files
from worker_service.tokenizer_files import TokenizerFiles
from worker_service.weight_files import check_weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOGGER = logging.getLogger(__name__)

# Told how far loading is: a share of 0 to 1, and a line for people.
Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A loaded model and what the worker needs to know of it."""

    name: str
    module: PreTrainedModel | None  # without weights, where the fused decoder has them; None: never made
    forward: Forward
    decoder_name: str  # "fused" or "generic"
    device: torch.device
    dtype: torch.dtype  # of activations
    kv_dtype: torch.dtype
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
    check_weight_files(files)
    device = choose_device(config.device)
    record = _record_file(config, files, device)
    model = None if record is None else _load_recorded(config, files, record, progress)
    if model is not None:
        return model
    from worker_service.transformers_model import load_through_transformers  # seconds to import

    return load_through_transformers(config, files, device, record, progress)


def _record_file(config: WorkerConfig, files: ModelFiles, device: torch.device) -> Path | None:
    """Where a record of this model is, or is to be; None where none is of use."""
    if device.type != "cpu" or config.decoder == "generic" or files.gguf_file is not None:
        return None
    from worker_service.model_record import record_file

    return record_file(config, files.folder)


def _load_recorded(config: WorkerConfig, files: ModelFiles, path: Path, progress: Progress) -> Model | None:
    """The model by its record; None where there is none, or it does not fit."""
    from worker_service.checkpoint import CheckpointError
    from worker_service.model_record import read_record
    from worker_service.recorded_model import load_recorded

    record = read_record(path)
    if record is None:
        return None
    try:
        return load_recorded(config, files, record, progress)
    except (CheckpointError, UnsupportedModelError) as error:
        log_event(
            _LOGGER, logging.WARNING, "the model is not as recorded; asking transformers", why=str(error)
        )
        return None


def choose_device(name: str) -> torch.device:
    """The device by its name; "auto" takes CUDA where there is one. Raises UnsupportedModelError."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModelError("--device cuda: torch finds no CUDA device here")
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
