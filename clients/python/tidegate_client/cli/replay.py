"""`tidegate replay`: plays a scheduler's recording again, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import typer

from tidegate_client.cli.failures import BAD_REQUEST, Failure

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""How the command is registered: its options are the replay's, `--help` among them."""


def replay(context: typer.Context) -> None:
    """Play a scheduler's recording again, and see what other options would have done. See `replay --help`."""
    if find_spec("scheduler_service") is None:
        raise Failure(
            "the scheduler is not installed here: in a clone of Tidegate, pip install .", BAD_REQUEST
        )
    command = [sys.executable, "-m", "scheduler_service.simulation.replay_command", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)  # noqa: S603 - our own module
