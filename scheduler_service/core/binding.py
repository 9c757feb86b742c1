"""Owns the choice of a worker: what it costs, in milliseconds, to take a waiting candidate in on each.

    cost = wait + ahead + own + decode

wait    until the steps that the worker has in flight have ended, by their predicted times. A step that is
        overdue is expected to take as long again as it is late, so a worker that hangs draws nobody.
ahead   the prompts of its running candidates, as far as they are not computed, and of those left to it.
own     the candidate's own prompt, less what the worker holds of it. It delays each that runs there, too, so
        it counts once more for each of them.
decode  what those that run there add to each of its steps, for an output as long as its tenant's usually are.

So wait + ahead + own, once, is the time until its first token, and the rest is what it and the others lose by
being on one worker. The worker that asks for a plan takes the candidate, unless another one that has room is
cheaper by more than a twentieth. Prices are those that each worker's steps have shown (step_time.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from scheduler_service.core.estimates import Estimates
from scheduler_service.core.load import load_of
from scheduler_service.core.model import Model
from scheduler_service.core.placement import Hold, Placement, can_take, find, has_room
from scheduler_service.core.request import Request
from scheduler_service.core.step_time import StepSize
from scheduler_service.core.worker import Worker

_MARGIN = 0.05
"""By what part another worker must be cheaper: less than that is within what the estimates are worth."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What it costs to take a candidate in on a worker."""

    worker: Worker
    cost_ms: float


class Binding:
    """Compares the workers of a model for one candidate."""

    def __init__(self, rule: str, estimates: Estimates) -> None:
        self._rule = rule
        self._estimates = estimates

    def place(
        self, worker: Worker, model: Model, request: Request, left_to: Counter[Worker], now: float
    ) -> Placement | Hold:
        """Finds a place for a waiting candidate on the worker that plans, or why it has none. `left_to`
        counts the candidates that this plan leaves to other workers."""
        if request.draining:
            return Hold.IN_FLIGHT
        if not worker.spec.fits(request.max_total):
            return Hold.MISFIT
        if request.is_suspect and worker.suspect is not None:
            return Hold.SUSPECT
        found = find(worker, request)
        if isinstance(found, Hold):
            return found
        better = self.better(worker, model, request, found, left_to, now)
        if better is not None:
            left_to[better.worker] += 1
            return Hold.BETTER_ELSEWHERE
        return found if has_room(worker, request, found) else Hold.NO_ROOM

    def better(
        self,
        worker: Worker,
        model: Model,
        request: Request,
        found: Placement,
        left_to: Counter[Worker],
        now: float,
    ) -> Offer | None:
        """The cheapest other worker that could take the candidate now, if it is cheaper by the margin."""
        if len(model.workers) < 2:
            return None
        cost_ms = self.cost_ms(worker, request, found.num_computed, 0, now)
        limit_ms = cost_ms - _MARGIN * abs(cost_ms)
        best = None
        for other in model.others(worker):
            left = left_to[other]
            if other.num_running + left >= other.seats:
                continue
            # What it would cost with all of the prefix: looking for what there is of it takes longer.
            if self.cost_ms(other, request, request.num_known - 1, left, now) >= limit_ms:
                continue
            place = can_take(other, request)
            if place is None:
                continue
            cost_ms = self.cost_ms(other, request, place.num_computed, left, now)
            if cost_ms < limit_ms:
                limit_ms = cost_ms
                best = Offer(other, cost_ms)
        return best

    def cost_ms(
        self, worker: Worker, request: Request, num_computed: int, num_left: int, now: float
    ) -> float:
        """What it costs to take the candidate in, with so many of its tokens computed, on a worker to which
        this plan has left others like it."""
        num_running = worker.num_running + num_left
        if self._rule == "load":
            return float(num_running)
        if self._rule == "prefix":
            return -float(num_computed)
        prices = worker.step_time
        own_ms = prices.prefill_ms(request.num_known - num_computed, num_computed)
        load = load_of(worker)
        first_ms = load.wait_ms(now) + load.ahead_ms + own_ms * (1 + num_left)
        others_ms = prices.added_ms(StepSize(num_running, load.context, 0))
        max_tokens = request.spec.stopping.max_tokens - len(request.output_ids)
        outputs = self._estimates.mean_outputs(request.spec.tenant, max_tokens)
        return first_ms + own_ms * num_running + outputs * others_ms
