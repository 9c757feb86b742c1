"""Every rule that a plan can break is found, named by column and value, and breaks nothing else."""

import numpy as np
import pytest
from fake_scheduler import greedy, int32

from tidegate.worker.v1 import worker_pb2 as pb
from worker_service.errors import PlanError
from worker_service.plan import Limits, LogprobColumns, Result, Timings
from worker_service.plan_codec import decode_plan, encode_result

LIMITS = Limits(
    num_slots=4, num_blocks=10, block_size=8, max_batched_tokens=64, max_model_len=40, vocab_size=100
)


def floats(*values) -> bytes:
    return np.array(values, "<f4").tobytes()


def request(sampling: dict | None = None, **changes) -> pb.AdmittedRequest:
    fields = {
        "slot": 1,
        "request_id": "r",
        "token_ids": int32([5, 6, 7]),
        "num_prompt_tokens": 2,
        "num_computed_tokens": 0,
        "block_ids": int32([1]),
        "sampling": greedy(**(sampling or {})),
    }
    return pb.AdmittedRequest(**{**fields, **changes})


def plan(**changes) -> pb.StepPlan:
    fields = {
        "seq": 3,
        "released": int32([0]),
        "admitted": [request()],
        "copy_sources": int32([2]),
        "copy_destinations": int32([3]),
        "slots": int32([1, 2]),
        "num_tokens": int32([3, 1]),
        "block_rows": int32([0, 1, 1]),
        "block_ids": int32([4, 5, 6]),
    }
    return pb.StepPlan(**{**fields, **changes})


def test_a_good_plan_keeps_every_column():
    knobs = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.75,
        "min_p": 0.25,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.125,
        "repetition_penalty": 1.5,
        "seed": 2**64 - 1,
        "bias_token_ids": int32([8, 9]),
        "bias_values": floats(1.5, -2),
        "min_tokens_banned_ids": int32([2]),
        "min_tokens": 4,
        "logprobs": 5,
    }
    decoded = decode_plan(plan(admitted=[request(knobs, traceparent="t")], traceparent="p"), LIMITS)
    for column, values in {
        "released": [0],
        "copy_sources": [2],
        "copy_destinations": [3],
        "slots": [1, 2],
        "num_tokens": [3, 1],
        "block_rows": [0, 1, 1],
        "block_ids": [4, 5, 6],
    }.items():
        assert getattr(decoded, column).tolist() == values
    assert (decoded.seq, decoded.traceparent) == (3, "p")
    (admission,) = decoded.admitted
    assert (admission.slot, admission.request_id, admission.traceparent) == (1, "r", "t")
    assert admission.token_ids.tolist() == [5, 6, 7]
    assert (admission.num_prompt_tokens, admission.num_computed_tokens) == (2, 0)
    assert admission.block_ids.tolist() == [1]
    sampling = admission.sampling
    scalars = {k: v for k, v in knobs.items() if not isinstance(v, bytes)}
    assert {k: getattr(sampling, k) for k in scalars} == scalars
    assert sampling.bias_token_ids.tolist() == [8, 9]
    assert sampling.bias_values.tolist() == [1.5, -2]
    assert sampling.banned_token_ids.tolist() == [2]


def test_large_top_k_and_logprobs_mean_the_vocabulary():
    admission = decode_plan(plan(admitted=[request({"top_k": 2**32 - 1, "logprobs": 900})]), LIMITS).admitted[
        0
    ]
    assert (admission.sampling.top_k, admission.sampling.logprobs) == (100, 100)


def test_an_empty_plan_is_good():
    decoded = decode_plan(pb.StepPlan(seq=1), LIMITS)
    assert len(decoded.slots) == 0


