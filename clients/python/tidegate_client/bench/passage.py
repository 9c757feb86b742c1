"""One request as the client saw it: when its tokens came, how many, and how it ended.

Owns that arithmetic. Times are seconds on one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

SHORT = "SHORT"
"""Error of an answer without the tokens that were asked for."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One request."""

    started_s: float
    """When it was due to be sent."""
    ended_s: float
    arrivals_s: tuple[float, ...] = ()
    """For each message that carried tokens."""
    counts: tuple[int, ...] = ()
    """Tokens in each of them."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    """Code of the failure, such as "RESOURCE_EXHAUSTED" or "HTTP 429". Empty: it was answered."""
    message: str = ""
    """What was said of the failure."""

    @classmethod
    def failed(cls, started_s: float, ended_s: float, error: str, message: str) -> Passage:
        """Returns that of a request that was not answered, or not as asked."""
        return cls(started_s, ended_s, error=error, message=message)

    @classmethod
    def short(cls, started_s: float, ended_s: float, got: int, asked: int) -> Passage:
        """Returns that of a request whose answer must have a number of tokens and has another."""
        message = f"{got} tokens came where {asked} were asked for"
        return cls.failed(started_s, ended_s, SHORT, message)

    def time_to_first_token_s(self) -> float:
        """Returns the time from when it was due to its first token."""
        return self.arrivals_s[0] - self.started_s

    def end_to_end_s(self) -> float:
        """Returns the time from when it was due to its end."""
        return self.ended_s - self.started_s

    def gaps_s(self) -> list[float]:
        """Returns the time before each token after the first message; tokens of a message share its gap."""
        gaps: list[float] = []
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], self.counts[1:], strict=False)
        for before, after, count in pairs:
            gaps += [(after - before) / count] * count
        return gaps

    def time_per_output_token_s(self) -> float | None:
        """Returns the mean time of the tokens after the first. None: there was only one."""
        later_tokens = self.output_tokens - 1
        if later_tokens < 1:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / later_tokens
