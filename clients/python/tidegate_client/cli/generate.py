"""`tidegate generate`: one prompt, one streamed answer."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from tidegate_client.channel import DEFAULT_ADDRESS
from tidegate_client.cli import options
from tidegate_client.cli.failures import BAD_REQUEST, INTERRUPTED, OUT_OF_TIME, Failure, unreadable
from tidegate_client.cli.own_command import own_command
from tidegate_client.cli.screen import err, print_stats, write_text
from tidegate_client.client import Client
from tidegate_client.errors import DeadlineExceededError
from tidegate_client.requests import GenerateOptions
from tidegate_client.stream import Stream
from tidegate_client.types import Grammar


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt, or - to read it from standard input.")],
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    n: Annotated[int | None, typer.Option("--n", "-n", min=1, help="Candidates. Default: 1.")] = None,
    priority: options.Priority = None,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    choice: options.Choice = None,
    grammar: options.GrammarFile = None,
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message, through the chat template.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as a line of JSON.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print id, usage and timings to stderr.")] = False,
    request_id: Annotated[
        str, typer.Option(help="Name of the request, for explain and trace. Default: the server's choice.")
    ] = "",
    timeout: options.Timeout = None,
    model: options.ModelName = "",
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Generate text from a prompt and print it as it comes."""
    request_options = given_options(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop,
        n=n,
        priority=priority,
        request_id=request_id,
        json_schema=_read_file("--json-schema", json_schema),
        regex=regex,
        choice=choice,
        grammar=_read_grammar(grammar),
    )
    text = _read_stdin() if prompt == "-" else prompt
    with Client(address) as client:
        start = client.chat if as_chat else client.generate
        with start(text, timeout_s=timeout, **request_options) as stream:
            try:
                _print_stream(stream, as_json=as_json, several=(n or 1) > 1)
            except KeyboardInterrupt:
                stream.cancel()
                raise typer.Exit(INTERRUPTED) from None
            except DeadlineExceededError as error:
                if timeout is None or error.reason not in ("", "DEADLINE_EXCEEDED"):  # as in a full queue
                    raise
                what = "no whole answer" if stream.text else "no answer"
                raise Failure(f"{what} within {timeout:g} s (--timeout)", OUT_OF_TIME) from None
        if stats:
            _print_stats(stream)


def _print_stats(stream: Stream) -> None:
    if stream.admitted is not None:
        name = stream.admitted.request_id
        err.print(f"request: {name} ({own_command()} trace {name})", markup=False, soft_wrap=True)
    for generation in stream.generations():
        print_stats(generation.finished)


def given_options(**values: Any) -> GenerateOptions:
    """Returns the options that were given; the server has defaults for the rest."""
    given = {name: value for name, value in values.items() if value is not None and value != ""}
    return cast(GenerateOptions, given)


def _read_file(option: str, path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(option, path, error) from None


def _read_grammar(path: Path | None) -> Grammar | None:
    text = _read_file("--grammar", path)
    if path is None or text is None:
        return None
    return Grammar(text, "ebnf" if path.suffix in (".ebnf", ".gbnf") else "lark")


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise Failure(f"standard input is not UTF-8 text: {error}", BAD_REQUEST) from None


def _print_stream(stream: Stream, *, as_json: bool, several: bool) -> None:
    if as_json:
        _print_json(stream)
    elif several:
        for _ in stream:  # several texts at a time can't be read: each comes whole
            pass
        for generation in stream.generations():
            write_text(f"[{generation.index}] {generation.text}\n")
    else:
        for delta in stream:
            write_text(delta.text)
        write_text("\n")


def _print_json(stream: Stream) -> None:
    begun = False
    for delta in stream:
        if not begun and stream.admitted is not None:
            _print_event("admitted", stream.admitted)
            begun = True
        _print_event("delta", delta)
    for generation in stream.generations():
        _print_event("finished", generation.finished)


def _print_event(kind: str, value: Any) -> None:
    write_text(json.dumps({"event": kind, **dataclasses.asdict(value)}, ensure_ascii=False) + "\n")
