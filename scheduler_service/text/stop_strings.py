"""Owns the search for stop strings in text that arrives in pieces.

The string that is complete first wins; of several that end with the same character, the longest. So the
result does not depend on how the text was cut into pieces. Nothing of a stop string is ever let through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request as an automaton (Aho and Corasick, 1975), shared by its candidates."""

    __slots__ = ("depths", "failures", "first_characters", "hits", "transitions")

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` must not hold an empty string. Takes time in proportion to their length together."""
        self.transitions: list[dict[str, int]] = [{}]  # by state, 0 is the start
        self.hits: list[str | None] = [None]  # by state: the longest stop string that ends here
        self.depths = [0]  # by state: number of last characters that may be the start of a stop string
        for stop in stops:
            self._add(stop)
        self.failures = [0] * len(self.depths)
        self._link()
        self.first_characters = frozenset(self.transitions[0])

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.transitions[state].get(character)
            if following is None:
                following = len(self.depths)
                self.transitions[state][character] = following
                self.transitions.append({})
                self.hits.append(None)
                self.depths.append(self.depths[state] + 1)
            state = following
        self.hits[state] = stop

    def _link(self) -> None:
        """Points each state to that of its longest proper suffix, shallow states first."""
        queue = deque(self.transitions[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self.transitions[state].items():
                failure = self.step(self.failures[state], character)
                self.failures[following] = failure
                if self.hits[following] is None:
                    self.hits[following] = self.hits[failure]
                queue.append(following)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while (following := self.transitions[state].get(character)) is None:
            if state == 0:
                return 0
            state = self.failures[state]
        return following


class StopMatcher:
    """Watches the text of one candidate."""

    __slots__ = ("_held", "_state", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""  # what may be the start of a stop string

    def feed(self, text: str) -> tuple[str, str | None]:
        """Takes further text. Returns what may go out, and the stop string that was found, if any.

        After a find, the text returned ends where the stop string starts; nothing may be fed any more.
        """
        stops = self._stops
        state = self._state
        if state == 0 and stops.first_characters.isdisjoint(text):
            return text, None
        known = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            state = stops.step(state, character)
            stop = stops.hits[state]
            if stop is not None:
                self._held = ""
                return known[: end - len(stop)], stop
        self._state = state
        cut = len(known) - stops.depths[state]
        self._held = known[cut:]
        return known[:cut], None

    def would_find(self, text: str) -> bool:
        """Whether a stop string would be found in `text`, which is not taken."""
        state = self._state
        for character in text:
            state = self._stops.step(state, character)
            if self._stops.hits[state] is not None:
                return True
        return False

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
