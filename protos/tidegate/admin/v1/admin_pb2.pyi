from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATUS_UNSPECIFIED: _ClassVar[WorkerStatus]
    WORKER_STATUS_CONNECTING: _ClassVar[WorkerStatus]
    WORKER_STATUS_READY: _ClassVar[WorkerStatus]
    WORKER_STATUS_DRAINING: _ClassVar[WorkerStatus]

class RequestStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATUS_UNSPECIFIED: _ClassVar[RequestStatus]
    REQUEST_STATUS_WAITING: _ClassVar[RequestStatus]
    REQUEST_STATUS_RUNNING: _ClassVar[RequestStatus]
    REQUEST_STATUS_PREEMPTED: _ClassVar[RequestStatus]
    REQUEST_STATUS_FINISHED: _ClassVar[RequestStatus]

class BlockerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCKER_KIND_UNSPECIFIED: _ClassVar[BlockerKind]
    BLOCKER_KIND_NO_WORKER: _ClassVar[BlockerKind]
    BLOCKER_KIND_SIBLING_PROMPT: _ClassVar[BlockerKind]
    BLOCKER_KIND_TOKENS_IN_FLIGHT: _ClassVar[BlockerKind]
    BLOCKER_KIND_TOO_SMALL: _ClassVar[BlockerKind]
    BLOCKER_KIND_SLOTS: _ClassVar[BlockerKind]
    BLOCKER_KIND_BUDGET: _ClassVar[BlockerKind]
    BLOCKER_KIND_BLOCKS: _ClassVar[BlockerKind]
    BLOCKER_KIND_PREFIX_COMING: _ClassVar[BlockerKind]
    BLOCKER_KIND_BETTER_ELSEWHERE: _ClassVar[BlockerKind]
    BLOCKER_KIND_QUEUE_ORDER: _ClassVar[BlockerKind]
    BLOCKER_KIND_NEXT_PLAN: _ClassVar[BlockerKind]
    BLOCKER_KIND_KEPT_ELSEWHERE: _ClassVar[BlockerKind]
    BLOCKER_KIND_FORECAST: _ClassVar[BlockerKind]
WORKER_STATUS_UNSPECIFIED: WorkerStatus
WORKER_STATUS_CONNECTING: WorkerStatus
WORKER_STATUS_READY: WorkerStatus
WORKER_STATUS_DRAINING: WorkerStatus
REQUEST_STATUS_UNSPECIFIED: RequestStatus
REQUEST_STATUS_WAITING: RequestStatus
REQUEST_STATUS_RUNNING: RequestStatus
REQUEST_STATUS_PREEMPTED: RequestStatus
REQUEST_STATUS_FINISHED: RequestStatus
BLOCKER_KIND_UNSPECIFIED: BlockerKind
BLOCKER_KIND_NO_WORKER: BlockerKind
BLOCKER_KIND_SIBLING_PROMPT: BlockerKind
BLOCKER_KIND_TOKENS_IN_FLIGHT: BlockerKind
BLOCKER_KIND_TOO_SMALL: BlockerKind
BLOCKER_KIND_SLOTS: BlockerKind
BLOCKER_KIND_BUDGET: BlockerKind
BLOCKER_KIND_BLOCKS: BlockerKind
BLOCKER_KIND_PREFIX_COMING: BlockerKind
BLOCKER_KIND_BETTER_ELSEWHERE: BlockerKind
BLOCKER_KIND_QUEUE_ORDER: BlockerKind
BLOCKER_KIND_NEXT_PLAN: BlockerKind
BLOCKER_KIND_KEPT_ELSEWHERE: BlockerKind
BLOCKER_KIND_FORECAST: BlockerKind

class GetStateRequest(_message.Message):
    __slots__ = ("verify",)
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    verify: bool
    def __init__(self, verify: _Optional[bool] = ...) -> None: ...

