"""Where this machine keeps what can be made again: the demo model, and records of models that were loaded."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """TIDEGATE_CACHE, by default ~/.cache/tidegate. It may not exist yet.

    A user whom the system does not know has no home, and / in its place, as containers have it.
    """
    try:
        home = Path.home()
    except RuntimeError:
        home = Path("/")
    return Path(os.environ.get("TIDEGATE_CACHE") or home / ".cache" / "tidegate")
