"""Owns what was asked (RequestSpec) and one candidate's state (Request). Decides nothing.

Counters of a running candidate live in its worker's arrays, at its slot; see worker.py.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

import numpy as np

from scheduler_service.core.prefix_hash import PrefixHasher
from scheduler_service.core.sampling import SamplingParams, StoppingParams, candidate_seed
from scheduler_service.core.step import Int32

if TYPE_CHECKING:
    from scheduler_service.core.host_tier import Stash
    from scheduler_service.core.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestSpec:
    """A request as it was asked for, every default resolved. Times are seconds on the clock of `now`.

    Raises:
        ValueError: the prompt is empty or no int32 row, n or max_tokens is below 1.
    """

    request_id: str
    model: str
    prompt_token_ids: Int32  # [prompt tokens]; not copied: leave it unchanged
    sampling: SamplingParams
    stopping: StoppingParams
    n: int = 1
    priority: int = 0  # lower runs first, under the policy `priority`
    tenant: str = "default"
    cache_salt: str = ""
    adapter: str = ""
    grammar: str = ""  # what each output must match, in the form that workers take; empty: anything
    arrival: float | None = None  # when it came to the service; None: when it was submitted
    deadline: float | None = None
    queue_timeout_s: float | None = None  # counts until the first admission
    traceparent: str = ""
    sink: object | None = None  # the caller's own, given back with each event

    def __post_init__(self) -> None:
        prompt = self.prompt_token_ids
        if prompt.dtype != np.int32 or prompt.ndim != 1 or len(prompt) == 0:
            raise ValueError(
                f"prompt_token_ids is {prompt.dtype} {prompt.shape}; allowed: int32 (tokens >= 1,)"
            )
        if self.n < 1 or self.stopping.max_tokens < 1:
            raise ValueError(f"n is {self.n}, max_tokens is {self.stopping.max_tokens}; allowed: at least 1")


_LOSSES_OF_SUSPECTS = 2


class Status(Enum):
    """Where a candidate stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Phase(IntEnum):
    """What a candidate's time is counted for."""

    QUEUE = 0
    PREFILL = 1
    DECODE = 2
    PREEMPTED = 3


class Prompt:
    """A prompt that the candidates of one request share: hashed once for each block size."""

    __slots__ = ("_hasher", "_hashes", "_root", "num_tokens", "token_ids")

    def __init__(self, spec: RequestSpec, hasher: PrefixHasher | None) -> None:
        self.token_ids = spec.prompt_token_ids
        self.num_tokens = len(spec.prompt_token_ids)
        self._hasher = hasher
        self._root = hasher.root(spec.model, spec.adapter, spec.cache_salt) if hasher else b""
        self._hashes: dict[int, list[bytes]] = {}

    @property
    def is_hashed(self) -> bool:
        """Whether prefix caching is on."""
        return self._hasher is not None

    def hashes(self, block_size: int) -> list[bytes]:
        """Hashes of the prompt's full blocks; empty without prefix caching."""
        if self._hasher is None:
            return []
        if block_size not in self._hashes:
            tokens = self.token_ids.tobytes()
            self._hashes[block_size] = self._hasher.extend(self._root, tokens, block_size)
        return self._hashes[block_size]

    def extend(self, hashes: list[bytes], tokens: bytes, block_size: int) -> None:
        """Appends to `hashes` those of the full blocks in `tokens`, which follow."""
        if self._hasher is not None:
            hashes.extend(self._hasher.extend(hashes[-1] if hashes else self._root, tokens, block_size))


