"""n > 1: candidates share the first one's prompt, and copy the block that holds its last token."""

from __future__ import annotations

import pytest
from core_harness import Harness

from scheduler_service.core.events import FinishReason
from scheduler_service.core.sampling import candidate_seed


def admitted(plan) -> list[tuple[int, int]]:
    return [(a.index, a.num_computed_tokens) for a in plan.admitted]


def test_candidate_0_computes_the_prompt_and_the_others_follow_one_plan_later():
    h = Harness()
    h.accept("a", 10, 4, n=3)
    assert admitted(h.step()) == [(0, 0)]
    plan = h.step()
    assert admitted(plan) == [(1, 9), (2, 9)]
    assert plan.num_tokens.tolist() == [1, 1, 1]
    h.run()
    h.assert_all_right()
    h.assert_empty()


def test_full_blocks_are_shared_and_the_tail_is_copied():
    h = Harness(block_size=4)
    h.accept("a", 10, 4, n=3)
    h.step()
    plan = h.plan()
    tables = [a.block_ids.tolist() for a in plan.admitted]
    assert [table[:2] for table in tables] == [[1, 2], [1, 2]]
    assert plan.copy_sources.tolist() == [3, 3]
    assert plan.copy_destinations.tolist() == [tables[0][2], tables[1][2]] == [4, 5]


@pytest.mark.parametrize(
    ("prompt", "shared", "copies"), [(1, 0, 0), (2, 0, 1), (4, 0, 1), (5, 1, 0), (8, 1, 1), (9, 2, 0)]
)
def test_the_borders_of_sharing(prompt, shared, copies):
    h = Harness(block_size=4)
    h.accept("a", prompt, 6, n=2)
    parent = h.step().admitted[0].block_ids.tolist()
    plan = h.plan()
    child = plan.admitted[0].block_ids.tolist()
    assert child[:shared] == parent[:shared]
    assert len(child) == -(-prompt // 4) and not set(child[shared:]) & set(parent)
    assert len(plan.copy_sources) == copies
    h.run()
    h.assert_all_right()
    h.assert_empty()


def test_each_candidate_has_a_seed_of_its_own():
    h = Harness()
    h.accept("a", 10, 4, n=3, seed=42)
    h.run()
    seeds = [a.sampling.seed for plan in h.plans for a in plan.admitted]
    assert seeds == [candidate_seed(42, i) for i in range(3)]
    assert len({tuple(h.seen["a", i].tokens) for i in range(3)}) == 3


def test_waiting_candidates_do_not_hold_up_other_requests():
    h = Harness(max_num_batched_tokens=20)
    h.accept("a", 50, 4, n=3)
    h.accept("b", 3, 4)
    h.step()
    h.step()
    plan = h.step()
    assert [a.request_id for a in plan.admitted] == ["b"]
    h.run()
    h.assert_all_right()


def test_they_wait_until_the_whole_prompt_is_planned():
    h = Harness(max_num_batched_tokens=16)
    h.accept("a", 40, 4, n=2)
    assert [admitted(h.step()) for _ in range(4)] == [[(0, 0)], [], [], [(1, 39)]]
    h.run()
    h.assert_all_right()


def test_pipelined_forks_copy_in_a_later_plan_than_the_prompts():
    h = Harness(depth=2)
    h.accept("a", 10, 4, n=2)
    assert admitted(h.plan()) == [(0, 0)]
    plan = h.plan()
    assert admitted(plan) == [(1, 9)] and len(plan.copy_sources) == 1
    h.run()
    h.assert_all_right()


def test_a_fork_after_the_first_candidate_has_gone_is_an_ordinary_request():
    h = Harness(max_num_seqs=1)
    h.accept("a", 10, 2, n=3)
    plans = []
    while (plan := h.step()) is not None:
        plans.append(plan)
    assert [a for plan in plans for a in admitted(plan)] == [(0, 0), (1, 8), (2, 8)]
    assert all(len(plan.copy_sources) == 0 for plan in plans)
    h.assert_all_right()
    h.assert_empty()


def test_cancelling_the_first_candidate_lets_the_others_in():
    h = Harness()
    h.accept("a", 10, 4, n=2)
    h.cancel("a", 0)
    assert admitted(h.step()) == [(1, 0)]
    h.run()
    h.assert_right("a", 1)
    h.assert_empty()


def test_cancelling_the_request_ends_every_candidate():
    h = Harness()
    h.accept("a", 10, 9, n=3)
    h.step()
    events = h.cancel("a")
    assert sorted(event.index for event in events) == [0, 1, 2]
    assert {event.reason for event in events} == {FinishReason.CANCELLED}
    assert h.plan() is None
    h.assert_empty()


def test_one_candidate_can_be_cancelled_alone():
    h = Harness()
    h.accept("a", 10, 9, n=3)
    h.step()
    h.step()
    h.cancel("a", 1)
    h.run()
    h.assert_right("a", 0)
    h.assert_right("a", 2)
    assert h.seen["a", 1].finished.reason is FinishReason.CANCELLED
    h.assert_empty()


def test_the_loss_of_the_worker_before_the_fork_is_survived():
    h = Harness()
    h.accept("a", 10, 4, n=3)
    h.step()
    h.lose()
    h.add_worker()
    h.run()
    h.assert_all_right()
    h.assert_empty()


def test_the_loss_of_the_worker_after_the_fork_is_survived():
    h = Harness(depth=2)
    h.accept("a", 10, 9, n=3)
    h.plan()
    h.plan()
    h.answer()
    h.answer()
    h.lose()
    h.add_worker()
    h.run()
    h.assert_all_right()
    h.assert_empty()


def test_forks_under_memory_pressure_get_their_tokens():
    h = Harness(num_blocks=12, block_size=4)
    h.accept("a", 10, 20, n=4)
    h.run()
    h.assert_all_right()
    h.assert_empty()


def test_forks_work_without_prefix_caching():
    h = Harness(enable_prefix_caching=False)
    h.accept("a", 10, 4, n=3)
    h.step()
    assert admitted(h.plan()) == [(1, 9), (2, 9)]
    h.run()
    h.assert_all_right()


def test_a_fork_pays_the_watermark():
    h = Harness(num_blocks=7, block_size=4, watermark=0.5)  # 3 of 6 kept free
    h.accept("a", 10, 2, n=2)  # 3 blocks, so 3 are free: 1 + 3 > 3
    h.step()
    assert h.plan().admitted == ()
    h.answer()
    h.run()
    h.assert_all_right()


def test_usage_counts_the_shared_prompt_as_cached():
    h = Harness()
    h.accept("a", 10, 4, n=2)
    h.run()
    assert [h.seen["a", i].finished.usage.cached_tokens for i in range(2)] == [0, 9]


def test_another_worker_leaves_a_fork_to_the_first_candidates():
    h = Harness(workers=2)
    h.accept("a", 140, 4, n=2)
    h.step("w0")
    assert h.plan("w1") is None
    assert admitted(h.plan("w0")) == [(1, 139)]


def test_another_idle_worker_takes_a_fork_of_a_short_prompt():
    h = Harness(workers=2)
    h.accept("a", 10, 40, n=2)
    h.step("w0")
    assert admitted(h.plan("w1")) == [(1, 0)]
    h.run()
    h.assert_all_right()


def test_another_worker_takes_a_fork_that_has_no_room_there():
    h = Harness(workers=2, max_num_seqs=1)
    h.accept("a", 10, 4, n=2)
    h.step("w0")
    assert admitted(h.plan("w1")) == [(1, 0)]
    h.run()
    h.assert_all_right()
