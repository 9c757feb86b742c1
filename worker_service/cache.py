"""Where this machine keeps what can be made again: the demo model, records of models, and compiled code."""

from __future__ import annotations

import os
import stat
import tempfile
from importlib.util import find_spec
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


def place_compiled_code() -> None:
    """Tells numba where to keep compiled code, if it can't be beside the sources. Before numba is imported.

    By itself it would look for a home then, and fail without one: a user other than the one who installed
    this, with a read-only root, has neither. Raises OSError where no folder can be written.
    """
    if "NUMBA_CACHE_DIR" in os.environ or all(map(_writable, _sources())):
        return
    places = cache_folder() / "compiled", Path(tempfile.gettempdir()) / f"tidegate-compiled-{os.geteuid()}"
    for place in places:
        if _is_own(place):
            os.environ["NUMBA_CACHE_DIR"] = str(place)
            return
    raise PermissionError(
        f"there is no place for compiled code: {' and '.join(map(str, places))} are no folders of this "
        "user's that can be written. Set TIDEGATE_CACHE to one"
    )


def _sources() -> list[Path]:
    """The folders in which compiled functions are."""
    here = Path(__file__).parent
    kernels = find_spec("tidegate_kernels")
    return [here / "fused", *map(Path, (kernels and kernels.submodule_search_locations) or ())]


def _is_own(folder: Path) -> bool:
    """Whether it is this user's alone to write, made if need be: code that others can change is not run."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode) and not others and _writable(folder)


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK)
