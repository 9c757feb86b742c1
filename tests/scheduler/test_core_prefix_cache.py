"""Shared prefixes: what hits, what is registered when, and who waits for a prefix that is being computed."""

from __future__ import annotations

from core_harness import MODEL, Harness

STEM = [*range(10, 26)]  # four blocks of four


def cached(h: Harness, plan) -> dict[str, int]:
    return {a.request_id: a.num_computed_tokens for a in plan.admitted}


def counters(h: Harness):
    return h.core.state(h.now).counters


def test_the_full_blocks_of_an_equal_prefix_are_not_computed_again():
    h = Harness()
    h.accept("a", [*STEM, 1, 2], 1)
    h.run()
    h.accept("b", [*STEM, 3, 4, 5], 1)
    plan = h.plan()
    assert cached(h, plan) == {"b": 16}
    assert plan.num_tokens.tolist() == [3]
    h.run()
    h.assert_all_right()
    assert h.seen["b", 0].finished.usage.cached_tokens == 16


def test_a_full_hit_computes_the_last_block_again():
    h = Harness()
    h.accept("a", STEM, 1)
    h.run()
    h.accept("b", STEM, 1)
    plan = h.plan()
    assert cached(h, plan) == {"b": 12}
    assert plan.num_tokens.tolist() == [4]
    h.run()
    h.assert_all_right()


def test_a_prompt_that_is_one_token_longer_than_the_prefix_hits_all_of_it():
    h = Harness()
    h.accept("a", STEM, 1)
    h.run()
    h.accept("b", [*STEM, 9], 1)
    assert cached(h, h.plan()) == {"b": 16}


def test_a_prefix_that_differs_in_its_first_token_does_not_hit():
    h = Harness()
    h.accept("a", STEM, 1)
    h.run()
    h.accept("b", [9, *STEM[1:], 3], 1)
    assert cached(h, h.plan()) == {"b": 0}


def test_a_partial_block_does_not_hit():
    h = Harness()
    h.accept("a", STEM[:7], 1)
    h.run()
    h.accept("b", STEM[:7], 1)
    assert cached(h, h.plan()) == {"b": 4}


def test_salts_and_adapters_separate_prefixes():
    h = Harness()
    h.accept("a", [*STEM, 1], 1)
    h.run()
    h.accept("salted", [*STEM, 1], 1, cache_salt="x")
    h.accept("adapted", [*STEM, 1], 1, adapter="x")
    h.accept("equal", [*STEM, 1], 1)
    assert cached(h, h.plan()) == {"salted": 0, "adapted": 0, "equal": 16}


def test_caching_can_be_off():
    h = Harness(enable_prefix_caching=False)
    for name in "ab":
        h.accept(name, STEM, 1)
        h.run()
    h.assert_all_right()
    assert (counters(h).prefix_queried_tokens, counters(h).prefix_hit_tokens) == (0, 0)
    assert h.core.state(0.0).workers[0].blocks_cached == 0


def test_two_requests_of_one_step_share_what_the_first_computes():
    h = Harness()
    h.accept("a", [*STEM, 1, 2], 1)
    h.accept("b", [*STEM, 3], 1)
    plan = h.plan()
    assert cached(h, plan) == {"a": 0, "b": 16}
    assert plan.admitted[1].block_ids.tolist()[:4] == plan.admitted[0].block_ids.tolist()[:4]
    h.run()
    h.assert_all_right()


def test_the_second_turn_of_a_chat_hits_prompt_and_answer_of_the_first():
    h = Harness()
    h.accept("a", STEM, 9)
    h.run()
    answer = h.seen["a", 0].tokens
    h.accept("b", [*STEM, *answer, 5, 6], 1)
    # 24 tokens of the first turn have KV: the answer's last token was never computed.
    assert cached(h, h.plan()) == {"b": 24}
    h.run()
    h.assert_all_right()


def test_tokens_that_are_still_in_flight_are_never_registered():
    h = Harness(depth=3)
    h.accept("a", [1, 2, 3], 9)
    for _ in range(3):
        h.plan()
    worker = h.core._workers["w0"]
    assert int(worker.computed[0]) == 5
    h.cancel("a")
    assert worker.pool._block_of == {}  # the second token of the block is not known


