"""From passages to figures: percentiles, throughput, goodput, errors.

Owns that arithmetic and the names of latencies.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate_client.bench.passage import Passage

LATENCIES = ("ttft", "itl", "tpot", "e2e")
"""Time to first token, between tokens, per output token after the first, and from end to end."""


_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Returns a percentile of sorted values, interpolated between neighbours. Of nothing: 0."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles, in milliseconds. All zero where there is nothing to measure."""

    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Summarizes times."""
        values_ms = sorted(value * 1000 for value in seconds)
        mean_ms = sum(values_ms) / len(values_ms) if values_ms else 0.0
        return cls(mean_ms, *(percentile(values_ms, percent) for percent in (50, 90, 99)))


@dataclass(frozen=True, slots=True)
class Objective:
    """What a good request keeps: limits by latency, in milliseconds. For itl, 99 % of its gaps."""

    limits_ms: Mapping[str, float]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Objective:
        """Reads "ttft=500". Raises ValueError."""
        limits_ms = {}
        for text in texts:
            name, _, limit = text.partition("=")
            if name not in LATENCIES or not _NUMBER.fullmatch(limit):
                raise ValueError(f"{text!r} is not NAME=MILLISECONDS with a NAME of {', '.join(LATENCIES)}")
            limits_ms[name] = float(limit)
        return cls(limits_ms)

    def is_met(self, passage: Passage) -> bool:
        """Whether a request was answered within every limit."""
        if passage.error:
            return False
        found_s = {
            "ttft": passage.time_to_first_token_s(),
            "itl": percentile(sorted(passage.gaps_s()), 99),
            "tpot": passage.time_per_output_token_s() or 0.0,
            "e2e": passage.end_to_end_s(),
        }
        return all(found_s[name] * 1000 <= limit_ms for name, limit_ms in self.limits_ms.items())


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run showed. Rates are over the time from its start to its last answer's end."""

    requests: int
    errors: Mapping[str, int]
    """Requests that failed, by code."""
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    """Of answered ones."""
    output_tokens_per_s: float
    ttft: Spread
    itl: Spread
    tpot: Spread
    e2e: Spread
    goodput_per_s: float | None
    """Requests a second that kept the objective. None: there was none."""
    good_share: float | None
    """Of all requests, failed ones too."""


def latencies_s(passages: Sequence[Passage]) -> dict[str, list[float]]:
    """Returns the times of answered requests by name of latency."""
    answered = [passage for passage in passages if not passage.error]
    per_token = [passage.time_per_output_token_s() for passage in answered]
    return {
        "ttft": [passage.time_to_first_token_s() for passage in answered],
        "itl": [gap for passage in answered for gap in passage.gaps_s()],
        "tpot": [value for value in per_token if value is not None],
        "e2e": [passage.end_to_end_s() for passage in answered],
    }


def summarize(passages: Sequence[Passage], started_s: float, objective: Objective | None) -> Figures:
    """Computes a run's figures. There must be at least one passage."""
    answered = [passage for passage in passages if not passage.error]
    duration_s = max(passage.ended_s for passage in passages) - started_s
    output_tokens = sum(passage.output_tokens for passage in answered)
    good = None if objective is None else sum(map(objective.is_met, passages))
    return Figures(
        requests=len(passages),
        errors=dict(Counter(passage.error for passage in passages if passage.error)),
        duration_s=duration_s,
        prompt_tokens=sum(passage.prompt_tokens for passage in answered),
        cached_tokens=sum(passage.cached_tokens for passage in answered),
        output_tokens=output_tokens,
        requests_per_s=len(answered) / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        **{name: Spread.of(values) for name, values in latencies_s(passages).items()},
        goodput_per_s=None if good is None else good / duration_s,
        good_share=None if good is None else good / len(passages),
    )
