"""Owns one worker's side of the core: its blocks, slots, counters, promises and steps in flight.

Counters of running candidates are columns indexed by slot, so that a step in which nothing changes is a few
array operations. Knows nothing of queues or policies.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from scheduler_service.core.block_pool import BlockPool
from scheduler_service.core.errors import ConfigError
from scheduler_service.core.request import Request
from scheduler_service.core.step import Int32

Int64 = NDArray[np.int64]

FIRST = 1
"""Flag of a slot: its candidate has no output yet."""
MANY_STOPS = 2
"""Flag of a slot: its candidate has more stop ids than the columns hold, so each token is looked at."""
PARENT = 4
"""Flag of a slot: other candidates wait for its prompt to be planned."""

_STOP_COLUMNS = 4
_NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker has. All limits are the worker's own.

    Raises:
        ConfigError: naming the value and what is allowed.
    """

    worker_id: str
    model: str
    num_blocks: int  # null block 0 included
    block_size: int  # tokens, a power of two
    num_slots: int
    max_batched_tokens: int
    max_in_flight: int
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int

    def __post_init__(self) -> None:
        if self.num_blocks < 2:
            raise ConfigError("num_blocks", self.num_blocks, "at least 2, since block 0 is the null block")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError("block_size", self.block_size, "a power of two")
        for option in ("num_slots", "max_batched_tokens", "max_in_flight", "vocab_size"):
            if getattr(self, option) < 1:
                raise ConfigError(option, getattr(self, option), "at least 1")
        if self.max_model_len < 2:
            raise ConfigError("max_model_len", self.max_model_len, "at least 2: a prompt and an output token")

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the KV of so many tokens."""
        return -(-num_tokens // self.block_size)

    def fits(self, total_tokens: int) -> bool:
        """Whether a candidate of so many prompt and output tokens fits when it is alone. The last token's KV
        is never computed."""
        if total_tokens > self.max_model_len:
            return False
        return self.blocks_for(total_tokens - 1) < self.num_blocks


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """What must be known of a sent plan to read its result: the rows that sample, in order."""

    seq: int
    requests: list[Request]
    slots: Int64
    stays: Int64  # value of Worker.stay at each slot when the plan was made


class Worker:
    """A connected worker."""

    def __init__(
        self, spec: WorkerSpec, max_num_seqs: int, budget: int, depth: int, watermark: float
    ) -> None:
        self.spec = spec
        self.budget = min(budget, spec.max_batched_tokens)
        # A step gives each running candidate a token, so more than the budget would starve the last ones.
        self.seats = min(max_num_seqs, spec.num_slots, self.budget)
        self.depth = min(depth, spec.max_in_flight)
        self.watermark_blocks = int(watermark * spec.num_blocks)
        self.shift = spec.block_size.bit_length() - 1
        self.pool = BlockPool(spec.num_blocks)
        self.draining = False
        self.seq = 0
        self.in_flight: deque[StepInFlight] = deque()
        self.released: list[int] = []  # slots that the next plan tells the worker of
        self.promises: dict[bytes, Request] = {}  # blocks that a running prefill is going to compute
        self.running: list[Request] = []  # in order of admission; replaced, never changed in place
        self.rows: Int64 = _NO_ROWS  # their slots
        self.rows32: Int32 = _NO_ROWS.astype(np.int32)
        self._free_slots = list(range(spec.num_slots - 1, -1, -1))
        self._init_columns(spec.num_slots)

    def _init_columns(self, n: int) -> None:
        self.total = np.zeros(n, np.int64)  # known tokens and those in flight
        self.pending = np.zeros(n, np.int64)  # tokens in flight
        self.computed = np.zeros(n, np.int64)  # tokens whose KV is planned
        self.held = np.zeros(n, np.int64)  # blocks
        self.last = np.zeros(n, np.int64)  # most tokens whose KV is ever computed: those before the last one
        self.registered = np.zeros(n, np.int64)  # leading blocks whose prefix is registered
        self.flags = np.zeros(n, np.int64)
        self.stay = np.zeros(n, np.int64)  # changes when a slot's candidate leaves
        self.active = np.zeros(n, np.bool_)
        self.stop_ids = np.full((n, _STOP_COLUMNS), -1, np.int64)

    @property
    def num_running(self) -> int:
        """Slots that are taken."""
        return self.spec.num_slots - len(self._free_slots)

    @property
    def reserve_blocks(self) -> int:
        """Blocks that an admission must leave free: none where nothing runs."""
        return self.watermark_blocks if self.num_running else 0

    def place(self, request: Request, block_ids: list[int], num_computed: int, num_registered: int) -> None:
        """Gives `request` a slot and its blocks. It joins `running` with seat()."""
        slot = self._free_slots.pop()
        request.worker = self
        request.slot = slot
        request.block_ids = block_ids
        request.prompt_seq = None
        request.admitted_seq = self.seq + 1
        stopping = request.spec.stopping
        stops = [*stopping.eos_token_ids, *(stopping.stop_token_ids - stopping.eos_token_ids)]
        self.stop_ids[slot] = -1
        flags = 0 if request.output_ids else FIRST
        if len(stops) > _STOP_COLUMNS:
            flags |= MANY_STOPS
        else:
            self.stop_ids[slot, : len(stops)] = stops
        if request.index == 0 and len(request.siblings) > 1:
            flags |= PARENT
        self.flags[slot] = flags
        self.total[slot] = request.num_known
        self.pending[slot] = 0
        self.computed[slot] = num_computed
        self.held[slot] = len(block_ids)
        self.last[slot] = request.max_total - 1
        self.registered[slot] = num_registered
        self.active[slot] = True

    def seat(self, requests: list[Request]) -> None:
        """Appends placed candidates to the running order."""
        if requests:
            self.running = self.running + requests
            self._set_rows(np.concatenate((self.rows, [r.slot for r in requests])))

    def vacate(self, request: Request) -> None:
        """Takes back a candidate's slot and blocks. compact() takes it off the running order.

        Blocks can be given to another plan at once: the worker executes plans in order.
        """
        slot = request.slot
        self.break_promises(request)
        self.pool.release(request.block_ids)
        self.released.append(slot)
        self._free_slots.append(slot)
        self.active[slot] = False
        self.stay[slot] += 1
        request.block_ids = []
        request.worker = None

    def compact(self) -> None:
        """Drops vacated candidates from the running order."""
        keep = self.active[self.rows]
        if not keep.all():
            self.running = list(compress(self.running, keep.tolist()))
            self._set_rows(self.rows[keep])

    def _set_rows(self, rows: Int64) -> None:
        self.rows = rows
        self.rows32 = rows.astype(np.int32)

    def promise(self, request: Request, first: int, hashes: list[bytes]) -> None:
        """Notes that `request` is going to compute its blocks from `first` on, those of `hashes`."""
        request.promised_blocks = len(hashes)
        for block_hash in hashes[first:]:
            self.promises.setdefault(block_hash, request)

    def break_promises(self, request: Request) -> None:
        """Forgets what `request` has promised and not kept."""
        if request.promised_blocks:
            hashes = request.block_hashes(self.spec.block_size, request.promised_blocks)
            self._end_promises(request, hashes, int(self.registered[request.slot]), request.promised_blocks)
            request.promised_blocks = 0

    def _end_promises(self, request: Request, hashes: list[bytes], first: int, end: int) -> None:
        for block_hash in hashes[first:end]:
            if self.promises.get(block_hash) is request:
                del self.promises[block_hash]

    def register(self, request: Request, num_full: int) -> None:
        """Registers the prefixes of the first `num_full` blocks, whose tokens are known and planned."""
        slot = request.slot
        first = int(self.registered[slot])
        hashes = request.block_hashes(self.spec.block_size, num_full)
        if not hashes or num_full <= first:
            return
        for index in range(first, num_full):
            self.pool.register(request.block_ids[index], hashes[index])
        self.registered[slot] = num_full
        if request.promised_blocks:
            self._end_promises(request, hashes, first, num_full)
            if num_full >= request.promised_blocks:
                request.promised_blocks = 0

    def register_full(self, rows: Int64, requests: list[Request], known: Int64, computed: Int64) -> None:
        """Registers blocks of `rows` that have become full of tokens that are known and planned."""
        full = np.minimum(known, computed) >> self.shift
        for row in np.flatnonzero(full > self.registered[rows]).tolist():
            self.register(requests[row], int(full[row]))
