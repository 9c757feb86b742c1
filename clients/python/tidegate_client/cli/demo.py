"""`tidegate demo`: the whole path once, from starting the services to stopping them."""

from __future__ import annotations

from typing import Annotated

import typer

from tidegate_client.cli.demo_model import DEMO, find_model
from tidegate_client.cli.failures import INTERRUPTED
from tidegate_client.cli.load_screen import LoadScreen
from tidegate_client.cli.local_cluster import ClusterOptions, LocalCluster
from tidegate_client.cli.screen import err, timings_line, usage_line, write_text
from tidegate_client.cli.serve import Device, stop_on_signals
from tidegate_client.client import Client

_PROMPT = "What causes the tides of the sea?"


def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = _PROMPT,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 70,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = "auto",
) -> None:
    """Start a scheduler and a worker with the demo model, stream one answer, stop both."""
    stop_on_signals()
    try:
        with LocalCluster(ClusterOptions(model=find_model(DEMO), port=0, device=device)) as cluster:
            with LoadScreen() as screen:
                cluster.wait_ready(screen.show)
            err.print(f"{cluster.model_name} is served at {cluster.address}.", style="dim")
            _ask(cluster.address, prompt, max_tokens)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _ask(address: str, prompt: str, max_tokens: int) -> None:
    write_text(f"> {prompt}\n")
    with Client(address) as client, client.chat(prompt, max_tokens=max_tokens, temperature=0.0) as stream:
        for delta in stream:
            write_text(delta.text)
    write_text("\n")
    if stream.finished is not None:
        write_text(f"{usage_line(stream.finished)}\n{timings_line(stream.finished)}\n")
