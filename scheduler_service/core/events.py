"""Owns what the core tells the outside: how each candidate of a request fares.

Every event names its candidate. `sink` is what RequestSpec.sink was, so that whoever hands events out needs
no table. Tokens come as one TokenBatch a step; everything else is rare and comes one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from scheduler_service.core.request import Request
from scheduler_service.core.step import TokenLogprobs


class FinishReason(Enum):
    """Why a candidate ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    QUEUE_TIMEOUT = "queue_timeout"
    GRAMMAR = "grammar"  # it became too complex to follow
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a candidate."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that a candidate spent in each state; they add up to its time from arrival to end."""

    queue_s: float
    prefill_s: float
    decode_s: float
    preempted_s: float
    time_to_first_token_s: float | None


@dataclass(frozen=True, slots=True)
class Admitted:
    """A candidate was given to a worker for the first time."""

    request_id: str
    index: int
    worker_id: str
    cached_tokens: int
    sink: object | None = field(default=None, compare=False, repr=False)
    at: float = field(default=0.0, compare=False, kw_only=True)  # when it happened, on the clock of `now`


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens that a step gave: candidates[i] gained token_ids[i]. Columns, since there are many.

    A candidate that ends with its token is here too; its Finished follows in the same list. Of each candidate
    read request_id, index and sink. Both sequences belong to the core: read them before the next call.
    """

    candidates: Sequence[Request]
    token_ids: Sequence[int]
    logprobs: Mapping[int, TokenLogprobs] | None = None  # by index into candidates


@dataclass(frozen=True, slots=True)
class Preempted:
    """A candidate went back to the queue and keeps its tokens."""

    request_id: str
    index: int
    worker_id: str
    reason: str  # "blocks", "slots", "worker_lost" or "drain"
    sink: object | None = field(default=None, compare=False, repr=False)
    at: float = field(default=0.0, compare=False, kw_only=True)  # when it happened, on the clock of `now`
    kept_tokens: int = 0  # whose KV its worker keeps for it. 0: it is recomputed


@dataclass(frozen=True, slots=True)
class Resumed:
    """A preempted candidate was given to a worker again."""

    request_id: str
    index: int
    worker_id: str
    cached_tokens: int
    sink: object | None = field(default=None, compare=False, repr=False)
    at: float = field(default=0.0, compare=False, kw_only=True)  # when it happened, on the clock of `now`


@dataclass(frozen=True, slots=True)
class Finished:
    """A candidate ended. Its last event."""

    request_id: str
    index: int
    reason: FinishReason
    stop_token_id: int | None
    usage: Usage
    timings: Timings
    detail: str = ""  # for ERROR: what to log, never sent to clients
    sink: object | None = field(default=None, compare=False, repr=False)
    at: float = field(default=0.0, compare=False, kw_only=True)  # when it happened, on the clock of `now`


Event = Admitted | TokenBatch | Preempted | Resumed | Finished
