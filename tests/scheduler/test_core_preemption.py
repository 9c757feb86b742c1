"""What happens when blocks run out."""

from __future__ import annotations

import pytest
from core_harness import Harness, expected_outputs

from scheduler_service.core.events import FinishReason


def kinds(h: Harness, name: str) -> list[str]:
    return h.seen[name, 0].kinds


def step_until(h: Harness, condition) -> None:
    for _ in range(200):
        if condition():
            return
        assert h.step() is not None
    raise AssertionError("it never came")


def two_on_little_memory(**options: object) -> Harness:
    h = Harness(num_blocks=7, block_size=4, **options)  # 6 usable; each needs 5 in the end
    h.accept("a", 7, 12)
    h.accept("b", 8, 12)
    return h


def test_the_last_one_admitted_goes_back_to_the_queue():
    h = two_on_little_memory()
    step_until(h, lambda: "Preempted" in kinds(h, "b"))
    assert h.running() == ["a"]
    assert kinds(h, "a") == ["Admitted"]
    state = h.core.state(0.0)
    assert (state.waiting_requests, state.running_requests, state.counters.preemptions) == (1, 1, 1)


def test_it_keeps_its_tokens_and_goes_on_where_it_was():
    h = two_on_little_memory()
    step_until(h, lambda: "Preempted" in kinds(h, "b"))
    before = list(h.seen["b", 0].tokens)
    assert before
    h.run()
    assert h.seen["b", 0].tokens[: len(before)] == before
    h.assert_all_right()
    h.assert_empty()
    assert kinds(h, "b") == ["Admitted", "Preempted", "Resumed", "Finished"]
    assert h.seen["b", 0].finished.usage.preemptions == 1


def test_a_resumed_request_is_sent_as_a_new_one_with_all_its_tokens():
    h = two_on_little_memory()
    step_until(h, lambda: "Resumed" in kinds(h, "b"))
    admission = h.plans[-1].admitted[0]
    assert admission.num_prompt_tokens == 8
    outputs = h.seen["b", 0].tokens[: len(admission.token_ids) - 8]
    assert admission.token_ids.tolist() == [*h.specs["b"].prompt_token_ids.tolist(), *outputs]
    assert len(outputs) >= 1


def test_a_preempted_request_comes_before_those_that_never_ran():
    h = two_on_little_memory()
    step_until(h, lambda: "Preempted" in kinds(h, "b"))
    h.accept("c", 1, 4)  # would fit long before b does
    step_until(h, lambda: "Admitted" in kinds(h, "c") or "Resumed" in kinds(h, "b"))
    assert kinds(h, "b")[-1] == "Resumed"


def test_a_preempted_request_comes_before_an_older_one_that_never_ran():
    h = Harness(num_blocks=11, block_size=4)
    h.accept("running", 17, 20)
    h.step()
    h.accept("big", 24, 2)  # has no room
    h.accept("small", 3, 20)  # passes it, and has to go when `running` grows
    order: list[str] = []
    while h.step() is not None:
        order += [a.request_id for a in h.plans[-1].admitted]
    assert order[:3] == ["small", "small", "big"]
    h.assert_all_right()


def test_nobody_takes_the_blocks_of_a_preempted_request_while_its_answers_are_in_flight():
    # With three plans in flight there is a plan to make before the last answer has come.
    h = two_until_preempted_in_flight(depth=3)
    h.accept("c", 1, 1)
    h.answer()
    assert h.core._lifecycle.requests["b"][0].draining == 1
    assert h.free_blocks() > 0
    assert h.plan().admitted == ()
    h.run()
    h.assert_all_right()


def test_preempted_requests_come_back_in_order_of_arrival():
    h = Harness(num_blocks=10, block_size=2)
    for name in "abc":
        h.accept(name, 4, 12)
    order: list[str] = []
    while h.step() is not None:
        order += [a.request_id for a in h.plans[-1].admitted]
    assert order == ["a", "b", "c", "b", "c", "c"]
    h.assert_all_right()


def test_nobody_is_admitted_in_a_step_that_preempted():
    h = two_on_little_memory()
    step_until(h, lambda: "Preempted" in kinds(h, "b"))
    steps = len(h.plans)
    h = two_on_little_memory(max_num_seqs=3)
    for _ in range(steps - 1):
        h.step()
    h.accept("c", 1, 1)  # would fit in the blocks that b gives back
    plan = h.plan()
    assert kinds(h, "b")[-1] == "Preempted"
    assert h.free_blocks() > 0
    assert (plan.admitted, plan.slots.tolist()) == ((), [0])


def test_the_victim_of_a_step_has_no_row_in_it_and_its_slot_is_released():
    h = two_on_little_memory()
    step_until(h, lambda: "Preempted" in kinds(h, "b"))
    plan = h.plans[-1]
    assert plan.released.tolist() == [1]
    assert 1 not in plan.slots.tolist()


def test_what_a_victim_was_granted_in_the_same_step_is_given_to_others():
    # `worst` is planned first, then must go for the block that `best` needs; `long` gets its token.
    h = Harness(num_blocks=9, block_size=4, max_num_batched_tokens=6, max_num_seqs=3, policy="priority")
    h.accept("worst", 5, 8, priority=9)
    h.step()
    h.accept("best", 3, 8, priority=0)
    h.step()
    h.accept("long", 17, 2, priority=1)  # all five blocks that are left
    assert h.grants(h.plan()) == {"worst": 1, "best": 1, "long": 4}
    h.answer()
    assert h.grants(h.plan()) == {"best": 1, "long": 5}
    assert kinds(h, "worst") == ["Admitted", "Preempted"]
    h.answer()
    h.run()
    h.assert_all_right()
    h.assert_empty()


