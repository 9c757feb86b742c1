"""Owns one candidate's text: its detokenizer and its stop strings together, and the count of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_service.text.detokenizer import Detokenizer
from scheduler_service.text.stop_strings import StopMatcher, StopStrings


class OutputText:
    """Turns tokens into the text that a client may see. At most one stop string is ever found."""

    __slots__ = ("_detokenizer", "_matcher", "num_tokens", "stop_string")

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings | None) -> None:
        self._detokenizer = detokenizer
        self._matcher = None if stops is None else StopMatcher(stops)
        self.num_tokens = 0  # fed; those that completed `stop_string`, if it is set
        self.stop_string: str | None = None

    @property
    def has_stops(self) -> bool:
        """Whether it looks for stop strings."""
        return self._matcher is not None

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text to send for further tokens.

        With stop strings, feed tokens one by one to learn which of them completed one.
        """
        self.num_tokens += len(token_ids)
        text = self._detokenizer.feed(token_ids)
        if self._matcher is None:
            return text
        pending = self._detokenizer.pending()
        text, self.stop_string = self._matcher.feed(text)
        if self.stop_string is None and pending and self._matcher.would_find(pending):
            # The output ends here, so what is pending is certain after all.
            rest, self.stop_string = self._matcher.feed(pending)
            text += rest
        return text

    def finish(self) -> str:
        """The rest of the text, at the end of the output. It may find a stop string, too."""
        if self.stop_string is not None:
            return ""
        text = self._detokenizer.flush()
        if self._matcher is None:
            return text
        text, self.stop_string = self._matcher.feed(text)
        return text if self.stop_string is not None else text + self._matcher.flush()