class Request:
    """One candidate. The core changes it; others read request_id, index, sink and spec.

    While it runs, `worker` and `slot` say where; its block table is `block_ids`.
    """

    __slots__ = (
        "_hash_block_size",
        "_hashes",
        "arrival",
        "awaits",
        "block_ids",
        "cached_tokens",
        "draining",
        "first_token_at",
        "index",
        "last_worker",
        "losses",
        "num_preemptions",
        "num_prompt",
        "order",
        "output_ids",
        "outputs_at_loss",
        "overtaken",
        "parked",
        "phase",
        "phase_s",
        "phase_since",
        "prefill_blocks",
        "prompt",
        "prompt_planned",
        "queue_charge",
        "registered",
        "request_id",
        "restored_tokens",
        "sampling",
        "siblings",
        "sink",
        "slot",
        "spec",
        "stash",
        "status",
        "was_admitted",
        "worker",
    )

    def __init__(self, spec: RequestSpec, index: int, prompt: Prompt, order: int, now: float) -> None:
        self.spec = spec
        self.request_id = spec.request_id
        self.index = index
        self.sink = spec.sink
        self.order = order  # of arrival; no two candidates have the same
        self.arrival = now if spec.arrival is None else min(spec.arrival, now)
        self.prompt = prompt
        self.num_prompt = prompt.num_tokens
        self.sampling = spec.sampling
        if index:
            self.sampling = replace(spec.sampling, seed=candidate_seed(spec.sampling.seed, index))
        self.siblings: list[Request] = [self]  # every candidate of the request, by index
        self.status = Status.WAITING
        self.output_ids: array[int] = array("i")  # small, and bytes at once for hashing
        self._hashes: list[bytes] = []
        self._hash_block_size = 0
        self._init_stay()
        self._init_history(self.arrival)

    def _init_stay(self) -> None:
        self.worker: Worker | None = None
        self.last_worker: Worker | None = None  # of the stay before
        self.stash: Stash | None = None  # what that one keeps of it
        self.slot = 0  # meaningful while worker is set
        self.block_ids: list[int] = []
        self.registered = 0  # leading blocks of the table whose prefixes are registered
        self.prefill_blocks = 0  # full blocks of the tokens that were known when this stay began
        self.prompt_planned = False  # whether plans of this stay that were sent compute all of the prompt

    def _init_history(self, arrival: float) -> None:
        self.draining = 0  # tokens in flight from a stay that is over
        self.was_admitted = False
        self.cached_tokens = 0  # at first admission
        self.num_preemptions = 0
        self.losses = 0  # workers that it lost in a row, without a token in between
        self.outputs_at_loss = 0
        self.overtaken = 0
        self.parked = False  # waits for candidate 0's prompt, outside the queue
        self.queue_charge = 0  # tokens that it counts for in the queue
        self.awaits: tuple[Worker, bytes] | None = None  # a prefix block that someone is computing
        self.first_token_at: float | None = None
        self.restored_tokens: int | None = None  # outputs from an earlier process; None: it began in this one
        self.phase = Phase.QUEUE
        self.phase_since = arrival
        self.phase_s = [0.0] * len(Phase)

    @property
    def num_known(self) -> int:
        """Prompt and received tokens."""
        return self.num_prompt + len(self.output_ids)

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what ends workers: it has lost some in a row, and has had no token since."""
        return self.losses >= _LOSSES_OF_SUSPECTS and len(self.output_ids) == self.outputs_at_loss

    @property
    def max_total(self) -> int:
        """Prompt and output tokens at which it ends by length."""
        return self.num_prompt + self.spec.stopping.max_tokens

    @property
    def finished(self) -> bool:
        """Whether its last event was given."""
        return self.status is Status.FINISHED

    def enter(self, phase: Phase, now: float) -> None:
        """Counts the time since the last call for the phase until now, and begins another."""
        self.phase_s[self.phase] += now - self.phase_since
        self.phase = phase
        self.phase_since = now

    def token_ids(self) -> Int32:
        """Prompt and received tokens."""
        if not self.output_ids:
            return self.prompt.token_ids
        return np.concatenate((self.prompt.token_ids, np.array(self.output_ids, np.int32)))

    def block_hashes(self, block_size: int, count: int) -> list[bytes]:
        """Hashes of at least the first `count` full blocks of known tokens; empty without prefix caching."""
        if self._hash_block_size != block_size:
            self._hashes = list(self.prompt.hashes(block_size))
            self._hash_block_size = block_size
        hashes = self._hashes
        if len(hashes) < count and self.prompt.is_hashed:
            tokens = self._token_bytes(len(hashes) * block_size, count * block_size)
            self.prompt.extend(hashes, tokens, block_size)
        return hashes

    def _token_bytes(self, start: int, end: int) -> bytes:
        first, last = start - self.num_prompt, end - self.num_prompt
        if first >= 0:
            return self.output_ids[first:last].tobytes()
        return self.prompt.token_ids[start:end].tobytes() + self.output_ids[: max(0, last)].tobytes()
