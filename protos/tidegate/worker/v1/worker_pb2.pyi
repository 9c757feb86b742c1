from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_PHASE_UNSPECIFIED: _ClassVar[WorkerPhase]
    WORKER_PHASE_LOADING: _ClassVar[WorkerPhase]
    WORKER_PHASE_WARMING_UP: _ClassVar[WorkerPhase]
    WORKER_PHASE_READY: _ClassVar[WorkerPhase]
    WORKER_PHASE_SERVING: _ClassVar[WorkerPhase]
    WORKER_PHASE_DRAINING: _ClassVar[WorkerPhase]
WORKER_PHASE_UNSPECIFIED: WorkerPhase
WORKER_PHASE_LOADING: WorkerPhase
WORKER_PHASE_WARMING_UP: WorkerPhase
WORKER_PHASE_READY: WorkerPhase
WORKER_PHASE_SERVING: WorkerPhase
WORKER_PHASE_DRAINING: WorkerPhase

class ExecuteRequest(_message.Message):
    __slots__ = ("hello", "plan", "notice")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    hello: SchedulerHello
    plan: StepPlan
    notice: TraceNotice
    def __init__(self, hello: _Optional[_Union[SchedulerHello, _Mapping]] = ..., plan: _Optional[_Union[StepPlan, _Mapping]] = ..., notice: _Optional[_Union[TraceNotice, _Mapping]] = ...) -> None: ...

class TraceNotice(_message.Message):
    __slots__ = ("step_seqs", "ended_slots", "admitted_seqs")
    STEP_SEQS_FIELD_NUMBER: _ClassVar[int]
    ENDED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_SEQS_FIELD_NUMBER: _ClassVar[int]
    step_seqs: _containers.RepeatedScalarFieldContainer[int]
    ended_slots: _containers.RepeatedScalarFieldContainer[int]
    admitted_seqs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step_seqs: _Optional[_Iterable[int]] = ..., ended_slots: _Optional[_Iterable[int]] = ..., admitted_seqs: _Optional[_Iterable[int]] = ...) -> None: ...

class ExecuteResponse(_message.Message):
    __slots__ = ("hello", "result")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    result: StepResult
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ...) -> None: ...

class SchedulerHello(_message.Message):
    __slots__ = ("protocol_version", "scheduler_epoch", "worker_id", "model_fingerprint")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    scheduler_epoch: int
    worker_id: str
    model_fingerprint: str
    def __init__(self, protocol_version: _Optional[int] = ..., scheduler_epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("protocol_version", "scheduler_epoch", "incarnation", "model", "block_size", "num_blocks", "num_slots", "max_batched_tokens", "max_in_flight", "num_host_blocks", "block_copy_ns")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COPY_NS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    scheduler_epoch: int
    incarnation: str
    model: ModelInfo
    block_size: int
    num_blocks: int
    num_slots: int
    max_batched_tokens: int
    max_in_flight: int
    num_host_blocks: int
    block_copy_ns: int
    def __init__(self, protocol_version: _Optional[int] = ..., scheduler_epoch: _Optional[int] = ..., incarnation: _Optional[str] = ..., model: _Optional[_Union[ModelInfo, _Mapping]] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_slots: _Optional[int] = ..., max_batched_tokens: _Optional[int] = ..., max_in_flight: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., block_copy_ns: _Optional[int] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "fingerprint", "max_model_len", "vocab_size", "eos_token_ids", "tokenizer", "dtype", "kv_bytes_per_token", "structured_output")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokenizer: TokenizerFiles
    dtype: str
    kv_bytes_per_token: int
    structured_output: bool
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., tokenizer: _Optional[_Union[TokenizerFiles, _Mapping]] = ..., dtype: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., structured_output: _Optional[bool] = ...) -> None: ...

