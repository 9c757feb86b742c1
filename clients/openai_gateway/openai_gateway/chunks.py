"""The events of a stream, as bytes.

Owns their JSON. One is made for each delta of each stream, so what is the same in all of them is made once.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence

from openai_gateway.answers import ChatForm, Head, finish_reason, usage_body
from openai_gateway.generation import Generation, Usage
from openai_gateway.logprobs import chat_logprobs, completion_logprobs, num_characters
from openai_gateway.tools import Tools, call_body
from tidegate_client import Delta, Finished

DONE = b"data: [DONE]\n\n"


class Chunks(ABC):
    """Makes the events of one answer. Each method returns one event, or b"" where there is nothing to say."""

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
        if choice in self._silent:
            self._silent.remove(choice)
            members = '"role": "assistant"' + (f", {members}" if members else "")
        return (
            f'{self._start}{choice}, "delta": {{{members}}}, "logprobs": {logprobs}, '
            f'"finish_reason": {reason}{self._end}'
        ).encode()


class ToolChunks(ChatChunks):
    """Events of an answer that calls a function.

    The arguments of a named function are streamed; where the model chooses, the call comes whole, at its end.
    """

    def __init__(self, head: Head, form: ChatForm, num_choices: int, *, include_usage: bool) -> None:
        super().__init__(head, form, num_choices, include_usage=include_usage)
        assert form.tools is not None  # noqa: S101 - else these are not the right chunks
        self._tools: Tools = form.tools
        self._unread: dict[int, list[str]] = {choice: [] for choice in range(num_choices)}
        self._begun: set[int] = set()  # choices whose call's name has been sent

    def end(self, choice: int, finished: Finished) -> bytes:
        """The call, if it was not streamed, and why the choice ended."""
        text = "".join(self._unread[choice])
        call = self._tools.read(text)
        members = ""
        if self._tools.is_named:
            call = call or ("", "")
        elif call is not None:
            members = f'"tool_calls": [{json.dumps({"index": 0, **call_body(*call)})}]'
        elif text:  # it was cut short, and there is no telling of what
            members = f'"content": {json.dumps(text)}'
        reason = finish_reason(finished, self._tools if call else None)
        return self._event(choice, members, "null", json.dumps(reason))

    def _told(self, choice: int, text: str) -> str:
        if not self._tools.is_named:
            self._unread[choice].append(text)
            return ""
        if not text:
            return ""
        if choice not in self._begun:
            self._begun.add(choice)
            call = call_body(self._tools.functions[0].name, text)
            return f'"tool_calls": [{json.dumps({"index": 0, **call})}]'
        return f'"tool_calls": [{{"index": 0, "function": {{"arguments": {json.dumps(text)}}}}}]'


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