class GetStateResponse(_message.Message):
    __slots__ = ("version", "draining", "workers", "waiting_requests", "running_requests", "waiting_tokens", "counters", "violations")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    version: str
    draining: bool
    workers: _containers.RepeatedCompositeFieldContainer[WorkerState]
    waiting_requests: int
    running_requests: int
    waiting_tokens: int
    counters: Counters
    violations: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[str] = ..., draining: _Optional[bool] = ..., workers: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ..., waiting_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., violations: _Optional[_Iterable[str]] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("requests_accepted", "requests_refused", "requests_finished", "requests_cancelled", "requests_failed", "preemptions", "requests_moved", "prefix_queried_tokens", "prefix_hit_tokens", "prefill_tokens", "output_tokens", "steps", "preemptions_kept", "swapped_out_blocks", "swapped_in_blocks")
    REQUESTS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_MOVED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_KEPT_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_OUT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_IN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    requests_accepted: int
    requests_refused: int
    requests_finished: int
    requests_cancelled: int
    requests_failed: int
    preemptions: int
    requests_moved: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    prefill_tokens: int
    output_tokens: int
    steps: int
    preemptions_kept: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    def __init__(self, requests_accepted: _Optional[int] = ..., requests_refused: _Optional[int] = ..., requests_finished: _Optional[int] = ..., requests_cancelled: _Optional[int] = ..., requests_failed: _Optional[int] = ..., preemptions: _Optional[int] = ..., requests_moved: _Optional[int] = ..., prefix_queried_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., preemptions_kept: _Optional[int] = ..., swapped_out_blocks: _Optional[int] = ..., swapped_in_blocks: _Optional[int] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("worker_id", "address", "status", "model", "blocks_total", "blocks_used", "blocks_cached", "blocks_free", "running_requests", "num_slots", "steps_in_flight", "steps", "last_error", "block_size", "budget_tokens", "watermark_blocks", "steps_per_second", "host_blocks_total", "host_blocks_used")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    status: WorkerStatus
    model: str
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    running_requests: int
    num_slots: int
    steps_in_flight: int
    steps: int
    last_error: str
    block_size: int
    budget_tokens: int
    watermark_blocks: int
    steps_per_second: float
    host_blocks_total: int
    host_blocks_used: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., status: _Optional[_Union[WorkerStatus, str]] = ..., model: _Optional[str] = ..., blocks_total: _Optional[int] = ..., blocks_used: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., blocks_free: _Optional[int] = ..., running_requests: _Optional[int] = ..., num_slots: _Optional[int] = ..., steps_in_flight: _Optional[int] = ..., steps: _Optional[int] = ..., last_error: _Optional[str] = ..., block_size: _Optional[int] = ..., budget_tokens: _Optional[int] = ..., watermark_blocks: _Optional[int] = ..., steps_per_second: _Optional[float] = ..., host_blocks_total: _Optional[int] = ..., host_blocks_used: _Optional[int] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "next_page_token")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestState]
    next_page_token: str
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestState, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RequestState(_message.Message):
    __slots__ = ("request_id", "index", "status", "tenant", "priority", "prompt_tokens", "output_tokens", "computed_tokens", "blocks", "worker_id", "age_seconds", "preemptions", "model", "key", "max_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    status: RequestStatus
    tenant: str
    priority: int
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    blocks: int
    worker_id: str
    age_seconds: float
    preemptions: int
    model: str
    key: int
    max_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., status: _Optional[_Union[RequestStatus, str]] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., worker_id: _Optional[str] = ..., age_seconds: _Optional[float] = ..., preemptions: _Optional[int] = ..., model: _Optional[str] = ..., key: _Optional[int] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class WatchStateRequest(_message.Message):
    __slots__ = ("interval_ms", "steps")
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    steps: bool
    def __init__(self, interval_ms: _Optional[int] = ..., steps: _Optional[bool] = ...) -> None: ...

class WatchStateResponse(_message.Message):
    __slots__ = ("sequence", "snapshot", "time_seconds", "version", "draining", "waiting_requests", "running_requests", "waiting_tokens", "counters", "workers", "removed_worker_ids", "queues", "heads", "requests", "progress", "ended_keys", "hidden_requests", "steps")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ENDED_KEYS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    snapshot: bool
    time_seconds: float
    version: str
    draining: bool
    waiting_requests: int
    running_requests: int
    waiting_tokens: int
    counters: Counters
    workers: _containers.RepeatedCompositeFieldContainer[WorkerState]
    removed_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    queues: _containers.RepeatedCompositeFieldContainer[QueueState]
    heads: _containers.RepeatedCompositeFieldContainer[QueueHead]
    requests: _containers.RepeatedCompositeFieldContainer[RequestState]
    progress: RequestProgress
    ended_keys: _containers.RepeatedScalarFieldContainer[int]
    hidden_requests: int
    steps: _containers.RepeatedCompositeFieldContainer[WorkerSteps]
    def __init__(self, sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., time_seconds: _Optional[float] = ..., version: _Optional[str] = ..., draining: _Optional[bool] = ..., waiting_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ..., removed_worker_ids: _Optional[_Iterable[str]] = ..., queues: _Optional[_Iterable[_Union[QueueState, _Mapping]]] = ..., heads: _Optional[_Iterable[_Union[QueueHead, _Mapping]]] = ..., requests: _Optional[_Iterable[_Union[RequestState, _Mapping]]] = ..., progress: _Optional[_Union[RequestProgress, _Mapping]] = ..., ended_keys: _Optional[_Iterable[int]] = ..., hidden_requests: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[WorkerSteps, _Mapping]]] = ...) -> None: ...

