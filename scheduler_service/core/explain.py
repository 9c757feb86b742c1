"""Owns the answer to "why": what keeps a candidate from running, in numbers, and what became of it.

It asks the questions that the planner asks, in the planner's order, and moves nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from scheduler_service.core.binding import Binding
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.forecast import peak_blocks
from scheduler_service.core.history import Chunk, Moment
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.model import Model
from scheduler_service.core.placement import Hold, Placement, find, has_room
from scheduler_service.core.request import Request
from scheduler_service.core.running_pass import wanted
from scheduler_service.core.state import RequestState, request_state
from scheduler_service.core.step_budget import prompt_cap, share
from scheduler_service.core.worker import Worker


class BlockerKind(Enum):
    """What a waiting candidate lacks."""

    NO_WORKER = "no_worker"  # no worker of its model is connected, or all are draining
    SIBLING_PROMPT = "sibling_prompt"  # candidate 0 of its request has to compute the prompt first
    TOKENS_IN_FLIGHT = "tokens_in_flight"  # of the stay that a preemption ended
    TOO_SMALL = "too_small"  # the worker could never hold it
    SLOTS = "slots"  # as many run as may
    BUDGET = "budget"  # those that run take all tokens of a step
    BLOCKS = "blocks"  # its blocks and the watermark's reserve are not free
    FORECAST = "forecast"  # with it, those that run would come to need more blocks than there are
    PREFIX_COMING = "prefix_coming"  # another one is computing a prefix that it can share
    BETTER_ELSEWHERE = "better_elsewhere"  # another worker is cheaper for it and could take it now
    KEPT_ELSEWHERE = "kept_elsewhere"  # the worker that preempted it keeps its KV for it
    QUEUE_ORDER = "queue_order"  # it would fit; others come first
    NEXT_PLAN = "next_plan"  # nothing: the worker's next plan takes it


@dataclass(frozen=True, slots=True)
class Blocker:
    """One worker's reason not to take a candidate. What the numbers count depends on the kind:

    TOKENS_IN_FLIGHT: `needed` tokens. SLOTS: candidates that run, of `limit`. BUDGET: tokens that the running
    ones want, of `limit`. BLOCKS, TOO_SMALL: blocks. FORECAST: blocks at the peak, of `limit`.
    BETTER_ELSEWHERE: milliseconds here, and `available` there. QUEUE_ORDER: candidates ahead.
    NEXT_PLAN: plans unanswered.
    """

    kind: BlockerKind
    text: str
    worker_id: str = ""
    needed: int = 0
    reserve: int = 0
    available: int = 0
    limit: int = 0
    other: str = ""  # the request or worker that it waits for


@dataclass(frozen=True, slots=True)
class Explanation:
    """A candidate, live or ended."""

    state: RequestState
    timeline: tuple[Moment, ...]
    chunks: tuple[Chunk, ...]
    finish_reason: str = ""  # empty while it is live
    blockers: tuple[Blocker, ...] = ()
    position: int | None = None  # in the queue, from 1
    estimated_start_s: float | None = None  # from now; None where nothing has left yet, so no rate is known


def explain(request_id: str, lifecycle: Lifecycle, config: SchedulerConfig, now: float) -> list[Explanation]:
    """Every candidate of a request that is live or remembered, by index. Empty: it is unknown."""
    live = lifecycle.requests.get(request_id)
    past = [
        Explanation(each.state, each.timeline, each.chunks, each.finish_reason)
        for each in lifecycle.history.ended(request_id)
    ]
    if live is None:
        return past
    alive = [_explain_live(request, lifecycle, config, now) for request in live if not request.finished]
    orders = {request.order for request in live}
    ended = [each for each in past if each.state.order in orders]
    return sorted(alive + ended, key=lambda each: each.state.index)


def head_blockers(
    request: Request, model: Model, lifecycle: Lifecycle, config: SchedulerConfig, now: float
) -> tuple[Blocker, ...]:
    """Why the first candidate of a model's queue does not run."""
    return tuple(_blockers(_Question(request, [], model, lifecycle, config, now)))


