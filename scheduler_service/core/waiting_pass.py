"""Owns the second half of a plan: which WAITING candidates a worker takes in."""

from __future__ import annotations

from collections import Counter

import numpy as np

from scheduler_service.core.binding import Binding
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.draft import Draft
from scheduler_service.core.events import Event
from scheduler_service.core.forecast import expected_total
from scheduler_service.core.host_tier import let_go
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.model import Model
from scheduler_service.core.placement import Hold, Placement
from scheduler_service.core.policy import Policy
from scheduler_service.core.request import Request
from scheduler_service.core.step import Admission
from scheduler_service.core.step_budget import prompt_cap
from scheduler_service.core.worker import Worker

_MOST_HELD = 64
"""How many candidates that wait for something other than room are looked past in one plan."""


class WaitingPass:
    """Admits from the queue in the policy's order, looking past few that cannot come."""

    def __init__(self, config: SchedulerConfig, policy: Policy, lifecycle: Lifecycle) -> None:
        self._config = config
        self._policy = policy
        self._lifecycle = lifecycle
        self._binding = Binding(config.binding, lifecycle.estimates)

    def admit(self, worker: Worker, model: Model, draft: Draft, now: float, events: list[Event]) -> None:
        """Admits while token budget, seats and blocks last."""
        skipped = []
        passed: list[Request] = []  # lacked room; whoever is admitted after them overtakes them
        left_to: Counter[Worker] = Counter()
        num_held = 0
        while draft.budget.most() and worker.num_running < worker.seats:
            # Every admission takes at least one block.
            if worker.pool.num_free <= worker.reserve_blocks or not (entry := model.queue.take()):
                break
            request = entry[1]
            found = self._binding.place(worker, model, request, left_to, now)
            if isinstance(found, Placement):
                self._admit(worker, request, found, draft, now, events)
                for overtaken in passed:
                    overtaken.overtaken += 1
                continue
            skipped.append(entry)
            if self._holds_the_line(worker, request, found):
                break
            if found is Hold.NO_ROOM:
                passed.append(request)
            else:
                num_held += 1
            if len(passed) > self._config.overtaking_window or num_held > _MOST_HELD:
                break
        model.queue.put_back(skipped)
        worker.seat(draft.admitted)

    def _holds_the_line(self, worker: Worker, request: Request, hold: Hold) -> bool:
        """Whether nobody may pass: it was passed too often, or was preempted here, where memory is short then
        and newcomers would push it out again."""
        if hold is Hold.NO_ROOM:
            return request.was_admitted or request.overtaken >= self._config.max_overtakes
        return hold is Hold.IN_FLIGHT and request.last_worker is worker

    def _admit(
        self,
        worker: Worker,
        request: Request,
        place: Placement,
        draft: Draft,
        now: float,
        events: list[Event],
    ) -> None:
        copied = self._take_blocks(worker, request, place, draft)
        if worker.forecast is not None:
            worker.expected[request.slot] = expected_total(worker.forecast, request)
        self._policy.note_admitted(worker, request, request.num_known - place.num_computed)
        events.append(self._lifecycle.admit(request, worker, place.num_computed, now, copied))
        # A long context may leave no time for a single token.
        most = max(1, draft.budget.most(place.num_computed))
        grant = min(request.num_known - place.num_computed, most)
        grant = min(grant, prompt_cap(worker, self._config, self._lifecycle.load.num_waiting))
        draft.budget.take(grant, place.num_computed)
        draft.admitted.append(request)
        draft.admitted_grants.append(grant)
        draft.admissions.append(_admission(request, place.num_computed))
        if self._config.enable_prefix_caching:
            self._name_blocks(worker, request, place, place.num_computed + grant)

    def _take_blocks(self, worker: Worker, request: Request, place: Placement, draft: Draft) -> int | None:
        """Gives the candidate its slot and its blocks, with the copies that fill them. Returns how many come
        from host memory. None: nothing was kept of it."""
        restored = {} if place.from_stash is None else place.from_stash.reads
        worker.pool.share(place.shared)
        let_go(request, set(restored.values()))
        fresh = worker.allocate(place.num_fresh)
        table = place.table(fresh)
        worker.place(request, table, place.num_computed, place.num_registered)
        draft.swap_in_host_blocks += restored.values()
        draft.swap_in_blocks += (table[index] for index in restored)
        if place.copy_from is not None:
            draft.copy_sources.append(place.copy_from)
            draft.copy_destinations.append(fresh[0])
        return None if place.from_stash is None else len(restored)

    def _name_blocks(self, worker: Worker, request: Request, place: Placement, num_planned: int) -> None:
        """Registers what this step computes, so that the next candidate can share it in the same step, and
        promises the rest, so that it can wait for it."""
        counters = self._lifecycle.counters
        if not place.by_fork and place.from_stash is None:
            counters.prefix_queried_tokens += request.num_known
            counters.prefix_hit_tokens += place.num_computed
        worker.register(request, num_planned >> worker.shift)
        worker.promise(request)


def _admission(request: Request, num_computed: int) -> Admission:
    stopping = request.spec.stopping
    banned = stopping.eos_token_ids | stopping.stop_token_ids if stopping.min_tokens else ()
    return Admission(
        slot=request.slot,
        request_id=request.request_id,
        index=request.index,
        token_ids=request.token_ids(),
        num_prompt_tokens=request.num_prompt,
        num_computed_tokens=num_computed,
        block_ids=np.array(request.block_ids, np.int32),
        sampling=request.sampling,
        min_tokens=stopping.min_tokens,
        min_tokens_banned_ids=tuple(sorted(banned)),
        traceparent=request.spec.traceparent,
        adapter=request.spec.adapter,
        grammar=request.spec.grammar,
    )
