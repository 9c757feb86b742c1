"""Preemption that keeps KV in host memory: what is copied, when, and that nothing is lost or read wrongly.

The fake worker models both tiers' contents, so every row checks the KV that it reads.
"""

from __future__ import annotations

import pytest
from core_harness import Harness, expected_outputs
from swap_harness import events, host_used, step_until, swapped, two_on_little_memory, until_preempted

from scheduler_service.core.events import FinishReason, Preempted, Resumed


def test_a_victims_tokens_are_kept_and_none_is_computed_twice():
    h = two_on_little_memory(enable_prefix_caching=False)
    lost = until_preempted(h)
    assert lost.kept_tokens > 8
    h.run()
    h.assert_all_right()
    h.assert_empty()
    resumed = events(h, "b", Resumed)
    assert [each.cached_tokens for each in resumed] == [
        each.kept_tokens for each in events(h, "b", Preempted)
    ]
    counters = h.core.state(0.0).counters
    assert (counters.preemptions, counters.preemptions_kept) == (len(resumed), len(resumed))
    assert counters.prefill_tokens == 15  # both prompts, once


def test_only_blocks_that_someone_takes_are_copied():
    h = Harness(num_blocks=9, block_size=4, num_host_blocks=8, preemption_mode="swap")  # 8 usable
    h.accept("a", 15, 6)
    h.accept("b", 14, 12)
    lost = until_preempted(h)
    assert lost.kept_tokens == 15  # in four blocks
    assert swapped(h) == (1, 0)  # the one that `a` needed
    blocks = h.core.block_map("w0")
    assert sorted(blocks.host_states) == [0, 0, 0, 0, 1, 1, 1, 2]
    assert [(owner.request_id, owner.num_blocks) for owner in blocks.host_owners] == [("b", 4)]
    assert [index == 0 for index in blocks.host_owner_indices] == [state > 0 for state in blocks.host_states]
    h.run()
    h.assert_all_right()
    out, back = swapped(h)
    assert 1 <= out < 4  # `a` took as many as it grew by
    assert back == out


def test_the_plan_that_takes_a_kept_block_copies_it_first():
    h = two_on_little_memory()
    until_preempted(h)
    step_until(h, lambda: len(h.plans[-1].swap_out_blocks))
    plan = h.plans[-1]
    assert plan.swap_out_blocks.tolist() == plan.block_ids.tolist()  # `a` gets what `b` left
    assert len(plan.swap_out_host_blocks) == 1
    assert (plan.swap_in_blocks.size, plan.swap_in_host_blocks.size) == (0, 0)


def test_the_plan_that_resumes_copies_back_what_was_copied_out():
    h = two_on_little_memory()
    until_preempted(h)
    step_until(h, lambda: events(h, "b", Resumed))
    plan = h.plans[-1]
    (admission,) = plan.admitted
    out = [block for each in h.plans for block in each.swap_out_host_blocks.tolist()]
    assert sorted(plan.swap_in_host_blocks.tolist()) == sorted(out)
    table = admission.block_ids.tolist()
    assert set(plan.swap_in_blocks.tolist()) < set(table)
    assert admission.num_computed_tokens == events(h, "b", Preempted)[0].kept_tokens
    assert host_used(h) == 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_crowd_on_little_memory_gets_its_own_tokens(depth, caching):
    h = Harness(
        num_blocks=14,
        block_size=2,
        depth=depth,
        num_host_blocks=30,
        preemption_mode="swap",
        enable_prefix_caching=caching,
    )
    for i in range(6):
        h.accept(f"r{i}", 3 + i % 3, 14, n=1 + i % 2)
    h.run()
    h.assert_all_right()
    h.assert_empty()
    counters = h.core.state(0.0).counters
    assert counters.preemptions_kept == counters.preemptions > 3
    assert min(swapped(h)) > 0
    assert host_used(h) == 0


def test_a_token_in_flight_of_a_victim_is_delivered_once_and_its_kv_is_kept():
    h = two_on_little_memory(depth=2)
    while not events(h, "b", Preempted):
        if h.plan() is None:
            h.answer()
    request = h.core._lifecycle.requests["b"][0]
    got, in_flight = len(h.seen["b", 0].tokens), request.draining
    assert in_flight > 0
    kept = events(h, "b", Preempted)[0].kept_tokens
    assert kept > request.num_known - 1  # beyond what is known, since the step in flight computes it
    assert kept < request.num_known + in_flight
    while h.workers["w0"].inbox:
        h.answer()
    assert len(h.seen["b", 0].tokens) == got + in_flight
    h.run()
    h.assert_all_right()


def test_a_victim_can_end_by_a_token_in_flight_and_its_host_blocks_are_free():
    h = two_on_little_memory(depth=2)
    while not events(h, "b", Preempted):
        if h.plan() is None:
            h.answer()
    number = len(h.seen["b", 0].tokens) + 1
    stop = expected_outputs(h.specs["b"], 0)[0][number - 1]
    h = Harness(num_blocks=7, block_size=4, depth=2, num_host_blocks=8, preemption_mode="swap")
    h.accept("a", 7, 12)
    h.accept("b", 8, 12, stop_token_ids=frozenset([stop]), min_tokens=number)
    while not events(h, "b", Preempted):
        if h.plan() is None:
            h.answer()
    assert host_used(h) > 0
    while h.workers["w0"].inbox:
        h.answer()
    assert h.seen["b", 0].finished.reason is FinishReason.STOP
    assert host_used(h) == 0
    h.run()
    h.assert_all_right()


def test_victims_that_share_blocks_share_host_blocks():
    h = Harness(num_blocks=12, block_size=2, num_host_blocks=40, preemption_mode="swap")
    h.accept("a", 2, 18)
    h.accept("b", 8, 6, n=3)
    most = kept = 0
    while h.step() is not None:
        stashes = h.core._workers["w0"].host.stashes.values()
        if len(stashes) > 1 and host_used(h) > most:
            most, kept = host_used(h), sum(len(stash.blocks) for stash in stashes)
    assert 0 < most < kept
    h.assert_all_right()
    h.assert_empty()


def test_preempted_requests_keep_their_place():
    h = Harness(num_blocks=10, block_size=2, num_host_blocks=20, preemption_mode="swap")
    for name in "abc":
        h.accept(name, 4, 12)
    order: list[str] = []
    while h.step() is not None:
        order += [a.request_id for a in h.plans[-1].admitted]
    assert order[:3] == ["a", "b", "c"]
    assert order[3:] == sorted(order[3:])
    assert len(order) > 4
    h.assert_all_right()


def test_a_prefix_that_came_back_to_the_cache_is_not_copied_in():
    h = two_on_little_memory()
    until_preempted(h)
    prompt = h.specs["b"].prompt_token_ids.tolist()
    step_until(h, lambda: h.seen["a", 0].finished)
    h.run()
    h.assert_all_right()
    before = swapped(h)
    h.accept("again", prompt, 2)
    h.run()
    h.assert_right("again")
    assert swapped(h) == before


def test_a_victim_of_a_displacement_takes_its_place_again_without_a_copy():
    h = Harness(num_host_blocks=16, preemption_mode="swap", policy="priority", max_num_seqs=1)
    h.accept("low", 9, 8, priority=5)
    h.step()
    h.step()
    h.accept("high", 3, 2, priority=0)
    h.run()
    h.assert_all_right()
    (lost,), (back,) = events(h, "low", Preempted), events(h, "low", Resumed)
    assert (lost.reason, back.cached_tokens) == ("slots", lost.kept_tokens)
    assert swapped(h) == (0, 0)
