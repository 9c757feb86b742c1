"""Several workers, one queue: late binding, loss, return, drain."""

from __future__ import annotations

import pytest
from core_harness import Harness

from scheduler_service.core.errors import DuplicateWorkerError, UnknownWorkerError

STEM = [*range(10, 26)]


def admitted(plan) -> list[str]:
    return [] if plan is None else [a.request_id for a in plan.admitted]


def test_a_worker_of_the_same_name_is_refused():
    h = Harness()
    with pytest.raises(DuplicateWorkerError, match="'w0' is connected already"):
        h.core.add_worker(h.workers["w0"].spec, 0.0)


def test_unknown_workers_are_named():
    h = Harness()
    for call in (h.core.plan, h.core.drain_worker):
        with pytest.raises(UnknownWorkerError, match="no worker named 'x'"):
            call("x", 0.0)
    assert h.core.remove_worker("x", 0.0) == []


def test_a_request_goes_to_the_worker_that_plans():
    h = Harness(workers=2)
    h.accept("a", 3)
    assert admitted(h.plan("w1")) == ["a"]
    assert h.plan("w0") is None


def test_the_queue_is_shared():
    h = Harness(workers=2, max_num_seqs=2)
    for i in range(4):
        h.accept(f"r{i}", 3)
    assert admitted(h.plan("w0")) == ["r0", "r2"]
    assert admitted(h.plan("w1")) == ["r1", "r3"]


def test_models_have_queues_of_their_own():
    h = Harness()
    h.add_worker("other", model="other")
    h.accept("a", 3)
    h.accept("b", 3, model="other")
    assert admitted(h.plan("w0")) == ["a"]
    assert admitted(h.plan("other")) == ["b"]
    assert h.core.models() == ("fake", "other")


def test_a_worker_leaves_a_request_to_one_that_holds_its_prefix():
    h = Harness(workers=2)
    h.accept("a", [*STEM, 1], 1)
    h.step("w1")
    h.accept("b", [*STEM, 2], 1)
    assert h.plan("w0") is None
    plan = h.plan("w1")
    assert (admitted(plan), plan.admitted[0].num_computed_tokens) == (["b"], 16)


def test_it_takes_the_request_where_the_other_has_no_seat():
    h = Harness(workers=2, max_num_seqs=1)
    h.accept("a", [*STEM, 1], 9)
    h.step("w1")
    h.accept("b", [*STEM, 2], 1)
    assert admitted(h.plan("w0")) == ["b"]


def test_it_takes_the_request_where_the_other_has_no_blocks():
    h = Harness(workers=2, num_blocks=7)
    h.accept("a", [*STEM, 1, 2, 3, 4, 5], 2)  # all six blocks
    h.step("w1")
    h.accept("b", [*STEM, 2], 1)
    assert admitted(h.plan("w0")) == ["b"]


def test_it_takes_the_request_where_the_other_drains():
    h = Harness(workers=2)
    h.accept("a", [*STEM, 1], 1)
    h.step("w1")
    h.core.drain_worker("w1", 0.0)
    h.accept("b", [*STEM, 2], 1)
    assert admitted(h.plan("w0")) == ["b"]


def test_a_lost_worker_gives_its_requests_back_in_order():
    h = Harness(workers=1)
    for name in "abc":
        h.accept(name, 3, 9)
    h.step()
    events = h.lose()
    assert [(e.request_id, e.reason, e.worker_id) for e in events] == [
        (n, "worker_lost", "w0") for n in "abc"
    ]
    h.accept("late", 3, 9)
    h.add_worker("w1")
    assert admitted(h.plan("w1")) == ["a", "b", "c", "late"]
    h.run()
    h.assert_all_right()
    assert h.core.state(0.0).counters.requests_moved == 3
    assert h.core.state(0.0).counters.preemptions == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_in_flight_on_a_lost_worker_are_computed_again(depth):
    h = Harness(depth=depth)
    h.accept("a", 5, 9)
    for _ in range(depth):
        h.plan()
    h.answer()
    for _ in range(depth):
        h.plan()
    h.lose()
    h.add_worker("w1")
    plan = h.plan("w1")
    assert plan.admitted[0].token_ids.tolist()[5:] == h.seen["a", 0].tokens
    h.run()
    h.assert_all_right()


def test_a_request_that_was_preempted_with_tokens_in_flight_survives_the_loss():
    h = Harness(num_blocks=7, block_size=4, depth=2)
    h.accept("a", 7, 12)
    h.accept("b", 8, 12)
    while "Preempted" not in h.seen["b", 0].kinds:
        h.plan()
        if "Preempted" not in h.seen["b", 0].kinds and len(h.workers["w0"].inbox) == 2:
            h.answer()
    assert h.core._lifecycle.requests["b"][0].draining > 0
    h.lose()
    assert h.core._lifecycle.requests["b"][0].draining == 0
    h.add_worker()
    h.run()
    h.assert_all_right()


