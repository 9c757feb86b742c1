"""The policy `priority`: order, ties, victims, and who makes room for whom."""

from __future__ import annotations

from core_harness import Harness


def prio(**options: object) -> Harness:
    return Harness(policy="priority", **options)


def admitted(plan) -> list[str]:
    return [a.request_id for a in plan.admitted]


def test_lower_values_come_first():
    h = prio()
    for name, priority in (("c", 3), ("a", 1), ("b", 2)):
        h.accept(name, 3, priority=priority)
    assert admitted(h.plan()) == ["a", "b", "c"]


def test_equal_priorities_come_in_order_of_arrival():
    h = prio()
    for name in ("x", "b", "a"):
        h.accept(name, 3, priority=1)
    assert admitted(h.plan()) == ["x", "b", "a"]


def test_priority_comes_before_arrival():
    h = prio()
    for name, priority in (("a", 2), ("b", 1), ("c", 2), ("d", 1), ("e", -5)):
        h.accept(name, 3, priority=priority)
    assert admitted(h.plan()) == ["e", "b", "d", "a", "c"]


def test_fcfs_ignores_priorities():
    h = Harness()
    for name, priority in (("a", 2), ("b", 1)):
        h.accept(name, 3, priority=priority)
    assert admitted(h.plan()) == ["a", "b"]


def test_the_victim_is_the_worst_priority_whoever_came_last():
    h = prio(num_blocks=7, block_size=4)
    h.accept("low", 7, 12, priority=9)
    h.step()
    h.accept("high", 8, 12, priority=1)
    while "Preempted" not in h.seen["low", 0].kinds + h.seen["high", 0].kinds:
        h.step()
    assert h.seen["low", 0].kinds == ["Admitted", "Preempted"]
    assert h.running() == ["high"]
    h.run()
    h.assert_all_right()


def test_of_equal_priorities_the_later_arrival_is_the_victim():
    h = prio(num_blocks=7, block_size=4)
    h.accept("a", 7, 12)
    h.accept("b", 8, 12)
    h.run()
    assert h.seen["a", 0].finished.usage.preemptions == 0
    assert h.seen["b", 0].finished.usage.preemptions >= 1
    h.assert_all_right()


def test_nobody_is_preempted_while_there_is_room():
    h = prio()
    h.accept("low", 8, 12, priority=9)
    h.step()
    h.accept("high", 8, 12, priority=1)
    h.run()
    h.assert_all_right()
    assert h.core.state(0.0).counters.preemptions == 0


def test_a_better_one_takes_the_seat_of_a_worse_one():
    h = prio(max_num_seqs=1)
    h.accept("low", 4, 12, priority=9)
    h.step()
    h.accept("high", 4, 3, priority=1)
    plan = h.plan()
    assert admitted(plan) == ["high"]
    assert plan.released.tolist() == [0]
    event = h.seen["low", 0].events[-1]
    assert (type(event).__name__, event.reason) == ("Preempted", "slots")
    h.run()
    h.assert_all_right()


def test_an_equal_one_does_not():
    h = prio(max_num_seqs=1)
    h.accept("first", 4, 12, priority=1)
    h.step()
    h.accept("second", 4, 3, priority=1)
    h.run()
    h.assert_all_right()
    assert h.core.state(0.0).counters.preemptions == 0


def test_a_better_one_takes_the_blocks_of_worse_ones_and_no_more_than_it_needs():
    h = prio(num_blocks=13, block_size=4)  # 12 usable
    for i in range(4):
        h.accept(f"low{i}", 9, 4, priority=5 + i)  # 3 blocks each
    h.step()
    assert h.free_blocks() == 0
    h.accept("high", 20, 4, priority=1)  # 5 blocks
    plan = h.plan()
    assert admitted(plan) == ["high"]
    gone = [name for name in ("low0", "low1", "low2", "low3") if h.seen[name, 0].kinds[-1] == "Preempted"]
    assert gone == ["low2", "low3"]
    assert h.seen["low3", 0].events[-1].reason == "blocks"
    h.run()
    h.assert_all_right()
    h.assert_empty()


