"""Finds the model to serve before anything is started; makes the demo model's folder if need be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tidegate_client.cli.failures import BAD_REQUEST, Failure

DEMO = "demo"


def find_model(model: str) -> str:
    """Returns what a worker can load: the given path or hub id, or the demo model's folder.

    Raises Failure for what is none, and when the demo model can't be made.
    """
    if model != DEMO:
        _check(model)
        return model
    command = [sys.executable, "-m", "worker_service.demo_model"]  # it needs torch, and we do without
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 - our own module
    if done.returncode != 0:
        raise Failure("the demo model can't be prepared; `tidegate doctor` tells what is missing")
    return done.stdout.strip()


def _check(model: str) -> None:
    """Paths are looked up here, hub ids by the worker."""
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return
    if path.is_file():
        raise Failure(f"{model} is a file, but not a .gguf one: give the model's folder", BAD_REQUEST)
    if path.is_absolute() or model.count("/") != 1 or model.startswith("."):
        raise Failure(
            f"there is no model at {model}: give a folder, a GGUF file, a hub id (owner/name), or {DEMO}",
            BAD_REQUEST,
        )