class QueueState(_message.Message):
    __slots__ = ("model", "tenant", "priority", "waiting_requests", "preempted_requests", "running_requests", "waiting_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    tenant: str
    priority: int
    waiting_requests: int
    preempted_requests: int
    running_requests: int
    waiting_tokens: int
    def __init__(self, model: _Optional[str] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., preempted_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_tokens: _Optional[int] = ...) -> None: ...

class QueueHead(_message.Message):
    __slots__ = ("model", "request_id", "index", "blockers")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCKERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    request_id: str
    index: int
    blockers: _containers.RepeatedCompositeFieldContainer[Blocker]
    def __init__(self, model: _Optional[str] = ..., request_id: _Optional[str] = ..., index: _Optional[int] = ..., blockers: _Optional[_Iterable[_Union[Blocker, _Mapping]]] = ...) -> None: ...

class RequestProgress(_message.Message):
    __slots__ = ("keys", "output_tokens", "computed_tokens", "blocks")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[int]
    output_tokens: _containers.RepeatedScalarFieldContainer[int]
    computed_tokens: _containers.RepeatedScalarFieldContainer[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, keys: _Optional[_Iterable[int]] = ..., output_tokens: _Optional[_Iterable[int]] = ..., computed_tokens: _Optional[_Iterable[int]] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerSteps(_message.Message):
    __slots__ = ("worker_id", "sequences", "ended_seconds", "durations_ms", "prefill_tokens", "decode_tokens", "budget_tokens", "requests")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    ENDED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DURATIONS_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    sequences: _containers.RepeatedScalarFieldContainer[int]
    ended_seconds: _containers.RepeatedScalarFieldContainer[float]
    durations_ms: _containers.RepeatedScalarFieldContainer[float]
    prefill_tokens: _containers.RepeatedScalarFieldContainer[int]
    decode_tokens: _containers.RepeatedScalarFieldContainer[int]
    budget_tokens: _containers.RepeatedScalarFieldContainer[int]
    requests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_id: _Optional[str] = ..., sequences: _Optional[_Iterable[int]] = ..., ended_seconds: _Optional[_Iterable[float]] = ..., durations_ms: _Optional[_Iterable[float]] = ..., prefill_tokens: _Optional[_Iterable[int]] = ..., decode_tokens: _Optional[_Iterable[int]] = ..., budget_tokens: _Optional[_Iterable[int]] = ..., requests: _Optional[_Iterable[int]] = ...) -> None: ...

class GetBlockMapRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class GetBlockMapResponse(_message.Message):
    __slots__ = ("worker_id", "holders", "cached", "owner_indices", "owners", "block_size", "host_states", "host_owner_indices", "host_owners")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    OWNER_INDICES_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    HOST_STATES_FIELD_NUMBER: _ClassVar[int]
    HOST_OWNER_INDICES_FIELD_NUMBER: _ClassVar[int]
    HOST_OWNERS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    holders: bytes
    cached: bytes
    owner_indices: bytes
    owners: _containers.RepeatedCompositeFieldContainer[BlockOwner]
    block_size: int
    host_states: bytes
    host_owner_indices: bytes
    host_owners: _containers.RepeatedCompositeFieldContainer[BlockOwner]
    def __init__(self, worker_id: _Optional[str] = ..., holders: _Optional[bytes] = ..., cached: _Optional[bytes] = ..., owner_indices: _Optional[bytes] = ..., owners: _Optional[_Iterable[_Union[BlockOwner, _Mapping]]] = ..., block_size: _Optional[int] = ..., host_states: _Optional[bytes] = ..., host_owner_indices: _Optional[bytes] = ..., host_owners: _Optional[_Iterable[_Union[BlockOwner, _Mapping]]] = ...) -> None: ...

class BlockOwner(_message.Message):
    __slots__ = ("request_id", "index", "tenant", "key", "blocks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    tenant: str
    key: int
    blocks: int
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., tenant: _Optional[str] = ..., key: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class ExplainRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainRequestResponse(_message.Message):
    __slots__ = ("candidates",)
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    candidates: _containers.RepeatedCompositeFieldContainer[CandidateExplanation]
    def __init__(self, candidates: _Optional[_Iterable[_Union[CandidateExplanation, _Mapping]]] = ...) -> None: ...

class CandidateExplanation(_message.Message):
    __slots__ = ("state", "finish_reason", "blockers", "position", "estimated_start_seconds", "timeline", "chunks")
    STATE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    BLOCKERS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    state: RequestState
    finish_reason: str
    blockers: _containers.RepeatedCompositeFieldContainer[Blocker]
    position: int
    estimated_start_seconds: float
    timeline: _containers.RepeatedCompositeFieldContainer[TimelineEntry]
    chunks: PrefillChunks
    def __init__(self, state: _Optional[_Union[RequestState, _Mapping]] = ..., finish_reason: _Optional[str] = ..., blockers: _Optional[_Iterable[_Union[Blocker, _Mapping]]] = ..., position: _Optional[int] = ..., estimated_start_seconds: _Optional[float] = ..., timeline: _Optional[_Iterable[_Union[TimelineEntry, _Mapping]]] = ..., chunks: _Optional[_Union[PrefillChunks, _Mapping]] = ...) -> None: ...

class PrefillChunks(_message.Message):
    __slots__ = ("at_seconds", "step_sequences", "tokens", "ended_seconds")
    AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    at_seconds: _containers.RepeatedScalarFieldContainer[float]
    step_sequences: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    ended_seconds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, at_seconds: _Optional[_Iterable[float]] = ..., step_sequences: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., ended_seconds: _Optional[_Iterable[float]] = ...) -> None: ...

class Blocker(_message.Message):
    __slots__ = ("kind", "worker_id", "needed", "reserve", "available", "limit", "other", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: BlockerKind
    worker_id: str
    needed: int
    reserve: int
    available: int
    limit: int
    other: str
    text: str
    def __init__(self, kind: _Optional[_Union[BlockerKind, str]] = ..., worker_id: _Optional[str] = ..., needed: _Optional[int] = ..., reserve: _Optional[int] = ..., available: _Optional[int] = ..., limit: _Optional[int] = ..., other: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class TimelineEntry(_message.Message):
    __slots__ = ("at_seconds", "event", "worker_id", "detail", "step_sequence")
    AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    at_seconds: float
    event: str
    worker_id: str
    detail: str
    step_sequence: int
    def __init__(self, at_seconds: _Optional[float] = ..., event: _Optional[str] = ..., worker_id: _Optional[str] = ..., detail: _Optional[str] = ..., step_sequence: _Optional[int] = ...) -> None: ...

class GetLatencyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLatencyResponse(_message.Message):
    __slots__ = ("recent_seconds", "recent", "intervals", "interval_seconds")
    RECENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    INTERVALS_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    recent_seconds: float
    recent: Latencies
    intervals: Latencies
    interval_seconds: float
    def __init__(self, recent_seconds: _Optional[float] = ..., recent: _Optional[_Union[Latencies, _Mapping]] = ..., intervals: _Optional[_Union[Latencies, _Mapping]] = ..., interval_seconds: _Optional[float] = ...) -> None: ...

class Latencies(_message.Message):
    __slots__ = ("started_seconds", "time_to_first_token", "between_tokens", "output_tokens", "prefill_tokens")
    STARTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BETWEEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    started_seconds: _containers.RepeatedScalarFieldContainer[float]
    time_to_first_token: Quantiles
    between_tokens: Quantiles
    output_tokens: _containers.RepeatedScalarFieldContainer[int]
    prefill_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, started_seconds: _Optional[_Iterable[float]] = ..., time_to_first_token: _Optional[_Union[Quantiles, _Mapping]] = ..., between_tokens: _Optional[_Union[Quantiles, _Mapping]] = ..., output_tokens: _Optional[_Iterable[int]] = ..., prefill_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Quantiles(_message.Message):
    __slots__ = ("counts", "p50_ms", "p95_ms", "p99_ms")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    P50_MS_FIELD_NUMBER: _ClassVar[int]
    P95_MS_FIELD_NUMBER: _ClassVar[int]
    P99_MS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    p50_ms: _containers.RepeatedScalarFieldContainer[float]
    p95_ms: _containers.RepeatedScalarFieldContainer[float]
    p99_ms: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., p50_ms: _Optional[_Iterable[float]] = ..., p95_ms: _Optional[_Iterable[float]] = ..., p99_ms: _Optional[_Iterable[float]] = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("address", "worker_id")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    address: str
    worker_id: str
    def __init__(self, address: _Optional[str] = ..., worker_id: _Optional[str] = ...) -> None: ...

class RegisterWorkerResponse(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DeregisterWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DeregisterWorkerResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("moved_requests",)
    MOVED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    moved_requests: int
    def __init__(self, moved_requests: _Optional[int] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...
