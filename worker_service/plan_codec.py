"""Translates plans and results between protobuf and numpy, and checks what needs no state of a slot.

What needs the state of a slot is checked where the plan is applied (slots.py).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidegate.worker.v1 import worker_pb2 as pb
from worker_service.errors import PlanError
from worker_service.plan import Admission, Float32, Int32, Limits, LogprobColumns, Plan, Result, Sampling

_MAX_LOGPROBS = 1024


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the columns of one plan and knows how to complain about them."""

    seq: int

    def int32(self, data: bytes, column: str) -> Int32:
        self.require(len(data) % 4 == 0, column, f"{len(data)} bytes", "not a whole number of 4-byte values")
        return np.frombuffer(data, dtype="<i4")

    def float32(self, data: bytes, column: str) -> Float32:
        self.require(len(data) % 4 == 0, column, f"{len(data)} bytes", "not a whole number of 4-byte values")
        return np.frombuffer(data, dtype="<f4")

    def require(self, condition: bool, column: str, value: object, why: str) -> None:
        if not condition:
            raise PlanError(self.seq, column, value, why)

    def in_range(self, values: Int32, low: int, high: int, column: str) -> None:
        """Every value is at least `low` and below `high`."""
        if len(values) and (values.min() < low or values.max() >= high):
            bad = values[(values < low) | (values >= high)][0]
            raise PlanError(self.seq, column, int(bad), f"must be {low} to {high - 1}")

    def same_length(self, values: Int32 | Float32, others: Int32, column: str, other: str) -> None:
        if len(values) != len(others):
            why = f"must be as long as {other}, which has {len(others)}"
            raise PlanError(self.seq, column, f"{len(values)} values", why)

    def unique(self, values: Int32, column: str) -> None:
        if len(values) > 1:
            ordered = np.sort(values)
            again = ordered[1:][ordered[1:] == ordered[:-1]]
            if len(again):
                raise PlanError(self.seq, column, int(again[0]), "is there twice")


def decode_plan(message: pb.StepPlan, limits: Limits) -> Plan:
    """The plan as columns. Raises PlanError for the first rule that it breaks."""
    read = _Reader(message.seq)
    slots = read.int32(message.slots, "slots")
    num_tokens = read.int32(message.num_tokens, "num_tokens")
    released = read.int32(message.released, "released")
    for column, values in (("slots", slots), ("released", released)):
        read.in_range(values, 0, limits.num_slots, column)
        read.unique(values, column)
    read.same_length(num_tokens, slots, "num_tokens", "slots")
    read.in_range(num_tokens, 1, limits.max_batched_tokens + 1, "num_tokens")
    total = int(num_tokens.sum(dtype=np.int64))
    why = f"tokens in all, more than max_batched_tokens {limits.max_batched_tokens}"
    read.require(total <= limits.max_batched_tokens, "num_tokens", total, why)
    block_rows, block_ids = _appended_blocks(read, message, len(slots), limits)
    sources, destinations = _copies(read, message, limits)
    swaps = _swaps(read, message, limits)
    admitted = tuple(_admission(read, request, limits) for request in message.admitted)
    read.unique(np.array([a.slot for a in admitted], np.int32), "admitted.slot")
    return Plan(
        seq=message.seq,
        released=released,
        admitted=admitted,
        copy_sources=sources,
        copy_destinations=destinations,
        slots=slots,
        num_tokens=num_tokens,
        block_rows=block_rows,
        block_ids=block_ids,
        **swaps,
        traceparent=message.traceparent,
        received_ns=time.monotonic_ns(),
    )


def _appended_blocks(read: _Reader, message: pb.StepPlan, rows: int, limits: Limits) -> tuple[Int32, Int32]:
    block_rows = read.int32(message.block_rows, "block_rows")
    block_ids = read.int32(message.block_ids, "block_ids")
    read.same_length(block_ids, block_rows, "block_ids", "block_rows")
    read.in_range(block_rows, 0, rows, "block_rows")
    read.in_range(block_ids, 1, limits.num_blocks, "block_ids")
    falls = np.flatnonzero(np.diff(block_rows) < 0)
    if len(falls):
        raise PlanError(message.seq, "block_rows", int(block_rows[falls[0] + 1]), "comes after a higher one")
    return block_rows, block_ids


def _copies(read: _Reader, message: pb.StepPlan, limits: Limits) -> tuple[Int32, Int32]:
    sources = read.int32(message.copy_sources, "copy_sources")
    destinations = read.int32(message.copy_destinations, "copy_destinations")
    read.same_length(destinations, sources, "copy_destinations", "copy_sources")
    read.in_range(sources, 1, limits.num_blocks, "copy_sources")
    read.in_range(destinations, 1, limits.num_blocks, "copy_destinations")
    read.unique(destinations, "copy_destinations")
    return sources, destinations


def _swaps(read: _Reader, message: pb.StepPlan, limits: Limits) -> dict[str, Int32]:
    columns: dict[str, Int32] = {}
    for way, destination in (("swap_out", "host_blocks"), ("swap_in", "blocks")):
        blocks = read.int32(getattr(message, f"{way}_blocks"), f"{way}_blocks")
        host_blocks = read.int32(getattr(message, f"{way}_host_blocks"), f"{way}_host_blocks")
        if len(host_blocks) and not limits.num_host_blocks:
            why = "there is no host memory; it is set by --host-memory"
            raise PlanError(read.seq, f"{way}_host_blocks", int(host_blocks[0]), why)
        read.same_length(blocks, host_blocks, f"{way}_blocks", f"{way}_host_blocks")
        read.in_range(blocks, 1, limits.num_blocks, f"{way}_blocks")
        read.in_range(host_blocks, 0, limits.num_host_blocks, f"{way}_host_blocks")
        columns |= {f"{way}_blocks": blocks, f"{way}_host_blocks": host_blocks}
        read.unique(columns[f"{way}_{destination}"], f"{way}_{destination}")
    return columns


