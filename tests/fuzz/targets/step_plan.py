"""StepPlan: the columns that a worker gets from whoever holds its stream."""

import struct

import numpy as np
from fuzz.mutations import message_maker
from fuzz.target import Target
from google.protobuf.message import DecodeError

from tidegate.worker.v1 import worker_pb2 as pb
from worker_service.errors import PlanError
from worker_service.plan import Limits
from worker_service.plan_codec import decode_plan

LIMITS = Limits(
    num_slots=8, num_blocks=64, block_size=4, max_batched_tokens=64, max_model_len=64, vocab_size=500
)


def ints(*values: int) -> bytes:
    """A column."""
    return struct.pack(f"<{len(values)}i", *values)


SEEDS = [
    pb.StepPlan(
        seq=1,
        released=ints(5),
        admitted=[
            pb.AdmittedRequest(
                slot=slot,
                request_id=f"r/{slot}",
                token_ids=ints(*range(10)),
                num_prompt_tokens=9,
                num_computed_tokens=4,
                block_ids=ints(1 + 3 * slot, 2 + 3 * slot, 3 + 3 * slot),
                sampling=pb.WorkerSampling(
                    temperature=1.0,
                    top_p=1.0,
                    repetition_penalty=1.0,
                    bias_token_ids=ints(3, 4),
                    bias_values=struct.pack("<2f", 1.0, -1.0),
                    min_tokens_banned_ids=ints(1),
                    logprobs=2,
                ),
            )
            for slot in (0, 1)
        ],
        copy_sources=ints(4),
        copy_destinations=ints(9),
        slots=ints(0, 1, 2),
        num_tokens=ints(6, 6, 1),
        block_rows=ints(2, 2),
        block_ids=ints(10, 11),
    ),
    pb.StepPlan(seq=2, slots=ints(0), num_tokens=ints(1)),
]


def read(data: bytes) -> None:
    """What was accepted is within the worker's limits."""
    plan = decode_plan(pb.StepPlan.FromString(data), LIMITS)
    assert len(plan.slots) == len(plan.num_tokens) == len(set(plan.slots.tolist()))
    assert plan.num_tokens.sum(dtype=np.int64) <= LIMITS.max_batched_tokens
    for blocks in (plan.block_ids, plan.copy_sources, plan.copy_destinations):
        assert all(1 <= block < LIMITS.num_blocks for block in blocks.tolist())
    for admission in plan.admitted:
        assert 0 <= admission.slot < LIMITS.num_slots
        assert 0 <= admission.num_computed_tokens < len(admission.token_ids) <= LIMITS.max_model_len
        assert all(0 <= token < LIMITS.vocab_size for token in admission.token_ids.tolist())


TARGET = Target("step_plan", message_maker(SEEDS), read, (DecodeError, PlanError), 3)
