"""`tidegate chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from tidegate_client.channel import DEFAULT_ADDRESS
from tidegate_client.cli import options
from tidegate_client.cli.failures import describe
from tidegate_client.cli.generate import given_options
from tidegate_client.cli.screen import err, print_stats, write_text
from tidegate_client.client import Client
from tidegate_client.errors import TidegateError
from tidegate_client.requests import GenerateOptions
from tidegate_client.types import ChatMessage, Finished

_HELP = (
    "/clear forgets the conversation, /stats shows the last answer's numbers. Ctrl-C cancels, Ctrl-D leaves."
)


def chat(
    system: Annotated[str, typer.Option(help="Instructions that the conversation begins with.")] = "",
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    model: options.ModelName = "",
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Talk with a model in the terminal. Ctrl-C cancels an answer, Ctrl-D leaves."""
    request_options = given_options(
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
    )
    with Client(address) as client:
        names = [served.name for served in client.list_models()]
        err.print(f"{model or ', '.join(names) or 'no model yet'} at {address}. {_HELP}", style="dim")
        _Conversation(client, system, request_options).run()


class _Conversation:
    def __init__(self, client: Client, system: str, request_options: GenerateOptions) -> None:
        self._client = client
        self._options = request_options
        self._beginning = [ChatMessage("system", system)] if system else []
        self._messages = list(self._beginning)
        self._last: Finished | None = None

    def run(self) -> None:
        asks = sys.stdin.isatty()  # else the output has nothing but answers
        if asks:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - importing it gives input() a history and line editing
        while True:
            try:
                line = input("> " if asks else "").strip()
            except EOFError:
                if asks:
                    write_text("\n")
                return
            except KeyboardInterrupt:
                write_text("\n")
                err.print(_HELP, style="dim")
                continue
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _command(self, line: str) -> None:
        if line == "/clear":
            self._messages = list(self._beginning)
            err.print("The conversation is forgotten.", style="dim")
        elif line == "/stats" and self._last is not None:
            print_stats(self._last)
        elif line == "/stats":
            err.print("No answer has been finished yet.", style="dim")
        else:
            err.print(_HELP, style="dim")

    def _answer(self, line: str) -> None:
        messages = [*self._messages, ChatMessage("user", line)]
        try:
            with self._client.chat(messages, **self._options) as stream:
                try:
                    for delta in stream:
                        write_text(delta.text)
                except KeyboardInterrupt:
                    stream.cancel()
                    err.print(" (cancelled)", style="dim")
        except TidegateError as error:
            # The question is not kept: the model has not answered it.
            err.print(f"error: {describe(error)}", style="red", markup=False, soft_wrap=True)
            return
        write_text("\n")
        self._last = stream.finished or self._last
        if stream.text:
            self._messages = [*messages, ChatMessage("assistant", stream.text)]