def _admission(read: _Reader, request: pb.AdmittedRequest, limits: Limits) -> Admission:
    tokens = read.int32(request.token_ids, "admitted.token_ids")
    blocks = read.int32(request.block_ids, "admitted.block_ids")
    read.require(
        request.slot < limits.num_slots, "admitted.slot", request.slot, f"must be below {limits.num_slots}"
    )
    read.require(
        0 < len(tokens) <= limits.max_model_len,
        "admitted.token_ids",
        f"{len(tokens)} tokens",
        f"must be 1 to max_model_len {limits.max_model_len}",
    )
    read.in_range(tokens, 0, limits.vocab_size, "admitted.token_ids")
    read.in_range(blocks, 1, limits.num_blocks, "admitted.block_ids")
    prompt, computed = request.num_prompt_tokens, request.num_computed_tokens
    known = f"with {len(tokens)} tokens known"
    read.require(0 < prompt <= len(tokens), "admitted.num_prompt_tokens", prompt, known)
    read.require(computed < len(tokens), "admitted.num_computed_tokens", computed, f"not below all, {known}")
    read.require(
        -(-computed // limits.block_size) <= len(blocks) <= limits.max_blocks_per_request,
        "admitted.block_ids",
        f"{len(blocks)} blocks",
        f"must hold {computed} computed tokens, and be at most {limits.max_blocks_per_request}",
    )
    read.require(not request.adapter, "admitted.adapter", request.adapter, "there are no adapters here")
    return Admission(
        slot=request.slot,
        request_id=request.request_id,
        token_ids=tokens,
        num_prompt_tokens=prompt,
        num_computed_tokens=computed,
        block_ids=blocks,
        sampling=_sampling(read, request.sampling, limits),
        traceparent=request.traceparent,
        grammar=request.grammar,
    )


def _sampling(read: _Reader, s: pb.WorkerSampling, limits: Limits) -> Sampling:
    def check(ok: bool, name: str, value: Any, why: str) -> None:
        read.require(ok, f"admitted.sampling.{name}", value, why)

    check(0 <= s.temperature < math.inf, "temperature", s.temperature, "must be 0 or more")
    check(0 < s.top_p <= 1, "top_p", s.top_p, "must be above 0, at most 1")
    check(0 <= s.min_p <= 1, "min_p", s.min_p, "must be 0 to 1")
    check(0 < s.repetition_penalty < math.inf, "repetition_penalty", s.repetition_penalty, "must be above 0")
    check(math.isfinite(s.presence_penalty), "presence_penalty", s.presence_penalty, "must be finite")
    check(math.isfinite(s.frequency_penalty), "frequency_penalty", s.frequency_penalty, "must be finite")
    check(-1 <= s.logprobs <= _MAX_LOGPROBS, "logprobs", s.logprobs, f"must be -1 to {_MAX_LOGPROBS}")
    bias_ids = read.int32(s.bias_token_ids, "admitted.sampling.bias_token_ids")
    bias_values = read.float32(s.bias_values, "admitted.sampling.bias_values")
    banned_ids = read.int32(s.min_tokens_banned_ids, "admitted.sampling.min_tokens_banned_ids")
    read.in_range(bias_ids, 0, limits.vocab_size, "admitted.sampling.bias_token_ids")
    read.unique(bias_ids, "admitted.sampling.bias_token_ids")
    read.same_length(bias_values, bias_ids, "admitted.sampling.bias_values", "bias_token_ids")
    check(bool(np.isfinite(bias_values).all()), "bias_values", "not finite", "must be finite")
    read.in_range(banned_ids, 0, limits.vocab_size, "admitted.sampling.min_tokens_banned_ids")
    return Sampling(
        temperature=s.temperature,
        top_k=min(s.top_k, limits.vocab_size),
        top_p=s.top_p,
        min_p=s.min_p,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty,
        seed=s.seed,
        bias_token_ids=bias_ids,
        bias_values=bias_values,
        banned_token_ids=banned_ids,
        min_tokens=s.min_tokens,
        logprobs=min(s.logprobs, limits.vocab_size),
    )


def encode_result(result: Result) -> pb.StepResult:
    """The result as the wire has it."""
    t = result.timings
    return pb.StepResult(
        seq=result.seq,
        slots=_int32_bytes(result.slots),
        token_ids=_int32_bytes(result.token_ids),
        failed_rows=_int32_bytes(result.failed_rows),
        grammar_failed_rows=_int32_bytes(result.grammar_failed_rows),
        logprobs=None if result.logprobs is None else _encode_logprobs(result.logprobs),
        timings=pb.StepTimings(
            received_ns=t.received_ns,
            started_ns=t.started_ns,
            forward_ns=t.forward_ns,
            sampling_ns=t.sampling_ns,
            finished_ns=t.finished_ns,
            gap_ns=t.gap_ns,
        ),
    )


def _encode_logprobs(columns: LogprobColumns) -> pb.Logprobs:
    return pb.Logprobs(
        rows=_int32_bytes(columns.rows),
        sampled=_float32_bytes(columns.sampled),
        top_offsets=_int32_bytes(columns.top_offsets),
        top_token_ids=_int32_bytes(columns.top_token_ids),
        top_values=_float32_bytes(columns.top_values),
    )


def _int32_bytes(values: Int32) -> bytes:
    return values.astype("<i4", copy=False).tobytes()


def _float32_bytes(values: Float32) -> bytes:
    return values.astype("<f4", copy=False).tobytes()
