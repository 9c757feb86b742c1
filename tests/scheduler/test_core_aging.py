"""Priority aging: nothing starves, and what has aged is not pushed aside."""

from __future__ import annotations

from core_harness import MACHINE, Harness
from hypothesis import given
from hypothesis import strategies as st


def prio(aging_s: float | None, **options: object) -> Harness:
    return Harness(policy="priority", priority_aging_s=aging_s, **options)


def admitted(plan) -> list[str]:
    return [a.request_id for a in plan.admitted]


def steps_until_admitted(h: Harness, name: str, most: int) -> int | None:
    """Seconds until `name` gets its turn while a better one arrives each second, which takes one to serve."""
    for second in range(most):
        h.accept(f"better{second}", 3, 1, priority=0)
        if name in admitted(h.step()):
            return second
        h.now += 1.0
    return None


def test_without_aging_a_steady_stream_of_better_ones_starves_the_rest():
    h = prio(None, max_num_seqs=1, check=False)
    h.accept("low", 3, 1, priority=10)
    assert steps_until_admitted(h, "low", 100) is None


def test_with_aging_it_waits_no_longer_than_its_priority_is_worse():
    h = prio(2.0, max_num_seqs=1, check=False)
    h.accept("low", 3, 1, priority=10)
    assert steps_until_admitted(h, "low", 100) == 20


def test_one_second_of_waiting_at_a_time():
    h = prio(5.0)
    h.accept("old", 3, priority=3)
    h.now = 9.9
    h.accept("two_better_but_later", 3, priority=1)
    h.now = 10.1
    h.accept("too_late", 3, priority=1)
    assert admitted(h.plan()) == ["two_better_but_later", "old", "too_late"]


def test_one_that_has_aged_past_another_is_not_displaced_by_it():
    h = prio(1.0, max_num_seqs=1)
    h.accept("old", 4, 12, priority=5)
    h.step()
    h.now = 6.0
    h.accept("better_but_late", 4, 12, priority=0)
    h.step()
    assert h.running() == ["old"]
    h.run()
    h.assert_all_right()


def test_one_that_has_not_aged_enough_is_displaced():
    h = prio(1.0, max_num_seqs=1)
    h.accept("old", 4, 12, priority=5)
    h.step()
    h.now = 4.0
    h.accept("better", 4, 12, priority=0)
    h.step()
    assert h.running() == ["better"]
    h.run()
    h.assert_all_right()


def test_equals_never_displace_each_other():
    h = prio(1.0, max_num_seqs=1)
    h.accept("a", 4, 6, priority=1)
    h.step()
    h.now = 1.0
    h.accept("b", 4, 6, priority=1)
    h.run()
    assert h.core.state(h.now).counters.preemptions == 0


@MACHINE
@given(
    arrivals=st.lists(st.tuples(st.floats(0, 3), st.integers(-4, 4)), min_size=2, max_size=40),
    aging_s=st.floats(0.1, 5),
)
def test_nobody_who_came_much_later_goes_first(arrivals, aging_s):
    h = prio(aging_s, max_num_seqs=1, check=False)
    came: dict[str, tuple[float, int]] = {}
    first: list[str] = []
    for i, (pause, priority) in enumerate(arrivals):
        h.now += pause
        came[f"r{i}"] = (h.now, priority)
        h.accept(f"r{i}", 3, 2, priority=priority)
        plan = h.step()
        first += [name for name in admitted(plan) if name not in first]
    while (plan := h.step()) is not None:
        first += [name for name in admitted(plan) if name not in first]
    assert len(first) == len(arrivals)
    for place, name in enumerate(first):
        for passed in first[place + 1 :]:
            later = came[name][0] - came[passed][0]
            better = came[passed][1] - came[name][1]
            assert later <= max(0, better) * aging_s + 1e-9
