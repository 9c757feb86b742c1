"""Calls of functions in the model's text: how they are written, and how they are told from other text.

Owns that notation, which conversations and grammars use as well. Answers are read as they come, each once.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from openai_gateway.requests import ToolCall

# Many open models were trained on this notation. Names need no escapes, and JSON's strings have no line
# breaks: the arguments are what is between these texts.
OPEN = "<tool_call>"
BEFORE_NAME = '\n{"name": "'
AFTER_NAME = '", "arguments": '
CLOSE = "}\n</tool_call>"
_HEAD = re.compile(f'\\n?{OPEN}{re.escape(BEFORE_NAME)}([^"]+){re.escape(AFTER_NAME)}')


def written(calls: Sequence[ToolCall]) -> str:
    """Calls of an earlier turn, as the model would have written them."""
    return "\n".join(form_of_call(each.function.name, each.function.arguments) for each in calls)


def form_of_call(name: str, arguments: str) -> str:
    """One call as text."""
    return f"{OPEN}{BEFORE_NAME}{name}{AFTER_NAME}{arguments}{CLOSE}"


def results(contents: Sequence[str]) -> str:
    """What functions returned, as the turn after their calls."""
    return "\n".join(f"<tool_response>\n{content}\n</tool_response>" for content in contents)


@dataclass(frozen=True, slots=True)
class CallPart:
    """The next piece of a call."""

    index: int
    name: str | None
    """Set in the first part of each call."""
    arguments: str


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """The next piece of an answer: text, then calls."""

    text: str
    calls: list[CallPart]


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call, or as much as was written of it."""

    name: str
    arguments: str


class AnswerReader(ABC):
    """Reads one answer."""

    @abstractmethod
    def read(self, text: str, *, is_end: bool = False) -> AnswerPart:
        """What more is known with more text. is_end: nothing more comes, so nothing is held back."""

    @property
    @abstractmethod
    def has_called(self) -> bool:
        """Whether what was read ends behind a call that the model chose to make."""

    def read_all(self, text: str) -> tuple[str, list[Call]]:
        """A whole answer: its text and its calls."""
        part = self.read(text, is_end=True)
        names = [each.name for each in part.calls if each.name is not None]
        pieces = [[each.arguments for each in part.calls if each.index == i] for i in range(len(names))]
        return part.text, [Call(name, "".join(piece)) for name, piece in zip(names, pieces, strict=True)]


class ArgumentsReader(AnswerReader):
    """Reads an answer that is nothing but the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def read(self, text: str, *, is_end: bool = False) -> AnswerPart:
        """See AnswerReader."""
        if not text:
            return AnswerPart("", [])
        name, self._name = self._name, None
        return AnswerPart("", [CallPart(0, name, text)])

    @property
    def has_called(self) -> bool:
        """See AnswerReader."""
        return False


class _Next(Enum):
    """What comes next in an answer."""

    TEXT = auto()
    HEAD = auto()
    ARGUMENTS = auto()


class CallsReader(AnswerReader):
    """Reads text with calls behind it.

    A first call that was cut short before its function's name ended is text; a later one is left out.
    """

    def __init__(self) -> None:
        self._next = _Next.TEXT
        self._held = ""  # that may turn out to begin something else
        self._num_calls = 0

    def read(self, text: str, *, is_end: bool = False) -> AnswerPart:
        """See AnswerReader."""
        rest, told, calls = self._held + text, "", []
        reading = None
        while reading is not self._next:  # else what comes next needs more text
            reading = self._next
            if reading is _Next.TEXT:
                told, rest = self._read_text(rest)
                continue
            part, rest = self._read_head(rest) if reading is _Next.HEAD else self._read_arguments(rest)
            if part is not None:
                calls.append(part)
        self._held = "" if is_end else rest
        if (
            is_end and self._next is _Next.ARGUMENTS and rest == CLOSE[0]
        ):  # more of it were the mark for certain
            calls.append(CallPart(self._num_calls - 1, None, rest))
        if is_end and not self._num_calls:
            told += rest
        return AnswerPart(told, calls)

    @property
    def has_called(self) -> bool:
        """See AnswerReader."""
        return self._next is _Next.HEAD and self._num_calls > 0

    def _read_text(self, rest: str) -> tuple[str, str]:
        end = rest.find(OPEN)
        if end >= 0:
            self._next = _Next.HEAD
        else:
            end = _certain(rest, OPEN)
        end = len(rest[:end].rstrip())  # blanks before a call are nothing to show
        return rest[:end], rest[end:].lstrip() if self._next is _Next.HEAD else rest[end:]

    def _read_head(self, rest: str) -> tuple[CallPart | None, str]:
        head = _HEAD.match(rest)
        if head is None:
            return None, rest
        self._next = _Next.ARGUMENTS
        self._num_calls += 1
        return CallPart(self._num_calls - 1, head[1], ""), rest[head.end() :]

    def _read_arguments(self, rest: str) -> tuple[CallPart | None, str]:
        end = rest.find(CLOSE)
        if end >= 0:
            self._next = _Next.HEAD
            part, rest = rest[:end], rest[end + len(CLOSE) :]
        else:
            end = _certain(rest, CLOSE)
            part, rest = rest[:end], rest[end:]
        return CallPart(self._num_calls - 1, None, part) if part else None, rest


def _certain(text: str, mark: str) -> int:
    """How much of a text can't belong to a mark that ends beyond it. A mark has its first character once."""
    start = text.rfind(mark[0])
    return start if start >= 0 and mark.startswith(text[start:]) else len(text)


def json_text(value: object) -> str:
    """JSON for the model to read: as it is written, without escapes for other alphabets."""
    return json.dumps(value, ensure_ascii=False)
