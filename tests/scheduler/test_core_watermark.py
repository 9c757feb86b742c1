"""The watermark: admitted only if needed_blocks + int(watermark * total_blocks) <= free_blocks."""

from __future__ import annotations

import pytest
from core_harness import Harness


def pool(num_blocks: int, watermark: float, **options: object) -> Harness:
    return Harness(num_blocks=num_blocks, block_size=4, watermark=watermark, overtaking_window=0, **options)


def test_the_first_request_bypasses_it():
    h = pool(11, 0.9)  # 10 usable blocks, int(0.9 * 11) = 9 kept free
    h.accept("a", 40, 1)
    assert h.grants(h.plan()) == {"a": 40}
    assert h.free_blocks() == 0


def test_the_second_request_pays_it_though_admitted_in_the_same_step():
    h = pool(11, 0.5)  # 5 kept free
    h.accept("a", 4, 2)
    h.accept("b", 20, 2)  # 5 + 5 > 9
    h.accept("c", 4, 2)
    assert h.grants(h.plan()) == {"a": 4}


@pytest.mark.parametrize(("prompt", "admitted"), [(16, True), (17, False)])
def test_the_reserve_may_be_met_exactly_but_not_touched(prompt, admitted):
    h = pool(11, 0.5)
    h.accept("a", 3, 2)
    h.step()  # 9 free
    h.accept("b", prompt, 2)  # 4 + 5 <= 9, 5 + 5 > 9
    plan = h.plan()
    assert [a.request_id for a in plan.admitted] == (["b"] if admitted else [])


@pytest.mark.parametrize(
    ("num_blocks", "watermark", "reserve"),
    [(11, 0.09, 0), (11, 0.1, 1), (10, 0.19, 1), (10, 0.2, 2), (100, 0.0, 0)],
)
def test_the_reserve_is_truncated_and_counts_the_null_block(num_blocks, watermark, reserve):
    h = pool(num_blocks, watermark)
    h.accept("a", 1, 2)
    h.step()
    h.accept("b", 4 * (num_blocks - 2 - reserve), 1)  # all that is left but the reserve
    assert [a.request_id for a in h.plan().admitted] == ["b"]
    h = pool(num_blocks, watermark)
    h.accept("a", 1, 2)
    h.step()
    h.accept("b", 4 * (num_blocks - 2 - reserve) + 1, 1)
    assert [a.request_id for a in h.plan().admitted] == []


def test_a_running_request_never_pays_it():
    h = pool(6, 0.8)  # int(0.8 * 6) = 4 kept free
    h.accept("a", 4, 17)
    h.run()
    h.assert_all_right()
    assert h.core.state(0.0).counters.preemptions == 0


def test_running_requests_may_use_the_reserve_between_them():
    h = pool(7, 0.34)  # 2 kept free
    h.accept("a", 8, 5)
    h.accept("b", 8, 5)
    assert h.grants(h.plan()) == {"a": 8, "b": 8}
    h.answer()
    assert len(h.plan().block_ids) == 2
    assert h.free_blocks() == 0


def test_a_resumed_request_pays_it():
    h = pool(9, 0.25, enable_prefix_caching=False)  # 8 usable, 2 kept free
    h.accept("a", 12, 20)
    h.accept("b", 12, 9)
    h.step()
    while not h.seen["b", 0].events[-1:] or h.seen["b", 0].kinds[-1] != "Preempted":
        h.step()
    core_b = h.core._lifecycle.requests["b"][0]
    while core_b.worker is None:
        free, needed = h.free_blocks(), -(-core_b.num_known // 4)
        alone = not h.running()
        h.step()
        assert (core_b.worker is not None) == (alone or needed + 2 <= free)
    h.run()
    h.assert_all_right()


def test_a_resumed_request_that_is_alone_bypasses_it():
    h = pool(9, 0.9)
    h.accept("a", 20, 8)
    h.step()
    h.lose()
    h.add_worker()
    assert [a.request_id for a in h.plan().admitted] == ["a"]


def test_cached_blocks_in_the_free_list_count_as_needed():
    h = pool(11, 0.3)  # 10 usable, 3 kept free
    h.accept("old", [*range(16)], 1)
    h.run()
    assert (h.free_blocks(), h.core.state(0.0).workers[0].blocks_cached) == (10, 4)
    h.accept("a", 11, 2)
    h.step()  # 7 free
    h.accept("b", [*range(16), 50], 2)  # 4 cached and 1 fresh: 5 + 3 > 7
    assert h.plan().admitted == ()


def test_cached_blocks_that_someone_holds_are_not_needed():
    h = pool(11, 0.3)
    h.accept("a", [*range(16)], 9)
    h.step()  # holds 4, 6 free
    h.accept("b", [*range(16), *range(8)], 2)  # shares 4, needs 2: 2 + 3 <= 6
    plan = h.plan()
    assert [(a.request_id, a.num_computed_tokens) for a in plan.admitted] == [("b", 16)]


def test_a_refused_admission_touches_nothing():
    h = pool(11, 0.3)
    h.accept("old", [*range(16)], 1)
    h.run()
    h.accept("a", 11, 9)
    h.step()
    worker = h.core._workers["w0"]
    before = worker.pool.free_blocks()
    h.accept("b", [*range(16), 50], 2)
    plan = h.plan()
    assert plan.admitted == () and plan.block_ids.tolist() == []
    assert worker.pool.free_blocks() == before
    assert h.core.state(0.0).counters.prefix_queried_tokens == 16 + 11  # b has not been counted


def test_the_waiting_request_comes_when_the_running_one_has_finished():
    h = pool(11, 0.9)
    h.accept("a", 4, 3)
    h.accept("b", 4, 3)
    rounds = 0
    while h.running() != ["b"]:
        h.step()
        rounds += 1
    assert rounds == 4
    h.run()
    h.assert_all_right()
