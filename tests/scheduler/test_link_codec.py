from __future__ import annotations

import numpy as np
import pytest

from scheduler_service.core.sampling import SamplingParams
from scheduler_service.core.step import Admission, StepPlan, TokenLogprobs
from scheduler_service.hello_codec import decode_hello, encode_hello
from scheduler_service.plan_codec import (
    MalformedResultError,
    ResultLimits,
    decode_result,
    decode_timings,
    encode_plan,
)
from scheduler_service.workers import WorkerRefusedError
from tidegate.worker.v1 import worker_pb2 as pb

LIMITS = ResultLimits(num_slots=8, vocab_size=100)


def ints(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def plan(**fields) -> StepPlan:
    names = "released copy_sources copy_destinations slots num_tokens block_rows block_ids"
    defaults = {"seq": 1, "admitted": (), **{name: column() for name in names.split()}}
    return StepPlan(**{**defaults, **fields})


def test_plan_columns_are_little_endian_int32():
    message = encode_plan(
        plan(
            seq=7,
            released=column(3),
            copy_sources=column(1, 2),
            copy_destinations=column(5, 6),
            slots=column(0, 2),
            num_tokens=column(1, 300),
            block_rows=column(1),
            block_ids=column(70_000),
            swap_out_blocks=column(9),
            swap_out_host_blocks=column(0),
            swap_in_host_blocks=column(4, 3),
            swap_in_blocks=column(8, 7),
        ),
        traceparent="00-ab-cd-01",
    ).plan
    assert message.seq == 7
    assert message.released == b"\x03\0\0\0"
    assert message.copy_sources == ints(1, 2)
    assert message.copy_destinations == ints(5, 6)
    assert message.slots == ints(0, 2)
    assert message.num_tokens == ints(1, 300)
    assert message.block_rows == ints(1)
    assert message.block_ids == ints(70_000)
    assert (message.swap_out_blocks, message.swap_out_host_blocks) == (ints(9), ints(0))
    assert (message.swap_in_host_blocks, message.swap_in_blocks) == (ints(4, 3), ints(8, 7))
    assert message.traceparent == "00-ab-cd-01"


def test_an_admission_carries_all_that_a_worker_must_know():
    sampling = SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.125,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        seed=2**64 - 1,
        logit_bias=((4, -100.0), (9, 2.5)),
        logprobs=0,
    )
    admission = Admission(
        slot=3,
        request_id="r",
        index=2,
        token_ids=column(5, 6, 7),
        num_prompt_tokens=2,
        num_computed_tokens=1,
        block_ids=column(11),
        sampling=sampling,
        min_tokens=4,
        min_tokens_banned_ids=(0, 2),
        traceparent="tp",
        adapter="lora",
    )
    (sent,) = encode_plan(plan(admitted=(admission,))).plan.admitted
    assert (sent.slot, sent.request_id, sent.num_prompt_tokens, sent.num_computed_tokens) == (3, "r/2", 2, 1)
    assert (sent.token_ids, sent.block_ids) == (ints(5, 6, 7), ints(11))
    assert (sent.traceparent, sent.adapter) == ("tp", "lora")
    got = sent.sampling
    assert (got.temperature, got.top_k, got.top_p, got.min_p) == (0.5, 7, 0.25, 0.125)
    assert (got.presence_penalty, got.frequency_penalty, got.repetition_penalty) == (1.0, -1.0, 1.5)
    assert (got.seed, got.logprobs, got.min_tokens) == (2**64 - 1, 0, 4)
    assert (got.bias_token_ids, got.bias_values) == (ints(4, 9), floats(-100.0, 2.5))
    assert got.min_tokens_banned_ids == ints(0, 2)


def test_without_logprobs_the_wire_says_minus_one():
    admission = Admission(0, "r", 0, column(1), 1, 0, column(1), SamplingParams(), 0, (), "", "")
    assert encode_plan(plan(admitted=(admission,))).plan.admitted[0].sampling.logprobs == -1


def test_a_result_becomes_columns():
    result = decode_result(pb.StepResult(seq=3, slots=ints(1, 7), token_ids=ints(99, 0)), LIMITS)
    assert result.seq == 3
    assert result.slots.tolist() == [1, 7]
    assert result.token_ids.tolist() == [99, 0]
    assert result.failed_rows == frozenset()
    assert result.logprobs is None


def test_a_result_may_sample_nothing():
    result = decode_result(pb.StepResult(seq=1), LIMITS)
    assert len(result.slots) == len(result.token_ids) == 0


@pytest.mark.parametrize(
    ("busy_until_ns", "compute_ms"),
    [(0, 7.0), (1_500_000, 7.0), (4_000_000, 5.0), (99_000_000, 0.0)],
)
def test_a_step_takes_from_its_start_or_the_end_of_the_one_before_to_its_end(busy_until_ns, compute_ms):
    timings = pb.StepTimings(started_ns=2_000_000, forward_ns=3_000_000, finished_ns=9_000_000)
    message = pb.StepResult(seq=1, timings=timings)
    assert decode_result(message, LIMITS, busy_until_ns).compute_ms == compute_ms


def test_a_result_without_timings_tells_no_time():
    assert decode_result(pb.StepResult(seq=1), LIMITS).compute_ms == 0


def test_tokens_of_failed_rows_are_not_looked_at():
    message = pb.StepResult(seq=1, slots=ints(0, 1), token_ids=ints(-1, 5), failed_rows=ints(0))
    assert decode_result(message, LIMITS).failed_rows == {0}


