"""Owns the step-time model of one worker: how long its steps take, learnt from those it has done.

    milliseconds = base + per_token * tokens + per_pair * pairs

`tokens` are those that the step computes. `pairs` are the pairs of a computed token and one that it attends
to: a decode has as many as its context is long, a chunk of a prompt about chunk * context. So one number says
what attention costs, where it grows with what is cached and where it grows with the square of a chunk.

Numbers only, in plain floats, so that every machine that replays a recording gets the same ones.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_KEEP = 63 / 64
"""Weight of what was known of steps of one size, at each new one: the last 64 or so count."""
_STIFFNESS = 1e-3
"""Pull towards the last coefficients, against one step's relative error. It decides only what the steps do
not tell, such as the price of a token where all steps have equally many."""
_SWEEPS = 24
"""Passes over the three coefficients at each fit. They start from the last fit, so few are enough."""
_EARLY_STEPS = 64
"""So many steps are fitted one by one, those after them _STEPS_PER_FIT at a time."""
_STEPS_PER_FIT = 8
_MOST_DEVIATIONS = 4.0
"""A step that is further from the prediction, in mean deviations, counts as just that far."""
_TRUSTED_STEPS = 8
"""Steps of one size before one of them can be called too far off."""
_UNLIMITED = 1 << 40


class StepCost(NamedTuple):
    """Coefficients of the model, none negative."""

    base_ms: float
    token_ms: float
    pair_ms: float


_DEFAULT = StepCost(6.0, 0.025, 4e-5)
"""Before anything was measured: about a model of 8 billion parameters on one accelerator. Only proportions
matter then, since a model's workers are mostly alike."""


def count_pairs(num_computed: int, num_tokens: int) -> int:
    """Pairs of a row that computes `num_tokens` after `num_computed`."""
    return num_tokens * num_computed + num_tokens * (num_tokens + 1) // 2


class StepTime:
    """The model of one worker. Each step costs it a constant time.

    Steps are kept as sums for each power of two of their tokens, so that an hour of decodes does not wash out
    what is known of prefills. All errors count relative to the time of such a step.
    """

    def __init__(self) -> None:
        self.cost = _DEFAULT
        self.deviation = 0.25
        """Mean of |measured / predicted - 1| over the last steps."""
        self.num_steps = 0
        self._sizes: dict[int, _Sums] = {}  # by bit length of the number of tokens

    def note(self, num_tokens: int, num_pairs: int, measured_ms: float) -> None:
        """A step of so many tokens and pairs took so long. A time that is not above 0 tells nothing."""
        if not (math.isfinite(measured_ms) and measured_ms > 0) or num_tokens < 1:
            return
        sums = self._sizes.setdefault(num_tokens.bit_length(), _Sums())
        predicted_ms = self.predict_ms(num_tokens, num_pairs)
        if predicted_ms > 0 and sums.weight >= _TRUSTED_STEPS * _KEEP**_TRUSTED_STEPS:
            limit = _MOST_DEVIATIONS * self.deviation + 0.01
            error = min(limit, max(-limit, measured_ms / predicted_ms - 1))
            measured_ms = max(0.1, 1 + error) * predicted_ms
            self.deviation += (abs(error) - self.deviation) / 32
        sums.add(float(num_tokens), float(num_pairs), measured_ms)
        self.num_steps += 1
        if self.num_steps <= _EARLY_STEPS or self.num_steps % _STEPS_PER_FIT == 0:
            self.cost = _fit(self._sizes, self.cost)

    def predict_ms(self, num_tokens: int, num_pairs: int) -> float:
        """Time of a step."""
        base_ms, token_ms, pair_ms = self.cost
        return base_ms + token_ms * num_tokens + pair_ms * num_pairs

    def prefill_ms(self, num_tokens: int, num_computed: int = 0) -> float:
        """What `num_tokens` of a prompt after `num_computed` add to the steps that compute them."""
        _, token_ms, pair_ms = self.cost
        return token_ms * num_tokens + pair_ms * count_pairs(num_computed, num_tokens)

    def most_tokens(self, limit_ms: float, num_computed: int = 0) -> int:
        """The most tokens of a prompt, after `num_computed`, for which prefill_ms() is within the limit."""
        if limit_ms <= 0:
            return 0
        _, token_ms, pair_ms = self.cost
        linear = token_ms + pair_ms * (num_computed + 0.5)
        denominator = linear + math.sqrt(linear * linear + 2 * pair_ms * limit_ms)
        return min(_UNLIMITED, int(2 * limit_ms / denominator)) if denominator > 0 else _UNLIMITED


class _Sums:
    """Decaying sums over steps of about one size: what least squares need, as (1, tokens, pairs) products."""

    __slots__ = ("moments", "weight")

    def __init__(self) -> None:
        self.weight = 0.0
        self.moments = [0.0] * 8  # t, p, tt, tp, pp, and with the time: y, ty, py

    def add(self, tokens: float, pairs: float, ms: float) -> None:
        self.weight = self.weight * _KEEP + 1
        products = (
            tokens,
            pairs,
            tokens * tokens,
            tokens * pairs,
            pairs * pairs,
            ms,
            tokens * ms,
            pairs * ms,
        )
        moments = self.moments
        for index, product in enumerate(products):
            moments[index] = moments[index] * _KEEP + product


def _fit(sizes: dict[int, _Sums], last: StepCost) -> StepCost:
    """Least squares of relative errors over non-negative coefficients, by descent along one at a time."""
    n = t = p = tt = tp = pp = y = ty = py = 0.0
    num_steps = 0.0
    for sums in sizes.values():
        mean_ms = sums.moments[5] / sums.weight
        scale = 1 / (mean_ms * mean_ms)
        num_steps += sums.weight
        n += scale * sums.weight
        st, sp, stt, stp, spp, sy, sty, spy = sums.moments
        t, p, tt, tp, pp = (
            t + scale * st,
            p + scale * sp,
            tt + scale * stt,
            tp + scale * stp,
            pp + scale * spp,
        )
        y, ty, py = y + scale * sy, ty + scale * sty, py + scale * spy
    pulls = [
        _STIFFNESS * num_steps / max(now, 0.1 * usual) ** 2 for now, usual in zip(last, _DEFAULT, strict=True)
    ]
    base, token, pair = last
    for _ in range(_SWEEPS):
        base = max(0.0, (y + pulls[0] * last[0] - t * token - p * pair) / (n + pulls[0]))
        token = max(0.0, (ty + pulls[1] * last[1] - t * base - tp * pair) / (tt + pulls[1]))
        pair = max(0.0, (py + pulls[2] * last[2] - p * base - tp * token) / (pp + pulls[2]))
    return StepCost(base, token, pair)
