"""Owns reading a worker's results: tokens to candidates, and the stop rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scheduler_service.core.errors import ProtocolViolation
from scheduler_service.core.events import Event, FinishReason, TokenBatch
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.request import Phase, Request
from scheduler_service.core.step import Int32, StepResult, TokenLogprobs
from scheduler_service.core.worker import FIRST, MANY_STOPS, Bool, Int64, StepInFlight, Worker

_NOT_FINITE = "the worker's logits were not finite"
_LOST_GRAMMAR = "the grammar became too complex for the worker"


@dataclass(frozen=True, slots=True)
class _Delivery:
    """Tokens of one step that reach their candidates. Those still in their slots are columns too."""

    candidates: list[Request]
    token_ids: list[int]
    logprobs: Mapping[int, TokenLogprobs] | None
    seated: list[Request]
    seated_at: Int64 | None  # their indices into candidates; None: all of them, in order
    slots: Int64  # theirs
    ids: Int32  # their tokens
    ended: list[Event]  # candidates that failed


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
        worker.step_time.note(step.size, result.compute_ms)
        worker.answered_at = now
        self._lifecycle.history.answered(worker.spec.worker_id, step.seq, now)
        seated = worker.stay[step.slots] == step.stays
        if seated.all() and not result.failed_rows:
            requests, ids = step.requests, result.token_ids
            given = _Delivery(requests, ids.tolist(), result.logprobs, requests, None, step.slots, ids, [])
        else:
            given = self._sort_out(worker, step, result, seated, now)
        if not given.candidates:
            return given.ended
        self._lifecycle.counters.output_tokens += len(given.candidates)
        for request, token_id in zip(given.candidates, given.token_ids, strict=True):
            request.output_ids.append(token_id)
        ends = [
            end
            for index in self._settle(worker, given)
            if (end := self._look_at(given.candidates[index], given.token_ids[index], now))
        ]
        if ends:
            worker.compact()
        return [TokenBatch(given.candidates, given.token_ids, given.logprobs), *given.ended, *ends]

    def _settle(self, worker: Worker, given: _Delivery) -> list[int]:
        """Counts the tokens of seated candidates as known. Returns the indices of candidates that need a look
        of their own: the first token, perhaps the last one, or not in a slot any more."""
        slots = given.slots
        pending = worker.pending[slots] - 1
        worker.pending[slots] = pending
        known = worker.total[slots] - pending
        if self._caching:
            worker.register_full(slots, given.seated, known)
        notable = known > worker.last[slots]
        notable |= worker.flags[slots] & (FIRST | MANY_STOPS) != 0
        for stops in worker.stop_ids[: worker.stop_width]:
            notable |= stops[slots] == given.ids
        if given.seated_at is None:
            return np.flatnonzero(notable).tolist()
        quiet = set(given.seated_at[~notable].tolist())
        return [index for index in range(len(given.candidates)) if index not in quiet]

    def _look_at(self, request: Request, token_id: int, now: float) -> Event | None:
        if request.first_token_at is None:
            request.first_token_at = now
            self._lifecycle.first_tokens_s.append(now - request.arrival)
            if request.worker is not None:
                request.worker.flags[request.slot] &= ~FIRST
                request.enter(Phase.DECODE, now)
        end = _end(request, token_id)
        if end is None:
            return None
        reason, stop_token_id = end
        return self._lifecycle.finish(request, reason, now, stop_token_id=stop_token_id)

    def _sort_out(
        self, worker: Worker, step: StepInFlight, result: StepResult, seated: Bool, now: float
    ) -> _Delivery:
        """The same where some rows are special. Tokens of finished candidates are dropped, those of preempted
        ones are not. Candidates whose row failed end."""
        kept: list[int] = []
        ended: list[Event] = []
        for row, request in enumerate(step.requests):
            if request.finished:
                continue
            if request.worker is None:
                request.draining -= 1
            if row in result.grammar_failed_rows:
                reason, detail = FinishReason.GRAMMAR, _LOST_GRAMMAR
                ended.append(self._lifecycle.finish(request, reason, now, detail=detail))
            elif row in result.failed_rows:
                if request.worker is None:
                    worker.distrust(request)
                error = FinishReason.ERROR
                ended.append(self._lifecycle.finish(request, error, now, detail=_NOT_FINITE))
            else:
                kept.append(row)
        worker.compact()
        rows = np.array(kept, np.int64)
        seated_at = np.flatnonzero(seated[rows])
        candidates = [step.requests[row] for row in kept]
        return _Delivery(
            candidates=candidates,
            token_ids=result.token_ids[rows].tolist(),
            logprobs=_renumber(result.logprobs, kept),
            seated=[candidates[index] for index in seated_at.tolist()],
            seated_at=seated_at,
            slots=step.slots[rows[seated_at]],
            ids=result.token_ids[rows[seated_at]],
            ended=ended,
        )


def _check(worker: Worker, result: StepResult) -> StepInFlight:
    name = worker.spec.worker_id
    if not worker.in_flight:
        raise ProtocolViolation(f"worker {name} sent result {result.seq} to no plan")
    step = worker.in_flight[0]
    if result.seq != step.seq:
        raise ProtocolViolation(
            f"worker {name} sent result {result.seq}; plan {step.seq} is the next to answer"
        )
    if result.slots.shape != step.slots.shape or not (result.slots == step.slots).all():
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
    """The stop rules in their order: end of text, stop ids, length. The first two only from min_tokens on,
    but where a grammar is complete and allows end of text alone, that is the end whenever it comes."""
    stopping = request.spec.stopping
    num_outputs = len(request.output_ids)
    is_end = token_id in stopping.eos_token_ids
    may_stop = num_outputs >= stopping.min_tokens
    if (is_end and (may_stop or request.spec.grammar)) or (may_stop and token_id in stopping.stop_token_ids):
        return FinishReason.STOP, token_id
    if num_outputs >= stopping.max_tokens:
        return FinishReason.LENGTH, None
    return None