def _explain_live(request: Request, lifecycle: Lifecycle, config: SchedulerConfig, now: float) -> Explanation:
    state, history = request_state(request, now), lifecycle.history
    timeline, chunks = history.timeline(request), history.chunks(request)
    if request.worker is not None:
        return Explanation(state, timeline, chunks)
    model = lifecycle.models[request.spec.model]
    ahead = model.queue.ahead_of(request)
    blockers = tuple(_blockers(_Question(request, ahead, model, lifecycle, config, now)))
    position = None if request.parked else len(ahead) + 1
    start = _estimate(blockers, position, lifecycle, now)
    return Explanation(state, timeline, chunks, "", blockers, position, start)


def _estimate(
    blockers: tuple[Blocker, ...], position: int | None, lifecycle: Lifecycle, now: float
) -> float | None:
    """One candidate starts for each that leaves, so far as the last seconds tell."""
    if any(blocker.kind is BlockerKind.NEXT_PLAN for blocker in blockers):
        return 0.0
    rate = lifecycle.drain_rate.at(now)
    if position is None or rate < 1e-6:
        return None
    return position / rate


@dataclass(frozen=True, slots=True)
class _Question:
    """Whom it is about, and all that the answer depends on."""

    request: Request
    ahead: list[Request]
    model: Model
    lifecycle: Lifecycle
    config: SchedulerConfig
    now: float


def _blockers(question: _Question) -> Iterable[Blocker]:
    request, model = question.request, question.model
    ready = [worker for worker in model.workers.values() if not worker.draining]
    if request.parked:
        text = f"candidate 0 of {request.request_id} has not computed the prompt that they share"
        yield Blocker(BlockerKind.SIBLING_PROMPT, text, other=request.request_id)
    elif not ready:
        connected = len(model.workers)
        text = f"no worker of {model.name} takes requests: {connected} connected, all of them draining"
        if not connected:
            text = f"no worker of {model.name} is connected"
        yield Blocker(BlockerKind.NO_WORKER, text)
    elif request.draining:
        text = f"{request.draining} tokens of its last stay on a worker are still to come"
        yield Blocker(BlockerKind.TOKENS_IN_FLIGHT, text, needed=request.draining)
    else:
        for worker in ready:
            yield _blocker(worker, question)


def _blocker(worker: Worker, question: _Question) -> Blocker:
    """Why `worker` would not take a candidate that is in the queue, if it planned now."""
    request, config = question.request, question.config
    limit = _by_limits(worker, request, config, question.lifecycle.load.num_waiting)
    if limit is not None:
        return limit
    awaits = request.awaits
    found = find(worker, request)
    promised, request.awaits = request.awaits, awaits
    if found is Hold.PREFIX_COMING and promised is not None:
        computing = worker.promises[promised[1]].request_id
        text = f"{computing} is computing a prefix on {_name(worker)} that it can share"
        return Blocker(BlockerKind.PREFIX_COMING, text, _name(worker), other=computing)
    if found is Hold.KEPT_ELSEWHERE and request.stash is not None and request.last_worker is not None:
        keeper, kept = _name(request.last_worker), request.stash.num_computed
        text = f"{keeper} keeps the KV of {kept} of its tokens; {_name(worker)} would compute them again"
        return Blocker(BlockerKind.KEPT_ELSEWHERE, text, _name(worker), needed=kept, other=keeper)
    if not isinstance(found, Placement):
        raise AssertionError(f"no other hold comes from find(): {found}")
    dearer = _by_cost(worker, found, question)
    if dearer is not None:
        return dearer
    if not has_room(worker, request, found):
        return _lack_of_blocks(worker, request, found)
    return _by_order(worker, question.ahead, config)


