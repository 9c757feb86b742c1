"""What a worker learned of a model when it loaded it through transformers, kept for later starts.

Owns the record, the file that it is in, and when it holds: as long as the model's files, the options that it
depends on, this code and its libraries are the same. Holds no weights. See docs/adr/0015-recorded-models.md.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import logging
import os
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from worker_service.cache import cache_folder
from worker_service.config import WorkerConfig
from worker_service.fused.llama import Outline
from worker_service.kv_memory import LayerShape
from worker_service.logs import log_event
from worker_service.probe import Probe

_LOGGER = logging.getLogger(__name__)
_LIBRARIES = ("torch", "transformers", "safetensors")
_SETTINGS = ("config.json", "generation_config.json")
_MOST_RECORDS = 32  # of half a megabyte or so; the oldest go


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A model that the fused decoder computes, but for its weights and its tokenizer."""

    outline: Outline
    shapes: dict[str, tuple[int, ...]]  # of each weight, by its name
    dtype: str  # of activations, such as "bfloat16"
    layers: tuple[LayerShape, ...]
    vocab_size: int
    max_model_len: int  # tokens
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    probe_tokens: tuple[tuple[int, ...], ...]
    probe_logits: str  # base64 of fp32 `[sequences, V]`

    def probe(self) -> Probe:
        """What the model's plain forward answered."""
        logits = np.frombuffer(bytearray(base64.b64decode(self.probe_logits)), np.float32)
        sequences = [torch.tensor(tokens) for tokens in self.probe_tokens]
        expected = torch.from_numpy(logits.reshape(len(sequences), -1))
        return Probe(sequences, expected, getattr(torch, self.dtype), torch.device("cpu"))


def encode_logits(logits: Tensor) -> str:
    """`probe_logits` of a record."""
    return base64.b64encode(logits.numpy().tobytes()).decode()


_CODEC = TypeAdapter(ModelRecord)


def record_file(config: WorkerConfig, folder: Path) -> Path:
    """The file of the record that holds for these options and the folder as it is now. Raises OSError."""
    told = hashlib.blake2b(digest_size=16)
    options = [config.dtype, config.quantization, config.max_model_len]
    told.update(json.dumps([options, [version(name) for name in _LIBRARIES]]).encode())
    for path in (folder / name for name in _SETTINGS):
        told.update(path.read_bytes() if path.is_file() else b"none")
    for path in sorted([*folder.glob("*.safetensors*"), *folder.glob("adapter_config.json")]):
        status = path.stat()
        told.update(json.dumps([path.name, status.st_size, status.st_mtime_ns]).encode())
    told.update(_code())
    return cache_folder() / "records" / f"{told.hexdigest()}.json"


@functools.cache
def _code() -> bytes:
    """A digest of the worker's sources, as they were when this process first asked."""
    told = hashlib.blake2b(digest_size=16)
    here = Path(__file__).parent
    for path in sorted([*here.glob("*.py"), *(here / "fused").glob("*.py")]):
        told.update(path.read_bytes())
    return told.digest()


def read_record(path: Path) -> ModelRecord | None:
    """The record in the file; None where there is none that is whole, or it is another user's.

    A digest is no proof of who wrote it, and sizes that lie would have the decoder read beyond its weights.
    """
    try:
        if not path.is_file() or path.stat().st_uid not in (os.geteuid(), 0):  # a pipe would never end
            return None
        digest, _, content = path.read_bytes().partition(b"\n")
        return _CODEC.validate_json(content) if digest == _digest(content) else None
    except (OSError, ValidationError):
        return None


def keep_record(path: Path, record: ModelRecord) -> None:
    """Writes the file, whole or not at all, and removes the oldest where there are many."""
    content = _CODEC.dump_json(record)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(_digest(content) + b"\n" + content)
                file.flush()
                Path(file.name).replace(path)
            except OSError:
                Path(file.name).unlink()
                raise
        _remove_oldest(path.parent)
    except OSError as error:
        log_event(_LOGGER, logging.INFO, "later starts will be slow: no record is kept", why=str(error))


def _remove_oldest(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another worker removes them too
        files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in files[:-_MOST_RECORDS]:
            file.unlink()


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).hexdigest().encode()