def test_output_that_was_in_flight_at_the_end_is_cached_as_far_as_it_was_known():
    h = Harness(depth=2)
    h.accept("a", [1, 2, 3], 30)
    h.plan()
    h.plan()
    h.answer()  # the fourth token is known, and its KV planned
    h.cancel("a")
    assert len(h.core._workers["w0"].pool._block_of) == 1
    h.answer()
    h.accept("b", [1, 2, 3, h.seen["a", 0].tokens[0], 7], 1)
    assert cached(h, h.plan()) == {"b": 4}
    h.answer()
    h.assert_right("b")


def test_a_long_decode_registers_its_blocks_while_it_runs():
    h = Harness(block_size=1, num_blocks=400)
    h.accept("a", [1], 200)
    for _ in range(100):
        h.step()
    registered = len(h.core._workers["w0"].pool._block_of)
    assert 100 - 16 <= registered <= 100


def test_hits_that_are_needed_survive_the_allocation_of_the_same_request():
    h = Harness(num_blocks=7)  # 6 usable
    h.accept("a", STEM, 1)
    h.run()
    h.accept("b", [*STEM, *range(40, 48)], 1)  # 4 hits in the free list and 2 fresh: all there is
    plan = h.plan()
    assert cached(h, plan) == {"b": 16}
    assert sorted(plan.admitted[0].block_ids.tolist()) == [1, 2, 3, 4, 5, 6]
    h.run()
    h.assert_all_right()


def test_the_longest_unused_prefix_is_evicted_first_and_from_its_tail():
    h = Harness(num_blocks=9)  # 8 usable
    h.accept("old", STEM, 1)
    h.run()
    h.accept("new", [*range(40, 52), 1], 1)
    h.run()  # 4 + 3 cached, 1 free
    h.accept("big", [*range(50, 62)], 1)  # takes the free one and two of the oldest
    h.run()
    h.accept("x", [*STEM, 1], 1)
    assert cached(h, h.plan()) == {"x": 8}
    h.run()
    h.accept("y", [*range(40, 52), 1], 1)
    h.run()
    h.assert_all_right()


def test_reset_forgets_what_nobody_holds():
    h = Harness()
    h.accept("a", [*STEM, 1], 1)
    h.run()
    assert h.core.reset_prefix_cache() == 4
    h.accept("b", [*STEM, 1], 1)
    assert cached(h, h.plan()) == {"b": 0}


def test_reset_leaves_running_requests_their_blocks():
    h = Harness(depth=2)
    h.accept("a", [*STEM, 1], 9)
    h.plan()
    assert h.core.reset_prefix_cache() == 0
    h.run()
    h.assert_all_right()


def test_statistics_count_a_candidate_once_when_it_is_admitted():
    h = Harness(num_blocks=9, overtaking_window=0)
    h.accept("a", [*STEM, 1], 9)
    h.step()
    h.accept("b", [*range(40, 60)], 1)  # has to wait
    for _ in range(3):
        h.step()
    assert (counters(h).prefix_queried_tokens, counters(h).prefix_hit_tokens) == (17, 0)
    h.run()
    assert counters(h).prefix_queried_tokens == 17 + 20


def test_a_preemption_queries_again():
    h = Harness()
    h.accept("a", [*STEM, 1], 4)
    h.step()
    h.lose()
    h.add_worker()
    h.run()
    h.assert_all_right()
    assert counters(h).prefix_queried_tokens == 17 + 18


def chunked(**options: object) -> Harness:
    """A prefill gets 16 tokens a step while others run or wait; the budget would allow many more."""
    return Harness(max_num_batched_tokens=400, long_prefill_token_threshold=16, **options)


LONG_STEM = [*range(10, 50)]  # ten blocks


def test_a_request_waits_for_a_prefix_that_another_is_computing():
    h = chunked()
    h.accept("a", [*LONG_STEM, 1], 2)
    h.accept("b", [*LONG_STEM, 2], 2)
    assert cached(h, h.step()) == {"a": 0}
    plan = h.step()
    assert cached(h, plan) == {} and plan.num_tokens.tolist() == [16]
    assert cached(h, h.step()) == {"b": 40}
    h.run()
    h.assert_all_right()
    assert counters(h).prefill_tokens == 41 + 1


