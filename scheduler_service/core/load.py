"""Owns what a worker has before it, in milliseconds: for the choice between workers. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.core.worker import Worker


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker has before it, as long as it gets no plan and gives no result."""

    key: tuple[int, int, int]
    context: int  # tokens with KV of those that run
    ahead_ms: float  # prompts of theirs that are not computed
    in_flight_ms: float
    first_ms: float  # of that, the step that runs now
    begun: float  # when that began

    def wait_ms(self, now: float) -> float:
        """Until all in flight is done."""
        if not self.in_flight_ms:
            return 0.0
        elapsed_ms = max(0.0, 1e3 * (now - self.begun))
        return self.in_flight_ms - self.first_ms + abs(self.first_ms - elapsed_ms)


def load_of(worker: Worker) -> Load:
    """The worker's load, measured again only where it can have changed."""
    key = (worker.seq, len(worker.in_flight), worker.num_running)
    known = worker.load
    if known is None or known.key != key:
        known = worker.load = _measure(worker, key)
    return known


def _measure(worker: Worker, key: tuple[int, int, int]) -> Load:
    prices, rows = worker.step_time, worker.rows
    computed = worker.computed[rows]
    context = int(computed.sum())
    left = worker.total[rows] - computed
    num_ahead = int(left[left > 1].sum())
    steps = [prices.predict_ms(step.size) for step in worker.in_flight]
    begun = max(worker.in_flight[0].sent_at, worker.answered_at) if steps else 0.0
    return Load(
        key=key,
        context=context,
        ahead_ms=prices.cost.token_ms * num_ahead,
        in_flight_ms=sum(steps),
        first_ms=steps[0] if steps else 0.0,
        begun=begun,
    )