def logprobs(**fields: bytes) -> pb.StepResult:
    columns = {
        "rows": ints(0, 2),
        "sampled": floats(-0.5, -1.5),
        "top_offsets": ints(0, 2, 2),
        "top_token_ids": ints(4, 5),
        "top_values": floats(-0.25, -0.75),
    }
    entries = pb.Logprobs(**{**columns, **fields})
    return pb.StepResult(seq=1, slots=ints(0, 1, 2), token_ids=ints(1, 2, 3), logprobs=entries)


def test_logprobs_become_one_entry_for_each_row():
    assert decode_result(logprobs(), LIMITS).logprobs == {
        0: TokenLogprobs(-0.5, ((4, -0.25), (5, -0.75))),
        2: TokenLogprobs(-1.5, ()),
    }


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (pb.StepResult(seq=9, slots=b"\0\0\0"), "result 9: slots has 3 bytes"),
        (pb.StepResult(slots=ints(1, 2), token_ids=ints(1)), "token_ids has 1 items, but slots has 2"),
        (pb.StepResult(slots=ints(8), token_ids=ints(1)), r"slots\[0\] is 8; allowed is 0 to 7"),
        (pb.StepResult(slots=ints(-1), token_ids=ints(1)), r"slots\[0\] is -1"),
        (
            pb.StepResult(slots=ints(1, 2), token_ids=ints(1, 100)),
            r"token_ids\[1\] is 100; allowed is 0",
        ),
        (pb.StepResult(slots=ints(1), token_ids=ints(-5)), r"token_ids\[0\] is -5"),
        (pb.StepResult(slots=ints(1), token_ids=ints(1), failed_rows=ints(1)), r"failed_rows\[0\] is 1"),
        (pb.StepResult(failed_rows=ints(0)), r"failed_rows\[0\] is 0"),
        (logprobs(rows=ints(2, 0)), "not ascending"),
        (logprobs(rows=ints(0, 0)), "not ascending"),
        (logprobs(rows=ints(0, 3)), r"logprobs.rows\[1\] is 3"),
        (logprobs(sampled=floats(-1)), "logprobs.sampled has 1 items"),
        (logprobs(sampled=floats(-1, float("nan"))), "not a number"),
        (logprobs(top_values=floats(-1)), "logprobs.top_values has 1 items"),
        (logprobs(top_token_ids=ints(4, 100)), r"logprobs.top_token_ids\[1\] is 100"),
        (logprobs(top_offsets=ints(0, 2)), "logprobs.top_offsets has 2 items"),
        (logprobs(top_offsets=b""), "logprobs.top_offsets has 0 items"),
        (logprobs(top_offsets=ints(0, 3, 2)), "must rise from 0 to 2"),
        (logprobs(top_offsets=ints(1, 2, 2)), "must rise from 0 to 2"),
        (logprobs(top_offsets=ints(0, 1, 1)), "must rise from 0 to 2"),
    ],
)
def test_malformed_results_are_named(message, complaint):
    with pytest.raises(MalformedResultError, match=complaint):
        decode_result(message, LIMITS)


def test_timings_are_differences_and_never_negative():
    stamps = pb.StepTimings(
        received_ns=1_000,
        started_ns=3_000,
        forward_ns=2_000,
        sampling_ns=7_000,
        finished_ns=8_000,
        gap_ns=9,
    )
    timings = decode_timings(stamps)
    assert timings.wait_s == pytest.approx(2e-6)
    assert timings.prepare_s == 0
    assert timings.forward_s == pytest.approx(5e-6)
    assert timings.sampling_s == pytest.approx(1e-6)
    assert timings.gap_s == pytest.approx(9e-9)


def hello(**fields) -> pb.ExecuteResponse:
    model = pb.ModelInfo(name="m", fingerprint="f", max_model_len=64, vocab_size=100, eos_token_ids=[2])
    defaults = {
        "protocol_version": 1,
        "scheduler_epoch": 5,
        "incarnation": "i",
        "model": model,
        "block_size": 16,
        "num_blocks": 9,
        "num_slots": 4,
        "max_batched_tokens": 32,
        "max_in_flight": 2,
    }
    return pb.ExecuteResponse(hello=pb.WorkerHello(**{**defaults, **fields}))


def test_hellos():
    sent = encode_hello("w1", 5).hello
    assert (sent.protocol_version, sent.scheduler_epoch, sent.worker_id) == (1, 5, "w1")
    info = decode_hello(hello(), 5)
    assert (info.incarnation, info.block_size, info.num_blocks, info.num_slots) == ("i", 16, 9, 4)
    assert (info.model.name, info.model.fingerprint, info.model.eos_token_ids) == ("m", "f", {2})


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (hello(protocol_version=2), "protocol version 2, this service 1"),
        (hello(scheduler_epoch=4), "epoch 4, this stream has 5"),
        (hello(num_blocks=1), "num_blocks = 1; allowed is 2"),
        (hello(num_slots=0), "num_slots = 0"),
        (hello(max_in_flight=0), "max_in_flight = 0"),
        (hello(incarnation=""), "lacks an incarnation"),
        (hello(model=pb.ModelInfo(max_model_len=8, vocab_size=8)), "lacks an incarnation or a model name"),
        (hello(model=pb.ModelInfo(name="m", max_model_len=8)), "vocab_size = 0"),
        (pb.ExecuteResponse(result=pb.StepResult()), "not a hello"),
        (pb.ExecuteResponse(), "not a hello"),
    ],
)
def test_hellos_that_cannot_be_accepted_are_refused(message, complaint):
    with pytest.raises(WorkerRefusedError, match=complaint):
        decode_hello(message, 5)
