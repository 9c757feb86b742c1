"""`tidegate replay`: plays a scheduler's recording again, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from tidegate_client.cli.failures import BAD_REQUEST, Failure


def replay(
    file: Annotated[Path, typer.Argument(help="What a scheduler wrote with --record FILE.")],
) -> None:
    """Play a scheduler's recording again, and check that it decides the same."""
    if find_spec("scheduler_service") is None:
        raise Failure("the scheduler is not installed here: pip install tidegate", BAD_REQUEST)
    command = [sys.executable, "-m", "scheduler_service.replay", str(file)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)  # noqa: S603 - our own module
