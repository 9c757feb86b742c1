"""The door: exact queue limits, what can never fit, and what a refusal says."""

from __future__ import annotations

import pytest
from core_harness import Harness

from scheduler_service.core.admission import Accepted, DrainRate, RefusalReason, Refused


def test_an_accepted_request_names_its_candidates():
    h = Harness()
    outcome = h.submit("a", 3, n=2)
    assert isinstance(outcome, Accepted)
    assert [(c.request_id, c.index) for c in outcome.candidates] == [("a", 0), ("a", 1)]


def test_an_unknown_model_is_refused():
    h = Harness()
    assert h.submit("a", 3, model="other") == Refused("a", RefusalReason.UNKNOWN_MODEL)
    assert h.core.models() == ("fake",)


def test_a_model_stays_known_when_its_workers_are_gone():
    h = Harness()
    h.lose()
    assert isinstance(h.submit("a", 3), Accepted)
    assert h.core.models() == ("fake",)


def test_a_live_request_id_is_refused_and_a_finished_one_is_free():
    h = Harness()
    h.accept("a", 3, 1)
    assert h.submit("a", 5).reason is RefusalReason.DUPLICATE_ID
    h.run()
    assert isinstance(h.submit("a", 5), Accepted)


def test_an_id_is_taken_until_its_last_candidate_ends():
    h = Harness()
    h.accept("a", 3, 9, n=2)
    h.cancel("a", 0)
    assert h.submit("a", 3).reason is RefusalReason.DUPLICATE_ID
    h.cancel("a", 1)
    assert isinstance(h.submit("a", 3), Accepted)


def test_a_draining_scheduler_refuses_new_ones_and_finishes_old_ones():
    h = Harness()
    h.accept("a", 3)
    h.core.start_draining()
    assert h.submit("b", 3).reason is RefusalReason.DRAINING
    h.run()
    h.assert_right("a")
    assert h.core.state(0.0).draining


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"), [(10, 10, True), (10, 11, False), (19, 1, True), (20, 1, False)]
)
def test_the_context_must_hold_prompt_and_output(prompt, max_tokens, fits):
    h = Harness(max_model_len=20)
    outcome = h.submit("a", prompt, max_tokens)
    if fits:
        assert isinstance(outcome, Accepted)
    else:
        assert outcome == Refused("a", RefusalReason.CONTEXT_TOO_LONG, prompt + max_tokens, prompt, 20)


@pytest.mark.parametrize(("max_tokens", "fits"), [(13, True), (14, False)])
def test_the_blocks_must_hold_all_but_the_last_token(max_tokens, fits):
    h = Harness(num_blocks=6, block_size=4)  # 20 tokens of KV
    outcome = h.submit("a", 8, max_tokens)
    if fits:
        assert isinstance(outcome, Accepted)
        h.run()
        h.assert_all_right()
    else:
        assert outcome == Refused("a", RefusalReason.TOO_MANY_BLOCKS, 6, 0, 5)


def test_the_largest_worker_decides_what_fits():
    h = Harness(num_blocks=6)
    assert h.submit("a", 30).reason is RefusalReason.TOO_MANY_BLOCKS
    h.add_worker("big", num_blocks=60)
    assert isinstance(h.submit("a", 30), Accepted)
    assert h.plan("w0") is None
    h.run()
    h.assert_all_right()


def test_the_last_workers_limits_hold_while_there_is_none():
    h = Harness(max_model_len=20)
    h.lose()
    assert h.submit("a", 20, 1).reason is RefusalReason.CONTEXT_TOO_LONG


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_the_limit_of_waiting_requests_is_exact(limit):
    h = Harness(max_num_queued_reqs=limit)
    outcomes = [h.submit(f"r{i}", 3) for i in range(5)]
    assert [isinstance(o, Accepted) for o in outcomes] == [i < limit for i in range(5)]
    refused = outcomes[-1]
    assert (refused.reason, refused.requested, refused.current, refused.limit) == (
        RefusalReason.QUEUE_FULL_REQUESTS,
        1,
        limit,
        limit,
    )
    assert refused.retry_after_s == 1.0


