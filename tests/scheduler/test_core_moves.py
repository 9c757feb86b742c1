"""A request that loses its worker moves on, but one that ends every worker does not move forever."""

from __future__ import annotations

import pytest
from core_harness import Harness

from scheduler_service.core.events import FinishReason


def lose_workers(h: Harness, count: int, *, steps: int = 0) -> int:
    """Loses up to `count` workers, each with a plan in flight after `steps` whole ones; returns how many."""
    for lost in range(count):
        if h.core.requests(h.now) == []:
            return lost
        h.add_worker()
        for _ in range(steps):
            h.step()
        h.plan()
        h.lose()
    return count


@pytest.mark.parametrize("most", [0, 1, 5])
def test_a_request_that_ends_every_worker_ends_itself_after_a_bounded_number(most):
    h = Harness(workers=0, max_moves_without_progress=most, check=False)
    h.add_worker()
    h.accept("poison", 5, 4)
    h.lose()
    assert lose_workers(h, 20) == most + 1
    finished = h.seen["poison", 0].finished
    assert finished.reason is FinishReason.ERROR
    assert finished.detail == (
        f"{most + 1} workers were lost under it without a token in between, w0 the last"
    )
    assert h.seen["poison", 0].kinds.count("Preempted") == most
    h.assert_empty()


def test_a_token_is_progress():
    h = Harness(workers=0, max_moves_without_progress=1)
    h.add_worker()
    h.accept("a", 5, 12)
    h.lose()
    lose_workers(h, 6, steps=1)
    h.add_worker()
    h.run()
    h.assert_all_right()
    assert h.seen["a", 0].finished.usage.preemptions == 6


def test_a_part_of_a_prefill_is_no_progress():
    h = Harness(workers=0, max_moves_without_progress=2, max_num_batched_tokens=16)
    h.add_worker()
    h.accept("a", 60, 2)
    h.lose()
    assert lose_workers(h, 9, steps=2) == 3
    assert h.seen["a", 0].finished.reason is FinishReason.ERROR


def test_drains_do_not_count():
    h = Harness(workers=0, max_moves_without_progress=0)
    h.add_worker()
    h.accept("a", 5, 4)
    for i in range(4):
        name = f"w{i}"
        if i:
            h.add_worker(name)
        h.plan(name)
        h.note(h.core.drain_worker(name, h.now))
        h.answer(name)
    h.add_worker("last")
    h.run()
    h.assert_all_right()


def test_waiting_requests_lose_nothing_with_a_worker():
    h = Harness(workers=0, max_moves_without_progress=0, max_num_seqs=1)
    h.add_worker()
    h.accept("poison", 5, 4)
    h.accept("waits", 5, 4)
    h.plan()
    h.lose()
    assert h.seen["poison", 0].finished.reason is FinishReason.ERROR
    assert h.seen["waits", 0].finished is None
    h.add_worker()
    h.run()
    h.assert_right("waits")


def test_the_first_candidate_ends_and_its_siblings_go_on():
    h = Harness(workers=0, max_moves_without_progress=0)
    h.add_worker()
    h.accept("a", 5, 4, n=3)
    h.plan()
    h.lose()
    assert h.seen["a", 0].finished.reason is FinishReason.ERROR
    h.add_worker()
    h.run()
    h.assert_right("a", 1)
    h.assert_right("a", 2)
    h.assert_empty()
