"""A checkpoint's weights, read from its safetensors files without transformers.

Owns the mapping of the files. Pages are given back as their weights are forgotten; whoever asks for one again
gets it from its file anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker_service.errors import UnsupportedModelError
from worker_service.fused.llama import Outline, Weights
from worker_service.fused.pages import release
from worker_service.weight_files import names_of_weights


class CheckpointError(Exception):
    """The files can't be read, or don't hold what they should; the message says which and what."""


class CheckpointWeights(Weights):
    """The weights of a model's folder, of the given names and shapes."""

    def __init__(
        self,
        folder: Path,
        outline: Outline,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        report: Callable[[float], None] = lambda share: None,
    ) -> None:
        """`report` is told the share of the weights that are forgotten. Raises CheckpointError."""
        self.outline = outline
        self._shapes = shapes
        self._dtype = dtype
        self._report = report
        self._forgotten: set[str] = set()
        try:
            self._places = _find(folder)
            for name, shape in shapes.items():
                stored = tuple(self._places[name].get_slice(name).get_shape())
                if stored != shape:
                    raise CheckpointError(f"{name} is {list(stored)}, not {list(shape)}")
        except KeyError as error:
            raise CheckpointError(f"there is no {error.args[0]}") from error
        except (OSError, ValueError, SafetensorError, UnsupportedModelError) as error:
            raise CheckpointError(str(error)) from error

    def get(self, name: str) -> Tensor | None:
        """See Weights."""
        return self._mapped(name).to(self._dtype) if name in self._shapes else None

    def forget(self, prefix: str) -> None:
        """See Weights."""
        for name in self._shapes:
            if name.startswith(prefix) and name not in self._forgotten:
                release(self._mapped(name))
                self._forgotten.add(name)
        self._report(len(self._forgotten) / len(self._shapes))

    def _mapped(self, name: str) -> Tensor:
        """A view of the file, whose pages are read when they are touched."""
        tensor: Tensor = self._places[name].get_tensor(name)
        return tensor


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in the folder's files, by name. Raises as names_of_weights."""
    return {name: tuple(file.get_slice(name).get_shape()) for name, file in _find(folder).items()}


def stored_types(folder: Path) -> dict[str, str]:
    """Types of the tensors in the folder's files, as those name them, such as "BF16". Raises likewise."""
    return {name: file.get_slice(name).get_dtype() for name, file in _find(folder).items()}


def _find(folder: Path) -> dict[str, Any]:
    """The open file of each tensor: of one file, or of those that an index names, as in transformers."""
    files = [safe_open(folder / name, "pt") for name in names_of_weights(folder)]
    places: dict[str, Any] = {}
    for file in files:
        places |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]
    return places
