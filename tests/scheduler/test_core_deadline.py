"""The policy `deadline`: order, and refusal of what cannot be done in time by the measured rates."""

from __future__ import annotations

import pytest
from core_harness import Harness

from scheduler_service.core.admission import Accepted, RefusalReason, Refused


def edf(**options: object) -> Harness:
    return Harness(policy="deadline", **options)


def admitted(plan) -> list[str]:
    return [a.request_id for a in plan.admitted]


def measured(**options: object) -> Harness:
    """A service where a prompt token takes 10 ms and each further output token 100 ms."""
    h = edf(**options)
    h.accept("probe", 20, 11)
    h.plan()
    h.now += 0.2
    h.answer()
    while h.plan():
        h.now += 0.1
        h.answer()
    h.assert_right("probe")
    return h


def test_the_earliest_deadline_comes_first():
    h = edf()
    for name, deadline in (("c", 30.0), ("a", 10.0), ("b", 20.0)):
        h.accept(name, 3, deadline=deadline)
    assert admitted(h.plan()) == ["a", "b", "c"]


def test_equal_deadlines_come_in_order_of_arrival():
    h = edf()
    for name in ("x", "b", "a"):
        h.accept(name, 3, deadline=5.0)
    assert admitted(h.plan()) == ["x", "b", "a"]


def test_one_without_a_deadline_is_passed_for_a_minute_at_most():
    h = edf()
    h.accept("patient", 3)
    h.now = 50.0
    h.accept("urgent", 3, deadline=59.0)
    h.accept("later", 3, deadline=61.0)
    assert admitted(h.plan()) == ["urgent", "patient", "later"]


def test_the_latest_deadline_makes_room():
    h = edf(num_blocks=7, block_size=4)
    h.accept("late", 7, 12, deadline=90.0)
    h.step()
    h.accept("soon", 8, 12, deadline=50.0)
    h.run()
    assert h.seen["soon", 0].finished.usage.preemptions == 0
    assert h.seen["late", 0].finished.usage.preemptions >= 1
    h.assert_all_right()


@pytest.mark.parametrize(("prompt", "left_ms", "needed_ms"), [(20, 1199, 1200), (120, 2000, 2200)])
def test_what_cannot_be_done_in_time_is_refused_with_both_numbers(prompt, left_ms, needed_ms):
    h = measured()
    outcome = h.submit("a", prompt, 11, deadline=h.now + left_ms / 1000 + 1e-6)
    assert outcome == Refused("a", RefusalReason.DEADLINE_TOO_CLOSE, needed_ms, 0, left_ms)
    assert h.core.state(h.now).counters.requests_refused == 1


def test_what_can_be_done_in_time_is_taken():
    h = measured()
    assert isinstance(h.submit("a", 20, 11, deadline=h.now + 1.21), Accepted)


def test_max_tokens_caps_the_estimate():
    h = measured()
    assert isinstance(h.submit("a", 20, 2, deadline=h.now + 0.31), Accepted)
    assert h.submit("b", 20, 3, deadline=h.now + 0.31).reason is RefusalReason.DEADLINE_TOO_CLOSE


def test_a_cached_prompt_needs_less_time():
    h = measured()
    again = h.specs["probe"].prompt_token_ids.tolist()
    assert isinstance(h.submit("a", again, 11, deadline=h.now + 1.05), Accepted)


def test_nothing_is_refused_before_anything_was_measured_or_long_after():
    h = edf()
    assert isinstance(h.submit("a", 20, 11, deadline=0.001), Accepted)
    h = measured()
    h.now += 11.0
    assert isinstance(h.submit("a", 20, 11, deadline=h.now + 0.001), Accepted)


def test_other_policies_refuse_nothing_for_its_deadline():
    h = measured()
    other = Harness()
    other.core._lifecycle.estimates = h.core._lifecycle.estimates
    other.now = h.now
    assert isinstance(other.submit("a", 20, 11, deadline=h.now + 0.01), Accepted)
