"""Preemption that keeps KV in host memory: what is copied, when, and that nothing is lost or read wrongly.

The fake worker models both tiers' contents, so every row checks the KV that it reads.
"""

from __future__ import annotations

import re

import pytest
from core_harness import Harness, expected_outputs

from scheduler_service.core.errors import ConfigError, InvariantError
from scheduler_service.core.events import FinishReason, Preempted, Resumed
from scheduler_service.core.explain import BlockerKind
from scheduler_service.core.step_time import row_size


def events(h: Harness, name: str, kind: type, index: int = 0) -> list:
    return [event for event in h.seen[name, index].events if isinstance(event, kind)]


def step_until(h: Harness, condition) -> None:
    for _ in range(300):
        if condition():
            return
        assert h.step() is not None
    raise AssertionError("it never came")


def swapped(h: Harness) -> tuple[int, int]:
    """Blocks that were copied out and in."""
    counters = h.core.state(h.now).counters
    return counters.swapped_out_blocks, counters.swapped_in_blocks


def host_used(h: Harness, worker_id: str = "w0") -> int:
    states = {state.worker_id: state for state in h.core.state(h.now).workers}
    return states[worker_id].host_blocks_used


def two_on_little_memory(scale: int = 1, **options: object) -> Harness:
    """Two requests that need 5 of 6 blocks each in the end. `scale` makes everything longer."""
    options = {"num_host_blocks": 8, "preemption_mode": "swap", **options}
    h = Harness(num_blocks=7, block_size=4 * scale, **options)
    h.accept("a", 7 * scale, 12 * scale, priority=0)
    h.accept("b", 8 * scale, 12 * scale, priority=1)
    return h


def until_preempted(h: Harness, name: str = "b") -> Preempted:
    step_until(h, lambda: events(h, name, Preempted))
    return events(h, name, Preempted)[0]


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


def test_recompute_computes_them_again():
    h = two_on_little_memory(enable_prefix_caching=False, preemption_mode="recompute")
    assert until_preempted(h).kept_tokens == 0
    h.run()
    h.assert_all_right()
    assert h.core.state(0.0).counters.prefill_tokens > 15
    assert swapped(h) == (0, 0)


def test_a_worker_without_host_memory_is_what_it_was():
    h = two_on_little_memory(num_host_blocks=0)
    assert until_preempted(h).kept_tokens == 0
    h.run()
    h.assert_all_right()
    timeline = [
        moment.detail for moment in h.core.explain("b", 0.0)[0].timeline if moment.what == "preempted"
    ]
    assert timeline == ["blocks"]


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


def test_a_full_host_tier_means_recompute():
    h = two_on_little_memory(num_host_blocks=2)
    assert until_preempted(h).kept_tokens == 0
    (moment,) = (m for m in h.core.explain("b", 0.0)[0].timeline if m.what == "preempted")
    assert moment.detail == "blocks; recompute: 3 host blocks needed, 2 free"
    h.run()
    h.assert_all_right()


@pytest.mark.parametrize(("block_copy_ms", "keeps"), [(0.01, True), (10.0, False), (0.0, True)])
def test_auto_keeps_what_is_cheaper_to_copy_than_to_compute(block_copy_ms, keeps):
    h = two_on_little_memory(preemption_mode="auto", block_copy_ms=block_copy_ms)
    assert bool(until_preempted(h).kept_tokens) is keeps
    h.run()
    h.assert_all_right()
    counters = h.core.state(0.0).counters
    assert counters.preemptions_kept == (counters.preemptions if keeps else 0)


def test_auto_goes_by_the_measured_steps_of_the_worker():
    # A copy out and in of three blocks takes 6 ms.
    outcomes = {}
    for token_ms in (0.1, 10.0):
        h = two_on_little_memory(preemption_mode="auto", block_copy_ms=1.0)
        step_time = h.core._workers["w0"].step_time
        for num_tokens in (*range(1, 40), *range(1, 40)):
            step_time.note(row_size(0, num_tokens), 1.0 + token_ms * num_tokens)
        outcomes[token_ms] = until_preempted(h)
        h.run()
        h.assert_all_right()
    assert outcomes[0.1].kept_tokens == 0
    assert outcomes[10.0].kept_tokens > 8


def test_auto_counts_only_blocks_that_nobody_else_holds():
    h = Harness(num_blocks=12, block_size=2, num_host_blocks=40, block_copy_ms=0.001)
    h.accept("a", 2, 18)
    h.accept("b", 8, 6, n=3)
    while not any(events(h, "b", Preempted, i) for i in range(3)):
        assert h.step() is not None
    index = next(i for i in range(3) if events(h, "b", Preempted, i))
    (moment,) = (m for m in h.core.explain("b", 0.0)[index].timeline if m.what == "preempted")
    held, of, all_blocks = moment.detail.partition("kept: ")[2].split()[:3]
    assert of == "of" and int(held) < int(all_blocks)  # its siblings hold the prompt's blocks
    h.run()
    h.assert_all_right()


def test_the_choice_and_its_numbers_are_part_of_the_timeline():
    h = two_on_little_memory(preemption_mode="auto", block_copy_ms=0.01)
    until_preempted(h)
    step_until(h, lambda: events(h, "b", Resumed))
    timeline = {moment.what: moment.detail for moment in h.core.explain("b", 0.0)[0].timeline}
    assert re.fullmatch(
        r"blocks; kept: 3 of 3 blocks, 0\.06 ms to copy, 0\.\d\d ms to compute", timeline["preempted"]
    )
    kept, copied = events(h, "b", Preempted)[0].kept_tokens, len(h.plans[-1].swap_in_blocks)
    assert timeline["resumed"] == f"{kept} kept tokens, {copied} blocks copied back"


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


