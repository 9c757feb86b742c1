"""Plans before results: credits, placeholders, predicted ends, wasted rows, results that break rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from core_fake_worker import VOCAB
from core_harness import EOS, Harness, expected_outputs

from scheduler_service.core.errors import ProtocolViolation
from scheduler_service.core.events import FinishReason


@pytest.mark.parametrize(("depth", "max_in_flight", "plans"), [(1, 4, 1), (2, 4, 2), (3, 2, 2), (4, 4, 4)])
def test_as_many_plans_as_both_sides_allow_may_be_unanswered(depth, max_in_flight, plans):
    h = Harness(depth=depth, max_in_flight=max_in_flight)
    h.accept("a", 3, 20)
    made = 0
    while h.plan() is not None:
        made += 1
    assert made == plans
    h.answer()
    assert h.plan() is not None


def test_a_request_is_planned_again_before_its_token_is_known():
    h = Harness(depth=3)
    h.accept("a", 3, 9)
    grants = [h.grants(h.plan())["a"] for _ in range(3)]
    assert grants == [3, 1, 1]
    assert h.seen["a", 0].tokens == []
    h.run()
    h.assert_all_right()


def test_sequence_numbers_count_the_plans_of_a_worker():
    h = Harness(depth=2, workers=2)
    h.accept("a", 3, 9)
    h.accept("b", 3, 9)
    h.run()
    assert h.core.state(0.0).counters.steps == len(h.plans)
    assert [plan.seq for plan in h.plans[:2]] == [1, 2]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_an_end_by_length_is_predicted_and_wastes_nothing(depth, max_tokens):
    h = Harness(depth=depth)
    h.accept("a", 3, max_tokens)
    h.run()
    h.assert_all_right()
    assert sum(int(plan.num_tokens.sum()) for plan in h.plans) == 3 + max_tokens - 1
    assert len(h.plans) == max_tokens


def test_the_model_length_is_never_passed():
    h = Harness(depth=3, max_model_len=8)
    h.accept("a", 3, 5)
    h.run()
    h.assert_all_right()
    assert sum(int(plan.num_tokens.sum()) for plan in h.plans) == 7


def _ends_at(h: Harness, name: str, count: int) -> dict[str, object]:
    """Options that make a request's end of text come as its token number `count`."""
    tokens, _ = expected_outputs(h.spec(name, 5, count), 0)
    assert tokens[-1] not in tokens[:-1]
    return {"eos_token_ids": frozenset([tokens[-1]])}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_end_by_a_stop_costs_no_more_than_the_rows_in_flight(depth):
    h = Harness(depth=depth)
    h.accept("a", 5, 50, **_ends_at(h, "a", 4))
    h.run()
    end = h.assert_right("a")
    assert (end.reason, end.usage.output_tokens) == (FinishReason.STOP, 4)
    assert len(h.plans) <= 4 + depth - 1
    h.assert_empty()


def test_the_slot_of_a_wasted_row_can_be_given_on_before_its_result():
    h = Harness(depth=2, max_num_seqs=1)
    h.accept("a", 5, 50, **_ends_at(h, "a", 2))
    h.accept("b", 4, 3)
    h.plan()
    h.plan()
    h.answer()
    h.plan()  # the third of a
    h.answer()  # a has ended; one row of it is in flight
    assert h.seen["a", 0].finished is not None
    plan = h.plan()
    assert (plan.released.tolist(), [a.request_id for a in plan.admitted]) == ([0], ["b"])
    h.run()
    h.assert_all_right()
    h.assert_empty()


def test_blocks_of_a_wasted_row_can_be_given_on_before_its_result():
    h = Harness(depth=2, num_blocks=4, enable_prefix_caching=False)
    h.accept("a", 5, 8, **_ends_at(h, "a", 2))
    h.accept("b", 9, 3)
    h.plan()
    h.plan()
    h.answer()
    h.plan()
    h.answer()
    plan = h.plan()
    assert sorted(plan.admitted[0].block_ids.tolist()) == [1, 2, 3]
    h.run()
    h.assert_all_right()


def test_a_cancel_in_flight_drops_what_comes_and_tells_the_slot_in_the_next_plan():
    h = Harness(depth=2)
    h.accept("a", 3, 9)
    h.accept("b", 3, 9)
    h.plan()
    h.plan()
    (end,) = h.cancel("a")
    assert (end.reason, end.usage.output_tokens) == (FinishReason.CANCELLED, 0)
    h.answer()
    h.answer()
    assert h.seen["a", 0].tokens == []
    assert h.plan().released.tolist() == [0]
    h.run()
    h.assert_right("b")
    h.assert_empty()


def test_released_slots_travel_with_the_next_plan_that_has_rows():
    h = Harness()
    h.accept("a", 3, 1)
    h.step()
    assert h.plan() is None
    h.accept("b", 3, 1)
    assert h.plan().released.tolist() == [0]


def test_a_candidate_cancelled_twice_ends_once():
    h = Harness()
    h.accept("a", 3, 9)
    h.step()
    assert len(h.cancel("a")) == 1
    assert h.cancel("a") == []


@pytest.mark.parametrize(
    "breaks",
    [
        lambda r: replace(r, seq=r.seq + 1),
        lambda r: replace(r, seq=0),
        lambda r: replace(r, slots=r.slots[::-1].copy()),
        lambda r: replace(r, slots=r.slots[:1], token_ids=r.token_ids[:1]),
        lambda r: replace(r, token_ids=r.token_ids[:1]),
        lambda r: replace(r, token_ids=np.array([0, VOCAB], np.int32)),
        lambda r: replace(r, token_ids=np.array([-1, 0], np.int32)),
        lambda r: replace(r, failed_rows=frozenset([2])),
        lambda r: replace(r, logprobs={5: None}),
    ],
)
def test_a_result_that_does_not_answer_its_plan_changes_nothing(breaks):
    h = Harness(depth=2)
    h.accept("a", 3, 9)
    h.accept("b", 3, 9)
    h.plan()
    h.plan()
    good = h.workers["w0"].execute()
    with pytest.raises(ProtocolViolation, match="worker w0"):
        h.core.apply("w0", breaks(good), 0.0)
    h.core.check()
    assert h.core.state(0.0).workers[0].steps_in_flight == 2
    h.note(h.core.apply("w0", good, 0.0))
    h.run()
    h.assert_all_right()


def test_a_result_without_a_plan_is_a_violation():
    h = Harness()
    h.accept("a", 3, 1)
    h.plan()
    result = h.workers["w0"].execute()
    h.note(h.core.apply("w0", result, 0.0))
    with pytest.raises(ProtocolViolation, match="to no plan"):
        h.core.apply("w0", result, 0.0)


def test_the_token_of_a_failed_row_may_be_anything():
    h = Harness()
    h.accept("a", 3, 2)
    h.plan()
    result = replace(
        h.workers["w0"].execute(), token_ids=np.array([-7], np.int32), failed_rows=frozenset([0])
    )
    (end,) = h.note(h.core.apply("w0", result, 0.0))
    assert end.reason is FinishReason.ERROR


def test_deep_pipelines_keep_every_token():
    h = Harness(depth=4, num_blocks=20)
    for i in range(12):
        h.accept(f"r{i}", 5 + i, 17, eos_token_ids=frozenset([EOS, 2, 3]))
    h.run()
    h.assert_all_right()
    h.assert_empty()
