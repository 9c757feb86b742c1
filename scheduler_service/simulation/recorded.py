"""Owns what a recording tells of its run: its figures, its load to be run again, and how long its steps took.

The recording is played while that is read, so every plan of it is checked on the way.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.events import Event, Finished, FinishReason, Preempted, TokenBatch
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.step import StepPlan
from scheduler_service.core.worker import WorkerSpec
from scheduler_service.recording_file import Record, RecordingError
from scheduler_service.replay import Player
from scheduler_service.simulation.load import Happening
from scheduler_service.simulation.modelled_worker import (
    SCRIPT_END,
    SCRIPT_GOES_ON,
    Candidate,
    ModelledWorker,
    ScriptedWorker,
    Size,
    StepSizes,
    StepTime,
    copies_s,
)
from scheduler_service.simulation.outcome import Outcome, Passage, Sampler

Floats = NDArray[np.float64]

_SELF_ENDED = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """Requests and happenings of a recording, from second 0 on."""

    arrivals: list[float]
    requests: list[RequestSpec]
    scripts: dict[Candidate, list[int]]
    happenings: list[Happening]
    ratios: list[float]  # of the time of steps to what the formula says

    def request(self, index: int, max_tokens: int) -> RequestSpec:
        """The request that came then. It asks for what it asked for."""
        return self.requests[index]

    def worker(self, spec: WorkerSpec, step_time: StepTime) -> ModelledWorker:
        """A worker that gives the recorded tokens."""
        return ScriptedWorker(spec, step_time, self.scripts, self.ratios)


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """The formula that fits the recorded steps best, and how well it does."""

    step_time: StepTime
    ratios: list[float]  # of the time of each step to what the formula says
    mean_error: float  # share of the mean step

    @classmethod
    def of(cls, sizes: list[Size], seconds: list[float]) -> StepTimeFit:
        """By least squares, without negative coefficients. Raises RecordingError where there are no steps."""
        if not sizes:
            raise RecordingError("no step of the recording was answered, so there is no time to go by")
        columns = np.column_stack((np.ones(len(sizes)), np.array(sizes, np.float64)))  # [steps, 4]
        times = np.array(seconds)
        coefficients = _fit(columns, times)
        fitted = np.maximum(columns @ coefficients, 1e-9)
        error = float(np.abs(fitted - times).mean() / fitted.mean())
        base, token, kv_token, pair = coefficients.tolist()
        return cls(StepTime(base, token, kv_token, pair), (times / fitted).tolist(), error)


def _fit(columns: Floats, times: Floats) -> Floats:
    """Leaves out the column with the most negative coefficient until none is left."""
    scale = np.maximum(columns.max(axis=0), 1.0)
    kept = list(range(columns.shape[1]))
    while True:
        found = np.linalg.lstsq(columns[:, kept] / scale[kept], times, rcond=None)[0]
        if found.min() >= 0 or len(kept) == 1:
            coefficients = np.zeros(columns.shape[1])
            coefficients[kept] = np.maximum(found, 0.0) / scale[kept]
            return coefficients
        del kept[int(found.argmin())]


@dataclass(slots=True)
class _Output:
    """What a candidate gave, and how it ended."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    reason: FinishReason | None = None
    by_text: bool = False


