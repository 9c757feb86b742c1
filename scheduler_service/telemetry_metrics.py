"""Owns the scheduler's metrics: histograms and counts that are told, and instruments that read the state."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping

from opentelemetry.sdk.resources import Resource

from scheduler_service import telemetry_readings as readings
from scheduler_service.call_counts import CallCounts
from scheduler_service.core.events import Finished, FinishReason
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.state import SchedulerState
from scheduler_service.core.step import StepPlan
from scheduler_service.plan_codec import StepTimings
from scheduler_service.telemetry_readings import Snapshots
from tidegate_telemetry import names
from tidegate_telemetry.exporting import Outlets, meter_provider
from tidegate_telemetry.histogram import Histograms
from tidegate_telemetry.observing import Values, observable

PROVIDER = "tidegate"
OPERATION = "text_completion"
MAX_TENANTS = 100
OTHER_TENANT = "other"


class Metrics:
    """What happened, counted. Told on the event loop; read from other threads."""

    def __init__(self, outlets: Outlets, resource: Resource) -> None:
        histograms = Histograms()
        self.provider = meter_provider(outlets, resource, histograms)
        self._meter = self.provider.get_meter(PROVIDER)
        self._duration = histograms.new(names.REQUEST_DURATION)
        self._first_token = histograms.new(names.TIME_TO_FIRST_TOKEN)
        self._per_token = histograms.new(names.TIME_PER_OUTPUT_TOKEN)
        self._queue = histograms.new(names.REQUEST_QUEUE)
        self._steps = _StepHistograms(histograms)
        self._workers: dict[str, _WorkerMeter] = {}
        self._refusals: Counter[str] = Counter()
        self._tenants: dict[str, list[int]] = {}  # prompt and output tokens
        observable(self._meter, names.REQUESTS_REFUSED, self._read_refusals)
        observable(self._meter, names.TENANT_TOKENS, self._read_tenants)
        observable(self._meter, names.TELEMETRY_DROPPED, outlets.drops.read)

    def request_refused(self, reason: str, num: int) -> None:
        """Counts requests that were not taken in."""
        self._refusals[reason] += num

    def request_finished(self, spec: RequestSpec, event: Finished) -> None:
        """Records a candidate that ended."""
        labels = (OPERATION, PROVIDER, spec.model)
        timings, usage = event.timings, event.usage
        total_s = timings.queue_s + timings.prefill_s + timings.decode_s + timings.preempted_s
        error = event.reason.value if event.reason is FinishReason.ERROR else ""
        self._duration.series(*labels, error).record(total_s)
        self._queue.series(spec.model).record(timings.queue_s)
        if timings.time_to_first_token_s is not None:  # None: it never came, or before a restart
            self._first_token.series(*labels).record(timings.time_to_first_token_s)
            if usage.output_tokens > 1:
                per_token_s = timings.decode_s / (usage.output_tokens - 1)
                self._per_token.series(*labels).record(per_token_s)
        tenant = spec.tenant
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            tenant = OTHER_TENANT
        tokens = self._tenants.setdefault(tenant, [0, 0])
        tokens[0] += usage.prompt_tokens
        tokens[1] += usage.output_tokens

    def plan_sent(self, worker_id: str, plan: StepPlan, prefill_tokens: int, now: float) -> None:
        """Records a plan; `prefill_tokens` of its tokens are no decodes."""
        meter = self._workers.get(worker_id)
        if meter is None:
            meter = self._workers[worker_id] = _WorkerMeter(worker_id, self._steps)
        meter.plan_sent(plan, prefill_tokens, now)

    def step_done(self, worker_id: str, timings: StepTimings, now: float) -> None:
        """Records the step of the worker's oldest plan that has no result."""
        meter = self._workers.get(worker_id)
        if meter is not None:
            meter.step_done(timings, now)

    def worker_lost(self, worker_id: str) -> None:
        """Its plans will have no results."""
        self._workers.pop(worker_id, None)

    def observe(
        self,
        read_state: Callable[[], SchedulerState],
        read_workers: Callable[[], Mapping[str, str]],
        calls: CallCounts,
    ) -> None:
        """Makes the instruments that read the state of the scheduler, of each worker by name, and counts of
        public RPCs."""
        snapshots = Snapshots(read_state)

        def of(read: readings.Reading) -> Callable[[], Values]:
            return lambda: [] if (state := snapshots.get()) is None else read(state)

        def value_of(field: str) -> Callable[[], Values]:
            return of(lambda state: [(getattr(state, field), {})])

        def count_of(field: str) -> Callable[[], Values]:
            return of(lambda state: [(getattr(state.counters, field), {})])

        observable(self._meter, names.REQUESTS_RUNNING, value_of("running_requests"))
        observable(self._meter, names.REQUESTS_WAITING, value_of("waiting_requests"))
        observable(self._meter, names.WAITING_TOKENS, value_of("waiting_tokens"))
        observable(self._meter, names.KV_BLOCKS, of(readings.kv_blocks))
        observable(self._meter, names.HOST_KV_BLOCKS, of(readings.host_kv_blocks))
        observable(self._meter, names.WORKER_STATE, lambda: readings.worker_states(read_workers()))
        observable(self._meter, names.REQUESTS, of(readings.outcomes))
        observable(self._meter, names.RPCS, lambda: readings.rpcs(calls.rows()))
        observable(self._meter, names.DELTAS, lambda: [(calls.deltas, {})])
        for field, metric in names.COUNTER_FIELDS.items():
            observable(self._meter, metric, count_of(field))

    def _read_refusals(self) -> Values:
        return [(count, {names.REASON: reason}) for reason, count in list(self._refusals.items())]

    def _read_tenants(self) -> Values:
        return [
            (tokens[i], {names.TENANT: tenant, names.KIND: kind})
            for tenant, tokens in list(self._tenants.items())
            for i, kind in enumerate(("prompt", "output"))
        ]


class _StepHistograms:
    """Those that have a series for each worker."""

    def __init__(self, histograms: Histograms) -> None:
        self.phases = [(name, histograms.new(metric)) for name, metric in names.STEP_PHASES.items()]
        self.gap = histograms.new(names.WORKER_GAP)
        self.round_trip = histograms.new(names.STEP_ROUND_TRIP)
        self.requests = histograms.new(names.STEP_REQUESTS_NUM)
        self.tokens = histograms.new(names.STEP_TOKENS)


class _WorkerMeter:
    """The step metrics of one worker, while it is connected."""

    def __init__(self, worker_id: str, steps: _StepHistograms) -> None:
        self._phases = [(f"{phase}_s", histogram.series(worker_id)) for phase, histogram in steps.phases]
        self._gap = steps.gap.series(worker_id)
        self._round_trip = steps.round_trip.series(worker_id)
        self._requests = steps.requests.series(worker_id)
        self._prefill = steps.tokens.series(worker_id, "prefill")
        self._decode = steps.tokens.series(worker_id, "decode")
        self._sent: deque[float] = deque()

    def plan_sent(self, plan: StepPlan, prefill_tokens: int, now: float) -> None:
        self._requests.record(len(plan.slots))
        decode_tokens = int(plan.num_tokens.sum()) - prefill_tokens
        if decode_tokens:
            self._decode.record(decode_tokens)
        if prefill_tokens:
            self._prefill.record(prefill_tokens)
        self._sent.append(now)

    def step_done(self, timings: StepTimings, now: float) -> None:
        for field, series in self._phases:
            series.record(getattr(timings, field))
        self._gap.record(timings.gap_s)
        if self._sent:
            self._round_trip.record(now - self._sent.popleft())
