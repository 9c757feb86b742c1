"""Owns playing a recording again: the same calls on a new core must give the same plans.

`python -m scheduler_service.replay FILE`, which `tidegate replay` runs.
"""

from __future__ import annotations

import sys
from base64 import b64decode
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import ConfigError
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.sampling import SamplingParams, StoppingParams
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.step import Int32, StepResult
from scheduler_service.core.worker import WorkerSpec
from scheduler_service.recording import outcome_name, plan_digest
from scheduler_service.recording_file import RecordingError, read_records

_VOCABULARY = (1 << 31) - 1  # of the numbers that stand for tokens
_HASH_KEY = b"replay"  # any will do: prefixes are only compared


class ReplayMismatchError(Exception):
    """A call gave something else than when it was recorded. The text says which, and what."""


@dataclass(frozen=True, slots=True)
class ReplaySummary:
    """What a recording has, all of which came out again."""

    calls: int
    plans: int
    accepted: int
    refused: int
    seconds: float  # between the first and the last call


def replay(path: Path) -> ReplaySummary:
    """Makes the recorded calls again, and checks each plan and each answer to a submit.

    Raises:
        ReplayMismatchError: something else came out.
        RecordingError: the file is no whole recording.
        OSError: it cannot be read.
    """
    stops: dict[str, set[int]] = defaultdict(set)
    for record in read_records(path):
        if record[0] == "apply":
            for request_id, name in record[7]:
                stops[request_id].add(name)
    player = _Player(stops)
    for number, record in enumerate(read_records(path), start=1):
        player.play(number, record)
    return player.summary()


class _Player:
    def __init__(self, stops: dict[str, set[int]]) -> None:
        self._stops = stops
        self._core = Scheduler(SchedulerConfig())
        self._counts: Counter[str] = Counter()
        self._times: list[float] = []

    def summary(self) -> ReplaySummary:
        counts = self._counts
        seconds = self._times[1] - self._times[0] if self._times else 0.0
        return ReplaySummary(counts["calls"], counts["plans"], counts["accepted"], counts["refused"], seconds)

    def play(self, number: int, record: list[Any]) -> None:
        call, *values = record
        self._counts["calls"] += 1
        if values and isinstance(values[0], float):
            self._times = [self._times[0] if self._times else values[0], values[0]]
        if call == "new":
            self._core = Scheduler(SchedulerConfig(**values[0], hash_key=_HASH_KEY))
        elif call in ("submit", "restore"):
            self._submit(number, call, *values)
        elif call == "plan":
            self._plan(number, *values)
        elif call == "apply":
            self._apply(*values)
        elif call == "add_worker":
            self._core.add_worker(replace(WorkerSpec(**values[1]), vocab_size=_VOCABULARY), values[0])
        else:
            self._other(call, values)

    def _submit(
        self,
        number: int,
        call: str,
        now: float,
        values: dict[str, Any],
        prompt: str,
        limits: list[int],
        outputs: list[list[int] | None],
        recorded: str,
    ) -> None:
        stop_ids = frozenset(self._stops.get(values["request_id"], ()))
        spec = RequestSpec(
            prompt_token_ids=np.frombuffer(b64decode(prompt), "<i4").astype(np.int32),
            sampling=SamplingParams(),
            stopping=StoppingParams(limits[0], limits[1], stop_token_ids=stop_ids),
            **values,
        )
        if call == "submit":
            outcome = outcome_name(self._core.submit(spec, now))
        else:
            outcome = outcome_name(self._core.restore(spec, outputs, now))
        self._counts["accepted" if outcome == "accepted" else "refused"] += 1
        if outcome != recorded:
            raise ReplayMismatchError(
                f"call {number}, {call} of {values['request_id']}: {outcome}; recorded: {recorded}"
            )

    def _plan(self, number: int, now: float, worker_id: str, recorded: int | None) -> None:
        plan = self._core.plan(worker_id, now)
        self._core.drain_events()
        self._counts["plans"] += plan is not None
        if plan_digest(plan) == recorded:
            return
        which = "no plan" if plan is None else f"plan {plan.seq} with {len(plan.slots)} rows"
        told = "none" if recorded is None else "another one"
        raise ReplayMismatchError(
            f"call {number}, plan of {worker_id} at {now:.6f}: {which}; recorded: {told}"
        )

    def _apply(
        self,
        now: float,
        worker_id: str,
        seq: int,
        slots: list[int],
        token_ids: list[int],
        failed: list[int],
        _stops: list[list[Any]],
        compute_ms: float,
    ) -> None:
        failed_rows = frozenset(failed)
        result = StepResult(seq, _column(slots), _column(token_ids), failed_rows, compute_ms=compute_ms)
        self._core.apply(worker_id, result, now)

    def _other(self, call: str, values: list[Any]) -> None:
        core = self._core
        if call == "cancel":
            core.cancel(values[1], values[0], values[2])
        elif call == "stop":
            core.stop(values[1], values[2], values[3], values[0])
        elif call == "expire":
            core.expire(values[0])
        elif call == "remove_worker":
            core.remove_worker(values[1], values[0])
        elif call == "drain_worker":
            core.drain_worker(values[1], values[0])
        elif call == "start_draining":
            core.start_draining()
        elif call == "reset_prefix_cache":
            core.reset_prefix_cache()
        else:
            raise RecordingError(f"the recording has a call {call!r}, which this version does not know")


def _column(values: list[int]) -> Int32:
    return np.array(values, np.int32)


def main() -> int:
    """Replays the file that the command line names. Exit status: 1 for a difference, 2 for a bad file."""
    if len(sys.argv) != 2:
        sys.stderr.write("error: name one recording: python -m scheduler_service.replay FILE\n")
        return 2
    try:
        summary = replay(Path(sys.argv[1]))
    except ReplayMismatchError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except (RecordingError, ConfigError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(
        f"identical: {summary.plans} plans of {summary.calls} calls in {summary.seconds:.1f} s; "
        f"{summary.accepted} requests accepted, {summary.refused} refused\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