def test_running_requests_do_not_count_as_waiting():
    h = Harness(max_num_queued_reqs=1)
    for i in range(4):
        h.accept(f"r{i}", 3, 9)
        h.step()
    assert h.core.state(0.0).running_requests == 4


def test_every_candidate_counts_and_all_or_none_come_in():
    h = Harness(max_num_queued_reqs=4)
    h.accept("a", 3, n=3)
    assert h.submit("b", 3, n=2).reason is RefusalReason.QUEUE_FULL_REQUESTS
    assert h.core.state(0.0).waiting_requests == 3
    h.accept("c", 3)
    assert h.core.state(0.0).waiting_requests == 4


def test_a_cancelled_request_makes_room_at_once():
    h = Harness(max_num_queued_reqs=2)
    h.accept("a", 3, n=2)
    assert isinstance(h.submit("b", 3), Refused)
    h.cancel("a")
    assert isinstance(h.submit("b", 3), Accepted)


def test_the_limit_of_waiting_tokens_is_exact():
    h = Harness(max_num_queued_tokens=20)
    h.accept("a", 12)
    refused = h.submit("b", 9)
    assert refused == Refused("b", RefusalReason.QUEUE_FULL_TOKENS, 9, 12, 20, 1.0)
    h.accept("c", 8)
    assert h.core.state(0.0).waiting_tokens == 20


def test_an_empty_queue_takes_one_request_of_any_size():
    h = Harness(max_num_queued_tokens=20)
    h.accept("a", 50)
    assert h.submit("b", 1).reason is RefusalReason.QUEUE_FULL_TOKENS


def test_known_prefix_hits_do_not_count():
    h = Harness(max_num_queued_tokens=20)
    stem = [*range(16)]
    h.accept("old", [*stem, 1], 1)
    h.run()
    h.accept("a", [*stem, 2, 3])
    h.accept("b", [*stem, 4, 5])
    assert h.core.state(0.0).waiting_tokens == 4


def test_further_candidates_count_for_the_one_token_that_they_compute():
    h = Harness()
    h.accept("a", 10, n=3)
    assert h.core.state(0.0).waiting_tokens == 12


def test_the_request_limit_is_looked_at_first():
    h = Harness(max_num_queued_reqs=1, max_num_queued_tokens=5)
    h.accept("a", 5)
    assert h.submit("b", 5).reason is RefusalReason.QUEUE_FULL_REQUESTS


def test_a_preempted_request_is_never_refused_its_place():
    h = Harness(max_num_queued_reqs=1)
    for i in range(3):
        h.accept(f"r{i}", 3, 9)
        h.step()
    h.lose()
    assert h.core.state(0.0).waiting_requests == 3
    assert isinstance(h.submit("late", 3), Refused)
    h.add_worker()
    h.run()
    h.assert_all_right()


def test_refused_and_accepted_are_counted_by_candidate():
    h = Harness(max_num_queued_reqs=2)
    h.accept("a", 3, n=2)
    h.submit("b", 3, n=3)
    counters = h.core.state(0.0).counters
    assert (counters.requests_accepted, counters.requests_refused) == (2, 3)


def test_retry_time_follows_the_measured_rate():
    rate = DrainRate()
    assert rate.retry_after_s(1, 0.0) == 1.0  # nothing measured
    for i in range(1000):
        rate.note(i * 0.1)  # ten a second
    assert rate.at(99.9) == pytest.approx(10, rel=0.1)
    assert rate.retry_after_s(20, 99.9) == pytest.approx(2, rel=0.1)


def test_retry_time_is_bounded():
    rate = DrainRate()
    for i in range(1000):
        rate.note(i * 0.001)
    assert rate.retry_after_s(1, 1.0) == 0.1
    assert rate.retry_after_s(1, 1e6) == 30.0
    assert rate.retry_after_s(1e9, 1.0) == 30.0
