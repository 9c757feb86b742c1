"""Owns reading a worker's results: tokens to candidates, and the stop rules."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler_service.core.errors import ProtocolViolation
from scheduler_service.core.events import Event, FinishReason, TokenBatch
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.request import Phase, Request
from scheduler_service.core.step import StepResult, TokenLogprobs
from scheduler_service.core.worker import FIRST, MANY_STOPS, Int64, StepInFlight, Worker

_NOT_FINITE = "the worker's logits were not finite"


class ResultReader:
    """Applies results to the candidates that their plans were for."""

    def __init__(self, lifecycle: Lifecycle, enable_prefix_caching: bool) -> None:
        self._lifecycle = lifecycle
        self._caching = enable_prefix_caching

    def apply(self, worker: Worker, result: StepResult, now: float) -> list[Event]:
        """Delivers the tokens of the oldest unanswered plan: one TokenBatch, then what ends.

        Raises:
            ProtocolViolation: the result does not answer that plan. Nothing was applied.
        """
        step = _check(worker, result)
        worker.in_flight.popleft()
        rows = worker.stay[step.slots] == step.stays
        if rows.all() and not result.failed_rows:
            slots, candidates, token_ids = step.slots, step.requests, result.token_ids.tolist()
            stayed = np.arange(len(slots))
            logprobs: Mapping[int, TokenLogprobs] | None = result.logprobs
            events: list[Event] = []
        else:
            kept, events = self._sort_out(worker, step, result, now)
            candidates = [step.requests[row] for row in kept]
            token_ids = [int(result.token_ids[row]) for row in kept]
            stayed = np.array([i for i, row in enumerate(kept) if rows[row]], np.int64)
            slots = step.slots[[kept[i] for i in stayed.tolist()]]
            logprobs = _renumber(result.logprobs, kept)
        if not candidates:
            return events
        self._lifecycle.counters.output_tokens += len(candidates)
        for request, token_id in zip(candidates, token_ids, strict=True):
            request.output_ids.append(token_id)
        notable = self._settle(worker, slots, candidates, token_ids, stayed)
        ends = [self._look_at(candidates[i], token_ids[i], now) for i in notable]
        worker.compact()
        return [
            TokenBatch(candidates, token_ids, logprobs),
            *events,
            *(end for end in ends if end is not None),
        ]

    def _settle(
        self, worker: Worker, slots: Int64, candidates: list[Request], token_ids: list[int], stayed: Int64
    ) -> list[int]:
        """Counts the tokens of candidates that are still in their slots as known. Returns the indices of
        those that need a look of their own: the first token, perhaps the last one, or not in a slot any more.
        """
        worker.pending[slots] -= 1
        known = worker.total[slots] - worker.pending[slots]
        everyone = len(stayed) == len(candidates)
        here = candidates if everyone else [candidates[i] for i in stayed.tolist()]
        ids = np.array(token_ids if everyone else [token_ids[i] for i in stayed.tolist()], np.int64)
        if self._caching:
            worker.register_full(slots, here, known)
        notable = (known > worker.last[slots]) | (worker.flags[slots] & (FIRST | MANY_STOPS) != 0)
        for stops in worker.stop_ids[: worker.stop_width]:
            notable |= stops[slots] == ids
        indices: list[int] = stayed[notable].tolist()
        if not everyone:
            indices = sorted({*indices, *range(len(candidates))} - set(stayed[~notable].tolist()))
        return indices

    def _look_at(self, request: Request, token_id: int, now: float) -> Event | None:
        if request.first_token_at is None:
            request.first_token_at = now
            if request.worker is not None:
                request.worker.flags[request.slot] &= ~FIRST
                request.enter(Phase.DECODE, now)
        end = _end(request, token_id)
        if end is None:
            return None
        reason, stop_token_id = end
        return self._lifecycle.finish(request, reason, now, stop_token_id=stop_token_id)

    def _sort_out(
        self, worker: Worker, step: StepInFlight, result: StepResult, now: float
    ) -> tuple[list[int], list[Event]]:
        """Rows whose token is delivered, and the ends of those that failed. Rows of finished candidates are
        dropped; those of preempted ones are not."""
        kept: list[int] = []
        events: list[Event] = []
        for row, request in enumerate(step.requests):
            if request.finished:
                continue
            if request.worker is None:
                request.draining -= 1
            if row not in result.failed_rows:
                kept.append(row)
                continue
            events.append(self._lifecycle.finish(request, FinishReason.ERROR, now, detail=_NOT_FINITE))
        worker.compact()
        return kept, events


def _check(worker: Worker, result: StepResult) -> StepInFlight:
    name = worker.spec.worker_id
    if not worker.in_flight:
        raise ProtocolViolation(f"worker {name} sent result {result.seq} to no plan")
    step = worker.in_flight[0]
    if result.seq != step.seq:
        raise ProtocolViolation(
            f"worker {name} sent result {result.seq}; plan {step.seq} is the next to answer"
        )
    if not np.array_equal(result.slots, step.slots):
        raise ProtocolViolation(
            f"worker {name} sent result {result.seq} for other slots than sample in its plan"
        )
    rows = len(step.slots)
    if result.token_ids.shape != (rows,):
        raise ProtocolViolation(f"worker {name} sent {len(result.token_ids)} tokens for {rows} rows")
    named = result.failed_rows if result.logprobs is None else result.failed_rows | result.logprobs.keys()
    if any(not 0 <= row < rows for row in named):
        raise ProtocolViolation(f"worker {name} named a row beyond the {rows} of result {result.seq}")
    ids = result.token_ids
    if result.failed_rows:
        ids = np.delete(ids, list(result.failed_rows))
    if len(ids) and not (ids.min() >= 0 and ids.max() < worker.spec.vocab_size):
        raise ProtocolViolation(
            f"worker {name} sent a token outside its vocabulary of {worker.spec.vocab_size}"
        )
    return step


def _renumber(
    logprobs: Mapping[int, TokenLogprobs] | None, kept: list[int]
) -> dict[int, TokenLogprobs] | None:
    if not logprobs:
        return None
    return {i: logprobs[row] for i, row in enumerate(kept) if row in logprobs}


def _end(request: Request, token_id: int) -> tuple[FinishReason, int | None] | None:
    """The stop rules in their order: end of text, stop ids, length. The first two only from min_tokens on."""
    stopping = request.spec.stopping
    num_outputs = len(request.output_ids)
    is_stop = token_id in stopping.eos_token_ids or token_id in stopping.stop_token_ids
    if is_stop and num_outputs >= stopping.min_tokens:
        return FinishReason.STOP, token_id
    if num_outputs >= stopping.max_tokens:
        return FinishReason.LENGTH, None
    return None
