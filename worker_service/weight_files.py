"""Which safetensors files hold a folder's weights, and whether they are all there and whole.

Reads no weight, only the files' headers. Imports no torch and no transformers: what is damaged is refused
before either takes its seconds, and by the name of the file.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from worker_service.errors import UnsupportedModelError
from worker_service.model_files import ModelFiles

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"
_AGAIN = "Fetch it again"
_MOST_HEADER_BYTES = 100_000_000  # of safetensors


def names_of_weights(folder: Path) -> list[str]:
    """The files as transformers chooses them: one, or those that an index names. Empty: there are neither.

    Raises UnsupportedModelError for an index that is none, OSError for one that can't be read.
    """
    if (folder / _WHOLE).is_file():
        return [_WHOLE]
    if not (folder / _INDEX).is_file():
        return []
    try:
        names = set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values())
        plain = all(Path(name).name == name for name in names)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnsupportedModelError(f"its {_INDEX} can't be read: {error!r}. {_AGAIN}") from error
    if not plain:
        raise UnsupportedModelError(f"its {_INDEX} names files outside of the folder")
    return sorted(names)


def check_weight_files(files: ModelFiles) -> None:
    """Raises UnsupportedModelError for files that are missing or damaged, OSError for unreadable ones."""
    if files.gguf_file is not None:
        _check_gguf(files.folder / files.gguf_file)
        return
    names = names_of_weights(files.folder)
    missing = [name for name in names if not (files.folder / name).is_file()]
    if missing:
        raise UnsupportedModelError(
            f"{len(missing)} of the {len(names)} files that its {_INDEX} names are missing: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}. Fetch them"
        )
    for name in names:
        _check_safetensors(files.folder / name)


def _check_safetensors(path: Path) -> None:
    start = _start(path)
    try:
        with safe_open(path, "numpy"):
            return
    except SafetensorError as error:
        size, expected = path.stat().st_size, _expected_size(path, start)
        if expected is not None and size < expected:
            why = f"has {size:,} of {expected:,} bytes"
        else:
            why = f"({size:,} bytes) is damaged: {error}"
        raise UnsupportedModelError(f"its {path.name} {why}. {_AGAIN}") from error


def _expected_size(path: Path, start: bytes) -> int | None:
    """Bytes of a whole file by its header; None where that does not tell."""
    if len(start) < 8:
        return None
    header_size = struct.unpack("<Q", start[:8])[0]
    if header_size > _MOST_HEADER_BYTES:
        return None
    try:
        with path.open("rb") as file:
            file.seek(8)
            header: dict[str, Any] = json.loads(file.read(header_size))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        return int(8 + header_size + max(ends))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None


def _check_gguf(path: Path) -> None:
    if _start(path)[:4] != b"GGUF":
        raise UnsupportedModelError(
            f"its {path.name} ({path.stat().st_size:,} bytes) does not begin as GGUF files do. {_AGAIN}"
        )


def _start(path: Path) -> bytes:
    """The first bytes. Raises UnsupportedModelError where Git left a pointer in the file's place."""
    with path.open("rb") as file:
        start = file.read(len(_POINTER))
    if start == _POINTER:
        raise UnsupportedModelError(
            f"its {path.name} holds no weights but Git's pointer to them: run `git lfs pull` in its folder"
        )
    return start
