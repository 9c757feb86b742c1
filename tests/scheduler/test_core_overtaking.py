"""A request that does not fit is neither a blocker nor starved."""

from __future__ import annotations

from core_harness import Harness


def full(**options: object) -> Harness:
    """10 usable blocks, 5 of them held by a request that runs for long."""
    h = Harness(num_blocks=11, block_size=4, max_num_seqs=16, **options)
    h.accept("running", 17, 20)
    h.step()
    assert h.free_blocks() == 5
    return h


def admitted(plan) -> list[str]:
    return [a.request_id for a in plan.admitted]


def test_a_small_request_passes_one_that_does_not_fit():
    h = full()
    h.accept("big", 24, 2)
    h.accept("small", 3, 1)
    assert admitted(h.plan()) == ["small"]
    h.run()
    h.assert_all_right()


def test_without_a_window_the_head_blocks():
    h = full(overtaking_window=0)
    h.accept("big", 24, 2)
    h.accept("small", 3, 1)
    assert admitted(h.plan()) == []


def test_the_window_bounds_how_many_are_looked_past():
    h = full(overtaking_window=2)
    for i in range(3):
        h.accept(f"big{i}", 24, 2)
    h.accept("small", 3, 1)
    assert admitted(h.plan()) == []
    h = full(overtaking_window=3)
    for i in range(3):
        h.accept(f"big{i}", 24, 2)
    h.accept("small", 3, 1)
    assert admitted(h.plan()) == ["small"]


def test_a_request_is_overtaken_a_bounded_number_of_times_in_its_life():
    h = full(max_overtakes=3)
    h.accept("big", 24, 2)
    passed = []
    for i in range(6):
        h.accept(f"small{i}", 3, 1)
        passed += admitted(h.step())
    assert passed == ["small0", "small1", "small2"]
    h.run()
    h.assert_all_right()


def test_order_is_kept_among_those_that_were_looked_past():
    h = full()
    for name in ("big0", "big1"):
        h.accept(name, 24, 1)
    h.accept("small", 3, 1)
    h.run()
    order = [a.request_id for plan in h.plans for a in plan.admitted]
    assert order == ["running", "small", "big0", "big1"]


def test_planning_costs_no_more_with_many_waiting():
    """Counts how many candidates a plan takes out of the queue."""
    h = full(check=False)
    for i in range(500):
        h.accept(f"big{i}", 24, 2)
    queue = h.core._lifecycle.models["fake"].queue
    taken = []
    take = queue.take
    queue.take = lambda: taken.append(1) or take()
    h.plan()
    assert len(taken) == h.config.overtaking_window + 1


def test_nothing_is_taken_out_where_no_seat_is_free():
    h = Harness(max_num_seqs=1)
    h.accept("running", 3, 9)
    h.step()
    h.accept("next", 3, 9)
    queue = h.core._lifecycle.models["fake"].queue
    queue.take = None
    assert h.plan() is not None
