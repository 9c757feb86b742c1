"""Who is planned, in which order, and how many tokens each gets."""

from __future__ import annotations

import numpy as np
import pytest
from core_harness import Harness


def test_nothing_to_do_gives_no_plan():
    h = Harness()
    assert h.plan() is None


def test_requests_are_admitted_in_order_of_arrival():
    h = Harness()
    for name in "abc":
        h.accept(name, 5)
    assert h.grants(h.plan()) == {"a": 5, "b": 5, "c": 5}
    assert h.running() == ["a", "b", "c"]


def test_an_admission_tells_all_that_the_worker_must_know():
    h = Harness()
    spec = h.spec(
        "a",
        [7, 8, 9, 10, 11],
        traceparent="tp",
        adapter="lora",
        min_tokens=1,
        stop_token_ids=frozenset([5, 4]),
        eos_token_ids=frozenset([1]),
    )
    h.core.submit(spec, 0.0)
    plan = h.plan()
    (admission,) = plan.admitted
    assert (admission.slot, admission.request_id, admission.index) == (0, "a", 0)
    assert admission.token_ids.tolist() == [7, 8, 9, 10, 11]
    assert (admission.num_prompt_tokens, admission.num_computed_tokens) == (5, 0)
    assert admission.block_ids.tolist() == [1, 2]
    assert admission.sampling is spec.sampling
    assert (admission.min_tokens, admission.min_tokens_banned_ids) == (1, (1, 4, 5))
    assert (admission.traceparent, admission.adapter) == ("tp", "lora")
    assert (plan.seq, plan.slots.tolist(), plan.num_tokens.tolist()) == (1, [0], [5])


def test_without_min_tokens_no_ids_are_banned():
    h = Harness()
    h.accept("a", 3, eos_token_ids=frozenset([1]))
    assert h.plan().admitted[0].min_tokens_banned_ids == ()


def test_columns_of_a_plan_are_int32():
    h = Harness()
    h.accept("a", 9, 9)
    for _ in range(5):
        plan = h.step()
        for name in (
            "released",
            "copy_sources",
            "copy_destinations",
            "slots",
            "num_tokens",
            "block_rows",
            "block_ids",
        ):
            assert getattr(plan, name).dtype == np.int32


def test_a_decode_gets_one_token_and_a_block_when_it_crosses_a_border():
    h = Harness(block_size=4)
    h.accept("a", 7, 6)
    appended = []
    while (plan := h.step()) is not None:
        appended.append(plan.block_ids.tolist())
    # Tokens 8 to 11 need a third block, once; the last token's KV is never computed.
    assert appended == [[], [], [3], [], [], []]
    h.assert_all_right()


def test_running_requests_come_before_waiting_ones():
    h = Harness(max_num_batched_tokens=16)
    h.accept("a", 3, 9)
    h.step()
    h.accept("b", 40)
    assert h.grants(h.plan()) == {"a": 1, "b": 15}


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    h = Harness(max_num_batched_tokens=16)
    h.accept("a", 40)
    grants = []
    while (plan := h.plan()) is not None:
        grants.append(h.grants(plan)["a"])
        h.answer()
    assert grants == [16, 16, 8, 1, 1, 1]
    h.assert_all_right()


def test_a_chunk_that_is_not_the_last_samples_nothing():
    h = Harness(max_num_batched_tokens=16)
    h.accept("a", 40)
    h.step()
    assert h.seen["a", 0].tokens == []
    assert h.core.apply("w0", _empty_result(h), 0.0) == []


def _empty_result(h):
    h.plan()
    return h.workers["w0"].execute()


def test_a_running_prefill_keeps_its_place_before_later_arrivals():
    h = Harness(max_num_batched_tokens=16)
    h.accept("a", 40)
    h.step()
    h.accept("b", 4)
    assert h.grants(h.plan()) == {"a": 16}
    h.answer()
    assert h.grants(h.plan()) == {"a": 8, "b": 4}


def test_concurrent_prefills_share_the_budget_in_order():
    h = Harness(max_num_batched_tokens=16)
    for name in "ab":
        h.accept(name, 24)
    assert h.grants(h.plan()) == {"a": 16}
    h.answer()
    assert h.grants(h.plan()) == {"a": 8, "b": 8}
    h.answer()
    assert h.grants(h.plan()) == {"a": 1, "b": 15}


