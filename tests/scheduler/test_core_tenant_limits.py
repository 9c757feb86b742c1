"""Queue limits of each tenant: exact, all or nothing, and apart from other tenants."""

from __future__ import annotations

import pytest
from core_harness import Harness

from scheduler_service.core.admission import Accepted, RefusalReason, Refused


def test_a_tenant_may_have_so_many_waiting_and_others_their_own():
    h = Harness(max_num_queued_reqs_per_tenant=2)
    for name in ("a0", "a1"):
        h.accept(name, 3, tenant="a")
    refused = h.submit("a2", 3, tenant="a")
    assert refused == Refused("a2", RefusalReason.TENANT_QUEUE_FULL_REQUESTS, 1, 2, 2, 1.0)
    assert isinstance(h.submit("b0", 3, tenant="b"), Accepted)


def test_tokens_of_a_tenant_are_limited_too():
    h = Harness(max_num_queued_tokens_per_tenant=20)
    h.accept("a0", 12, tenant="a")
    refused = h.submit("a1", 9, tenant="a")
    assert refused == Refused("a1", RefusalReason.TENANT_QUEUE_FULL_TOKENS, 9, 12, 20, 1.0)
    assert isinstance(h.submit("a2", 8, tenant="a"), Accepted)
    assert isinstance(h.submit("b0", 20, tenant="b"), Accepted)


def test_a_tenant_with_nothing_waiting_may_send_one_of_any_length():
    h = Harness(max_num_queued_tokens_per_tenant=5)
    h.accept("other", 4, tenant="b")
    assert isinstance(h.submit("a0", 50, tenant="a"), Accepted)


def test_all_candidates_or_none():
    h = Harness(max_num_queued_reqs_per_tenant=3)
    h.accept("a0", 3, n=2, tenant="a")
    assert h.submit("a1", 3, n=2, tenant="a").reason is RefusalReason.TENANT_QUEUE_FULL_REQUESTS
    assert isinstance(h.submit("a2", 3, tenant="a"), Accepted)


@pytest.mark.parametrize("leave", ["admitted", "cancelled"])
def test_those_who_leave_the_queue_make_room(leave):
    h = Harness(max_num_queued_reqs_per_tenant=1)
    h.accept("a0", 3, tenant="a")
    if leave == "admitted":
        h.step()
    else:
        h.cancel("a0")
    assert isinstance(h.submit("a1", 3, tenant="a"), Accepted)


def test_preempted_ones_count_for_their_tenant():
    h = Harness(max_num_queued_reqs_per_tenant=1)
    h.accept("a0", 3, 9, tenant="a")
    h.step()
    h.lose()
    assert h.submit("a1", 3, tenant="a").reason is RefusalReason.TENANT_QUEUE_FULL_REQUESTS


def test_the_limit_of_all_comes_first():
    h = Harness(max_num_queued_reqs=1, max_num_queued_reqs_per_tenant=1)
    h.accept("a0", 3, tenant="a")
    assert h.submit("a1", 3, tenant="a").reason is RefusalReason.QUEUE_FULL_REQUESTS


def test_zero_takes_nothing_of_anybody():
    h = Harness(max_num_queued_reqs_per_tenant=0)
    assert h.submit("a", 3).reason is RefusalReason.TENANT_QUEUE_FULL_REQUESTS


def test_the_time_to_retry_is_by_the_tenants_part_of_what_leaves():
    h = Harness(max_num_seqs=1, max_num_queued_reqs_per_tenant=1)
    for second in range(100):
        h.accept(f"r{second}", 3, 1, tenant=f"t{second}")
        h.step()
        h.now += 1.0
    h.accept("a0", 3, tenant="a")
    for i in range(4):
        h.accept(f"b{i}", 3, tenant=f"b{i}")
    refused = h.submit("a1", 3, tenant="a")
    alone = h.core._lifecycle.drain_rate.retry_after_s(1, h.now)
    assert refused.retry_after_s == pytest.approx(5 * alone)
    assert alone == pytest.approx(1.0, rel=0.2)


def test_tenants_with_nothing_waiting_are_forgotten():
    h = Harness()
    for i in range(20):
        h.accept(f"r{i}", 3, 1, tenant=f"t{i}")
    h.run()
    assert h.core._lifecycle.tenant_loads == {}
