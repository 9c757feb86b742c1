"""The command line's face: its commands, and what becomes of their failures.

Owns the list of commands and the exit codes. Each command lives in its own file.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from tidegate_client.access import (
    TLS_CA_VARIABLE,
    TLS_CERT_VARIABLE,
    TLS_KEY_VARIABLE,
    TLS_VARIABLE,
    TOKEN_VARIABLE,
)
from tidegate_client.cli import options
from tidegate_client.cli.bench import bench
from tidegate_client.cli.chat import chat
from tidegate_client.cli.demo import demo
from tidegate_client.cli.doctor import doctor
from tidegate_client.cli.explain import explain
from tidegate_client.cli.failures import Failure, describe, exit_code
from tidegate_client.cli.gateway import SETTINGS as GATEWAY_SETTINGS
from tidegate_client.cli.gateway import gateway
from tidegate_client.cli.generate import generate
from tidegate_client.cli.replay import SETTINGS as REPLAY_SETTINGS
from tidegate_client.cli.replay import replay
from tidegate_client.cli.screen import err
from tidegate_client.cli.serve import serve
from tidegate_client.cli.simulate import SETTINGS as SIMULATE_SETTINGS
from tidegate_client.cli.simulate import simulate
from tidegate_client.cli.status import status
from tidegate_client.cli.top import top
from tidegate_client.cli.trace import trace
from tidegate_client.errors import TidegateError

_EPILOG = (
    "Exit codes: 0 done, 1 the server failed, 2 a wrong option or a request that can't be served, "
    "3 no server could be reached, 4 the queue is full, 5 the time ran out, 130 interrupted."
)

app = typer.Typer(
    name="tidegate",
    help="Serve language models, and talk to them.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (serve, generate, chat, status, top, explain, trace, bench, doctor, demo):
    app.command()(command)
app.command(context_settings=SIMULATE_SETTINGS)(simulate)
app.command(context_settings=GATEWAY_SETTINGS)(gateway)
app.command(context_settings=REPLAY_SETTINGS)(replay)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(version("tidegate"))
        except PackageNotFoundError:
            typer.echo("unknown: not installed as a package")
        raise typer.Exit


@app.callback()
def _options(
    tls: options.TlsFlag = False,
    tls_ca: options.TlsCa = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    token: options.Token = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    # Every client that a command makes, and the services that it starts, read them there.
    given = {
        TLS_VARIABLE: "1" if tls else None,
        TLS_CA_VARIABLE: tls_ca,
        TLS_CERT_VARIABLE: tls_cert,
        TLS_KEY_VARIABLE: tls_key,
        TOKEN_VARIABLE: token,
    }
    os.environ.update({name: value for name, value in given.items() if value})


def main() -> None:
    """Runs the command line; failures become one line on stderr and an exit code."""
    try:
        app()
    except (Failure, TidegateError) as error:
        err.print(f"error: {describe(error)}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(exit_code(error)) from None
    except BrokenPipeError:  # the reader of our output, such as `head`, has had enough
        raise SystemExit(1) from None