def _by_cost(worker: Worker, found: Placement, question: _Question) -> Blocker | None:
    request, binding = question.request, Binding(question.config.binding, question.lifecycle.estimates)
    better = binding.better(worker, question.model, request, found, Counter(), question.now)
    if better is None:
        return None
    name, other = _name(worker), _name(better.worker)
    here_ms = math.ceil(binding.cost_ms(worker, request, found.num_computed, 0, question.now))
    there_ms = math.floor(better.cost_ms)
    text = f"{name} leaves it to {other}, where it costs {there_ms} ms; here it would cost {here_ms} ms"
    return Blocker(BlockerKind.BETTER_ELSEWHERE, text, name, needed=here_ms, available=there_ms, other=other)


def _by_limits(worker: Worker, request: Request, config: SchedulerConfig, num_waiting: int) -> Blocker | None:
    spec, name = worker.spec, _name(worker)
    if not spec.fits(request.max_total):
        needed, total = spec.blocks_for(request.max_total - 1), spec.num_blocks - 1
        text = (
            f"{name} is too small: {request.max_total} tokens need {needed} blocks of its {total}, and its "
            f"longest sequence is {spec.max_model_len}"
        )
        return Blocker(BlockerKind.TOO_SMALL, text, name, needed=needed, available=total, limit=total)
    if worker.num_running >= worker.seats:
        text = f"{worker.num_running} of at most {worker.seats} run on {name}"
        return Blocker(BlockerKind.SLOTS, text, name, needed=1, limit=worker.seats)
    other = worker.suspect if request.is_suspect else None
    if other is not None:
        text = (
            f"it has lost {request.losses} workers in a row, and {other.request_id}, which {name} tries, "
            f"has lost {other.losses}: one at a time, since either may be why"
        )
        return Blocker(BlockerKind.QUEUE_ORDER, text, name, needed=1, other=other.request_id)
    return _by_budget(worker, config, num_waiting)


def _by_budget(worker: Worker, config: SchedulerConfig, num_waiting: int) -> Blocker | None:
    want = wanted(worker, prompt_cap(worker, config, num_waiting))
    grants, left = share(worker, want, config.target_itl_ms)
    if left.most():
        return None
    name, num_wanted, limit = _name(worker), int(want.sum()), int(grants.sum())
    text = f"those that run on {name} want {num_wanted} tokens of the next step, which has {limit}"
    if left.tokens:
        text += f" within target_itl_ms = {config.target_itl_ms:g}"
    return Blocker(BlockerKind.BUDGET, text, name, needed=num_wanted, limit=limit)


def _lack_of_blocks(worker: Worker, request: Request, found: Placement) -> Blocker:
    name, total = _name(worker), worker.spec.num_blocks - 1
    needed, reserve, free = found.needed_blocks, worker.reserve_blocks, worker.pool.num_free
    if worker.forecast is not None and needed + reserve <= free:
        held = len(found.shared) + found.num_fresh
        peak = peak_blocks(worker, worker.forecast, request, held, needed)
        text = (
            f"with it, those that run on {name} would come to hold {peak} blocks of {total}, by the forecast"
        )
        return Blocker(BlockerKind.FORECAST, text, name, peak, 0, free, total)
    text = f"needs {needed} blocks + {reserve} in reserve (watermark) > {free} free on {name}"
    return Blocker(BlockerKind.BLOCKS, text, name, needed, reserve, free, total)


def _by_order(worker: Worker, ahead: list[Request], config: SchedulerConfig) -> Blocker:
    name = _name(worker)
    if not ahead:
        unanswered = len(worker.in_flight)
        text = f"the next plan of {name} takes it ({unanswered} of {worker.depth} plans are unanswered)"
        return Blocker(BlockerKind.NEXT_PLAN, text, name, needed=unanswered, limit=worker.depth)
    head = ahead[0]
    text = f"it would fit on {name}, but {len(ahead)} come first"
    if head.was_admitted or head.overtaken >= config.max_overtakes:
        why = "was preempted" if head.was_admitted else f"was passed {head.overtaken} times"
        text += f"; the first of them, {head.request_id}, {why}, so nobody may pass it"
    return Blocker(BlockerKind.QUEUE_ORDER, text, name, needed=len(ahead), other=head.request_id)


def _name(worker: Worker) -> str:
    return worker.spec.worker_id
