"""Owns what finished requests tell of those to come: seconds per token, and how long outputs are."""

from __future__ import annotations

import math
from collections import OrderedDict

from scheduler_service.core.request import Phase, Request

_KEEP = 31 / 32
"""Weight of what was known, at each new request: the last 32 or so count."""
_FRESH_S = 10.0
"""Older rates are not used: where every request is refused, none finishes that could correct them."""
_MOST_TENANTS = 1024
_UNKNOWN_OUTPUTS = 128.0
"""Tokens that a tenant's outputs are taken to have before one of them has ended."""


class Estimates:
    """Averages over requests that ended by themselves. Times are on the clock of `now`."""

    def __init__(self) -> None:
        self._prefill = _Ratio()
        self._decode = _Ratio()
        self._noted_at = -math.inf
        self._lengths: OrderedDict[str, _Length] = OrderedDict()  # by tenant, the longest unheard of first

    def note(self, request: Request, now: float) -> None:
        """A candidate has ended by a stop or by length."""
        num_outputs = len(request.output_ids)
        self._prefill.add(request.phase_s[Phase.PREFILL], request.num_prompt - request.cached_tokens)
        self._decode.add(request.phase_s[Phase.DECODE], num_outputs - 1)
        self._noted_at = now
        tenant = request.spec.tenant
        length = self._lengths.setdefault(tenant, _Length())
        length.add(num_outputs)
        self._lengths.move_to_end(tenant)
        if len(self._lengths) > _MOST_TENANTS:
            self._lengths.popitem(last=False)

    def least_s(self, tenant: str, num_prefill: int, max_tokens: int, now: float) -> float | None:
        """Seconds from admission to end with outputs of the tenant's usual length. None: nothing was measured
        lately."""
        if now - self._noted_at > _FRESH_S:
            return None
        length = self._lengths.get(tenant)
        num_outputs = 1.0 if length is None else min(float(max_tokens), length.mean)
        return self._prefill.value * num_prefill + self._decode.value * max(0.0, num_outputs - 1)

    def mean_outputs(self, tenant: str, max_tokens: int) -> float:
        """Output tokens of the tenant's usual length, at most `max_tokens`."""
        length = self._lengths.get(tenant)
        return min(float(max_tokens), _UNKNOWN_OUTPUTS if length is None else length.mean)

    def num_outputs(self, tenant: str, max_tokens: int) -> int:
        """Output tokens that few of the tenant's requests exceed: the mean and two mean deviations, at most
        `max_tokens`. That itself where the tenant has no history."""
        length = self._lengths.get(tenant)
        if length is None:
            return max_tokens
        return max(1, min(max_tokens, math.ceil(length.mean + 2 * length.deviation)))


class _Ratio:
    """Seconds per token, of decaying sums, so that long requests count for more."""

    __slots__ = ("_seconds", "_tokens")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        if tokens > 0:
            self._seconds = self._seconds * _KEEP + seconds
            self._tokens = self._tokens * _KEEP + tokens

    @property
    def value(self) -> float:
        """0 where nothing was measured."""
        return self._seconds / self._tokens if self._tokens else 0.0


class _Length:
    """Mean and mean deviation, the plain ones of the first values and decaying ones after that."""

    __slots__ = ("_count", "deviation", "mean")

    def __init__(self) -> None:
        self._count = 0
        self.mean = 0.0
        self.deviation = 0.0

    def add(self, value: int) -> None:
        self._count += 1
        share = max(1 / self._count, 1 - _KEEP)
        self.mean += share * (value - self.mean)
        self.deviation += share * (abs(value - self.mean) - self.deviation)
