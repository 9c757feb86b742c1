"""The events of a stream, as bytes.

Owns their JSON. One is made for each delta of each stream, so what is the same in all of them is made once.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from openai_gateway.answers import ChatForm, Head, call_body, finish_reason, usage_body
from openai_gateway.calls import AnswerPart, CallPart
from openai_gateway.generation import Generation, Usage
from openai_gateway.logprobs import chat_logprobs, completion_logprobs, num_characters
from tidegate_client import Delta, Finished

DONE = b"data: [DONE]\n\n"


class Chunks(ABC):
    """Makes the events of one answer. Each method returns what is to be sent; b"" is nothing."""

    kind: str

    def __init__(self, head: Head, *, include_usage: bool) -> None:
        fields = json.dumps(head.fields(self.kind))[:-1]
        self._start = f'data: {fields}, "choices": [{{"index": '
        self._no_choices = f'data: {fields}, "choices": [], "usage": '
        # With usage asked for, every event has the member, and only the last one has something in it.
        self._end = '}], "usage": null}\n\n' if include_usage else "}]}\n\n"

    @abstractmethod
    def delta(self, choice: int, delta: Delta) -> bytes:
        """New tokens of a choice."""

    @abstractmethod
    def end(self, choice: int, finished: Finished) -> bytes:
        """The end of a choice."""

    def usage(self, usage: Usage) -> bytes:
        """The counts, after all choices have ended."""
        return f"{self._no_choices}{json.dumps(usage_body(usage))}}}\n\n".encode()


class CompletionChunks(Chunks):
    """Events of /v1/completions. echoes: what each choice's text begins with."""

    kind = "text_completion"

    def __init__(self, head: Head, echoes: Sequence[str], *, include_usage: bool, has_logprobs: bool) -> None:
        super().__init__(head, include_usage=include_usage)
        self._echoes = {i: echo for i, echo in enumerate(echoes) if echo}
        self._offsets = list(map(len, echoes)) if has_logprobs else None

    def delta(self, choice: int, delta: Delta) -> bytes:
        """New text of a choice."""
        text = delta.text
        logprobs = "null"
        if self._offsets is not None and delta.logprobs:
            logprobs = json.dumps(completion_logprobs(delta.logprobs, self._offsets[choice]))
            self._offsets[choice] += num_characters(delta.logprobs)
        elif not text:
            return b""
        return self._event(choice, text, logprobs, "null")

    def end(self, choice: int, finished: Finished) -> bytes:
        """Why a choice ended."""
        return self._event(choice, "", "null", json.dumps(finish_reason(finished)))

    def _event(self, choice: int, text: str, logprobs: str, reason: str) -> bytes:
        if self._echoes:
            text = self._echoes.pop(choice, "") + text
        return (
            f'{self._start}{choice}, "text": {json.dumps(text)}, "logprobs": {logprobs}, '
            f'"finish_reason": {reason}{self._end}'
        ).encode()


class ChatChunks(Chunks):
    """Events of /v1/chat/completions."""

    kind = "chat.completion.chunk"

    def __init__(self, head: Head, form: ChatForm, num_choices: int, *, include_usage: bool) -> None:
        super().__init__(head, include_usage=include_usage)
        self._num_top = form.num_top_logprobs
        self._silent = set(range(num_choices))

    def delta(self, choice: int, delta: Delta) -> bytes:
        """New text of a choice, with the role in the first."""
        text = self._told(choice, delta.text)
        logprobs = "null"
        if self._num_top is not None and delta.logprobs:
            logprobs = json.dumps(chat_logprobs(delta.logprobs, self._num_top))
        elif not text:
            return b""
        return self._event(choice, text, logprobs, "null")

    def end(self, choice: int, finished: Finished) -> bytes:
        """Why a choice ended."""
        return self._event(choice, "", "null", json.dumps(finish_reason(finished)))

    def _told(self, choice: int, text: str) -> str:
        """The members of an event's delta that new text makes."""
        return f'"content": {json.dumps(text)}' if text else ""

    def _event(self, choice: int, members: str, logprobs: str, reason: str) -> bytes:
        earlier = b""
        if choice in self._silent:
            # In their order, since OpenAI's client can't take it that a later choice speaks first.
            earlier = b"".join(self._event(c, "", "null", "null") for c in range(choice) if c in self._silent)
            self._silent.remove(choice)
            members = '"role": "assistant"' + (f", {members}" if members else "")
        return (
            earlier
            + (
                f'{self._start}{choice}, "delta": {{{members}}}, "logprobs": {logprobs}, '
                f'"finish_reason": {reason}{self._end}'
            ).encode()
        )


class ToolChunks(ChatChunks):
    """Events of an answer that may call functions: text and arguments as they come."""

    def __init__(self, head: Head, form: ChatForm, num_choices: int, *, include_usage: bool) -> None:
        super().__init__(head, form, num_choices, include_usage=include_usage)
        assert form.tools is not None  # noqa: S101 - else these are not the right chunks
        self._readers = [form.tools.reader() for _ in range(num_choices)]

    def end(self, choice: int, finished: Finished) -> bytes:
        """What was held back, and why the choice ended."""
        reader = self._readers[choice]
        members = _members(reader.read("", is_end=True))
        reason = finish_reason(finished, has_called=reader.has_called)
        return self._event(choice, members, "null", json.dumps(reason))

    def _told(self, choice: int, text: str) -> str:
        return _members(self._readers[choice].read(text))


def _members(part: AnswerPart) -> str:
    members = [f'"content": {json.dumps(part.text)}'] if part.text else []
    if part.calls:
        members.append(f'"tool_calls": {json.dumps([_call_delta(each) for each in part.calls])}')
    return ", ".join(members)


def _call_delta(part: CallPart) -> dict[str, Any]:
    if part.name is not None:
        return {"index": part.index, **call_body(part.name, part.arguments)}
    return {"index": part.index, "function": {"arguments": part.arguments}}


async def events_of(
    generation: Generation, make_chunks: Callable[[str], Chunks], *, include_usage: bool
) -> AsyncGenerator[bytes]:
    """The events of an answer in order, up to and with [DONE]. Raises TidegateError where it breaks off.

    make_chunks: from the model's name, which is known when something has come.
    """
    running = set(range(generation.num_choices))
    chunks = None
    async for stream, delta in generation.deltas():
        if chunks is None:
            chunks = make_chunks(generation.model)
        choices = generation.choices_of(stream)
        if delta is not None:
            event = chunks.delta(choices[delta.index], delta)
            if event:
                yield event
            if len(choices) == 1:  # it ends with its stream
                continue
        for choice in choices:
            if choice in running and (finished := generation.finished(choice)) is not None:
                running.remove(choice)
                yield chunks.end(choice, finished)
    if include_usage and chunks is not None:
        yield chunks.usage(generation.usage())
    yield DONE
