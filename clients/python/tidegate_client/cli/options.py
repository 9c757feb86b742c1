"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidegate_client.access import (
    TLS_CA_VARIABLE,
    TLS_CERT_VARIABLE,
    TLS_KEY_VARIABLE,
    TLS_VARIABLE,
    TOKEN_VARIABLE,
)
from tidegate_client.channel import ADDRESS_VARIABLE

Address = Annotated[
    str, typer.Option("--address", "-a", envvar=ADDRESS_VARIABLE, help="host:port of the scheduler.")
]
TlsFlag = Annotated[
    bool, typer.Option("--tls", envvar=TLS_VARIABLE, help="Encrypt, and trust the public CAs.")
]
TlsCa = Annotated[
    str | None, typer.Option(envvar=TLS_CA_VARIABLE, help="Encrypt, and trust this CA, a PEM file.")
]
TlsCert = Annotated[
    str | None, typer.Option(envvar=TLS_CERT_VARIABLE, help="Your own certificate, a PEM file.")
]
TlsKey = Annotated[str | None, typer.Option(envvar=TLS_KEY_VARIABLE, help="Its key, a PEM file.")]
Token = Annotated[
    str | None,
    typer.Option(envvar=TOKEN_VARIABLE, help="Your credential. The variable keeps it out of process lists."),
]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Most tokens to generate. Default: the server's setting.")
]
Temperature = Annotated[float | None, typer.Option(help="0 takes the most likely token; 0 to 2. Default: 1.")]
TopP = Annotated[
    float | None,
    typer.Option(help="Keep the smallest set of tokens this probable; above 0 to 1. Default: 1."),
]
TopK = Annotated[
    int | None, typer.Option(min=0, help="Keep this many likely tokens; 0 keeps all. Default: 0.")
]
MinP = Annotated[
    float | None, typer.Option(help="Drop tokens below this share of the likeliest; 0 to 1. Default: 0.")
]
Seed = Annotated[int | None, typer.Option(min=0, help="Makes the draw repeatable. Default: random.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")]
Priority = Annotated[
    int | None, typer.Option(help="Lower runs first, under the priority policy. Default: 0.")
]
JsonSchema = Annotated[Path | None, typer.Option(help="File of a JSON Schema that the output is valid for.")]
Regex = Annotated[str | None, typer.Option(help="Regular expression that the whole output matches.")]
Choice = Annotated[list[str] | None, typer.Option(help="Text that the output may be; may be repeated.")]
GrammarFile = Annotated[
    Path | None,
    typer.Option("--grammar", help="File of a grammar for the output: Lark, or EBNF if it ends in .ebnf."),
]
ModelName = Annotated[str, typer.Option("--model", "-m", help="Model to use. Default: the only one served.")]
Timeout = Annotated[
    float | None, typer.Option(min=0.001, help="Seconds that the request may take. Default: no limit.")
]
