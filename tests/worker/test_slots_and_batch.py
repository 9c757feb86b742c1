"""The slot table refuses plans that do not fit its state, and the batch is laid out as attention wants it."""

import numpy as np
import pytest
import torch
from fake_scheduler import int32
from test_plan_codec import LIMITS, request

from tidegate.worker.v1 import worker_pb2 as pb
from worker_service.batch import lay_out, upload
from worker_service.errors import PlanError
from worker_service.plan_codec import decode_plan
from worker_service.slots import SlotTable


def apply(table: SlotTable, message: pb.StepPlan):
    plan = decode_plan(message, LIMITS)
    table.release(plan)
    table.admit(plan)
    table.append_blocks(plan)
    return plan, table.advance(plan)


def admit(*requests, **changes) -> pb.StepPlan:
    return pb.StepPlan(seq=1, admitted=list(requests), **changes)


def tokens(*ids, **changes) -> pb.AdmittedRequest:
    return request(token_ids=int32(ids), num_prompt_tokens=len(ids), **changes)


@pytest.fixture
def table() -> SlotTable:
    """Slot 1 holds a request of 10 tokens with 2 blocks, 4 of the tokens computed."""
    table = SlotTable(LIMITS)
    first = tokens(*range(10), slot=1, block_ids=int32([7, 3]))
    apply(table, admit(first, slots=int32([1]), num_tokens=int32([4])))
    return table


BAD_STATE = {
    "released a free slot": ("released", pb.StepPlan(released=int32([0]))),
    "admitted to a taken slot": ("admitted.slot", admit(tokens(5, slot=1))),
    "row in a free slot": ("slots", pb.StepPlan(slots=int32([0]), num_tokens=int32([1]))),
    "row in a slot just released": (
        "slots",
        pb.StepPlan(released=int32([1]), slots=int32([1]), num_tokens=int32([1])),
    ),
    "more tokens than are known": ("num_tokens", pb.StepPlan(slots=int32([1]), num_tokens=int32([7]))),
    "more tokens than blocks hold": (
        "num_tokens",
        admit(
            tokens(*range(9), slot=0, block_ids=int32([1])),
            slots=int32([0]),
            num_tokens=int32([9]),
        ),
    ),
    "more blocks than the longest request": (
        "block_rows",
        pb.StepPlan(
            slots=int32([1]),
            num_tokens=int32([1]),
            block_rows=int32([0] * 4),
            block_ids=int32([1, 2, 4, 5]),
        ),
    ),
}


@pytest.mark.parametrize("case", BAD_STATE)
def test_a_plan_that_does_not_fit_the_state_is_refused(case, table):
    column, message = BAD_STATE[case]
    with pytest.raises(PlanError) as caught:
        apply(table, message)
    assert caught.value.column == column


def test_a_slot_may_be_released_and_taken_in_one_plan(table):
    message = admit(tokens(5, slot=1), released=int32([1]), slots=int32([1]), num_tokens=int32([1]))
    _, sampling_rows = apply(table, message)
    assert sampling_rows.tolist() == [0]
    assert table.block_table[1].tolist() == [1, 0, 0, 0, 0]


def test_a_request_can_grow_to_max_model_len_and_no_further():
    table = SlotTable(LIMITS)
    whole = tokens(*range(40), slot=0, block_ids=int32([1, 2, 3, 4, 5]))
    _, rows = apply(table, admit(whole, slots=int32([0]), num_tokens=int32([40])))
    assert rows.tolist() == [0]
    with pytest.raises(PlanError, match="max_model_len"):
        apply(table, pb.StepPlan(slots=int32([0]), num_tokens=int32([1])))


def test_batch_of_a_chunk_a_decode_and_a_new_request(table):
    finish = pb.StepPlan(slots=int32([1]), num_tokens=int32([6]))
    apply(table, finish)  # slot 1: all 10 computed, the 11th sampled
    long = tokens(*range(50, 70), slot=3, block_ids=int32([9]))
    plan, sampling_rows = apply(
        table,
        admit(
            long,
            tokens(80, 81, slot=0, block_ids=int32([5])),
            slots=int32([3, 1, 0]),
            num_tokens=int32([12, 1, 2]),
            block_rows=int32([0, 0]),
            block_ids=int32([4, 6]),
        ),
    )
    assert sampling_rows.tolist() == [1, 2]
    last_tokens = torch.tensor([0, 77, 0, 0])
    batch = upload(lay_out(table, plan, sampling_rows, LIMITS.block_size), last_tokens)
    assert batch.token_ids.tolist() == [*range(50, 62), 77, 80, 81]
    assert batch.positions.tolist() == [*range(12), 10, 0, 1]
    assert batch.sampled_tokens.tolist() == [12, 14]
    attention = batch.attention
    assert attention.query_starts.tolist() == [0, 12, 13, 15]
    assert attention.seq_lens.tolist() == [12, 11, 2]
    assert attention.block_tables.tolist() == [[9, 4], [7, 3], [5, 0]]
    assert attention.slot_mapping.tolist() == [
        *range(72, 80),
        *range(32, 36),
        3 * 8 + 2,
        5 * 8,
        5 * 8 + 1,
    ]
    assert (attention.max_query_len, attention.max_seq_len) == (12, 12)
    assert attention.query_starts.dtype == attention.block_tables.dtype == torch.int32
    assert attention.slot_mapping.dtype == torch.int64
    np.testing.assert_array_equal(attention.seq_lens_host, [12, 11, 2])
