"""Owns the step-time model of one worker: how long its steps take, learnt from those it has done.

    milliseconds = base + a * tokens + b * context + c * pairs

`tokens` are those that the step computes, `context` the tokens with KV that its rows end with: attention
reads them once, which is all that a decode does with them. `pairs` is what a chunk of a prompt does beyond
that: the further pairs of one of its tokens and one that this attends to, about chunk * context.

Plain floats only, so that every machine that replays a recording gets the same numbers.
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
"""Passes over the coefficients at each fit. They start from the last fit, so few are enough."""
_EARLY_STEPS = 64
"""So many steps are fitted one by one, those after them _STEPS_PER_FIT at a time."""
_STEPS_PER_FIT = 32
_MOST_DEVIATIONS = 4.0
"""A step that is further from the prediction, in mean deviations, counts as just that far."""
_TRUSTED_WEIGHT = 7.5
"""Of steps of one size, before one of them can be called too far off: eight of them."""
_HIGH = 0.95
"""Share of the steps that take no longer than `high` times their prediction."""
_UNLIMITED = 1 << 40


class StepSize(NamedTuple):
    """What a step's time depends on. Sizes add up."""

    tokens: int
    context: int
    pairs: int

    def plus(self, other: StepSize) -> StepSize:
        """Both in one step."""
        return StepSize(self.tokens + other.tokens, self.context + other.context, self.pairs + other.pairs)


class StepCost(NamedTuple):
    """Coefficients of the model, none negative."""

    base_ms: float
    token_ms: float
    context_ms: float
    pair_ms: float


_DEFAULT = StepCost(6.0, 0.025, 4e-5, 1e-6)
"""Before anything was measured: about a model of 8 billion parameters in bf16 on one accelerator. It is used
to compare a model's workers, which are mostly alike, so proportions are what matters."""


