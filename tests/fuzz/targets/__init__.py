"""The targets: each file here has one."""

from __future__ import annotations

import importlib
import pkgutil

from fuzz.target import Target


def load() -> list[Target]:
    """All targets, by name."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}").TARGET for name in names]
