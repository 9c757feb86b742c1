"""Owns every name that telemetry uses: attributes, spans, events and metrics, with what each means.

docs/metrics.md and docs/tracing.md are made from it. GenAI names follow the OpenTelemetry conventions of May
2026.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# Spans
SPAN_QUEUE = "queue"
SPAN_PREFILL = "prefill"
SPAN_DECODE = "decode"
SPAN_PREEMPTED = "preempted"
SPAN_STEP = "step"
SPAN_STEP_EXECUTE = "step.execute"
SPAN_WORKER_PREFILL = "worker.prefill"
SPAN_WORKER_DECODE = "worker.decode"

# Span events
EVENT_ADMITTED = "admitted"
EVENT_FIRST_TOKEN = "first_token"  # noqa: S105
EVENT_PREEMPTED = "preempted"
EVENT_RESUMED = "resumed"
EVENT_FINISHED = "finished"
EVENT_WAITING = "waiting"
EVENT_CHUNK = "prefill_chunk"

# Attributes by convention
SERVICE_NAME = "service.name"
RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS_CODE = "rpc.status_code"
ERROR_TYPE = "error.type"
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K = "gen_ai.request.top_k"
GEN_AI_REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"

# Attributes of our own, on spans
REQUEST_ID = "tidegate.request.id"
CANDIDATE = "tidegate.candidate"
WORKER_ID = "tidegate.worker.id"
TENANT = "tidegate.tenant"
PREEMPTION_REASON = "tidegate.preemption.reason"
PREEMPTIONS = "tidegate.preemptions"
CACHED_TOKENS = "tidegate.cached_tokens"
COMPUTED_TOKENS = "tidegate.computed_tokens"
TOKENS = "tidegate.tokens"
STEPS = "tidegate.steps"
STEP_SEQ = "tidegate.step.seq"
STEP_ROWS = "tidegate.step.rows"
STEP_ROLE = "tidegate.step.role"
STEP_REQUESTS = "tidegate.step.requests"
WAIT_REASON = "tidegate.wait.reason"
WAIT_TEXT = "tidegate.wait.text"
WAIT_AHEAD = "tidegate.wait.ahead"
WAIT_LOOKS = "tidegate.wait.looks"
WAIT_NEEDED = "tidegate.wait.needed"
WAIT_RESERVE = "tidegate.wait.reserve"
WAIT_AVAILABLE = "tidegate.wait.available"
WAIT_LIMIT = "tidegate.wait.limit"
PHASE_S = {phase: f"tidegate.step.{phase}_s" for phase in ("wait", "prepare", "forward", "sampling", "gap")}
"""Seconds of a step's parts, as the worker measured them."""

# Labels of metrics, and the attributes of spans that have the same values
STATE = "state"
OUTCOME = "outcome"
REASON = "reason"
KIND = "kind"
PHASE = "phase"
SIGNAL = "signal"


class Instrument(Enum):
    """How a metric's value behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Service(Enum):
    """Who has a metric."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: names as OpenTelemetry has them. Bounds are a histogram's, in its unit."""

    name: str
    instrument: Instrument
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    service: Service = Service.SCHEDULER

    @property
    def prometheus_name(self) -> str:
        """The name that a scrape shows, without the suffixes of a histogram's series."""
        name = self.name.replace(".", "_")
        if self.unit == "s" and not name.endswith("_seconds"):
            name += "_seconds"
        if self.unit == "By" and not name.endswith("_bytes"):
            name += "_bytes"
        return f"{name}_total" if self.instrument is Instrument.COUNTER else name


_STEP_BOUNDS_S = tuple(1e-5 * 2**i for i in range(21))  # 10 us to 10 s
_COUNT_BOUNDS = tuple(float(2**i) for i in range(15))  # 1 to 16384
_GEN_AI = (GEN_AI_OPERATION, GEN_AI_PROVIDER, GEN_AI_REQUEST_MODEL)
_DURATION_BOUNDS_S = tuple(0.01 * 2**i for i in range(14))


