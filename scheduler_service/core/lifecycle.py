"""Owns the moves of candidates between states, and the counts and events that follow from them.

It is told what happens to whom; the planner, the results and the scheduler's face decide.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from scheduler_service.core.admission import DrainRate, QueueLoad
from scheduler_service.core.estimates import Estimates
from scheduler_service.core.events import (
    Admitted,
    Finished,
    FinishReason,
    Preempted,
    Resumed,
    Timings,
    Usage,
)
from scheduler_service.core.history import History
from scheduler_service.core.host_tier import let_go
from scheduler_service.core.model import Model
from scheduler_service.core.queue_tally import QueueTally
from scheduler_service.core.request import Phase, Request, Status
from scheduler_service.core.request_heap import RequestHeap
from scheduler_service.core.state import Counters
from scheduler_service.core.swap import NOT_KEPT, choose
from scheduler_service.core.worker import Worker

_NO_LOAD = QueueLoad(0, 0)
_MOST_FIRST_TOKENS = 4_096
_MOVES = ("worker_lost", "drain")


class Lifecycle:
    """Every live candidate, and the queues of every model."""

    def __init__(self, preemption_mode: str) -> None:
        self._preemption_mode = preemption_mode
        self.models: dict[str, Model] = {}
        self.requests: dict[str, list[Request]] = {}  # candidates of live requests
        self.expiries = RequestHeap()
        self.history = History()
        self.counters = Counters()
        self.drain_rate = DrainRate()
        self.estimates = Estimates()
        self.first_tokens_s: deque[float] = deque(
            maxlen=_MOST_FIRST_TOKENS
        )  # from arrival, not yet asked for
        self.tally = QueueTally()
        self.load = _NO_LOAD
        self.tenant_loads: dict[str, QueueLoad] = {}  # of those that have something waiting

    def accept(self, candidates: list[Request]) -> None:
        """Queues the candidates of a new request. All but the first wait for the first one's prompt."""
        first = candidates[0]
        self.requests[first.request_id] = candidates
        self.counters.requests_accepted += len(candidates)
        for request in candidates:
            request.siblings = candidates
            request.parked = request is not first
            self._enqueue(request)
            expiry = next_expiry(request)
            if expiry is not None:
                self.expiries.push((expiry, request.order), request)

    def restore(self, candidates: list[Request], outputs: Sequence[Sequence[int] | None], now: float) -> None:
        """Queues the candidates of a request that had begun before; those without outputs have ended."""
        self.requests[candidates[0].request_id] = candidates
        for request, token_ids in zip(candidates, outputs, strict=True):
            request.siblings = candidates
            if token_ids is None:
                request.status = Status.FINISHED
                continue
            self.counters.requests_accepted += 1
            request.output_ids.extend(token_ids)
            request.restored_tokens = len(token_ids)
            if token_ids:
                request.first_token_at = now
            self._enqueue(request)
            expiry = next_expiry(request)
            if expiry is not None:
                self.expiries.push((expiry, request.order), request)

    def charge(self, request: Request) -> int:
        """Tokens that a candidate adds to what waits: those that no worker holds. One that waits for a
        sibling's prompt computes one."""
        if request.parked:
            return 1
        if request.stash is not None:
            return max(1, request.num_known - request.stash.num_computed)
        return request.num_known - self.models[request.spec.model].best_hit_tokens(request)

    def _enqueue(self, request: Request) -> None:
        request.queue_charge = self.charge(request)
        self._change_load(request, 1)
        if not request.parked:
            self.models[request.spec.model].queue.push(request)

    def _change_load(self, request: Request, num: int) -> None:
        tokens, tenant = num * request.queue_charge, request.spec.tenant
        self.load = self.load.plus(num, tokens)
        self.tally.change(request.spec, "preempted" if request.was_admitted else "waiting", num, tokens)
        load = self.tenant_loads.get(tenant, _NO_LOAD).plus(num, tokens)
        if load.num_waiting:
            self.tenant_loads[tenant] = load
        else:
            self.tenant_loads.pop(tenant, None)

    def unpark(self, first: Request) -> None:
        """Queues the siblings that have waited for the prompt of `first`."""
        queue = self.models[first.spec.model].queue
        for request in first.siblings:
            if request.parked and not request.finished:
                request.parked = False
                queue.push(request)

    def admit(
        self,
        request: Request,
        worker: Worker,
        cached_tokens: int,
        now: float,
        copied_blocks: int | None = None,
    ) -> Admitted | Resumed:
        """A candidate that was taken from the queue has got its place on a worker. Where that had kept its
        KV, `copied_blocks` of it come from host memory."""
        self._change_load(request, -1)
        self.tally.change(request.spec, "running", 1)
        request.status = Status.RUNNING
        request.enter(Phase.PREFILL if request.first_token_at is None else Phase.DECODE, now)
        names = (request.request_id, request.index, worker.spec.worker_id, cached_tokens, request.sink)
        what = "resumed" if request.was_admitted else "admitted"
        detail = f"{cached_tokens} cached tokens"
        if copied_blocks is not None:
            detail = f"{cached_tokens} kept tokens, {copied_blocks} blocks copied back"
        self.history.note(request, what, now, worker.spec.worker_id, detail, worker.seq + 1)
        if request.was_admitted:
            return Resumed(*names, at=now)
        request.was_admitted = True
        request.cached_tokens = min(cached_tokens, request.num_prompt)
        return Admitted(*names, at=now)

    def preempt(
        self, request: Request, worker: Worker, reason: str, now: float, *, lost: bool = False
    ) -> Preempted:
        """A candidate that runs on `worker` goes back to the queue. The running order wants compact() then.

        Tokens in flight are still delivered, unless the worker is lost: then they never come.
        """
        request.draining = 0 if lost else int(worker.pending[request.slot])
        moves = reason in _MOVES
        choice = NOT_KEPT if moves else choose(self._preemption_mode, worker, request)
        if choice.num_tokens:
            blocks = request.block_ids[: worker.spec.blocks_for(choice.num_tokens)]
            worker.host.keep(request, blocks, choice.num_tokens)
        worker.vacate(request)
        self.tally.change(request.spec, "running", -1)
        request.status = Status.PREEMPTED
        request.num_preemptions += 1
        request.enter(Phase.PREEMPTED, now)
        worker_id = worker.spec.worker_id
        detail = f"{reason}; {choice.why}" if choice.why else reason
        self.history.note(request, "preempted", now, worker_id, detail, worker.seq)
        self._enqueue(request)
        self.counters.requests_moved += moves
        self.counters.preemptions += not moves
        self.counters.preemptions_kept += choice.num_tokens > 0
        kept = choice.num_tokens
        return Preempted(request.request_id, request.index, worker_id, reason, request.sink, kept, at=now)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        *,
        stop_token_id: int | None = None,
        num_outputs: int | None = None,
        detail: str = "",
    ) -> Finished:
        """A live candidate ends. If it ran, its worker's running order wants compact() after this."""
        worker_id, step = "", 0
        if request.worker is not None:
            worker_id, step = request.worker.spec.worker_id, request.worker.seq
            # What made its logits go wrong may be in its blocks; nobody else should find them.
            trusted = reason not in (FinishReason.ERROR, FinishReason.GRAMMAR)
            request.worker.vacate(request, trusted=trusted)
            self.tally.change(request.spec, "running", -1)
            request.status = Status.FINISHED
        else:
            self._change_load(request, -1)
            request.status = Status.FINISHED
            let_go(request)
            if not request.parked:
                self.models[request.spec.model].queue.note_finished(request)
        if next_expiry(request) is not None:
            self.expiries.note_finished(request)
        self._close(request)
        self._count(reason)
        self.drain_rate.note(now)
        request.enter(request.phase, now)
        whole = request.restored_tokens is None  # else the times of some tokens are not known
        if whole and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.estimates.note(request, now)
        self.history.close(request, reason.value, worker_id, now, step)
        outputs = len(request.output_ids) if num_outputs is None else num_outputs
        usage = Usage(request.num_prompt, request.cached_tokens, outputs, request.num_preemptions)
        return Finished(
            request.request_id,
            request.index,
            reason,
            stop_token_id,
            usage,
            _timings(request),
            detail,
            request.sink,
            at=now,
        )

    def _close(self, request: Request) -> None:
        if all(sibling.finished for sibling in request.siblings):
            del self.requests[request.request_id]
        elif request.index == 0:
            self.unpark(request)

    def _count(self, reason: FinishReason) -> None:
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.counters.requests_finished += 1
        elif reason is FinishReason.CANCELLED:
            self.counters.requests_cancelled += 1
        else:
            self.counters.requests_failed += 1

    def move_from_lost(self, request: Request, worker: Worker, most: int, now: float) -> Preempted | Finished:
        """A candidate's worker is lost: it goes back to the queue, unless it has lost more than `most` since
        its last token. Then it may well be what ends them, and it ends itself."""
        num_outputs = len(request.output_ids)
        request.losses = 1 if num_outputs > request.outputs_at_loss else request.losses + 1
        request.outputs_at_loss = num_outputs
        if request.losses <= most:
            return self.preempt(request, worker, "worker_lost", now, lost=True)
        name = worker.spec.worker_id
        detail = f"{request.losses} workers were lost under it without a token in between, {name} the last"
        return self.finish(request, FinishReason.ERROR, now, detail=detail)

    def lose(self, worker: Worker) -> None:
        """Forgets what a lost worker kept, and the tokens that its unanswered plans would have given."""
        worker.host.drop_all()
        self.history.lost(worker.spec.worker_id)
        for step in worker.in_flight:
            for request in step.requests:
                request.draining = 0


def next_expiry(request: Request) -> float | None:
    """When a live candidate runs out of time: its deadline or, before it is admitted, its queue timeout."""
    spec = request.spec
    limits = [] if spec.deadline is None else [spec.deadline]
    if spec.queue_timeout_s is not None and not request.was_admitted:
        limits.append(request.arrival + spec.queue_timeout_s)
    return min(limits, default=None)


def _timings(request: Request) -> Timings:
    # Of a restored request, the first token came in an earlier process: nobody knows how late.
    first = None if request.restored_tokens else request.first_token_at
    return Timings(
        queue_s=request.phase_s[Phase.QUEUE],
        prefill_s=request.phase_s[Phase.PREFILL],
        decode_s=request.phase_s[Phase.DECODE],
        preempted_s=request.phase_s[Phase.PREEMPTED],
        time_to_first_token_s=None if first is None else first - request.arrival,
    )