def test_nobody_makes_room_in_vain():
    h = prio(num_blocks=13, block_size=4)
    h.accept("best", 33, 4, priority=0)  # 9 blocks
    h.accept("low", 9, 4, priority=9)  # 3 blocks
    h.step()
    h.accept("high", 20, 4, priority=5)  # 5 blocks: low's 3 would not do
    h.step()
    assert h.seen["low", 0].kinds == ["Admitted"]
    h.run()
    h.assert_all_right()


def test_a_pinned_one_is_not_displaced():
    h = prio(max_num_seqs=1, max_preemptions=1)
    h.accept("low", 4, 30, priority=9)
    h.step()
    h.accept("high", 4, 2, priority=1)
    h.step()
    h.step()  # high has finished
    h.step()
    assert h.running() == ["low"]
    h.accept("again", 4, 2, priority=1)
    h.step()
    assert h.running() == ["low"]
    h.run()
    h.assert_all_right()
    assert h.seen["low", 0].finished.usage.preemptions == 1


def test_it_goes_to_another_worker_with_room_instead():
    h = prio(workers=2, max_num_seqs=1)
    h.accept("low", 4, 12, priority=9)
    h.step("w0")
    h.accept("high", 4, 3, priority=1)
    h.step("w0")
    assert h.seen["low", 0].kinds == ["Admitted"]
    assert admitted(h.plan("w1")) == ["high"]


def test_the_loop_goes_on_after_a_victim_that_came_earlier_in_it():
    # The worst one is first in running order: its going must not skip the one after it.
    h = prio(num_blocks=9, block_size=4)
    h.accept("worst", 7, 12, priority=9)
    h.step()
    h.accept("mid", 7, 12, priority=5)
    h.accept("best", 7, 12, priority=1)
    while "Preempted" not in h.seen["worst", 0].kinds:
        h.step()
    assert len(h.plans[-1].slots) == len(h.running()) == 2
    h.run()
    h.assert_all_right()


def test_a_preempted_one_regains_its_place_by_priority():
    h = prio(max_num_seqs=1)
    h.accept("mid", 4, 12, priority=5)
    h.step()
    h.accept("low", 4, 2, priority=9)
    h.accept("high", 4, 2, priority=1)
    order = []
    while (plan := h.step()) is not None:
        order += admitted(plan)
    assert order == ["high", "mid", "low"]
    h.assert_all_right()


def test_room_is_made_for_the_decodes_of_the_step_as_well():
    h = prio(num_blocks=6, block_size=4)  # 5 usable
    h.accept("best", 4, 4, priority=0)  # 1 block, and one more in the next step
    h.accept("low", 9, 3, priority=9)  # 3 blocks
    h.step()
    h.accept("high", 14, 2, priority=5)  # 4 blocks: with low's there would be 4, but best takes one
    h.step()
    assert h.seen["low", 0].kinds == ["Admitted"]
    h.run()
    h.assert_all_right()


def test_blocks_that_the_victim_shares_with_the_other_do_not_count_as_room():
    h = prio(num_blocks=6, block_size=4, max_num_seqs=4)  # 5 usable
    stem = [*range(20, 32)]
    h.accept("best", 1, 3, priority=0)  # 1 block
    h.accept("low", [*stem, 1, 2, 3], 2, priority=9)  # 4 blocks
    h.step()
    h.accept("high", [*stem, 4, 5, 6, 7, 8, 9], 1, priority=5)  # 3 of low's and 2 more
    h.step()
    assert h.seen["low", 0].kinds == ["Admitted", "Finished"]
    h.run()
    h.assert_all_right()


def test_nobody_is_admitted_in_a_step_that_preempted_however_good():
    h = prio(num_blocks=4, block_size=4, max_preemptions=0)  # pinned: `mid` displaces nobody
    h.accept("best", 4, 4, priority=0)  # takes a second block in the next step
    h.accept("worst", 5, 3, priority=9)
    h.step()
    h.accept("mid", 1, 1, priority=5)
    plan = h.plan()
    assert h.seen["worst", 0].kinds == ["Admitted", "Preempted"]
    assert (plan.admitted, h.free_blocks()) == ((), 1)
    h.answer()
    assert admitted(h.plan()) == ["mid"]