def _histogram(
    name: str,
    unit: str,
    description: str,
    labels: tuple[str, ...],
    bounds: tuple[float, ...],
    service: Service = Service.SCHEDULER,
) -> Metric:
    return Metric(name, Instrument.HISTOGRAM, unit, description, labels, bounds, service)


def _gauge(
    name: str, unit: str, description: str, *labels: str, service: Service = Service.SCHEDULER
) -> Metric:
    return Metric(name, Instrument.GAUGE, unit, description, labels, service=service)


def _counter(
    name: str, unit: str, description: str, *labels: str, service: Service = Service.SCHEDULER
) -> Metric:
    return Metric(name, Instrument.COUNTER, unit, description, labels, service=service)


# Histograms of requests; bounds of gen_ai.* are the conventions'
REQUEST_DURATION = _histogram(
    "gen_ai.server.request.duration",
    "s",
    "From arrival to the end of a candidate.",
    (*_GEN_AI, ERROR_TYPE),
    _DURATION_BOUNDS_S,
)
TIME_TO_FIRST_TOKEN = _histogram(
    "gen_ai.server.time_to_first_token",
    "s",
    "From arrival to a candidate's first token.",
    _GEN_AI,
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Time of decoding for each token after a candidate's first one, preemptions left out.",
    _GEN_AI,
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
REQUEST_QUEUE = _histogram(
    "tidegate_request_queue_seconds",
    "s",
    "From arrival to a candidate's first place on a worker, or to its end if it got none.",
    (GEN_AI_REQUEST_MODEL,),
    (0.001, *_DURATION_BOUNDS_S),
)

# Histograms of steps
STEP_PHASES = {
    phase: _histogram(f"tidegate_step_{phase}_seconds", "s", description, (WORKER_ID,), _STEP_BOUNDS_S)
    for phase, description in (
        ("wait", "From a plan's arrival at the worker to the start of its step."),
        ("prepare", "Slot tables and inputs of a step."),
        ("forward", "The forward of a step."),
        ("sampling", "The sampling of a step."),
    )
}
STEP_ROUND_TRIP = _histogram(
    "tidegate_step_round_trip_seconds",
    "s",
    "From the sending of a plan to its result, as the scheduler sees it.",
    (WORKER_ID,),
    _STEP_BOUNDS_S,
)
WORKER_GAP = _histogram(
    "tidegate_worker_gap_seconds",
    "s",
    "Between two steps: how long the worker had nothing to do.",
    (WORKER_ID,),
    _STEP_BOUNDS_S,
)
STEP_REQUESTS_NUM = _histogram(
    "tidegate_step_requests", "{request}", "Batch size: candidates in a step.", (WORKER_ID,), _COUNT_BOUNDS
)
STEP_TOKENS = _histogram(
    "tidegate_step_tokens",
    "{token}",
    "Tokens in a step by kind: prefill or decode.",
    (WORKER_ID, KIND),
    _COUNT_BOUNDS,
)

# Gauges of the scheduler
REQUESTS_RUNNING = _gauge("tidegate_requests_running", "{request}", "Candidates on workers.")
REQUESTS_WAITING = _gauge(
    "tidegate_requests_waiting", "{request}", "Candidates in the queue, preempted ones among them."
)
WAITING_TOKENS = _gauge(
    "tidegate_waiting_tokens", "{token}", "Tokens to compute for those that wait, less known prefix hits."
)
KV_BLOCKS = _gauge(
    "tidegate_kv_blocks", "{block}", "KV blocks by state: used, cached, free.", WORKER_ID, STATE
)
HOST_KV_BLOCKS = _gauge(
    "tidegate_host_kv_blocks",
    "{block}",
    "Blocks in host memory by state: used for KV of preempted candidates, free. None of workers without any.",
    WORKER_ID,
    STATE,
)
WORKER_STATE = _gauge(
    "tidegate_worker_state",
    "",
    "1 for the state that a worker is in: connecting, ready or draining; else 0.",
    WORKER_ID,
    STATE,
)

# Counters of the scheduler
REQUESTS = _counter(
    "tidegate_requests",
    "{request}",
    "Candidates by what became of them: accepted, refused, finished, cancelled, failed.",
    OUTCOME,
)
REQUESTS_REFUSED = _counter(
    "tidegate_requests_refused",
    "{request}",
    "Requests that were not taken in, by reason; candidates, where a frontend turned them away.",
    REASON,
)
RPCS = _counter(
    "tidegate_rpcs",
    "{rpc}",
    "Public RPCs that have ended, of all frontends, by method and status; not those that lacked a token.",
    RPC_METHOD,
    RPC_STATUS_CODE,
)
DELTAS = _counter(
    "tidegate_deltas",
    "{message}",
    "Deltas that were written to clients, of all frontends; each has the tokens of one step or more.",
)
TENANT_TOKENS = _counter(
    "tidegate_tenant_tokens",
    "{token}",
    "Tokens of candidates that ended, by kind: prompt or output. Tenants beyond the first 100 are `other`.",
    TENANT,
    KIND,
)
COUNTER_FIELDS = {
    "preemptions": _counter(
        "tidegate_preemptions", "{preemption}", "Candidates put back for want of blocks or slots."
    ),
    "preemptions_kept": _counter(
        "tidegate_preemptions_kept", "{preemption}", "Those of which KV was kept in host memory."
    ),
    "swapped_out_blocks": _counter(
        "tidegate_swapped_out_blocks", "{block}", "KV blocks that were copied to host memory."
    ),
    "swapped_in_blocks": _counter(
        "tidegate_swapped_in_blocks", "{block}", "KV blocks that were copied back from host memory."
    ),
    "requests_moved": _counter(
        "tidegate_requests_moved", "{request}", "Candidates put back since their worker was lost or drained."
    ),
    "prefix_queried_tokens": _counter(
        "tidegate_prefix_cache_queries_tokens", "{token}", "Tokens that were looked up in the prefix cache."
    ),
    "prefix_hit_tokens": _counter(
        "tidegate_prefix_cache_hits_tokens", "{token}", "Tokens that the prefix cache had."
    ),
    "prefill_tokens": _counter("tidegate_prefill_tokens", "{token}", "Tokens of prompts that were planned."),
    "output_tokens": _counter("tidegate_output_tokens", "{token}", "Tokens that were sampled."),
    "steps": _counter("tidegate_steps", "{step}", "Plans that were sent."),
}
"""By the field of the scheduler's counters that each reads."""

# Of both services
TELEMETRY_DROPPED = _counter(
    "tidegate_telemetry_dropped",
    "{item}",
    "Spans, and batches of metrics, that did not reach their receiver: queue_full or export_failed.",
    SIGNAL,
    REASON,
    service=Service.BOTH,
)

# Of a worker
EXECUTOR_PHASES = _histogram(
    "tidegate_executor_phase_seconds",
    "s",
    "Parts of a step: wait, prepare, forward, sampling.",
    (PHASE,),
    _STEP_BOUNDS_S,
    Service.WORKER,
)
EXECUTOR_GAP = _histogram(
    "tidegate_executor_gap_seconds",
    "s",
    "Between two steps: how long there was nothing to do.",
    (),
    _STEP_BOUNDS_S,
    Service.WORKER,
)
EXECUTOR_ROWS = _histogram(
    "tidegate_executor_rows", "{row}", "Rows of a step.", (), _COUNT_BOUNDS, Service.WORKER
)
EXECUTOR_STEPS = _counter(
    "tidegate_executor_steps", "{step}", "Steps that were executed.", service=Service.WORKER
)
EXECUTOR_TOKENS = _counter(
    "tidegate_executor_tokens", "{token}", "Tokens by kind: computed, sampled.", KIND, service=Service.WORKER
)
EXECUTOR_PHASE = _gauge(
    "tidegate_executor_state",
    "",
    "1 for what the worker is doing: loading, warming_up, ready or draining; else 0.",
    STATE,
    service=Service.WORKER,
)
EXECUTOR_KV = _gauge("tidegate_executor_kv_memory", "By", "Memory of all KV blocks.", service=Service.WORKER)

METRICS: tuple[Metric, ...] = (
    *(value for value in list(globals().values()) if isinstance(value, Metric)),
    *STEP_PHASES.values(),
    *COUNTER_FIELDS.values(),
)
"""Every metric."""
