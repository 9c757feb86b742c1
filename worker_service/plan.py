"""Owns the values of a step: the plan that the worker applies and the result that it gives.

They mirror tidegate.worker.v1, with numpy columns where the wire has bytes. Nothing here checks or decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


def _none() -> Int32:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Sampling:
    """How a request samples; every default resolved."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # uint64
    bias_token_ids: Int32 = field(default_factory=_none)
    bias_values: Float32 = field(default_factory=lambda: np.empty(0, np.float32))
    banned_token_ids: Int32 = field(default_factory=_none)  # until min_tokens outputs
    min_tokens: int = 0
    logprobs: int = -1  # -1 sends none, 0 the sampled token's, k also the k most likely

    @property
    def penalizes(self) -> bool:
        """Whether what a request has seen changes its logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_plain(self) -> bool:
        """Whether it takes the most likely token, and that is all."""
        bans = self.min_tokens > 0 and len(self.banned_token_ids) > 0
        changes = self.penalizes or bans or len(self.bias_token_ids) > 0
        return self.temperature == 0 and self.logprobs < 0 and not changes


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """A request that enters a slot."""

    slot: int
    request_id: str
    token_ids: Int32  # prompt, and what was generated before a preemption
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: Int32
    sampling: Sampling
    traceparent: str = ""
    grammar: str = ""  # what the output must match, as llguidance takes it; empty: anything


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One step. See tidegate.worker.v1.StepPlan for the order in which it is applied."""

    seq: int
    released: Int32  # slots
    admitted: tuple[Admission, ...]
    copy_sources: Int32  # blocks
    copy_destinations: Int32  # blocks
    slots: Int32  # [R]
    num_tokens: Int32  # [R]
    block_rows: Int32  # ascending indices into slots
    block_ids: Int32  # one for each of block_rows
    swap_out_blocks: Int32 = field(default_factory=_none)
    swap_out_host_blocks: Int32 = field(default_factory=_none)
    swap_in_host_blocks: Int32 = field(default_factory=_none)
    swap_in_blocks: Int32 = field(default_factory=_none)
    traceparent: str = ""
    received_ns: int = 0  # monotonic clock


@dataclass(frozen=True, slots=True, eq=False)
class LogprobColumns:
    """Log-probabilities of the rows that asked for them, as the wire has them."""

    rows: Int32  # [M], ascending indices into the result's slots
    sampled: Float32  # [M]
    top_offsets: Int32  # [M + 1]
    top_token_ids: Int32  # most likely first
    top_values: Float32


@dataclass(frozen=True, slots=True)
class Timings:
    """Nanoseconds of the monotonic clock; gap_ns is a duration."""

    received_ns: int
    started_ns: int
    forward_ns: int
    sampling_ns: int
    finished_ns: int
    gap_ns: int

    def phases_ns(self) -> dict[str, int]:
        """How long each part of the step took, and the gap before it. Nothing is negative."""
        return {
            "wait": max(0, self.started_ns - self.received_ns),
            "prepare": self.forward_ns - self.started_ns,
            "forward": self.sampling_ns - self.forward_ns,
            "sampling": self.finished_ns - self.sampling_ns,
            "gap": self.gap_ns,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What a step gave: one token for each row that sampled, in the order of the plan's rows."""

    seq: int
    slots: Int32  # [S]
    token_ids: Int32  # [S]
    failed_rows: Int32  # indices into slots
    logprobs: LogprobColumns | None
    timings: Timings
    grammar_failed_rows: Int32 = field(default_factory=_none)  # those of failed_rows


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan may ask of this worker."""

    num_slots: int
    num_blocks: int  # the null block 0 included
    block_size: int  # tokens
    max_batched_tokens: int
    max_model_len: int  # tokens
    vocab_size: int
    num_host_blocks: int = 0

    @property
    def max_blocks_per_request(self) -> int:
        """Blocks that the longest request needs."""
        return -(-self.max_model_len // self.block_size)
