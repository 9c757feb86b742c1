"""Deadlines, queue timeouts, and where each candidate's time went."""

from __future__ import annotations

from core_harness import Harness

from scheduler_service.core.events import Finished, FinishReason


def total_s(end) -> float:
    return sum(parts(end))


def parts(end) -> tuple[float, float, float, float]:
    t = end.timings
    return t.queue_s, t.prefill_s, t.decode_s, t.preempted_s


def expire(h: Harness, now: float):
    h.now = now
    return h.note(h.core.expire(now))


def test_nothing_expires_without_limits():
    h = Harness()
    h.accept("a", 3)
    assert h.core.next_expiry() is None
    assert expire(h, 1e9) == []


def test_the_queue_timeout_ends_what_waits_too_long():
    h = Harness()
    h.accept("a", 3, queue_timeout_s=2.0)
    assert h.core.next_expiry() == 2.0
    assert expire(h, 1.999) == []
    (end,) = expire(h, 2.0)
    assert (end.reason, end.timings.queue_s) == (FinishReason.QUEUE_TIMEOUT, 2.0)
    assert h.core.next_expiry() is None
    h.assert_empty()


def test_the_queue_timeout_ends_with_the_first_admission():
    h = Harness()
    h.accept("a", 3, 9, queue_timeout_s=2.0)
    h.step()
    assert expire(h, 5.0) == []
    assert h.core.next_expiry() is None


def test_a_preempted_request_has_no_queue_timeout():
    h = Harness()
    h.accept("a", 3, 9, queue_timeout_s=2.0)
    h.step()
    h.lose()
    assert expire(h, 50.0) == []
    h.add_worker()
    h.run()
    h.assert_all_right()


def test_the_deadline_ends_what_waits():
    h = Harness()
    h.accept("a", 3, deadline=3.0, queue_timeout_s=9.0)
    (end,) = expire(h, 3.0)
    assert end.reason is FinishReason.DEADLINE


def test_the_deadline_ends_what_runs_and_frees_its_blocks():
    h = Harness(depth=2)
    h.accept("a", 3, 50, deadline=3.0, queue_timeout_s=1.0)
    h.plan()
    h.plan()
    h.answer()
    assert expire(h, 2.0) == []
    assert h.core.next_expiry() == 3.0
    (end,) = expire(h, 3.5)
    assert (end.reason, end.usage.output_tokens) == (FinishReason.DEADLINE, 1)
    assert h.answer() == []
    h.assert_empty()


def test_the_earliest_limit_is_told():
    h = Harness()
    h.accept("a", 3, deadline=9.0)
    h.accept("b", 3, queue_timeout_s=4.0)
    h.accept("c", 3, deadline=6.0, queue_timeout_s=5.0)
    assert h.core.next_expiry() == 4.0
    assert [e.request_id for e in expire(h, 5.5)] == ["b", "c"]
    assert h.core.next_expiry() == 9.0


def test_a_finished_request_has_no_limit_any_more():
    h = Harness()
    h.accept("a", 3, 1, deadline=9.0)
    h.run()
    assert h.core.next_expiry() is None


def test_every_candidate_of_a_request_expires():
    h = Harness()
    h.accept("a", 3, n=3, queue_timeout_s=1.0)
    assert sorted(e.index for e in expire(h, 1.0)) == [0, 1, 2]
    h.assert_empty()


def test_requests_wait_without_workers_until_their_timeout():
    h = Harness()
    h.lose()
    h.accept("a", 3, queue_timeout_s=1.0)
    h.accept("b", 3)
    (end,) = expire(h, 1.0)
    assert (end.request_id, end.reason) == ("a", FinishReason.QUEUE_TIMEOUT)
    h.add_worker()
    h.run()
    h.assert_right("b")


def test_time_is_split_into_queue_prefill_and_decode():
    h = Harness()
    h.now = 1.0
    h.accept("a", 3, 3)
    h.now = 3.0
    h.plan()
    h.now = 7.0
    h.answer()
    h.now = 8.0
    h.plan()
    h.now = 15.0
    h.answer()
    h.now = 16.0
    h.plan()
    h.now = 31.0
    h.answer()
    end = h.seen["a", 0].finished
    assert parts(end) == (
        2.0,
        4.0,
        24.0,
        0.0,
    )
    assert end.timings.time_to_first_token_s == 6.0


def test_time_after_a_preemption_is_told_apart():
    h = Harness()
    h.accept("a", 3, 3)
    h.now = 1.0
    h.plan()
    h.now = 2.0
    h.lose()  # while in prefill
    h.add_worker()
    h.now = 10.0
    h.plan()
    h.now = 12.0
    h.answer()
    h.now = 14.0
    h.lose()  # while in decode
    h.add_worker()
    h.now = 30.0
    h.run()
    end = h.seen["a", 0].finished
    assert parts(end) == (
        1.0,
        3.0,
        2.0,
        24.0,
    )
    assert end.timings.time_to_first_token_s == 12.0
    assert h.seen["a", 0].finished.usage.preemptions == 2


def test_time_adds_up_whatever_ends_a_request():
    h = Harness()
    h.accept("queued", 3, 9)
    h.now = 4.0
    (end,) = h.cancel("queued")
    assert total_s(end) == end.timings.queue_s == 4.0
    assert end.timings.time_to_first_token_s is None
    h.accept("failed", 3, 9)
    h.workers["w0"].fail.add(("failed", 0))
    h.plan()
    h.now = 9.0
    h.answer()
    assert total_s(h.seen["failed", 0].finished) == 5.0


def test_time_counts_from_the_arrival_at_the_service():
    h = Harness()
    h.now = 10.0
    h.accept("a", 3, 2, arrival=7.5, queue_timeout_s=4.0)
    assert h.core.next_expiry() == 11.5
    h.now = 11.0
    h.plan()
    h.now = 12.0
    h.answer()
    h.now = 13.0
    h.step()
    (end,) = [event for event in h.seen["a", 0].events if isinstance(event, Finished)]
    assert (end.timings.queue_s, end.timings.prefill_s, end.timings.decode_s) == (3.5, 1.0, 1.0)
    assert end.timings.time_to_first_token_s == 4.5
    (explained,) = h.core.explain("a", h.now)
    assert [(moment.at_s, moment.what) for moment in explained.timeline][:3] == [
        (0.0, "queued"),
        (3.5, "admitted"),
        (4.5, "first_token"),
    ]


def test_an_arrival_is_never_later_than_the_submission():
    h = Harness()
    h.accept("a", 3, 1, arrival=2.0)
    h.step()
    assert h.assert_right("a").timings.queue_s == 0.0
