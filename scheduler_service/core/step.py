"""Owns the values that pass between core and worker link: the plan of a step and its result.

They mirror tidegate.worker.v1.StepPlan and StepResult, with numpy int32 columns where the wire has bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler_service.core.sampling import SamplingParams

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

NONE: Int32 = np.zeros(0, np.int32)
"""The empty column."""


def _none() -> Int32:
    return NONE


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that enters a slot, with all that the worker must know of it."""

    slot: int
    request_id: str
    index: int  # candidate
    token_ids: Int32  # prompt, and what was generated before a preemption
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: Int32
    sampling: SamplingParams
    min_tokens: int
    min_tokens_banned_ids: tuple[int, ...]  # end-of-text and stop ids, empty where min_tokens is 0
    traceparent: str
    adapter: str
    grammar: str = ""  # see RequestSpec


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of one worker. See tidegate.worker.v1.StepPlan for the order in which a worker applies it."""

    seq: int
    released: Int32  # slots
    admitted: tuple[Admission, ...]
    copy_sources: Int32
    copy_destinations: Int32
    slots: Int32  # [rows]
    num_tokens: Int32  # [rows], each at least 1
    block_rows: Int32  # ascending indices into slots
    block_ids: Int32  # one block for each of block_rows
    swap_out_blocks: Int32 = field(default_factory=_none)  # copied to host blocks
    swap_out_host_blocks: Int32 = field(default_factory=_none)
    swap_in_host_blocks: Int32 = field(default_factory=_none)  # copied back to blocks
    swap_in_blocks: Int32 = field(default_factory=_none)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the sampled token's, and the most likely ones."""

    sampled: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: one token for each row that sampled, in the order of the plan's rows."""

    seq: int
    slots: Int32  # [sampled rows]
    token_ids: Int32  # [sampled rows]
    failed_rows: frozenset[int] = frozenset()  # indices into slots: their tokens mean nothing
    logprobs: dict[int, TokenLogprobs] | None = None  # by index into slots
    compute_ms: float = 0.0  # what the step took by the worker's clock, 0: it did not say
    grammar_failed_rows: frozenset[int] = frozenset()  # those of failed_rows whose logits were finite
