"""Finds the folder of a model that is given by name; makes the demo model's if need be."""

from __future__ import annotations

import subprocess
import sys

from tidegate_client.cli.failures import Failure

DEMO = "demo"


def find_model(model: str) -> str:
    """Returns what a worker can load: the given path or hub id, or the demo model's folder.

    Raises Failure when the demo model can't be made.
    """
    if model != DEMO:
        return model
    command = [sys.executable, "-m", "worker_service.demo_model"]  # it needs torch, and we do without
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 - our own module
    if done.returncode != 0:
        raise Failure("the demo model can't be prepared; `tidegate doctor` tells what is missing")
    return done.stdout.strip()