def cancel(h: Harness) -> None:
    assert h.cancel("b")


def pass_deadline(h: Harness) -> None:
    h.now = 10.0
    assert h.note(h.core.expire(h.now))


def stop_by_text(h: Harness) -> None:
    assert h.note(h.core.stop("b", 0, 1, h.now))


def drain(h: Harness) -> None:
    h.note(h.core.drain_worker("w0", h.now))


@pytest.mark.parametrize("end", [cancel, pass_deadline, stop_by_text, drain])
def test_host_blocks_are_free_as_soon_as_nobody_needs_them(end):
    h = Harness(num_blocks=7, block_size=4, num_host_blocks=8, preemption_mode="swap")
    h.accept("a", 7, 12)
    h.accept("b", 8, 12, deadline=5.0)
    until_preempted(h)
    assert host_used(h) > 0
    end(h)
    assert host_used(h) == 0
    if end is drain:
        h.add_worker("w1", num_blocks=40)
    h.run()
    h.assert_right("a")
    h.assert_empty()


def test_a_lost_worker_takes_what_it_kept_with_it():
    h = two_on_little_memory()
    until_preempted(h)
    h.lose()
    h.add_worker("w1")
    h.run()
    h.assert_all_right()
    h.assert_empty()
    assert events(h, "b", Resumed)[0].cached_tokens == 0


def test_a_copy_that_is_due_for_a_cancelled_victim_is_not_made():
    h = two_on_little_memory()
    until_preempted(h)
    host = h.core._workers["w0"].host
    host.note_taken([next(iter(host.watched))])
    h.core._lifecycle.finish(h.core._lifecycle.requests["b"][0], FinishReason.CANCELLED, 0.0)
    assert host.take_copies() == ([], [])


def test_a_victim_waits_for_the_worker_that_keeps_its_kv():
    h = two_on_little_memory(scale=16)
    until_preempted(h)
    h.add_worker("w1", num_host_blocks=0)
    assert h.plan("w1") is None
    (explanation,) = h.core.explain("b", h.now)
    why = {blocker.worker_id: blocker for blocker in explanation.blockers}
    assert why["w0"].kind is BlockerKind.BLOCKS
    kept = events(h, "b", Preempted)[0].kept_tokens
    assert (why["w1"].kind, why["w1"].other, why["w1"].needed) == (BlockerKind.KEPT_ELSEWHERE, "w0", kept)
    h.run()
    h.assert_all_right()
    assert events(h, "b", Resumed)[0].worker_id == "w0"


def test_a_much_busier_worker_loses_it_and_frees_its_host_blocks():
    h = Harness(num_blocks=7, block_size=4, num_host_blocks=8, preemption_mode="swap")
    h.accept("a", 2, 14)
    h.accept("b", 2, 14)
    h.accept("c", 4, 12)
    while not events(h, "c", Preempted):
        assert h.step() is not None
    assert len(h.running()) == 2
    assert events(h, "c", Preempted)[0].kept_tokens < 2 * 128
    h.add_worker("w1")
    assert h.grants(h.plan("w1"), "w1")
    assert host_used(h) == 0
    h.answer("w1")
    h.run()
    h.assert_all_right()
    assert events(h, "c", Resumed)[0].worker_id == "w1"


def test_a_head_whose_kv_is_kept_elsewhere_displaces_nobody():
    h = two_on_little_memory(scale=16, policy="priority")
    until_preempted(h)
    h.add_worker("w1", num_blocks=6)
    h.accept("low", 300, 20, priority=5)  # all blocks of w1
    assert h.grants(h.plan("w1"), "w1") == {"low": 300}
    h.answer("w1")
    h.plan("w1")
    assert not events(h, "low", Preempted)
    h.answer("w1")
    h.run()
    h.assert_all_right()


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


@pytest.mark.parametrize(("most", "times"), [(8, 3), (1, 1)])
def test_a_request_is_preempted_a_bounded_number_of_times(most, times):
    h = Harness(num_blocks=13, block_size=2, max_preemptions=most, num_host_blocks=30, preemption_mode="swap")
    for name, prompt, max_tokens in (("a", 4, 20), ("b", 2, 20), ("c", 2, 4), ("last", 2, 20)):
        h.accept(name, prompt, max_tokens)
    h.run()
    h.assert_all_right()
    assert h.seen["last", 0].finished.usage.preemptions == times


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


def test_check_finds_a_host_block_that_nobody_owns():
    h = two_on_little_memory()
    until_preempted(h)
    h.core._workers["w0"].host._free.pop()
    with pytest.raises(InvariantError, match="host blocks"):
        h.core.check()


def test_check_finds_a_stash_of_a_request_that_runs():
    h = two_on_little_memory()
    until_preempted(h)
    host = h.core._workers["w0"].host
    running = h.core._lifecycle.requests["a"][0]
    host.stashes[running] = host.stashes[h.core._lifecycle.requests["b"][0]]
    with pytest.raises(InvariantError, match="stash of a"):
        h.core.check()


def test_an_unknown_mode_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"preemption_mode.*'copy'.*auto, recompute, swap"):
        Harness(preemption_mode="copy")


@pytest.mark.parametrize(("option", "value"), [("num_host_blocks", -1), ("block_copy_ms", float("nan"))])
def test_a_worker_spec_that_makes_no_sense_is_refused(option, value):
    with pytest.raises(ConfigError, match=option):
        Harness(**{option: value})
