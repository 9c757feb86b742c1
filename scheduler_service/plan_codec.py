"""Owns the wire form of steps: core plans to protobuf columns, and results back with every check.

What comes from a worker is not trusted: lengths, offsets and ids are checked here, against the limits that
the worker told in its hello. Whether a result fits the plan that it answers is the core's to check.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from scheduler_service.core.step import Admission, Float32, Int32, StepPlan, StepResult, TokenLogprobs
from scheduler_service.span_notice import SpanNotice
from tidegate.worker.v1 import worker_pb2 as pb

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")


class MalformedResultError(Exception):
    """A worker's result breaks a rule of the wire form. The message has names and numbers for the log."""


@dataclass(frozen=True, slots=True)
class ResultLimits:
    """Bounds for the ids in a worker's results, from its hello."""

    num_slots: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where a worker's time went in one step, in seconds by its own clock; no part is negative."""

    wait_s: float  # the plan was there, the step before still ran
    prepare_s: float
    forward_s: float
    sampling_s: float
    gap_s: float  # the device had nothing to do before this step

    @property
    def computing_s(self) -> float:
        """From the beginning of its preparation to its last sampled token."""
        return self.prepare_s + self.forward_s + self.sampling_s


def encode_plan(plan: StepPlan, traceparent: str = "") -> pb.ExecuteRequest:
    """The message that carries a plan. `traceparent` is the step span's, empty where it is not sampled."""
    return pb.ExecuteRequest(
        plan=pb.StepPlan(
            seq=plan.seq,
            released=_int_bytes(plan.released),
            admitted=[_encode_admission(admission) for admission in plan.admitted],
            copy_sources=_int_bytes(plan.copy_sources),
            copy_destinations=_int_bytes(plan.copy_destinations),
            slots=_int_bytes(plan.slots),
            num_tokens=_int_bytes(plan.num_tokens),
            block_rows=_int_bytes(plan.block_rows),
            block_ids=_int_bytes(plan.block_ids),
            traceparent=traceparent,
            swap_out_blocks=_int_bytes(plan.swap_out_blocks),
            swap_out_host_blocks=_int_bytes(plan.swap_out_host_blocks),
            swap_in_host_blocks=_int_bytes(plan.swap_in_host_blocks),
            swap_in_blocks=_int_bytes(plan.swap_in_blocks),
        )
    )


def encode_notice(notice: SpanNotice) -> pb.ExecuteRequest:
    """The message that tells which spans to record."""
    told = pb.TraceNotice(
        step_seqs=notice.step_seqs, ended_slots=notice.ended_slots, admitted_seqs=notice.admitted_seqs
    )
    return pb.ExecuteRequest(notice=told)


def _encode_admission(admission: Admission) -> pb.AdmittedRequest:
    sampling = admission.sampling
    bias_ids = np.array([token for token, _ in sampling.logit_bias], _INT32)
    bias_values = np.array([bias for _, bias in sampling.logit_bias], _FLOAT32)
    banned = np.array(admission.min_tokens_banned_ids, _INT32)
    return pb.AdmittedRequest(
        slot=admission.slot,
        request_id=f"{admission.request_id}/{admission.index}",
        token_ids=_int_bytes(admission.token_ids),
        num_prompt_tokens=admission.num_prompt_tokens,
        num_computed_tokens=admission.num_computed_tokens,
        block_ids=_int_bytes(admission.block_ids),
        sampling=pb.WorkerSampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
            bias_token_ids=bias_ids.tobytes(),
            bias_values=bias_values.tobytes(),
            min_tokens_banned_ids=banned.tobytes(),
            min_tokens=admission.min_tokens,
            logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
        ),
        traceparent=admission.traceparent,
        adapter=admission.adapter,
        grammar=admission.grammar,
    )


def _int_bytes(column: Int32) -> bytes:
    return column.astype(_INT32, copy=False).tobytes()


