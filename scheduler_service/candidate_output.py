"""Owns the output of one candidate that its client has not taken yet: tokens as columns, text made late.

With stop strings each token becomes text at once; without them text is made when the client takes it, so that
a token costs next to nothing while the client is slow. Nothing is ever dropped.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from scheduler_service.core import events as core
from scheduler_service.core.events import FinishReason, Timings, Usage
from scheduler_service.core.step import TokenLogprobs
from scheduler_service.text.output_text import OutputText

# Keeps messages far below what clients accept, however much has piled up.
MAX_DELTA_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one candidate and new text; either may be empty."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]  # one for each token, if they were asked for


@dataclass(frozen=True, slots=True)
class Finished:
    """One candidate has ended by STOP, LENGTH or CANCELLED; other ends are raised as ServiceError."""

    index: int
    reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    usage: Usage
    timings: Timings


class LogprobColumns:
    """Log-probabilities that wait: about 8 bytes for each number, where objects would take a hundred."""

    __slots__ = ("_counts", "_ids", "_sampled", "_values")

    def __init__(self) -> None:
        self._sampled = array("f")
        self._counts = array("B")  # entries of _ids and _values for each token
        self._ids = array("I")
        self._values = array("f")

    def append(self, logprobs: TokenLogprobs) -> None:
        """Adds those of one more token."""
        self._sampled.append(logprobs.sampled)
        self._counts.append(len(logprobs.top))
        for token_id, value in logprobs.top:
            self._ids.append(token_id)
            self._values.append(value)

    def take(self, count: int) -> list[TokenLogprobs]:
        """Removes and returns those of the first `count` tokens."""
        taken: list[TokenLogprobs] = []
        if not self._sampled:
            return taken
        start = 0
        for sampled, num_top in zip(self._sampled[:count], self._counts[:count], strict=True):
            end = start + num_top
            top = zip(self._ids[start:end], self._values[start:end], strict=True)
            taken.append(TokenLogprobs(sampled, tuple(top)))
            start = end
        del self._sampled[:count], self._counts[:count], self._ids[:start], self._values[:start]
        return taken

    def encode(self) -> list[bytes]:
        """The columns as bytes, for another process on this machine."""
        return [column.tobytes() for column in (self._sampled, self._counts, self._ids, self._values)]

    @classmethod
    def decode(cls, *columns: memoryview) -> LogprobColumns:
        """The columns from their bytes."""
        made = cls()
        targets: tuple[array[Any], ...] = (made._sampled, made._counts, made._ids, made._values)
        for target, column in zip(targets, columns, strict=True):
            target.frombytes(column)
        return made


class CandidateOutput:
    """What one candidate has to send. `index` is its place among the n candidates."""

    __slots__ = (
        "_finished",
        "_finished_taken",
        "_flushed",
        "_logprobs",
        "_output",
        "_sends_token_ids",
        "_texts",
        "_token_ids",
        "index",
        "open",
        "queued",
    )

    def __init__(self, index: int, output: OutputText | None, *, sends_token_ids: bool) -> None:
        """`output` is None where no text is asked for."""
        self.index = index
        self.open = True  # takes tokens
        self.queued = False  # the stream's own mark: it is in the queue of those with something to take
        self._output = output
        self._sends_token_ids = sends_token_ids
        self._token_ids = array("I")
        self._texts: list[str] | None = [] if output is not None and output.has_stops else None
        self._logprobs = LogprobColumns()
        self._flushed = False
        self._finished: core.Finished | None = None
        self._finished_taken = False

    def add(self, token_id: int, logprobs: TokenLogprobs | None) -> int | None:
        """Takes a token. If it completed a stop string, the output ends: returns the number of tokens."""
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        if self._texts is None or self._output is None:
            return None
        self._texts.append(self._output.feed((token_id,)))
        if self._output.stop_string is None:
            return None
        self.open = False
        return self._output.num_tokens

    def finish(self, event: core.Finished) -> None:
        """Takes the candidate's end. Only the first counts."""
        self.open = False
        if self._finished is None:
            self._finished = event

    @property
    def has_more(self) -> bool:
        """Whether `take` may have something."""
        return bool(self._token_ids) or (self._finished is not None and not self._finished_taken)

    def take(self) -> Delta | Finished | None:
        """The next thing to send, with all tokens that wait, up to MAX_DELTA_TOKENS."""
        while self._token_ids:
            delta = self._take_delta()
            if delta.text or delta.logprobs or (self._sends_token_ids and delta.token_ids):
                return delta
        if self._finished is None or self._finished_taken:
            return None
        rest = self._flush()
        if rest:
            return Delta(self.index, rest, (), ())
        self._finished_taken = True
        return self._end(self._finished)

    def _take_delta(self) -> Delta:
        token_ids = self._token_ids[:MAX_DELTA_TOKENS].tolist()
        count = len(token_ids)
        del self._token_ids[:count]
        text = ""
        if self._texts is not None:
            text = "".join(self._texts[:count])
            del self._texts[:count]
        elif self._output is not None:
            text = self._output.feed(token_ids)
        if self._finished is not None and not self._token_ids:
            text += self._flush()
        return Delta(self.index, text, token_ids, self._logprobs.take(count))

    def _flush(self) -> str:
        if self._flushed or self._output is None:
            return ""
        self._flushed = True
        return self._output.finish()

    def _end(self, event: core.Finished) -> Finished:
        stop_string = None if self._output is None else self._output.stop_string
        if self._output is None or stop_string is None:
            return Finished(self.index, event.reason, None, event.stop_token_id, event.usage, event.timings)
        # Tokens that were on their way when the stop string was found were not delivered.
        usage = replace(event.usage, output_tokens=min(event.usage.output_tokens, self._output.num_tokens))
        return Finished(self.index, FinishReason.STOP, stop_string, None, usage, event.timings)
