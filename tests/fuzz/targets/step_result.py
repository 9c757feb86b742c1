"""StepResult: the columns that the scheduler gets from a worker."""

import math
import struct

from fuzz.mutations import message_maker
from fuzz.target import Target
from fuzz.targets.step_plan import ints
from google.protobuf.message import DecodeError

from scheduler_service.plan_codec import MalformedResultError, ResultLimits, decode_result, decode_timings
from tidegate.worker.v1 import worker_pb2 as pb

LIMITS = ResultLimits(num_slots=8, vocab_size=500)
SEEDS = [
    pb.StepResult(
        seq=1,
        slots=ints(0, 1, 2),
        token_ids=ints(5, 6, 7),
        failed_rows=ints(1),
        logprobs=pb.Logprobs(
            rows=ints(0, 2),
            sampled=struct.pack("<2f", -0.5, -1.5),
            top_offsets=ints(0, 1, 3),
            top_token_ids=ints(5, 7, 8),
            top_values=struct.pack("<3f", -0.5, -1.5, -2.5),
        ),
        timings=pb.StepTimings(received_ns=1, started_ns=2, forward_ns=3, sampling_ns=4, finished_ns=5),
    ),
    pb.StepResult(seq=2, slots=ints(3), token_ids=ints(499)),
]


def read(data: bytes) -> None:
    """What was accepted is within the limits of the worker's hello."""
    message = pb.StepResult.FromString(data)
    result = decode_result(message, LIMITS)
    timings = decode_timings(message.timings)
    assert min(timings.wait_s, timings.prepare_s, timings.forward_s, timings.sampling_s) >= 0
    assert len(result.slots) == len(result.token_ids)
    assert all(0 <= slot < LIMITS.num_slots for slot in result.slots.tolist())
    assert all(0 <= row < len(result.slots) for row in result.failed_rows)
    for row, token in enumerate(result.token_ids.tolist()):
        assert row in result.failed_rows or 0 <= token < LIMITS.vocab_size
    for row, logprobs in (result.logprobs or {}).items():
        assert 0 <= row < len(result.slots)
        assert not math.isnan(logprobs.sampled)
        assert all(0 <= token < LIMITS.vocab_size for token, _ in logprobs.top)


TARGET = Target("step_result", message_maker(SEEDS), read, (DecodeError, MalformedResultError), 3)