class TokenizerFiles(_message.Message):
    __slots__ = ("tokenizer_json", "chat_template", "special_tokens")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokenizer_json: bytes
    chat_template: str
    special_tokens: _containers.ScalarMap[str, str]
    def __init__(self, tokenizer_json: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("seq", "released", "admitted", "copy_sources", "copy_destinations", "slots", "num_tokens", "block_rows", "block_ids", "traceparent", "swap_out_blocks", "swap_out_host_blocks", "swap_in_host_blocks", "swap_in_blocks")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    COPY_SOURCES_FIELD_NUMBER: _ClassVar[int]
    COPY_DESTINATIONS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ROWS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    released: bytes
    admitted: _containers.RepeatedCompositeFieldContainer[AdmittedRequest]
    copy_sources: bytes
    copy_destinations: bytes
    slots: bytes
    num_tokens: bytes
    block_rows: bytes
    block_ids: bytes
    traceparent: str
    swap_out_blocks: bytes
    swap_out_host_blocks: bytes
    swap_in_host_blocks: bytes
    swap_in_blocks: bytes
    def __init__(self, seq: _Optional[int] = ..., released: _Optional[bytes] = ..., admitted: _Optional[_Iterable[_Union[AdmittedRequest, _Mapping]]] = ..., copy_sources: _Optional[bytes] = ..., copy_destinations: _Optional[bytes] = ..., slots: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., block_rows: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., swap_out_blocks: _Optional[bytes] = ..., swap_out_host_blocks: _Optional[bytes] = ..., swap_in_host_blocks: _Optional[bytes] = ..., swap_in_blocks: _Optional[bytes] = ...) -> None: ...

class AdmittedRequest(_message.Message):
    __slots__ = ("slot", "request_id", "token_ids", "num_prompt_tokens", "num_computed_tokens", "block_ids", "sampling", "traceparent", "adapter", "grammar")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    slot: int
    request_id: str
    token_ids: bytes
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: bytes
    sampling: WorkerSampling
    traceparent: str
    adapter: str
    grammar: str
    def __init__(self, slot: _Optional[int] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[WorkerSampling, _Mapping]] = ..., traceparent: _Optional[str] = ..., adapter: _Optional[str] = ..., grammar: _Optional[str] = ...) -> None: ...

class WorkerSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "bias_token_ids", "bias_values", "min_tokens_banned_ids", "min_tokens", "logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_BANNED_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    bias_token_ids: bytes
    bias_values: bytes
    min_tokens_banned_ids: bytes
    min_tokens: int
    logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., bias_token_ids: _Optional[bytes] = ..., bias_values: _Optional[bytes] = ..., min_tokens_banned_ids: _Optional[bytes] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("seq", "slots", "token_ids", "failed_rows", "logprobs", "timings", "grammar_failed_rows")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_ROWS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FAILED_ROWS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    slots: bytes
    token_ids: bytes
    failed_rows: bytes
    logprobs: Logprobs
    timings: StepTimings
    grammar_failed_rows: bytes
    def __init__(self, seq: _Optional[int] = ..., slots: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., failed_rows: _Optional[bytes] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., timings: _Optional[_Union[StepTimings, _Mapping]] = ..., grammar_failed_rows: _Optional[bytes] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("rows", "sampled", "top_offsets", "top_token_ids", "top_values")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    TOP_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_VALUES_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    sampled: bytes
    top_offsets: bytes
    top_token_ids: bytes
    top_values: bytes
    def __init__(self, rows: _Optional[bytes] = ..., sampled: _Optional[bytes] = ..., top_offsets: _Optional[bytes] = ..., top_token_ids: _Optional[bytes] = ..., top_values: _Optional[bytes] = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("received_ns", "started_ns", "forward_ns", "sampling_ns", "finished_ns", "gap_ns")
    RECEIVED_NS_FIELD_NUMBER: _ClassVar[int]
    STARTED_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_NS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_NS_FIELD_NUMBER: _ClassVar[int]
    GAP_NS_FIELD_NUMBER: _ClassVar[int]
    received_ns: int
    started_ns: int
    forward_ns: int
    sampling_ns: int
    finished_ns: int
    gap_ns: int
    def __init__(self, received_ns: _Optional[int] = ..., started_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., sampling_ns: _Optional[int] = ..., finished_ns: _Optional[int] = ..., gap_ns: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("phase", "progress", "detail", "model", "num_blocks", "block_size", "steps", "incarnation")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    phase: WorkerPhase
    progress: float
    detail: str
    model: ModelInfo
    num_blocks: int
    block_size: int
    steps: int
    incarnation: str
    def __init__(self, phase: _Optional[_Union[WorkerPhase, str]] = ..., progress: _Optional[float] = ..., detail: _Optional[str] = ..., model: _Optional[_Union[ModelInfo, _Mapping]] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., steps: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...
