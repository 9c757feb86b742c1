"""Owns one worker's side of the core: its blocks, slots, counters, promises and steps in flight.

Counters of running candidates are columns indexed by slot, so that a step in which nothing changes is a few
array operations. Knows nothing of queues or policies.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scheduler_service.core.block_pool import BlockPool
from scheduler_service.core.errors import ConfigError
from scheduler_service.core.estimates import Estimates
from scheduler_service.core.host_tier import HostTier
from scheduler_service.core.request import Request
from scheduler_service.core.step import Int32
from scheduler_service.core.step_time import StepSize, StepTime

if TYPE_CHECKING:
    from scheduler_service.core.load import Load

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

FIRST = 1
"""Flag of a slot: its candidate has no output yet."""
MANY_STOPS = 2
"""Flag of a slot: its candidate has more stop ids than the columns hold, so each token is looked at."""
PARENT = 4
"""Flag of a slot: other candidates wait for its prompt to be planned."""

_STOP_COLUMNS = 4
_GROUP_BLOCKS = 8
"""Full blocks of a decode that are registered together, or fewer when it leaves. Nobody waits for them: their
text is not complete, so no prompt continues it yet."""
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
    num_host_blocks: int = 0  # in host memory, for the KV of preempted candidates
    block_copy_ms: float = 0.0  # to copy a block to host memory or back. 0: not measured

    def __post_init__(self) -> None:
        if self.num_blocks < 2:
            raise ConfigError("num_blocks", self.num_blocks, "at least 2, since block 0 is the null block")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError("block_size", self.block_size, "a power of two")
        for option in ("num_slots", "max_batched_tokens", "max_in_flight", "vocab_size"):
            if getattr(self, option) < 1:
                raise ConfigError(option, getattr(self, option), "at least 1")
        if self.num_host_blocks < 0:
            raise ConfigError("num_host_blocks", self.num_host_blocks, "at least 0")
        if not 0 <= self.block_copy_ms < math.inf:
            raise ConfigError("block_copy_ms", self.block_copy_ms, "milliseconds of at least 0")
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
    """What must be known of a sent plan to read its result: the rows that sample, in order, and its size."""

    seq: int
    requests: list[Request]
    slots: Int64
    stays: Int64  # value of Worker.stay at each slot when the plan was made
    size: StepSize
    sent_at: float


class Worker:
    """A connected worker."""

    def __init__(
        self, spec: WorkerSpec, max_num_seqs: int, budget: int, depth: int, watermark: float
    ) -> None:
        self.spec = spec
        self.budget = min(budget, spec.max_batched_tokens)
        self.step_budget = self.budget  # of the last plan: less where there is a target and some decode
        self.seats = min(max_num_seqs, spec.num_slots)
        self.depth = min(depth, spec.max_in_flight)
        self.watermark_blocks = int(watermark * spec.num_blocks)
        self.shift = spec.block_size.bit_length() - 1
        self.pool = BlockPool(spec.num_blocks)
        self.host = HostTier(spec.num_host_blocks)
        self.forecast: Estimates | None = None  # of outputs, where admission goes by it
        self.step_time = StepTime()
        self.load: Load | None = None  # as it was last measured
        self.answered_at = -math.inf  # when its last result came
        self.draining = False
        self._last_suspect: Request | None = None
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
        self.expected = np.zeros(n, np.int64)  # prompt and output tokens by the forecast
        self.register_above = np.zeros(n, np.int64)  # full blocks above which some are to be registered
        self.flags = np.zeros(n, np.int64)
        self.account = np.zeros(n, np.int64)  # whom the policy counts the slot's tokens for
        self.stay = np.zeros(n, np.int64)  # changes when a slot's candidate leaves
        self.active = np.zeros(n, np.bool_)
        self.stop_ids = np.full((_STOP_COLUMNS, n), -1, np.int64)
        self.stop_width = 0  # leading columns that have ever been used

    @property
    def num_running(self) -> int:
        """Slots that are taken."""
        return self.spec.num_slots - len(self._free_slots)

    @property
    def reserve_blocks(self) -> int:
        """Blocks that an admission must leave free: none where nothing runs."""
        return self.watermark_blocks if self.num_running else 0

    def allocate(self, count: int) -> list[int]:
        """Takes blocks from the pool. What is kept in them is copied to host memory by the next plan."""
        taken = self.pool.allocate(count)
        if self.host.watched:
            self.host.note_taken(taken)
        return taken

    @property
    def suspect(self) -> Request | None:
        """The suspect that runs here. There is no second one, so that none is lost for what another does."""
        last = self._last_suspect
        return last if last is not None and last.worker is self and last.is_suspect else None

    def place(self, request: Request, block_ids: list[int], num_computed: int, num_registered: int) -> None:
        """Gives `request` a slot and its blocks. It joins `running` with seat()."""
        slot = self._free_slots.pop()
        request.worker = self
        request.slot = slot
        request.block_ids = block_ids
        request.prompt_planned = False
        stopping = request.spec.stopping
        stops = [*stopping.eos_token_ids, *(stopping.stop_token_ids - stopping.eos_token_ids)]
        self.stop_ids[:, slot] = -1
        flags = 0 if request.output_ids else FIRST
        if len(stops) > _STOP_COLUMNS:
            flags |= MANY_STOPS
        else:
            self.stop_ids[: len(stops), slot] = stops
            self.stop_width = max(self.stop_width, len(stops))
        if request.index == 0 and len(request.siblings) > 1:
            flags |= PARENT
        self.flags[slot] = flags
        self.total[slot] = request.num_known
        self.pending[slot] = 0
        self.computed[slot] = num_computed
        self.held[slot] = len(block_ids)
        self.last[slot] = request.max_total - 1
        request.registered = num_registered
        request.prefill_blocks = request.num_known >> self.shift
        self.register_above[slot] = _next_registration(request)
        self.active[slot] = True
        if request.is_suspect:
            self._last_suspect = request

    def seat(self, requests: list[Request]) -> None:
        """Appends placed candidates to the running order."""
        if requests:
            self.running = self.running + requests
            self._set_rows(np.concatenate((self.rows, [r.slot for r in requests])))

    def vacate(self, request: Request, *, trusted: bool = True) -> None:
        """Takes back a candidate's slot and blocks. compact() takes it off the running order.

        What its blocks hold stays in the prefix cache, unless it is not to be trusted.
        Blocks can be given to another plan at once: the worker executes plans in order.
        """
        slot = request.slot
        self._end_promises(request, self._unkept(request))
        if trusted:
            known = int(self.total[slot] - self.pending[slot])
            self.register(request, min(known, int(self.computed[slot])) >> self.shift)
        else:
            self.pool.forget(request.block_ids)
        self.pool.release(request.block_ids, self.host.watched)
        self.released.append(slot)
        self._free_slots.append(slot)
        self.active[slot] = False
        self.stay[slot] += 1
        request.block_ids = []
        request.worker = None
        request.last_worker = self

    def distrust(self, request: Request) -> None:
        """Forgets what the prefix cache has of a candidate that has left and whose logits went wrong."""
        hashes = request.block_hashes(self.spec.block_size, request.num_known >> self.shift)
        self.pool.forget(self.pool.holders_of(hashes))

    def compact(self) -> None:
        """Drops vacated candidates from the running order."""
        keep = self.active[self.rows]
        if not keep.all():
            self.running = list(compress(self.running, keep.tolist()))
            self._set_rows(self.rows[keep])

    def _set_rows(self, rows: Int64) -> None:
        self.rows = rows
        self.rows32 = rows.astype(np.int32)

    def promise(self, request: Request) -> None:
        """Notes the blocks that `request` is going to compute in later steps: others wait for them."""
        for block_hash in self._unkept(request):
            self.promises.setdefault(block_hash, request)

    def _unkept(self, request: Request) -> list[bytes]:
        hashes = request.block_hashes(self.spec.block_size, request.prefill_blocks)
        return hashes[request.registered : request.prefill_blocks]

    def register(self, request: Request, num_full: int) -> None:
        """Registers the prefixes of the first `num_full` blocks, whose tokens are known and planned."""
        hashes = request.block_hashes(self.spec.block_size, num_full)
        first = request.registered
        if num_full <= first or not hashes:
            return
        if self.promises and first < request.prefill_blocks:
            self._end_promises(request, hashes[first:num_full])
        self.pool.register(request.block_ids[first:num_full], hashes[first:num_full])
        request.registered = num_full
        self.register_above[request.slot] = _next_registration(request)

    def _end_promises(self, request: Request, hashes: list[bytes]) -> None:
        for block_hash in hashes:
            if self.promises.get(block_hash) is request:
                del self.promises[block_hash]

    def register_full(self, rows: Int64, requests: list[Request], known: Int64) -> None:
        """Registers blocks of `rows` that have become full of tokens that are known and planned: a prefill's
        at once, since others wait for them, those of a decode some at a time."""
        full = np.minimum(known, self.computed[rows]) >> self.shift
        for row in np.flatnonzero(full > self.register_above[rows]).tolist():
            self.register(requests[row], int(full[row]))


def _next_registration(request: Request) -> int:
    """Number of full blocks above which some are registered: a prefill's at once, a decode's in groups. The
    first group's size differs between candidates, so that those who came together don't register together."""
    if request.registered < request.prefill_blocks:
        return request.registered
    if request.registered == request.prefill_blocks:
        return request.registered + request.order % _GROUP_BLOCKS
    return request.registered + _GROUP_BLOCKS - 1