def test_a_request_that_is_alone_can_use_every_block():
    h = Harness(num_blocks=5, block_size=4)  # 16 tokens of KV, so 17 in all
    h.accept("a", 5, 12)
    h.run()
    h.assert_all_right()
    assert h.core.state(0.0).counters.preemptions == 0


def test_the_last_in_line_can_be_its_own_victim():
    h = Harness(num_blocks=5, block_size=2)
    h.accept("a", 3, 6)  # second block has room
    h.accept("b", 4, 4)  # needs a third block at once
    h.step()
    assert h.free_blocks() == 0
    plan = h.plan()
    assert plan.slots.tolist() == [0]
    assert kinds(h, "b") == ["Admitted", "Preempted"]
    h.run()
    h.assert_all_right()


def two_until_preempted_in_flight(depth: int = 2, **options: object) -> Harness:
    """Stops where b is preempted and a token of it is still to come."""
    h = Harness(num_blocks=7, block_size=4, depth=depth)
    h.accept("a", 7, 12)
    h.accept("b", 8, 12, **options)
    while "Preempted" not in kinds(h, "b"):
        if h.plan() is None:
            h.answer()
    assert h.core._lifecycle.requests["b"][0].draining > 0
    return h


def test_an_answer_in_flight_of_a_preempted_request_is_delivered_once():
    h = two_until_preempted_in_flight()
    got = len(h.seen["b", 0].tokens)
    request = h.core._lifecycle.requests["b"][0]
    in_flight = request.draining
    assert in_flight > 0
    while h.workers["w0"].inbox:
        h.answer()
    assert len(h.seen["b", 0].tokens) == got + in_flight
    assert request.draining == 0
    h.run()
    h.assert_all_right()


def test_it_is_not_resumed_before_its_answers_have_come():
    h = Harness(num_blocks=9, block_size=4, depth=3, max_in_flight=3)
    h.accept("a", 8, 20)
    h.accept("b", 8, 20)
    resumed_while_draining = False
    for _ in range(300):
        while h.plan() is not None:
            pass
        if not h.workers["w0"].inbox:
            break
        for name in "ab":
            candidates = h.core._lifecycle.requests.get(name)
            if candidates and candidates[0].worker is not None and candidates[0].draining:
                resumed_while_draining = True
        h.answer()
    assert not resumed_while_draining
    h.assert_all_right()
    assert h.core.state(0.0).counters.preemptions > 0


def test_a_preempted_request_can_end_by_an_answer_in_flight():
    h = two_until_preempted_in_flight()
    number = len(h.seen["b", 0].tokens) + 1  # of the token that is in flight
    tokens, _ = expected_outputs(h.specs["b"], 0)
    stop = tokens[number - 1]
    h = two_until_preempted_in_flight(stop_token_ids=frozenset([stop]), min_tokens=number)
    while h.workers["w0"].inbox:
        h.answer()
    end = h.seen["b", 0].finished
    assert (end.reason, end.usage.output_tokens) == (FinishReason.STOP, number)
    assert h.core.state(0.0).waiting_requests == 0
    h.run()
    h.assert_all_right()
    h.assert_empty()


def test_a_cancelled_preempted_request_leaves_the_queue():
    h = two_on_little_memory()
    step_until(h, lambda: "Preempted" in kinds(h, "b"))
    (event,) = h.cancel("b")
    assert event.reason is FinishReason.CANCELLED
    assert h.core.state(0.0).waiting_requests == 0
    h.run()
    h.assert_right("a")
    h.assert_empty()


@pytest.mark.parametrize(("max_preemptions", "times"), [(8, 3), (1, 1)])
def test_after_max_preemptions_another_is_chosen(max_preemptions, times):
    h = Harness(num_blocks=13, block_size=2, max_preemptions=max_preemptions)
    for name, prompt, max_tokens in (("a", 4, 20), ("b", 2, 20), ("c", 2, 4), ("last", 2, 20)):
        h.accept(name, prompt, max_tokens)
    h.run()
    h.assert_all_right()
    assert h.seen["last", 0].finished.usage.preemptions == times


def test_with_everyone_pinned_a_victim_is_still_found():
    h = Harness(num_blocks=10, block_size=2, max_preemptions=0)
    for name in "abc":
        h.accept(name, 4, 10)
    h.run()
    h.assert_all_right()
    h.assert_empty()


def test_a_resumed_request_hits_what_the_cache_still_has_of_it():
    h = two_on_little_memory()
    step_until(h, lambda: "Resumed" in kinds(h, "b"))
    resumed = next(e for e in h.seen["b", 0].events if type(e).__name__ == "Resumed")
    assert resumed.cached_tokens % 4 == 0
    assert resumed.cached_tokens == h.plans[-1].admitted[0].num_computed_tokens
    assert h.seen["b", 0].kinds.count("Preempted") == 1


def test_usage_tells_the_hit_of_the_first_admission_only():
    h = two_on_little_memory()
    h.run()
    assert h.seen["b", 0].finished.usage.cached_tokens == 0
    assert h.seen["b", 0].finished.usage.prompt_tokens == 8
