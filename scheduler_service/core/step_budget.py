"""Owns what one step may take: tokens and, where a time between tokens is wanted, milliseconds.

With a target, prompts get what keeps the predicted time of the step within it, as long as somebody decodes.
Decodes come first and are never cut. Nor do prompts starve: together they get at least a 64th of the worker's
token budget in each step, and at least a block, also where decodes alone take longer than the target.
"""

from __future__ import annotations

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.step_time import StepSize, StepTime
from scheduler_service.core.worker import Int64, Worker

_LEAST_SHARE = 64
_UNLIMITED = 1 << 40


def prompt_cap(worker: Worker, config: SchedulerConfig, num_waiting: int) -> int:
    """Most tokens that one prompt gets in a step: no limit for one that is alone, else the threshold, or its
    equal share of the budget where that is more and the option says so."""
    threshold, sharing = config.long_prefill_token_threshold, worker.num_running + num_waiting
    if not threshold or sharing <= 1:
        return _UNLIMITED
    fair = worker.budget // sharing if config.long_prefill_token_threshold_adaptive else 0
    return max(threshold, fair)


class StepBudget:
    """What is left of a step."""

    __slots__ = ("_least", "_left_ms", "_prices", "tokens", "whole")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.whole = tokens
        """Most tokens of the step, were its prompts at their beginning."""
        self._prices: StepTime | None = None  # None: time does not count
        self._left_ms = 0.0
        self._least = 0  # tokens that prompts get whatever the time

    def keep_within(self, target_ms: float, prices: StepTime, decodes: StepSize, least: int) -> None:
        """Has the step, with these decodes in it, end in time in nearly all cases."""
        self._prices = prices
        self._left_ms = target_ms / prices.high - prices.predict_ms(decodes)
        self._least = least
        self.whole = min(self.tokens, decodes.tokens + self.most())

    def most(self, num_computed: int = 0) -> int:
        """Most tokens that a prompt may get which has so many computed."""
        if self._prices is None:
            return self.tokens
        in_time = self._prices.most_tokens(self._left_ms, num_computed)
        return min(self.tokens, max(self._least, in_time))

    def take(self, num_tokens: int, num_computed: int) -> None:
        """A prompt gets so many tokens."""
        self.tokens -= num_tokens
        if self._prices is not None:
            self._left_ms -= self._prices.prefill_ms(num_tokens, num_computed)
            self._least = max(0, self._least - num_tokens)


def new_budget(worker: Worker, want: Int64, target_ms: float | None) -> StepBudget:
    """A whole step of `worker`, in which running candidates want so many tokens each. Those that want one
    decode, or are as cheap as a decode."""
    budget = StepBudget(worker.budget)
    if target_ms is not None and (decodes := want == 1).any():
        context = worker.computed[worker.rows[decodes]] + 1
        least = max(worker.spec.block_size, worker.budget // _LEAST_SHARE)
        size = StepSize(len(context), int(context.sum()), 0)
        budget.keep_within(target_ms, worker.step_time, size, least)
    return budget


def share(worker: Worker, want: Int64, target_ms: float | None) -> tuple[Int64, StepBudget]:
    """What each running candidate gets of what it wants, and what is left then: one token for each decode,
    in running order as far as the budget goes, then what prompts may have, in the same order."""
    budget = new_budget(worker, want, target_ms)
    total = int(want.sum())
    if total <= budget.tokens and (target_ms is None or not (want > 1).any()):
        budget.tokens -= total
        return want, budget
    prompts = want > 1
    grants = np.where(prompts, 0, want)
    before = grants.cumsum() - grants
    np.clip(budget.tokens - before, 0, grants, out=grants)
    budget.tokens -= int(grants.sum())
    for row in np.flatnonzero(prompts).tolist():
        if not budget.tokens:
            break
        num_computed = int(worker.computed[worker.rows[row]])
        grants[row] = min(int(want[row]), budget.most(num_computed))
        budget.take(int(grants[row]), num_computed)
    return grants, budget
