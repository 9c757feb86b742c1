"""Owns what docs/tracing.md says of each span, event and attribute. A test holds it to the names."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate_telemetry import names as n


@dataclass(frozen=True, slots=True)
class SpanEntry:
    """A span: who makes it, whose child it is, what it covers, what it carries."""

    name: str
    process: str
    parent: str
    covers: str
    attributes: tuple[str, ...] = ()
    events: tuple[str, ...] = ()


REQUEST_SPAN = "text_completion {model}"
RPC_SPAN = "tidegate.inference.v1.InferenceService/{method}"
_REQUEST = (
    *(n.GEN_AI_OPERATION, n.GEN_AI_PROVIDER, n.GEN_AI_REQUEST_MODEL, n.GEN_AI_REQUEST_MAX_TOKENS),
    *(n.GEN_AI_REQUEST_TEMPERATURE, n.GEN_AI_REQUEST_TOP_P, n.GEN_AI_REQUEST_TOP_K),
    *(n.GEN_AI_REQUEST_CHOICE_COUNT, n.GEN_AI_RESPONSE_ID, n.GEN_AI_RESPONSE_FINISH_REASONS),
    *(n.GEN_AI_USAGE_INPUT_TOKENS, n.GEN_AI_USAGE_OUTPUT_TOKENS, n.GEN_AI_USAGE_CACHED_TOKENS),
    *(n.TENANT, n.PREEMPTIONS, n.ERROR_TYPE),
)
_STEP = (n.WORKER_ID, n.STEP_SEQ, n.STEP_ROWS, n.TOKENS)
_STAY = (n.REQUEST_ID, n.WORKER_ID, n.TOKENS, n.STEPS)

SPANS = (
    SpanEntry(
        RPC_SPAN,
        "scheduler",
        "the caller's span (W3C `traceparent`)",
        "One RPC of a client.",
        (n.RPC_SYSTEM, n.RPC_METHOD, n.RPC_STATUS_CODE, n.ERROR_TYPE),
    ),
    SpanEntry(
        REQUEST_SPAN,
        "scheduler",
        "the RPC's span",
        "A request, from its acceptance to the end of its last candidate. It links the steps of interest.",
        _REQUEST,
        (n.EVENT_ADMITTED, n.EVENT_FIRST_TOKEN, n.EVENT_PREEMPTED, n.EVENT_RESUMED, n.EVENT_FINISHED),
    ),
    SpanEntry(
        n.SPAN_QUEUE,
        "scheduler",
        "the request's span",
        "From arrival to the first place on a worker.",
        (n.CANDIDATE,),
        (n.EVENT_WAITING,),
    ),
    SpanEntry(
        n.SPAN_PREFILL,
        "scheduler",
        "the request's span",
        "On a worker, before the first token.",
        (n.CANDIDATE,),
        (n.EVENT_CHUNK,),
    ),
    SpanEntry(
        n.SPAN_DECODE,
        "scheduler",
        "the request's span",
        "On a worker, after the first token. After a preemption it begins with recomputing, shown as chunks.",
        (n.CANDIDATE,),
        (n.EVENT_CHUNK,),
    ),
    SpanEntry(
        n.SPAN_PREEMPTED,
        "scheduler",
        "the request's span",
        "Back in the queue: blocks or slots were needed, or the worker was lost or drained.",
        (n.CANDIDATE,),
        (n.EVENT_WAITING,),
    ),
    SpanEntry(
        n.SPAN_WORKER_PREFILL,
        "worker",
        "the request's span",
        "A stay in a slot, up to the end of the step that sampled its first token.",
        (*_STAY, n.CACHED_TOKENS),
    ),
    SpanEntry(
        n.SPAN_WORKER_DECODE,
        "worker",
        "the request's span",
        "The rest of that stay, up to the end of its last step.",
        _STAY,
    ),
    SpanEntry(
        n.SPAN_STEP,
        "scheduler",
        "none: a trace of its own",
        "A step, from the sending of its plan to its result. It links the request that had it recorded, and "
        "others that were on the worker, at most 8 in all.",
        (*_STEP, n.STEP_REQUESTS),
    ),
    SpanEntry(
        n.SPAN_STEP_EXECUTE,
        "worker",
        "`step`",
        "The worker's part of the step: inputs, forward, sampling.",
        (*_STEP, *n.PHASE_S.values()),
    ),
)

EVENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    n.EVENT_ADMITTED: (
        "A candidate got its first worker.",
        (n.CANDIDATE, n.WORKER_ID, n.CACHED_TOKENS),
    ),
    n.EVENT_FIRST_TOKEN: ("A candidate's first token came.", (n.CANDIDATE,)),
    n.EVENT_PREEMPTED: (
        "A candidate went back to the queue.",
        (n.CANDIDATE, n.WORKER_ID, n.PREEMPTION_REASON),
    ),
    n.EVENT_RESUMED: ("It got a worker again.", (n.CANDIDATE, n.WORKER_ID, n.CACHED_TOKENS)),
    n.EVENT_FINISHED: (
        "A candidate ended. Where there are several, with its usage.",
        (n.CANDIDATE, n.OUTCOME, n.PREEMPTIONS),
    ),
    n.EVENT_WAITING: (
        "What keeps it in the queue has changed. The looks that found the same are counted, not repeated.",
        (
            *(n.WAIT_REASON, n.WAIT_TEXT, n.WAIT_AHEAD, n.WAIT_LOOKS),
            *(n.WAIT_NEEDED, n.WAIT_RESERVE, n.WAIT_AVAILABLE, n.WAIT_LIMIT),
        ),
    ),
    n.EVENT_CHUNK: (
        "A step was sent that computes a part of its tokens.",
        (n.WORKER_ID, n.STEP_SEQ, n.TOKENS, n.COMPUTED_TOKENS, n.CACHED_TOKENS),
    ),
}

ATTRIBUTES: dict[str, str] = {
    n.REQUEST_ID: "The request and its candidate.",
    n.CANDIDATE: "Index of the candidate, where `n` is above 1.",
    n.WORKER_ID: "The scheduler's name of the worker.",
    n.TENANT: "The tenant.",
    n.PREEMPTION_REASON: "`blocks`, `slots`, `worker_lost` or `drain`.",
    n.PREEMPTIONS: "How often it went back to the queue.",
    n.CACHED_TOKENS: "Tokens whose KV was there when it got its place.",
    n.COMPUTED_TOKENS: "Tokens with KV once this step is done.",
    n.TOKENS: "Tokens computed: in the step, the chunk or the stay's part.",
    n.STEPS: "Steps that it was in.",
    n.STEP_SEQ: "Number of the plan on its stream.",
    n.STEP_ROWS: "Candidates in the step.",
    n.STEP_ROLE: "On a link: the `first`, the `slowest` or the `last` step of a stay on a worker.",
    n.STEP_REQUESTS: "Sampled requests that were on the worker.",
    n.WAIT_REASON: "Kinds of blockers over all workers, as `tidegate explain` names them.",
    n.WAIT_TEXT: "The same for people, with numbers.",
    n.WAIT_AHEAD: "Candidates before it in the queue.",
    n.WAIT_LOOKS: "How many looks found this reason.",
    n.WAIT_NEEDED: "What it needs of the first worker: blocks, or tokens of a step's budget.",
    n.WAIT_RESERVE: "Blocks that the watermark keeps free there.",
    n.WAIT_AVAILABLE: "Blocks that are free there.",
    n.WAIT_LIMIT: "The limit that it meets there.",
    **{key: f"Seconds of the step's part `{phase}`." for phase, key in n.PHASE_S.items()},
}