def decode_result(message: pb.StepResult, limits: ResultLimits, busy_until_ns: int = 0) -> StepResult:
    """The result in core form. `busy_until_ns`: when the step before it ended by the worker's clock, which
    may be after work on this one began. Raises MalformedResultError."""
    seq = message.seq
    slots = _int_column(seq, "slots", message.slots)
    token_ids = _int_column(seq, "token_ids", message.token_ids)
    _check_same_length(seq, "token_ids", len(token_ids), "slots", len(slots))
    _check_range(seq, "slots", slots, limits.num_slots)
    failed = lost_grammar = frozenset[int]()
    if message.failed_rows:
        failed_rows = _int_column(seq, "failed_rows", message.failed_rows)
        _check_range(seq, "failed_rows", failed_rows, len(slots))
        failed = frozenset(failed_rows.tolist())
        of_grammar = _int_column(seq, "grammar_failed_rows", message.grammar_failed_rows)
        lost_grammar = failed.intersection(of_grammar.tolist())
        valid = np.ones(len(slots), np.bool_)
        valid[failed_rows] = False
        _check_range(seq, "token_ids", token_ids[valid], limits.vocab_size)
    else:
        _check_range(seq, "token_ids", token_ids, limits.vocab_size)
    logprobs = None
    if message.HasField("logprobs"):
        logprobs = _decode_logprobs(seq, message.logprobs, len(slots), limits.vocab_size)
    compute_ns = message.timings.finished_ns - max(message.timings.started_ns, busy_until_ns)
    compute_ms = max(0, compute_ns) / 1e6
    return StepResult(seq, slots, token_ids, failed, logprobs, compute_ms, lost_grammar)


def _decode_logprobs(
    seq: int, message: pb.Logprobs, num_sampled: int, vocab_size: int
) -> dict[int, TokenLogprobs]:
    rows = _int_column(seq, "logprobs.rows", message.rows)
    sampled = _float_column(seq, "logprobs.sampled", message.sampled)
    offsets = _int_column(seq, "logprobs.top_offsets", message.top_offsets)
    top_ids = _int_column(seq, "logprobs.top_token_ids", message.top_token_ids)
    top_values = _float_column(seq, "logprobs.top_values", message.top_values)
    _check_range(seq, "logprobs.rows", rows, num_sampled)
    if (np.diff(rows) <= 0).any():
        raise MalformedResultError(f"result {seq}: logprobs.rows is not ascending")
    _check_same_length(seq, "logprobs.sampled", len(sampled), "logprobs.rows", len(rows))
    _check_same_length(seq, "logprobs.top_values", len(top_values), "logprobs.top_token_ids", len(top_ids))
    _check_range(seq, "logprobs.top_token_ids", top_ids, vocab_size)
    if np.isnan(sampled).any() or np.isnan(top_values).any():
        raise MalformedResultError(f"result {seq}: logprobs has a value that is not a number")
    _check_offsets(seq, offsets, len(rows), len(top_ids))
    ids, values, bounds = top_ids.tolist(), top_values.tolist(), offsets.tolist()
    return {
        row: TokenLogprobs(value, tuple(zip(ids[start:end], values[start:end], strict=True)))
        for row, value, start, end in zip(
            rows.tolist(), sampled.tolist(), bounds[:-1], bounds[1:], strict=True
        )
    }


def decode_timings(message: pb.StepTimings) -> StepTimings:
    """Differences of the worker's time stamps; those that run backwards count as 0."""
    stamps = (
        message.received_ns,
        message.started_ns,
        message.forward_ns,
        message.sampling_ns,
        message.finished_ns,
    )
    wait, prepare, forward, sampling = (max(0, end - start) / 1e9 for start, end in pairwise(stamps))
    return StepTimings(wait, prepare, forward, sampling, message.gap_ns / 1e9)


def _int_column(seq: int, name: str, data: bytes) -> Int32:
    _check_whole_items(seq, name, data)
    return np.frombuffer(data, _INT32)


def _float_column(seq: int, name: str, data: bytes) -> Float32:
    _check_whole_items(seq, name, data)
    return np.frombuffer(data, _FLOAT32)


def _check_whole_items(seq: int, name: str, data: bytes) -> None:
    if len(data) % 4:
        raise MalformedResultError(
            f"result {seq}: {name} has {len(data)} bytes, which is no multiple of the item size 4"
        )


def _check_same_length(seq: int, name: str, length: int, other: str, other_length: int) -> None:
    if length != other_length:
        raise MalformedResultError(
            f"result {seq}: {name} has {length} items, but {other} has {other_length}; they must be equal"
        )


def _check_range(seq: int, name: str, column: Int32, end: int) -> None:
    """Every value is in [0, end). One comparison: as unsigned, negative values are the largest."""
    if len(column) and int(column.view(np.uint32).max()) >= end:
        row = int(np.argmax(column.view(np.uint32)))
        raise MalformedResultError(f"result {seq}: {name}[{row}] is {column[row]}; allowed is 0 to {end - 1}")


def _check_offsets(seq: int, offsets: Int32, num_rows: int, num_items: int) -> None:
    name = "logprobs.top_offsets"
    _check_same_length(seq, name, len(offsets), "logprobs.rows and one", num_rows + 1)
    if offsets[0] != 0 or offsets[-1] != num_items or (np.diff(offsets) < 0).any():
        raise MalformedResultError(
            f"result {seq}: {name} must rise from 0 to {num_items}, the number of top tokens"
        )