NAN, INFINITY = float("nan"), float("inf")
MALFORMED = {
    "slots": [
        {"slots": b"\1\0\0"},
        {"slots": int32([1, 4])},
        {"slots": int32([1, -1])},
        {"slots": int32([2, 2])},
    ],
    "released": [{"released": int32([4])}, {"released": int32([0, 0])}, {"released": b"\0"}],
    "num_tokens": [
        {"num_tokens": int32([3])},
        {"num_tokens": int32([3, 0])},
        {"num_tokens": int32([3, -1])},
        {"num_tokens": int32([60, 5])},
        {"num_tokens": int32([2**31 - 1, 2**31 - 1])},
        {"num_tokens": b"\1\1"},
    ],
    "block_rows": [
        {"block_rows": int32([0, 1, 2])},
        {"block_rows": int32([-1, 1, 1])},
        {"block_rows": int32([1, 0, 1])},
    ],
    "block_ids": [
        {"block_ids": int32([4, 5])},
        {"block_ids": int32([4, 5, 0])},
        {"block_ids": int32([4, 5, 10])},
    ],
    "copy_sources": [{"copy_sources": int32([0])}, {"copy_sources": int32([10])}],
    "copy_destinations": [
        {"copy_destinations": int32([])},
        {"copy_destinations": int32([0])},
        {"copy_destinations": int32([-3])},
        {"copy_sources": int32([1, 2]), "copy_destinations": int32([3, 3])},
    ],
    "admitted.slot": [{"admitted": [request(slot=4)]}, {"admitted": [request(), request()]}],
    "admitted.token_ids": [
        {"admitted": [request(token_ids=b"")]},
        {"admitted": [request(token_ids=int32([5, 100]))]},
        {"admitted": [request(token_ids=int32([5, -1]))]},
        {"admitted": [request(token_ids=int32([5] * 41))]},
        {"admitted": [request(token_ids=b"12345")]},
    ],
    "admitted.num_prompt_tokens": [
        {"admitted": [request(num_prompt_tokens=0)]},
        {"admitted": [request(num_prompt_tokens=4)]},
    ],
    "admitted.num_computed_tokens": [{"admitted": [request(num_computed_tokens=3)]}],
    "admitted.block_ids": [
        {"admitted": [request(block_ids=int32([0]))]},
        {"admitted": [request(block_ids=int32([10]))]},
        {"admitted": [request(block_ids=int32([]), num_computed_tokens=1)]},
        {"admitted": [request(block_ids=int32([1, 2, 3, 4, 5, 6]))]},
    ],
    "admitted.adapter": [{"admitted": [request(adapter="lora")]}],
    "admitted.sampling.temperature": [
        {"admitted": [request({"temperature": value})]} for value in (-0.1, NAN, INFINITY)
    ],
    "admitted.sampling.top_p": [{"admitted": [request({"top_p": value})]} for value in (0, 1.1, NAN)],
    "admitted.sampling.min_p": [{"admitted": [request({"min_p": value})]} for value in (-1, 1.1, NAN)],
    "admitted.sampling.repetition_penalty": [
        {"admitted": [request({"repetition_penalty": value})]} for value in (0, -1, NAN, INFINITY)
    ],
    "admitted.sampling.presence_penalty": [{"admitted": [request({"presence_penalty": NAN})]}],
    "admitted.sampling.frequency_penalty": [{"admitted": [request({"frequency_penalty": INFINITY})]}],
    "admitted.sampling.logprobs": [{"admitted": [request({"logprobs": value})]} for value in (-2, 5000)],
    "admitted.sampling.bias_token_ids": [
        {"admitted": [request({"bias_token_ids": int32([100]), "bias_values": floats(1)})]},
        {"admitted": [request({"bias_token_ids": int32([4, 4]), "bias_values": floats(1, 1)})]},
    ],
    "admitted.sampling.bias_values": [
        {"admitted": [request({"bias_token_ids": int32([4])})]},
        {"admitted": [request({"bias_token_ids": int32([4]), "bias_values": floats(NAN)})]},
        {"admitted": [request({"bias_values": b"123"})]},
    ],
    "admitted.sampling.min_tokens_banned_ids": [
        {"admitted": [request({"min_tokens_banned_ids": int32([100])})]}
    ],
}


@pytest.mark.parametrize(
    ("column", "changes"), [(column, changes) for column, cases in MALFORMED.items() for changes in cases]
)
def test_a_malformed_plan_is_refused_by_column(column, changes):
    with pytest.raises(PlanError) as caught:
        decode_plan(plan(**changes), LIMITS)
    assert caught.value.column == column
    assert caught.value.seq == 3
    assert f"plan 3: {column} = {caught.value.value}" in str(caught.value)


def test_a_result_is_encoded_column_by_column():
    columns = LogprobColumns(
        rows=np.array([1], np.int32),
        sampled=np.array([-0.5], np.float32),
        top_offsets=np.array([0, 2], np.int32),
        top_token_ids=np.array([9, 8], np.int32),
        top_values=np.array([-0.5, -1.5], np.float32),
    )
    result = Result(
        seq=7,
        slots=np.array([3, 1], np.int32),
        token_ids=np.array([11, 12], np.int32),
        failed_rows=np.array([0], np.int32),
        logprobs=columns,
        timings=Timings(1, 2, 3, 4, 5, 6),
    )
    message = encode_result(result)
    assert message.seq == 7
    assert message.slots == int32([3, 1])
    assert message.token_ids == int32([11, 12])
    assert message.failed_rows == int32([0])
    assert message.logprobs == pb.Logprobs(
        rows=int32([1]),
        sampled=floats(-0.5),
        top_offsets=int32([0, 2]),
        top_token_ids=int32([9, 8]),
        top_values=floats(-0.5, -1.5),
    )
    assert message.timings == pb.StepTimings(
        received_ns=1, started_ns=2, forward_ns=3, sampling_ns=4, finished_ns=5, gap_ns=6
    )


def test_a_result_without_logprobs_has_none():
    empty = np.empty(0, np.int32)
    assert not encode_result(Result(1, empty, empty, empty, None, Timings(0, 0, 0, 0, 0, 0))).HasField(
        "logprobs"
    )
