"""Snapshots: what operators and metrics read."""

from __future__ import annotations

import pytest
from core_harness import Harness

from scheduler_service.core.admission import QueueLoad
from scheduler_service.core.errors import InvariantError
from scheduler_service.core.request import Status

STEM = [*range(10, 26)]


def test_a_workers_blocks_add_up():
    h = Harness(num_blocks=21)
    h.accept("old", [*STEM, 1], 1)
    h.run()
    h.accept("a", 9, 9)
    h.step()
    (worker,) = h.core.state(0.0).workers
    assert (worker.blocks_total, worker.blocks_used, worker.blocks_cached, worker.blocks_free) == (
        20,
        3,
        4,
        13,
    )
    assert (worker.running_requests, worker.num_slots, worker.steps, worker.steps_in_flight) == (1, 16, 2, 0)
    assert (worker.worker_id, worker.model, worker.draining, worker.block_size) == ("w0", "fake", False, 4)


def test_counts_of_waiting_and_running():
    h = Harness(max_num_seqs=2)
    for i in range(5):
        h.accept(f"r{i}", 4)
    h.plan()
    state = h.core.state(0.0)
    assert (state.waiting_requests, state.running_requests, state.waiting_tokens) == (3, 2, 12)
    assert state.workers[0].steps_in_flight == 1


def test_counters_of_a_simple_life():
    h = Harness(max_num_batched_tokens=16)
    h.accept("a", 40, 4)
    h.run()
    counters = h.core.state(0.0).counters
    assert (counters.prefill_tokens, counters.output_tokens, counters.steps) == (40, 4, 6)
    assert (counters.requests_accepted, counters.requests_finished) == (1, 1)
    assert counters.prefix_queried_tokens == 40


def test_a_snapshot_does_not_change_later():
    h = Harness()
    before = h.core.state(0.0)
    h.accept("a", 4)
    h.run()
    assert before.counters.requests_accepted == 0
    assert before.workers[0].steps == 0


def test_ends_are_counted_by_kind():
    h = Harness()
    h.accept("ok", 3, 1)
    h.run()
    h.accept("cancelled", 3)
    h.cancel("cancelled")
    h.accept("late", 3, deadline=1.0)
    h.core.expire(2.0)
    counters = h.core.state(0.0).counters
    assert (counters.requests_finished, counters.requests_cancelled, counters.requests_failed) == (1, 1, 1)


def test_live_requests_are_listed_by_arrival():
    h = Harness(max_num_seqs=1)
    h.accept("a", 5, 9, tenant="t", priority=3)
    h.accept("b", 6)
    h.step()
    a, b = h.core.requests(2.5)
    assert (a.request_id, a.status, a.tenant, a.priority, a.worker_id) == ("a", Status.RUNNING, "t", 3, "w0")
    assert (a.prompt_tokens, a.output_tokens, a.computed_tokens, a.blocks, a.age_s) == (5, 1, 5, 2, 2.5)
    assert (b.request_id, b.status, b.worker_id, b.blocks, b.computed_tokens) == (
        "b",
        Status.WAITING,
        None,
        0,
        0,
    )


def test_a_preempted_request_is_listed_as_such():
    h = Harness()
    h.accept("a", 5, 9)
    h.step()
    h.lose()
    (a,) = h.core.requests(0.0)
    assert (a.status, a.preemptions, a.output_tokens) == (Status.PREEMPTED, 1, 1)


def test_pages_follow_each_other():
    h = Harness()
    for i in range(5):
        h.accept(f"r{i}", 3)
    h.accept("n", 3, n=2)
    seen, after = [], -1
    while page := h.core.requests(0.0, after=after, limit=2):
        seen += [(r.request_id, r.index) for r in page]
        after = page[-1].order
    assert seen == [*((f"r{i}", 0) for i in range(5)), ("n", 0), ("n", 1)]


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda h, r: h.core._workers["w0"].pool._refs.__setitem__(1, 5), "reference counts of blocks"),
        (lambda h, r: h.core._workers["w0"].pool._next.__setitem__(0, 9), "free list"),
        (lambda h, r: h.core._workers["w0"].pool._block_of.clear(), "prefix index"),
        (lambda h, r: h.core._workers["w0"].total.__setitem__(0, 99), "in flight"),
        (lambda h, r: h.core._workers["w0"].pending.__setitem__(0, 3), "in flight"),
        (lambda h, r: r.output_ids.append(1), "known"),
        (lambda h, r: r.block_ids.append(1), "blocks counted"),
        (lambda h, r: h.core._workers["w0"].promises.__setitem__(b"x", r), "promises"),
        (lambda h, r: setattr(r, "status", Status.WAITING), "its worker thinks otherwise"),
        (lambda h, r: h.core._lifecycle._change_load(r, 1), "the queue counts"),
        (lambda h, r: h.core._lifecycle.tenant_loads.update(x=QueueLoad(1, 1)), "of a tenant"),
        (lambda h, r: h.core._workers["w0"].released.extend([3, 3]), "released twice"),
    ],
)
def test_check_names_what_does_not_hold(break_it, message):
    h = Harness(check=False)
    request = h.accept("a", 9, 9)
    h.step()
    h.core.check()
    break_it(h, request)
    with pytest.raises(InvariantError, match=message):
        h.core.check()
