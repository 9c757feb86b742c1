"""`tidegate gateway`: OpenAI's HTTP API in front of a scheduler. This process becomes the gateway's."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import typer

from tidegate_client.cli.failures import BAD_REQUEST, Failure

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""How the command is registered: its options are the gateway's, `--help` among them."""


def gateway(context: typer.Context) -> None:
    """Serve OpenAI's HTTP API in front of a scheduler. See `gateway --help`."""
    if find_spec("openai_gateway") is None or find_spec("uvicorn") is None:
        raise Failure(
            "the gateway is not installed here: in a clone of Tidegate, pip install '.[gateway]'", BAD_REQUEST
        )
    # Signals are the gateway's to handle, and its end is ours.
    os.execv(sys.executable, [sys.executable, "-m", "openai_gateway", *context.args])  # noqa: S606