def row_size(num_computed: int, num_tokens: int) -> StepSize:
    """Of a row that computes `num_tokens` after `num_computed`. Without any tokens it is no row."""
    end = num_computed + num_tokens
    if not num_tokens:
        return StepSize(0, 0, 0)
    return StepSize(num_tokens, end, (num_tokens - 1) * (2 * end - num_tokens) // 2)


class StepTime:
    """The model of one worker. Each step costs it a constant time.

    Steps are kept as sums for each power of two of their tokens, so that an hour of decodes does not wash out
    what is known of prefills. All errors count relative to the time of such a step.
    """

    def __init__(self) -> None:
        self.cost = _DEFAULT
        self.deviation = 0.25
        """Mean of |measured / predicted - 1| over the last steps."""
        self.high = 1.0
        """Nearly all steps take at most this many times their prediction."""
        self.num_steps = 0
        self._sizes: dict[int, _Sums] = {}  # by bit length of the number of tokens

    def note(self, size: StepSize, measured_ms: float) -> None:
        """A step of this size took so long. A time that is not above 0 tells nothing."""
        if not (math.isfinite(measured_ms) and measured_ms > 0) or size.tokens < 1:
            return
        sums = self._sizes.setdefault(size.tokens.bit_length(), _Sums())
        predicted_ms = self.predict_ms(size)
        if predicted_ms > 0 and sums.weight >= _TRUSTED_WEIGHT:
            measured_ms = predicted_ms * max(0.1, 1 + self._limited(measured_ms / predicted_ms - 1))
        sums.add(size, measured_ms)
        self.num_steps += 1
        if self.num_steps <= _EARLY_STEPS or self.num_steps % _STEPS_PER_FIT == 0:
            self.cost = _fit(self._sizes, self.cost)

    def _limited(self, error: float) -> float:
        """A relative error, no larger than can be believed."""
        # A running quantile: it rises by 19 where it falls by 1, so it rests where 1 in 20 steps is above it.
        step = 0.2 * self.deviation
        self.high = max(1.0, self.high + step * (_HIGH if 1 + error > self.high else _HIGH - 1))
        limit = _MOST_DEVIATIONS * self.deviation + 0.01
        error = min(limit, max(-limit, error))
        self.deviation += (abs(error) - self.deviation) / 32
        return error

    def predict_ms(self, size: StepSize) -> float:
        """Time of a step."""
        return self.cost.base_ms + self.added_ms(size)

    @property
    def least_ms(self) -> float | None:
        """Time of the smallest step, in which one candidate decodes. None: too little was measured."""
        return self.predict_ms(row_size(0, 1)) if self.num_steps >= _EARLY_STEPS else None

    def added_ms(self, size: StepSize) -> float:
        """What a part of that size adds to a step's time."""
        _, token_ms, context_ms, pair_ms = self.cost
        return token_ms * size.tokens + context_ms * size.context + pair_ms * size.pairs

    def prefill_ms(self, num_tokens: int, num_computed: int = 0) -> float:
        """What `num_tokens` of a prompt after `num_computed` add to the step that computes them."""
        return self.added_ms(row_size(num_computed, num_tokens))

    def most_tokens(self, limit_ms: float, num_computed: int = 0) -> int:
        """The most tokens of a prompt, after `num_computed`, for which prefill_ms() is within the limit."""
        _, token_ms, context_ms, pair_ms = self.cost
        # prefill_ms() is square * x^2 + linear * x + fixed
        square = pair_ms / 2
        linear = token_ms + context_ms + pair_ms * (num_computed - 0.5)
        rest = limit_ms - (context_ms - pair_ms) * num_computed
        if rest <= 0:
            return 0
        denominator = linear + math.sqrt(max(0.0, linear * linear + 4 * square * rest))
        return min(_UNLIMITED, int(2 * rest / denominator)) if denominator > 0 else _UNLIMITED


class _Sums:
    """Decaying sums over steps of about one size: the products that least squares need."""

    __slots__ = ("moments", "weight")

    def __init__(self) -> None:
        self.weight = 0.0
        self.moments = [0.0] * 13

    def add(self, size: StepSize, ms: float) -> None:
        t, c, p = float(size.tokens), float(size.context), float(size.pairs)
        products = (t, c, p, t * t, t * c, t * p, c * c, c * p, p * p, ms, t * ms, c * ms, p * ms)
        self.weight = self.weight * _KEEP + 1
        self.moments = [old * _KEEP + new for old, new in zip(self.moments, products, strict=True)]

    @property
    def mean_ms(self) -> float:
        return self.moments[9] / self.weight


def _fit(sizes: dict[int, _Sums], last: StepCost) -> StepCost:
    """Least squares of relative errors over non-negative coefficients, by descent along one at a time."""
    total = [0.0] * 13
    n = num_steps = 0.0
    for sums in sizes.values():
        scale = sums.mean_ms**-2
        num_steps += sums.weight
        n += scale * sums.weight
        total = [old + scale * new for old, new in zip(total, sums.moments, strict=True)]
    t, c, p, tt, tc, tp, cc, cp, pp, y, ty, cy, py = total
    pulls = [
        _STIFFNESS * num_steps / max(now, 0.1 * usual) ** 2 for now, usual in zip(last, _DEFAULT, strict=True)
    ]
    weights = [each + pull for each, pull in zip((n, tt, cc, pp), pulls, strict=True)]
    y, ty, cy, py = (each + pull * now for each, pull, now in zip((y, ty, cy, py), pulls, last, strict=True))
    base, token, context, pair = last
    for _ in range(_SWEEPS):
        base = max(0.0, (y - t * token - c * context - p * pair) / weights[0])
        token = max(0.0, (ty - t * base - tc * context - tp * pair) / weights[1])
        context = max(0.0, (cy - c * base - tc * token - cp * pair) / weights[2])
        pair = max(0.0, (py - p * base - tp * token - cp * context) / weights[3])
    return StepCost(base, token, context, pair)
