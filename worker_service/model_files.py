"""Owns where a model's files are: a folder, a GGUF file, or a hub's copy. Imports no torch.

So what is no model is refused before torch is imported, which takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from worker_service.config import WorkerConfig
from worker_service.errors import UnsupportedModelError

DEMO = "demo"
"""Name of the model that `demo_model.py` makes."""

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


def find_files(config: WorkerConfig) -> ModelFiles:
    """The model's files on this machine; a hub model is fetched unless --offline is set.

    Raises FileNotFoundError where there is none, UnsupportedModelError for another kind of file.
    """
    return find_local(config.model) or _fetch(config)


def find_local(model: str) -> ModelFiles | None:
    """The files of a path; None: it is a hub id. Raises as find_files."""
    path = Path(model).expanduser()
    if path.is_dir():
        _check_folder(path)
        return ModelFiles(path, None)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModelError(f"{path} is a file but not a .gguf one: give the model's folder")
        return ModelFiles(path.parent, path.name)
    if path.is_absolute() or model.count("/") != 1 or model.startswith("."):
        raise FileNotFoundError(f"there is no model at {path}, and that is no hub id (owner/name) either")
    return None


def _check_folder(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    inside = sorted(folder.glob("*.gguf"))
    hint = f"; to serve a GGUF file give its own path, such as {inside[0]}" if inside else ""
    raise UnsupportedModelError(f"{folder} has no config.json, so it is no model's folder{hint}")


def _fetch(config: WorkerConfig) -> ModelFiles:
    from huggingface_hub import snapshot_download  # here, so that local models need no network library

    try:
        folder = snapshot_download(
            config.model,
            revision=config.revision,
            local_files_only=config.offline,
            allow_patterns=_HUB_FILES,
        )
    except (OSError, ValueError) as error:  # the hub's are one of them
        if config.offline:
            why = "it is not in the local cache, and --offline is set"
        else:
            why = str(error).partition("\n")[0]
        raise FileNotFoundError(
            f"there is no folder {config.model}, and it can't be fetched from the hub: {why}. "
            "Give a local folder"
        ) from error
    return ModelFiles(Path(folder), None)