class RecordedRun(Player):
    """Plays a recording and keeps what it sees. Requests get names of its own, since names come twice."""

    def __init__(self, stops: dict[str, set[int]]) -> None:
        super().__init__(stops)
        self.config: SchedulerConfig | None = None
        """Of the first core."""
        self.outcome = Outcome()
        self._start: float | None = None
        self._sampler = Sampler(self.core, self.outcome, 1.0)
        self._names: dict[str, str] = {}  # ours of the last request of a name
        self._requests: list[tuple[float, RequestSpec]] = []
        self._passages: dict[Candidate, Passage] = {}
        self._outputs: dict[Candidate, _Output] = {}
        self._happenings: list[Happening] = []
        self._sizes: dict[str, StepSizes] = {}
        self._specs: dict[str, WorkerSpec] = {}
        self._sent: dict[str, deque[tuple[float, Size, float]]] = {}  # when, how large, seconds of copies
        self._ended: dict[str, float] = {}  # when each worker's last result came
        self._step_sizes: list[Size] = []
        self._step_s: list[float] = []
        self._copies_s: list[float] = []  # of these

    def _at(self, now: float) -> float:
        """Seconds since the first call."""
        if self._start is None:
            self._start = now
        return now - self._start

    def see_core(self, config: SchedulerConfig) -> None:
        """See Player."""
        self.config = self.config or config
        self._sampler = Sampler(self.core, self.outcome, 1.0)

    def see_worker(self, spec: WorkerSpec, now: float) -> None:
        """See Player."""
        name = spec.worker_id
        self._specs[name] = spec
        self._sizes[name] = StepSizes(spec.num_slots)
        self._sent[name] = deque()
        self._ended[name] = now
        self._happenings.append(Happening(self._at(now), "add_worker", name, worker=spec))

    def see_request(
        self, spec: RequestSpec, outputs: list[list[int] | None], accepted: bool, now: float
    ) -> None:
        """See Player. One that had begun before is taken as one that begins."""
        name = f"{len(self._requests)}/{spec.request_id}"
        at_s = self._at(now)
        self._requests.append((at_s, replace(spec, request_id=name)))
        if not accepted:
            self.outcome.refused += spec.n
            return
        self._names[spec.request_id] = name
        for index, token_ids in enumerate(outputs):
            prompt_tokens = len(spec.prompt_token_ids)
            self._passages[name, index] = Passage(spec.tenant, at_s, prompt_tokens, candidate=(name, index))
            self._outputs[name, index] = _Output(array("i", token_ids or []))

    def see_call(self, call: str, name: str, index: int | None, now: float) -> None:
        """See Player."""
        if call == "stop":
            self._outputs[self._names[name], index or 0].by_text = True
        elif call == "cancel":
            self._happenings.append(Happening(self._at(now), call, self._names.get(name, name), index))
        else:
            self._happenings.append(Happening(self._at(now), call, name))

    def see_plan(self, worker_id: str, plan: StepPlan, now: float) -> None:
        """See Player."""
        for admission in plan.admitted:
            self._sizes[worker_id].admit(admission)
        size, _ = self._sizes[worker_id].advance(plan)
        self._sent[worker_id].append((now, size, copies_s(plan, self._specs[worker_id])))
        self.outcome.steps += 1
        self._sampler.note_plan(plan)
        self._sampler.look(self._at(now))

    def see_result(self, worker_id: str, now: float) -> None:
        """See Player. A step began when it was there and the one before it had ended."""
        sent, size, copies = self._sent[worker_id].popleft()
        self._step_sizes.append(size)
        self._copies_s.append(copies)
        self._step_s.append(now - max(sent, self._ended[worker_id]))
        self._ended[worker_id] = now

    def see_events(self, events: Iterable[Event], now: float) -> None:
        """See Player."""
        at_s = self._at(now)
        for event in events:
            if isinstance(event, TokenBatch):
                for candidate, token_id in zip(event.candidates, event.token_ids, strict=True):
                    name = self._names[candidate.request_id], candidate.index
                    self._passages[name].note_token(at_s, self.outcome.gaps_s)
                    self._outputs[name].tokens.append(token_id)
            elif isinstance(event, Preempted):
                self._passages[self._names[event.request_id], event.index].note_preempted(event)
            elif isinstance(event, Finished):
                self._see_end(event, at_s)

    def _see_end(self, event: Finished, at_s: float) -> None:
        name = self._names[event.request_id], event.index
        passage = self._passages[name]
        passage.end = at_s
        self._outputs[name].reason = event.reason
        if event.reason in _SELF_ENDED:
            self.outcome.finished.append(passage)
        else:
            self.outcome.failed += 1

    @property
    def unfinished(self) -> frozenset[Candidate]:
        """The candidates that had not ended when the recording did."""
        return frozenset(name for name, output in self._outputs.items() if output.reason is None)

    @property
    def _end(self) -> float:
        """When the last result came."""
        return max((self._at(now) for now in self._ended.values()), default=0.0)

    def close(self) -> None:
        """The recording is over."""
        self._sampler.close(self._end)
        self.outcome.failed += len(self.unfinished)
        if self._end:
            self.outcome.busy = sum(self._step_s) / (self._end * len(self._sizes))

    def fit(self) -> StepTimeFit:
        """How long steps took by their size. Copies to host memory and back have a price of their own.

        Raises:
            RecordingError: no step was answered.
        """
        times = [max(0.0, step - copies) for step, copies in zip(self._step_s, self._copies_s, strict=True)]
        return StepTimeFit.of(self._step_sizes, times)

    def load(self, ratios: list[float]) -> RecordedLoad:
        """What came, to be run again by workers whose steps take one of `ratios` times what a formula says.
        What was done to workers after the last result belongs to the recording's end, and is left out."""
        lengths = [len(each.tokens) for each in self._outputs.values() if each.reason in _SELF_ENDED]
        usual = max(1, round(float(np.mean(lengths)))) if lengths else 1
        scripts: dict[Candidate, list[int]] = {}
        for _, spec in self._requests:
            for index in range(spec.n):
                output = self._outputs.get((spec.request_id, index))
                scripts[spec.request_id, index] = _script(output, min(usual, spec.stopping.max_tokens))
        return RecordedLoad(
            arrivals=[at_s for at_s, _ in self._requests],
            requests=[self._again(spec) for _, spec in self._requests],
            scripts=scripts,
            happenings=[each for each in self._happenings if each.worker or each.at_s <= self._end],
            ratios=ratios,
        )

    def _again(self, spec: RequestSpec) -> RequestSpec:
        """The request on the load's clock, able to end by its script. It comes when it was submitted."""
        stop_ids = spec.stopping.stop_token_ids | {SCRIPT_END}
        stopping = replace(spec.stopping, stop_token_ids=stop_ids)
        deadline = None if spec.deadline is None else self._at(spec.deadline)
        return replace(spec, stopping=stopping, arrival=None, deadline=deadline)


def _script(output: _Output | None, usual: int) -> list[int]:
    """Tokens that a candidate gives. One that was cut off from outside goes on; one that was stopped by its
    text, or had not ended, ends where it did; one that was refused has a usual length."""
    if output is None:
        return [SCRIPT_GOES_ON] * (usual - 1) + [SCRIPT_END]
    tokens = output.tokens.tolist()
    if output.reason in (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.QUEUE_TIMEOUT):
        return tokens
    if output.by_text or output.reason not in _SELF_ENDED:
        return [*tokens[:-1], SCRIPT_END]
    return tokens


def read_run(records: Iterable[Record], stops: dict[str, set[int]]) -> RecordedRun:
    """Plays records. Raises what Player.play() does."""
    run = RecordedRun(stops)
    for number, record in enumerate(records, start=1):
        run.play(number, record)
    run.close()
    return run
