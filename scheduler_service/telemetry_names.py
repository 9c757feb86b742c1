"""Owns every name that telemetry uses. GenAI names follow the OpenTelemetry conventions of May 2026."""

from __future__ import annotations

# Spans
SPAN_QUEUE = "queue"
SPAN_PREFILL = "prefill"
SPAN_DECODE = "decode"
SPAN_PREEMPTED = "preempted"

# Span events
EVENT_ADMITTED = "admitted"
EVENT_FIRST_TOKEN = "first_token"  # noqa: S105
EVENT_PREEMPTED = "preempted"
EVENT_RESUMED = "resumed"
EVENT_FINISHED = "finished"

# Attributes by convention
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

# Attributes of our own
CANDIDATE = "tidegate.candidate"
WORKER_ID = "tidegate.worker.id"
PREEMPTION_REASON = "tidegate.preemption.reason"
PREEMPTIONS = "tidegate.preemptions"
CACHED_TOKENS = "tidegate.cached_tokens"
STATE = "state"
OUTCOME = "outcome"

# Gauges
REQUESTS_RUNNING = "tidegate_requests_running"
REQUESTS_WAITING = "tidegate_requests_waiting"
KV_BLOCKS = "tidegate_kv_blocks"

# Counters
REQUESTS = "tidegate_requests"
COUNTER_FIELDS = {
    "tidegate_preemptions": ("preemptions", "{preemption}"),
    "tidegate_requests_moved": ("requests_moved", "{request}"),
    "tidegate_prefix_cache_queries_tokens": ("prefix_queried_tokens", "{token}"),
    "tidegate_prefix_cache_hits_tokens": ("prefix_hit_tokens", "{token}"),
    "tidegate_prefill_tokens": ("prefill_tokens", "{token}"),
    "tidegate_output_tokens": ("output_tokens", "{token}"),
    "tidegate_steps": ("steps", "{step}"),
}
"""Counters by name: the field of the scheduler's counters that each reads, and its unit."""

# Histograms, in seconds
REQUEST_DURATION = "gen_ai.server.request.duration"
TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"  # noqa: S105
TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"  # noqa: S105
STEP_FORWARD = "tidegate_step_forward_seconds"
STEP_SAMPLING = "tidegate_step_sampling_seconds"
WORKER_GAP = "tidegate_worker_gap_seconds"

_STEP_BOUNDS_S = [1e-5 * 2**i for i in range(20)]
HISTOGRAM_BOUNDS_S = {
    REQUEST_DURATION: [0.01 * 2**i for i in range(14)],
    TIME_TO_FIRST_TOKEN: [
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08),
        *(0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    ],
    TIME_PER_OUTPUT_TOKEN: [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5],
    STEP_FORWARD: _STEP_BOUNDS_S,
    STEP_SAMPLING: _STEP_BOUNDS_S,
    WORKER_GAP: _STEP_BOUNDS_S,
}
"""Histograms by name, and their bucket bounds; those of gen_ai.* are the conventions'."""
