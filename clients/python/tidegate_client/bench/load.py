"""When sessions start: a closed loop of so many streams, or an open one at a rate.

Owns arrival times. Reads no clock.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Each stream starts its next session when its last one has ended."""

    streams: int

    def __str__(self) -> str:
        return f"{self.streams} stream" + "s" * (self.streams > 1)


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Sessions start at a rate, whether earlier ones have ended or not."""

    rate_per_s: float
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps: 1 is a Poisson process, below 1 comes in bursts."""

    def arrivals_s(self, rng: random.Random, count: int) -> list[float]:
        """Returns when each session starts, from the run's start."""
        scale = 1 / (self.rate_per_s * self.burstiness)
        return list(itertools.accumulate(rng.gammavariate(self.burstiness, scale) for _ in range(count)))

    def __str__(self) -> str:
        bursts = "" if self.burstiness == 1 else f", burstiness {self.burstiness:g}"
        return f"{self.rate_per_s:g}/s{bursts}"


Load: TypeAlias = ClosedLoop | OpenLoop
