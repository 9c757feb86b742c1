"""Owns how long tokens took over the last hour: quantiles and counts by interval. No gRPC, decides nothing.

It is told of each step once, whatever is in it. Times are counted in buckets that grow by a twentieth, so a
quantile is off by at most that much.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from scheduler_service.step_log import Step

INTERVAL_S = 10.0
KEPT_INTERVALS = 360
RECENT_INTERVALS = 6
"""So many intervals, and the one that is not over, are what is called recent."""

_GROWTH = math.log(1.05)
_LEAST_S = 1e-4
_NUM_BUCKETS = 300  # the last one begins at 0.1 ms * 1.05 ** 299, which is 215 s
QUANTILES = (0.5, 0.95, 0.99)


class Durations:
    """Durations, counted."""

    __slots__ = ("counts", "num")

    def __init__(self) -> None:
        self.counts = np.zeros(_NUM_BUCKETS, np.int64)
        self.num = 0

    def add(self, duration_s: float, num: int = 1) -> None:
        """Counts `num` durations of that length."""
        bucket = int(math.log(max(duration_s, _LEAST_S) / _LEAST_S) / _GROWTH)
        self.counts[min(bucket, _NUM_BUCKETS - 1)] += num
        self.num += num

    def merge(self, other: Durations) -> None:
        """Counts what the other one has, too."""
        self.counts += other.counts
        self.num += other.num

    def quantiles_ms(self) -> tuple[float, float, float]:
        """The median, and what 95 % and 99 % do not exceed; zeros where nothing was counted."""
        if not self.num:
            return 0.0, 0.0, 0.0
        reached = np.cumsum(self.counts)
        at = [int(np.searchsorted(reached, math.ceil(share * self.num))) for share in QUANTILES]
        p50, p95, p99 = (_LEAST_S * 1e3 * math.exp((bucket + 0.5) * _GROWTH) for bucket in at)
        return p50, p95, p99


@dataclass(slots=True)
class Interval:
    """What happened in one interval."""

    number: int  # INTERVAL_S of them since the clock's zero
    first_token: Durations = field(default_factory=Durations)  # from arrival
    between_tokens: Durations = field(default_factory=Durations)
    prefill_tokens: int = 0
    output_tokens: int = 0

    @property
    def started(self) -> float:
        """When it began, on the engine's clock."""
        return self.number * INTERVAL_S


class LatencyLog:
    """A ring of intervals. Those in which nothing happened are left out."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._intervals: deque[Interval] = deque(maxlen=KEPT_INTERVALS)
        self._answered: dict[str, float] = {}  # when each worker's last result came

    def step(
        self,
        worker_id: str,
        step: Step,
        output_tokens: int,
        first_tokens_s: Iterable[float],
    ) -> None:
        """A result came: each request that was generating has one more token than after the result before.
        `output_tokens`: those that it gave, first tokens among them."""
        interval = self._current(step.ended)
        last = self._answered.get(worker_id)
        self._answered[worker_id] = step.ended
        if last is not None and step.decode_tokens:
            interval.between_tokens.add(step.ended - last, step.decode_tokens)
        interval.prefill_tokens += step.prefill_tokens
        interval.output_tokens += output_tokens
        for waited_s in first_tokens_s:
            interval.first_token.add(waited_s)

    def forget(self, worker_id: str) -> None:
        """A worker is gone: what follows its last result is no time between tokens."""
        self._answered.pop(worker_id, None)

    def intervals(self, now: float) -> list[Interval]:
        """Those of the last hour, the oldest first; the last one may not be over."""
        oldest = int(now / INTERVAL_S) - KEPT_INTERVALS
        return [interval for interval in self._intervals if interval.number > oldest]

    def recent(self, now: float) -> tuple[Interval, float]:
        """What happened lately, as one interval, and how many seconds of it this log has seen."""
        number = int(now / INTERVAL_S)
        total = Interval(number - RECENT_INTERVALS)
        for interval in reversed(self._intervals):
            if interval.number < total.number:
                break
            total.first_token.merge(interval.first_token)
            total.between_tokens.merge(interval.between_tokens)
            total.prefill_tokens += interval.prefill_tokens
            total.output_tokens += interval.output_tokens
        return total, max(now - max(total.started, self._began), 1e-3)

    def _current(self, now: float) -> Interval:
        number = int(now / INTERVAL_S)
        if not self._intervals or self._intervals[-1].number != number:
            self._intervals.append(Interval(number))
        return self._intervals[-1]
