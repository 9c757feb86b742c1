"""Owns what is seen of a simulation: each candidate's passage, samples of the state, and counts of all."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from scheduler_service.core.events import Preempted
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.step import StepPlan
from scheduler_service.simulation.modelled_worker import Candidate, ModelledWorker

_MOVES = ("worker_lost", "drain")


@dataclass(slots=True)
class Passage:
    """What became of one candidate. Times are seconds on the simulation's clock."""

    tenant: str
    arrival: float
    prompt_tokens: int
    first_token: float = 0.0
    last_token: float = 0.0
    end: float = 0.0
    output_tokens: int = 0
    preemptions: int = 0  # for want of blocks or slots
    moves: int = 0  # since its worker was lost or drained
    candidate: Candidate = ("", 0)
    worker: ModelledWorker | None = field(default=None, repr=False, compare=False)  # where it runs

    def note_token(self, now: float, gaps: array[float]) -> None:
        """A token came; `gaps` gets the time since the one before."""
        if self.output_tokens:
            gaps.append(now - self.last_token)
        else:
            self.first_token = now
        self.last_token = now
        self.output_tokens += 1

    def note_preempted(self, event: Preempted) -> None:
        """It went back to the queue."""
        if event.reason in _MOVES:
            self.moves += 1
        else:
            self.preemptions += 1


@dataclass(frozen=True, slots=True)
class Sample:
    """The state at one moment. Tokens are those planned since the sample before."""

    at_s: float
    kv_used: float  # share of all blocks
    waiting: int
    running: int
    prefill_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0


@dataclass(slots=True)
class Outcome:
    """All that was seen."""

    finished: list[Passage] = field(default_factory=list)  # by a stop or by length
    refused: int = 0
    failed: int = 0  # cancelled, out of time, or still there when nothing was going to happen any more
    gaps_s: array[float] = field(default_factory=lambda: array("f"))  # between the tokens of a candidate
    samples: list[Sample] = field(default_factory=list)
    end_s: float = 0.0
    steps: int = 0
    preemptions: int = 0
    moves: int = 0  # of candidates whose worker was lost or drained
    preemptions_kept: int = 0  # of these, those whose KV was kept in host memory
    swapped_blocks: int = 0  # copied to host memory or back
    prefix_hit_tokens: int = 0
    prefix_queried_tokens: int = 0
    busy: float = 0.0  # share of the workers' time in which they computed


class Sampler:
    """Looks at the state every so often, and adds a sample to an outcome."""

    def __init__(self, core: Scheduler, outcome: Outcome, every_s: float) -> None:
        self._core = core
        self._outcome = outcome
        self._every_s = every_s
        self._next = 0.0
        self._prefill_tokens = self._tokens = self._steps = 0

    def note_plan(self, plan: StepPlan) -> None:
        """A plan was made."""
        self._tokens += int(plan.num_tokens.sum())
        self._steps += 1

    def look(self, now: float) -> None:
        """Adds a sample if it is time for one."""
        if now < self._next:
            return
        self._next = now + self._every_s
        state = self._core.state(now)
        used = sum(worker.blocks_used for worker in state.workers)
        total = sum(worker.blocks_total for worker in state.workers)
        prefill = state.counters.prefill_tokens - self._prefill_tokens
        sample = Sample(
            at_s=now,
            kv_used=used / max(1, total),
            waiting=state.waiting_requests,
            running=state.running_requests,
            prefill_tokens=prefill,
            decode_tokens=self._tokens - prefill,
            steps=self._steps,
        )
        self._outcome.samples.append(sample)
        self._prefill_tokens, self._tokens, self._steps = state.counters.prefill_tokens, 0, 0

    def close(self, now: float) -> None:
        """Adds what the core counted."""
        outcome, counters = self._outcome, self._core.counters
        outcome.end_s = now
        outcome.preemptions = counters.preemptions
        outcome.moves = counters.requests_moved
        outcome.preemptions_kept = counters.preemptions_kept
        outcome.swapped_blocks = counters.swapped_out_blocks + counters.swapped_in_blocks
        outcome.prefix_hit_tokens = counters.prefix_hit_tokens
        outcome.prefix_queried_tokens = counters.prefix_queried_tokens
