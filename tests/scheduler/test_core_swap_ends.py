"""Kept KV and its worker: who waits for it, who loses it, and that host blocks are free then."""

from __future__ import annotations

import pytest
from core_harness import Harness
from swap_harness import events, host_used, two_on_little_memory, until_preempted

from scheduler_service.core.errors import InvariantError
from scheduler_service.core.events import FinishReason, Preempted, Resumed
from scheduler_service.core.explain import BlockerKind


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