def test_a_returning_worker_starts_empty():
    h = Harness()
    h.accept("a", [*STEM, 1], 9)
    h.step()
    h.lose()
    h.add_worker()
    state = h.core.state(0.0).workers[0]
    assert (state.blocks_free, state.blocks_cached, state.steps, state.steps_in_flight) == (64, 0, 0, 0)
    plan = h.plan()
    assert (plan.seq, plan.admitted[0].num_computed_tokens, plan.released.tolist()) == (1, 0, [])


def test_workers_come_and_go_and_no_token_is_lost():
    h = Harness(workers=2, depth=2)
    for i in range(6):
        h.accept(f"r{i}", 5 + i, 20)
    for round_number in range(8):
        for worker_id in list(h.workers):
            h.plan(worker_id)
            h.plan(worker_id)
            if h.workers[worker_id].inbox:
                h.answer(worker_id)
        h.lose(f"w{round_number}")
        h.add_worker(f"w{round_number + 2}")
    h.run()
    h.assert_all_right()
    h.assert_empty()


def test_a_drained_worker_plans_nothing_and_its_requests_move():
    h = Harness(workers=2)
    h.accept("a", 5, 9)
    h.step("w0")
    events = h.note(h.core.drain_worker("w0", 0.0))
    assert [(e.request_id, e.reason) for e in events] == [("a", "drain")]
    assert h.plan("w0") is None
    assert admitted(h.plan("w1")) == ["a"]
    h.run()
    h.assert_all_right()


def test_results_of_a_drained_worker_still_count_before_the_move():
    h = Harness(workers=2, depth=2)
    h.accept("a", 5, 9)
    h.plan("w0")
    h.plan("w0")
    h.note(h.core.drain_worker("w0", 0.0))
    assert h.plan("w1") is None
    h.answer("w0")
    h.answer("w0")
    assert len(h.seen["a", 0].tokens) == 2
    assert len(h.plan("w1").admitted[0].token_ids) == 7
    h.run()
    h.assert_all_right()


def test_draining_twice_is_draining_once():
    h = Harness()
    h.accept("a", 5, 9)
    h.step()
    assert len(h.note(h.core.drain_worker("w0", 0.0))) == 1
    assert h.core.drain_worker("w0", 0.0) == []
    assert h.core.state(0.0).workers[0].draining


def test_a_request_too_large_for_one_worker_waits_for_another_without_blocking_it():
    h = Harness(num_blocks=6)
    h.add_worker("big", num_blocks=60)
    h.accept("large", 30, 4)
    h.accept("small", 3, 4)
    assert admitted(h.plan("w0")) == ["small"]
    assert admitted(h.plan("big")) == ["large"]
    h.run()
    h.assert_all_right()


def test_a_worker_that_could_begin_a_request_but_never_end_it_leaves_it_alone():
    h = Harness(num_blocks=6)  # 20 tokens of KV
    h.add_worker("big", num_blocks=60)
    h.accept("long", 5, 30)
    assert h.plan("w0") is None
    assert admitted(h.plan("big")) == ["long"]
    h.run()
    h.assert_all_right()


def test_a_worker_with_a_shorter_context_leaves_a_longer_request_alone():
    h = Harness(max_model_len=20)
    h.add_worker("big", max_model_len=60)
    h.accept("long", 5, 30)
    assert h.plan("w0") is None
    assert admitted(h.plan("big")) == ["long"]


def test_a_prefix_that_all_share_does_not_draw_them_all_to_one_worker():
    h = Harness(workers=2)
    h.accept("first", [*STEM, 1], 30)
    h.step("w0")
    for i in range(5):
        h.accept(f"r{i}", [*STEM, 2, i], 30)
        h.step("w0")
        h.step("w1")
    assert [len(h.running("w0")), len(h.running("w1"))] == [3, 3]
    h.run()
    h.assert_all_right()


def test_a_burst_is_shared_between_idle_workers():
    h = Harness(workers=3)
    for i in range(9):
        h.accept(f"r{i}", 3, 9)
    for worker_id in h.workers:
        h.step(worker_id)
    assert [len(h.running(worker_id)) for worker_id in h.workers] == [3, 3, 3]
    h.run()
    h.assert_all_right()


def test_a_worker_that_does_not_answer_draws_nothing_by_being_idle():
    h = Harness(workers=2)
    h.accept("stuck", 3, 30)
    h.plan("w0")
    h.accept("a", 3, 30)
    h.step("w1")
    for name in "bc":
        h.accept(name, 3, 30)
    assert admitted(h.plan("w1")) == ["b", "c"]


def test_a_long_prefix_is_worth_a_busier_worker():
    h = Harness(workers=2)
    stem = [i % 64 for i in range(140)]
    h.accept("first", [*stem, 1], 30)
    h.step("w0")
    h.accept("second", [*stem, 2], 30)
    assert h.plan("w1") is None
    assert h.plan("w0").admitted[0].num_computed_tokens == 140