def test_the_workers_own_budget_limits_the_step():
    h = Harness(max_batched_tokens=16, max_num_batched_tokens=1000)
    h.accept("a", 40)
    assert h.grants(h.plan()) == {"a": 16}


def test_a_budget_that_ends_within_the_decodes_serves_the_first_ones():
    h = Harness(max_num_seqs=4, max_num_batched_tokens=4)
    for name in "abcd":
        h.accept(name, 1, 9)
    h.step()
    assert h.grants(h.plan()) == dict.fromkeys("abcd", 1)


@pytest.mark.parametrize(("max_num_seqs", "num_slots", "expected"), [(2, 8, 2), (8, 3, 3)])
def test_seats_limit_admission(max_num_seqs, num_slots, expected):
    h = Harness(max_num_seqs=max_num_seqs, num_slots=num_slots)
    for i in range(5):
        h.accept(f"r{i}", 3)
    h.plan()
    assert len(h.running()) == expected


def test_a_worker_with_a_small_budget_seats_no_more_than_it_can_serve_each_step():
    h = Harness(max_num_seqs=8, max_batched_tokens=3)
    for i in range(5):
        h.accept(f"r{i}", 1, 6)
    for _ in range(3):
        h.step()
        assert h.running() == ["r0", "r1", "r2"]
    h.run()
    h.assert_all_right()


def test_a_seat_that_becomes_free_is_given_on_in_the_next_plan():
    h = Harness(max_num_seqs=1, num_slots=1)
    h.accept("a", 3, 1)
    h.accept("b", 3, 1)
    h.step()
    plan = h.plan()
    assert plan.released.tolist() == [0]
    assert [(a.request_id, a.slot) for a in plan.admitted] == [("b", 0)]


def test_threshold_is_ignored_for_a_request_that_is_alone():
    h = Harness(long_prefill_token_threshold=4)
    h.accept("a", 40)
    assert h.grants(h.plan()) == {"a": 40}


def test_threshold_applies_where_others_wait():
    h = Harness(long_prefill_token_threshold=4)
    h.accept("a", 40)
    h.accept("b", 3)
    assert h.grants(h.plan()) == {"a": 4, "b": 3}


def test_threshold_applies_where_others_run():
    h = Harness(long_prefill_token_threshold=4)
    h.accept("a", 3, 20)
    h.step()
    h.accept("b", 40)
    assert h.grants(h.plan()) == {"a": 1, "b": 4}
    h.answer()
    assert h.grants(h.plan()) == {"a": 1, "b": 4}


@pytest.mark.parametrize(("others", "grant"), [(1, 50), (3, 25), (24, 4)])
def test_an_adaptive_threshold_is_at_least_the_equal_share_of_the_step(others, grant):
    options = {"long_prefill_token_threshold_adaptive": True, "max_num_batched_tokens": 100}
    h = Harness(long_prefill_token_threshold=4, num_blocks=500, num_slots=32, max_num_seqs=32, **options)
    h.accept("long", 90)
    for i in range(others):
        h.accept(f"r{i}", 1)
    assert h.grants(h.plan())["long"] == grant


def test_a_running_prefill_gets_the_adaptive_threshold_too():
    options = {"long_prefill_token_threshold_adaptive": True, "max_num_batched_tokens": 40}
    h = Harness(long_prefill_token_threshold=4, num_blocks=500, **options)
    h.accept("a", 3, 20)
    h.accept("long", 90)
    h.step()
    assert h.grants(h.plan()) == {"a": 1, "long": 20}


def test_threshold_never_raises_a_grant():
    h = Harness(long_prefill_token_threshold=100)
    h.accept("a", 5)
    h.accept("b", 6)
    assert h.grants(h.plan()) == {"a": 5, "b": 6}


def test_threshold_ends_when_the_request_is_alone_again():
    h = Harness(long_prefill_token_threshold=4)
    h.accept("a", 30)
    h.accept("b", 3, 1)
    h.step()
    assert h.grants(h.plan()) == {"a": 26}


def test_thousands_of_short_requests_all_finish():
    h = Harness(check=False, max_num_seqs=16)
    for i in range(300):
        h.accept(f"r{i}", 1 + i % 9, 1 + i % 4)
    h.run()
    h.assert_all_right()
    h.assert_empty()
