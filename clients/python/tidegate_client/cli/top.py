"""`tidegate top`: a scheduler, live, until q."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Annotated

import typer
from rich.live import Live

from tidegate.admin.v1 import admin_pb2 as pb
from tidegate_client.admin import AdminClient
from tidegate_client.channel import DEFAULT_ADDRESS
from tidegate_client.cli import options
from tidegate_client.cli.keys import Keys
from tidegate_client.cli.screen import out
from tidegate_client.cli.top_view import ORDERS, View
from tidegate_client.errors import TidegateError
from tidegate_client.watched_state import WatchedState

_POLL_S = 0.1
_LATENCY_S = 2.0


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    interval_ms: Annotated[int, typer.Option(min=100, max=60_000, help="Between two updates.")] = 1000,
    sort: Annotated[str, typer.Option(help=f"Order of requests: {', '.join(ORDERS)}.")] = "arrival",
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Watch workers, queues and requests live. Keys: q quits, s sorts, p pauses.

    Where the output is no terminal, one picture is printed.
    """
    if sort not in ORDERS:
        raise typer.BadParameter(f"{sort!r} is not one of {', '.join(ORDERS)}", param_hint="--sort")
    with AdminClient(address) as admin:
        if once or not out.is_terminal:
            seen = WatchedState()
            seen.apply(next(admin.watch()))
            out.print(View(seen, admin.latency(), sort).picture(out.width, 1000, keys=False))
            return
        with suppress(KeyboardInterrupt):
            _show(Source(admin, interval_ms), sort)


class Source:
    """Keeps up with a scheduler, in a thread of its own."""

    def __init__(self, admin: AdminClient, interval_ms: int) -> None:
        self.lock = threading.Lock()
        """Held while the state changes."""
        self.seen = WatchedState()
        self.latency = pb.GetLatencyResponse()
        self.failure: TidegateError | None = None
        self.ended = False
        self.updates = 0
        self._admin = admin
        self._interval_ms = interval_ms
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        asked = 0.0
        try:
            for update in self._admin.watch(interval_ms=self._interval_ms):
                if time.monotonic() - asked > _LATENCY_S:
                    self.latency, asked = self._admin.latency(), time.monotonic()
                with self.lock:
                    self.seen.apply(update)
                    self.updates += 1
        except TidegateError as error:
            self.failure = error
        self.ended = True


def _show(source: Source, order: str) -> None:
    view, shown = View(source.seen, source.latency, order), -1
    with Keys() as keys, Live(console=out, screen=True, auto_refresh=False) as screen:
        while True:
            key = keys.next(_POLL_S)
            if key == "q":
                return
            if key == "s":
                orders = list(ORDERS)
                view.order = orders[(orders.index(view.order) + 1) % len(orders)]
            if key == "p":
                view.paused = not view.paused
            if source.failure is not None:
                raise source.failure
            if source.ended:
                return
            is_new = source.updates != shown and not view.paused
            if is_new or key:
                with source.lock:
                    shown, view.latency = source.updates, source.latency
                    screen.update(view.picture(out.width, out.height, keys=keys.enabled), refresh=True)
