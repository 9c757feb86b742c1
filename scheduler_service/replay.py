"""Owns playing a recording again: the same calls on a new core must give the same plans.

`python -m scheduler_service.simulation.replay_command FILE`, which `tidegate replay` runs, is its command.
"""

from __future__ import annotations

from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.events import Event
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.sampling import SamplingParams, StoppingParams
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.step import Int32, StepPlan, StepResult
from scheduler_service.core.worker import WorkerSpec
from scheduler_service.recording import outcome_name, plan_digest
from scheduler_service.recording_file import OWN_VERSION, Record, RecordingError, read_records, recorded_by

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

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
    unfinished: int  # when the recording ended
    seconds: float  # between the first and the last call


def replay(path: Path, partial: bool = False) -> ReplaySummary:
    """Makes the recorded calls again, and checks each plan and each answer to a submit. `partial`: plays a
    file that is cut or damaged up to there.

    Raises:
        ReplayMismatchError: something else came out.
        RecordingError: the file is no recording, or no whole one.
        OSError: it cannot be read.
    """
    player = Player(read_stops(path, partial))
    with naming_versions(path):
        for number, record in enumerate(read_records(path, partial), start=1):
            player.play(number, record)
    return player.summary()


@contextmanager
def naming_versions(path: Path) -> Iterator[None]:
    """Adds to a ReplayMismatchError that another version wrote the recording, where one did."""
    try:
        yield
    except ReplayMismatchError as difference:
        written_by = recorded_by(path)
        if written_by == OWN_VERSION:
            raise
        raise ReplayMismatchError(
            f"{difference}; the recording is by version {written_by} and this is {OWN_VERSION}, which may "
            "decide otherwise: play it with the version that wrote it"
        ) from None


def read_stops(path: Path, partial: bool = False) -> dict[str, set[int]]:
    """Tokens at which each request of a recording was stopped."""
    stops: dict[str, set[int]] = defaultdict(set)
    for record in read_records(path, partial):
        if record[0] == "apply":
            for request_id, name in record[7]:
                stops[request_id].add(name)
    return stops


class Player:
    """Makes recorded calls on a new core. The methods see_*() are for who wants to look on."""

    def __init__(self, stops: dict[str, set[int]]) -> None:
        self.core = Scheduler(SchedulerConfig())
        self._stops = stops
        self._counts: Counter[str] = Counter()
        self._times: list[float] = []

    def see_core(self, config: SchedulerConfig) -> None:
        """A core began."""

    def see_worker(self, spec: WorkerSpec, now: float) -> None:
        """A worker was added."""

    def see_request(
        self, spec: RequestSpec, outputs: list[list[int] | None], accepted: bool, now: float
    ) -> None:
        """A request came; `outputs` are what its candidates had already, None for those that had ended."""

    def see_call(self, call: str, name: str, index: int | None, now: float) -> None:
        """A cancel, stop, remove_worker or drain_worker is about to be made."""

    def see_plan(self, worker_id: str, plan: StepPlan, now: float) -> None:
        """A plan was made."""

    def see_result(self, worker_id: str, now: float) -> None:
        """A step was answered."""

    def see_events(self, events: Iterable[Event], now: float) -> None:
        """Something became of requests."""

    def summary(self) -> ReplaySummary:
        """What was played."""
        counts = self._counts
        first, last = self._times or (0.0, 0.0)
        state = self.core.state(last)
        return ReplaySummary(
            calls=counts["calls"],
            plans=counts["plans"],
            accepted=counts["accepted"],
            refused=counts["refused"],
            unfinished=state.waiting_requests + state.running_requests,
            seconds=last - first,
        )

    def play(self, number: int, record: Record) -> None:
        """Makes a call; `number` counts them. Raises ReplayMismatchError and RecordingError."""
        call, *values = record
        self._counts["calls"] += 1
        if values and isinstance(values[0], float):
            self._times = [self._times[0] if self._times else values[0], values[0]]
        if call == "new":
            _check_known(SchedulerConfig, values[0])
            config = SchedulerConfig(**values[0], hash_key=_HASH_KEY)
            self.core = Scheduler(config)
            self.see_core(config)
        elif call in ("submit", "restore"):
            self._submit(number, call, *values)
        elif call == "plan":
            self._plan(number, *values)
        elif call == "apply":
            self._apply(*values)
        elif call == "add_worker":
            _check_known(WorkerSpec, values[1])
            spec = replace(WorkerSpec(**values[1]), vocab_size=_VOCABULARY)
            self.core.add_worker(spec, values[0])
            self.see_worker(spec, values[0])
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
        _check_known(RequestSpec, values)
        stop_ids = frozenset(self._stops.get(values["request_id"], ()))
        spec = RequestSpec(
            prompt_token_ids=np.frombuffer(b64decode(prompt), "<i4").astype(np.int32),
            sampling=SamplingParams(),
            stopping=StoppingParams(limits[0], limits[1], stop_token_ids=stop_ids),
            **values,
        )
        if call == "submit":
            outcome = outcome_name(self.core.submit(spec, now))
        else:
            outcome = outcome_name(self.core.restore(spec, outputs, now))
        self._counts["accepted" if outcome == "accepted" else "refused"] += 1
        self.see_request(spec, outputs, outcome == "accepted", now)
        if outcome != recorded:
            raise ReplayMismatchError(
                f"call {number}, {call} of {values['request_id']}: {outcome}; recorded: {recorded}"
            )

    def _plan(self, number: int, now: float, worker_id: str, recorded: int | None) -> None:
        plan = self.core.plan(worker_id, now)
        self._counts["plans"] += plan is not None
        if plan_digest(plan) == recorded:
            if plan is not None:
                self.see_plan(worker_id, plan, now)
            self.see_events(self.core.drain_events(), now)
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
        self.see_result(worker_id, now)
        self.see_events(self.core.apply(worker_id, result, now), now)

    def _other(self, call: str, values: list[Any]) -> None:
        core = self.core
        if call in ("cancel", "stop", "remove_worker", "drain_worker"):
            now, name, *rest = values
            self.see_call(call, name, rest[0] if rest else None, now)
            if call == "cancel":
                events = core.cancel(name, now, rest[0])
            elif call == "stop":
                events = core.stop(name, rest[0], rest[1], now)
            elif call == "remove_worker":
                events = core.remove_worker(name, now)
            else:
                events = core.drain_worker(name, now)
            self.see_events(events, now)
        elif call == "expire":
            self.see_events(core.expire(values[0]), values[0])
        elif call == "start_draining":
            core.start_draining()
        elif call == "reset_prefix_cache":
            core.reset_prefix_cache()
        else:
            raise RecordingError(f"the recording has a call {call!r}, which this version does not know")


def _check_known(kind: type[DataclassInstance], values: dict[str, Any]) -> None:
    unknown = sorted(values.keys() - {each.name for each in fields(kind)})
    if unknown:
        raise RecordingError(
            f"the recording has values of a {kind.__name__} that this version does not know: "
            f"{', '.join(unknown)}; play it with the version that wrote it"
        )


def _column(values: list[int]) -> Int32:
    return np.array(values, np.int32)
