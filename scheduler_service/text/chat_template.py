"""Owns one model's chat template: Jinja in a sandbox, bounded in time and size.

A template comes from a model's files and sees a client's messages, so neither is trusted. Names and settings
follow what transformers gives to templates, so that a conversation renders alike in both.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# A conversation with more characters is rendered in a thread.
_MAX_INLINE_CHARACTERS = 16_384
_MAX_RENDER_S = 2.0
# Text that a template may add to the messages, and times that it may repeat them.
_MAX_ADDED_CHARACTERS = 1 << 20
_MAX_REPEATS = 4
_MAX_INT_BITS = 256
_MAX_MESSAGE_CHARACTERS = 300

_TICK = "tidegate_tick"


class ChatTemplateError(Exception):
    """A conversation that the template refuses or cannot render. The message is meant for the client."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are given to the template by name, such as `bos_token`."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the model's chat template is not valid: {_shortened(error)}") from error

    async def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """The conversation as the text of a prompt. Raises ChatTemplateError."""
        size = sum(len(message["content"]) for message in messages)
        if size > _MAX_INLINE_CHARACTERS:
            return await asyncio.to_thread(self._render, messages, size, add_generation_prompt)
        return self._render(messages, size, add_generation_prompt)

    def _render(self, messages: Sequence[Mapping[str, str]], size: int, add_generation_prompt: bool) -> str:
        limit = _MAX_REPEATS * size + _MAX_ADDED_CHARACTERS
        tick = _deadline(time.monotonic() + _MAX_RENDER_S)
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            _TICK: tick,
        }
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                tick()
                length += len(piece)
                if length > limit:
                    raise ChatTemplateError(f"the chat template gives more than {limit} characters")
                pieces.append(piece)
        except ChatTemplateError:
            raise
        except jinja2.TemplateError as error:
            raise ChatTemplateError(_shortened(error)) from error
        except (RecursionError, MemoryError) as error:
            raise ChatTemplateError("the chat template needs too much memory") from error
        except Exception as error:  # a template can raise what any operator or method of its values can
            raise ChatTemplateError(
                f"the chat template cannot render these messages: {_shortened(error)}"
            ) from error
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a look at the clock in each turn of a loop and bounds on explosive operators."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuses products that take up memory out of proportion."""
        if operator == "**" and not _small_power(left, right):
            raise SecurityError("the chat template uses a power that is too large")
        if operator == "*" and not _small_product(left, right):
            raise SecurityError("the chat template uses a repetition that is too large")
        return super().call_binop(context, operator, left, right)

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        for loop in source.find_all(nodes.For):
            tick = nodes.ExprStmt(
                nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None), lineno=loop.lineno
            )
            loop.body.insert(0, tick.set_environment(self))
        return super()._generate(source, name, filename, defer_init)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; rendering only needs what is inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads a plain set

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Gives the body of the tag in place of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """`namespace()` that cannot be given attributes of Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError("the chat template sets an attribute that begins with an underscore")


def _small_power(base: Any, exponent: Any) -> bool:
    if isinstance(base, int) and isinstance(exponent, int):
        return base.bit_length() * max(exponent, 0) <= _MAX_INT_BITS
    return isinstance(base, int | float) and isinstance(exponent, int | float)


def _small_product(left: Any, right: Any) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length() <= _MAX_INT_BITS
    if isinstance(left, str | list | tuple) and isinstance(right, int):
        return len(left) * right <= _MAX_ADDED_CHARACTERS
    if isinstance(left, int) and isinstance(right, str | list | tuple):
        return left * len(right) <= _MAX_ADDED_CHARACTERS
    return True


def _deadline(end: float) -> Callable[[], str]:
    def tick() -> str:
        if time.monotonic() > end:
            raise ChatTemplateError(f"the chat template takes more than {_MAX_RENDER_S:g} s")
        return ""

    return tick


def _shortened(error: BaseException) -> str:
    message = str(error) or type(error).__name__
    return message if len(message) <= _MAX_MESSAGE_CHARACTERS else message[:_MAX_MESSAGE_CHARACTERS] + "..."


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # local time, as templates expect


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which would change the prompt."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _new_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    del environment.globals["lipsum"]
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_SafeNamespace
    )
    return environment


_ENVIRONMENT = _new_environment()