def test_it_waits_for_no_more_than_it_shares():
    h = chunked()
    h.accept("a", [*LONG_STEM, 1], 2)
    h.accept("b", [*LONG_STEM[:20], 2, 3, 4, 5], 2)
    assert cached(h, h.step()) == {"a": 0}
    assert cached(h, h.step()) == {"b": 20}  # a has planned 32 tokens by now


def test_who_waits_for_a_prefix_does_not_hold_up_others():
    h = chunked()
    h.accept("a", [*LONG_STEM, 1], 2)
    h.accept("b", [*LONG_STEM, 2], 2)
    h.accept("c", [5, 6, 7], 2)
    h.step()
    assert h.running() == ["a", "c"]
    h.run()
    h.assert_all_right()


def test_any_number_of_requests_can_wait_for_one_prefix():
    h = chunked(num_blocks=400, num_slots=128, max_num_seqs=128)
    h.accept("a", [*LONG_STEM, 1], 2)
    for i in range(60):
        h.accept(f"b{i}", [*LONG_STEM, 2, i], 2)
    h.accept("c", [5, 6, 7], 2)
    h.step()
    assert h.running() == ["a", "c"]
    h.run()
    h.assert_all_right()


def test_a_promise_ends_with_its_prefill():
    h = chunked()
    h.accept("a", [*LONG_STEM, 1], 2)
    h.accept("b", [*LONG_STEM, 2], 2)
    h.step()
    assert len(h.core._workers["w0"].promises) == 6
    h.cancel("a")
    assert h.core._workers["w0"].promises == {}
    assert cached(h, h.plan()) == {"b": 16}
    h.run()
    h.assert_right("b")


def test_twenty_requests_with_one_prefix_compute_it_once():
    h = chunked(num_blocks=200, num_slots=32, max_num_seqs=32)
    for i in range(20):
        h.accept(f"r{i}", [*LONG_STEM, i], 2)
    h.run()
    h.assert_all_right()
    assert counters(h).prefill_tokens == 40 + 20
    assert counters(h).prefix_hit_tokens == 19 * 40


def test_two_workers_may_compute_one_prefix_each():
    h = chunked(workers=2)
    h.accept("a", [*LONG_STEM, 1], 2)
    h.accept("b", [*LONG_STEM, 2], 2)
    h.step("w0")
    assert cached(h, h.step("w1")) == {"b": 0}
    h.run()
    h.assert_all_right()


def test_a_failed_candidate_leaves_nothing_in_the_cache():
    h = Harness()
    h.accept("a", [*STEM, 1], 4)
    h.workers["w0"].fail.add(("a", 0))
    h.step()
    assert h.seen["a", 0].finished.reason.value == "error"
    h.accept("b", [*STEM, 1], 1)
    assert cached(h, h.plan()) == {"b": 0}


def test_one_that_was_preempted_before_it_failed_leaves_nothing_either():
    """Its row comes back when its blocks are free already, and somebody else's name for the first is gone."""
    h = Harness(workers=2)
    h.accept("a", [*STEM, 1], 4)
    assert h.plan() is not None
    h.note(h.core.drain_worker("w0", h.now))
    h.workers["w0"].fail.add(("a", 0))
    pool = h.core._workers["w0"].pool
    assert pool.num_free_hashed == len(STEM) // 4
    h.answer("w0")
    assert h.seen["a", 0].finished.reason.value == "error"
    assert pool.num_free_hashed == 0
    h.assert_empty()


def test_workers_with_other_block_sizes_hash_for_themselves():
    h = Harness(workers=0)
    h.add_worker("w4", block_size=4)
    h.accept("a", [*STEM, 1, 2, 3], 9)
    h.step("w4")
    h.lose("w4")
    h.add_worker("w2", block_size=2)
    h.run()
    h.accept("b", [*STEM, 1, 2, 9], 1)
    assert cached(h, h.plan("w2")) == {"b": 18}
    h.run()
    h.assert_all_right()
    assert h.specs["a"].model == MODEL
