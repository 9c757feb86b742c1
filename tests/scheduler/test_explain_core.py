"""Why a request waits, in numbers, and what became of it."""

from __future__ import annotations

import pytest
from core_harness import Harness

from scheduler_service.core.explain import Blocker, BlockerKind, Explanation
from scheduler_service.core.history import History
from scheduler_service.core.request import Status


def only(harness: Harness, request_id: str) -> Explanation:
    (explanation,) = harness.core.explain(request_id, harness.now)
    return explanation


def blocker(harness: Harness, request_id: str) -> Blocker:
    (found,) = only(harness, request_id).blockers
    return found


def moments(explanation: Explanation) -> list[tuple[float, str, str, str]]:
    return [(each.at_s, each.what, each.worker_id, each.detail) for each in explanation.timeline]


def test_nothing_is_known_of_a_request_that_never_came():
    assert Harness().core.explain("r", 0.0) == []


def test_the_watermark_blocks_with_its_numbers():
    harness = Harness(num_blocks=11, watermark=0.2)  # 10 blocks of 4 tokens, 2 in reserve
    harness.accept("a", 24)
    harness.plan()
    harness.accept("b", 12)
    found = blocker(harness, "b")
    assert (found.kind, found.worker_id) == (BlockerKind.BLOCKS, "w0")
    assert (found.needed, found.reserve, found.available, found.limit) == (3, 2, 4, 10)
    assert found.text == "needs 3 blocks + 2 in reserve (watermark) > 4 free on w0"
    assert only(harness, "b").state.status is Status.WAITING
    harness.answer()
    harness.plan()
    assert harness.running() == ["a"]  # what was said is what happens


def test_a_full_worker_blocks_by_its_seats():
    harness = Harness(max_num_seqs=2)
    for name in "abc":
        harness.accept(name, 4)
    harness.plan()
    found = blocker(harness, "c")
    assert (found.kind, found.limit) == (BlockerKind.SLOTS, 2)
    assert found.text == "2 of at most 2 run on w0"


def test_a_long_prefill_blocks_by_the_token_budget():
    harness = Harness(max_num_batched_tokens=16, max_num_seqs=4)
    harness.accept("a", 40)
    harness.plan()
    harness.accept("b", 4)
    found = blocker(harness, "b")
    assert (found.kind, found.needed, found.limit) == (BlockerKind.BUDGET, 24, 16)


def test_a_prefix_that_is_being_computed_blocks_and_is_named():
    harness = Harness(max_num_batched_tokens=17, max_num_seqs=4)
    harness.accept("first", list(range(32)))
    harness.plan()
    harness.accept("second", [*range(24), 60, 61])
    found = blocker(harness, "second")
    assert (found.kind, found.other) == (BlockerKind.PREFIX_COMING, "first")
    assert harness.core._candidates("second")[0].awaits is None  # looking changed nothing


def test_a_candidate_waits_for_the_prompt_of_its_sibling():
    harness = Harness(max_num_batched_tokens=16, max_num_seqs=4)
    harness.accept("r", 40, n=2)
    harness.plan()
    parent, sibling = harness.core.explain("r", harness.now)
    assert (parent.state.status, parent.blockers, parent.position) == (Status.RUNNING, (), None)
    assert [each.kind for each in sibling.blockers] == [BlockerKind.SIBLING_PROMPT]
    assert (sibling.position, sibling.estimated_start_s) == (None, None)


def test_without_a_worker_there_is_the_count_of_those_that_drain():
    harness = Harness()
    harness.core.drain_worker("w0", harness.now)
    harness.accept("a", 4)
    found = blocker(harness, "a")
    assert (found.kind, found.worker_id) == (BlockerKind.NO_WORKER, "")
    assert found.text == "no worker of fake takes requests: 1 connected, all of them draining"
    harness.lose()
    assert blocker(harness, "a").text == "no worker of fake is connected"


def test_a_worker_that_could_never_hold_it_says_so():
    harness = Harness()
    harness.add_worker("small", num_blocks=4)
    harness.accept("a", 20, max_tokens=9)
    large, small = only(harness, "a").blockers
    assert (large.kind, large.worker_id) == (BlockerKind.NEXT_PLAN, "w0")
    assert (small.kind, small.needed, small.limit) == (BlockerKind.TOO_SMALL, 7, 3)


def test_tokens_that_are_still_to_come_block_a_preempted_one():
    harness = Harness(workers=2)
    harness.accept("a", 4)
    harness.plan("w0")
    harness.core.drain_worker("w0", harness.now)
    found = blocker(harness, "a")
    assert (found.kind, found.needed) == (BlockerKind.TOKENS_IN_FLIGHT, 1)


def test_a_better_worker_is_named():
    harness = Harness(workers=2)
    harness.accept("a", 32)
    harness.plan("w0")
    harness.answer("w0")
    prompt = harness.specs["a"].prompt_token_ids.tolist()
    harness.accept("b", [*prompt, 1, 2])
    kinds = {each.worker_id: each for each in only(harness, "b").blockers}
    assert kinds["w1"].kind is BlockerKind.BETTER_ELSEWHERE and kinds["w1"].other == "w0"
    assert kinds["w1"].needed > kinds["w1"].available
    assert kinds["w1"].text == "w1 leaves it to w0, where it costs 0 ms; here it would cost 1 ms"
    assert kinds["w0"].kind is BlockerKind.NEXT_PLAN


def test_the_forecast_blocks_with_the_peak_that_it_fears():
    harness = Harness(admission="predicted", num_blocks=21, block_size=4)
    harness.accept("a", 8, 40)
    harness.step()
    harness.accept("b", 8, 40)
    found = blocker(harness, "b")
    assert (found.kind, found.needed, found.limit) == (BlockerKind.FORECAST, 24, 20)
    assert found.text == "with it, those that run on w0 would come to hold 24 blocks of 20, by the forecast"


def test_one_that_fits_waits_for_those_ahead():
    harness = Harness(num_blocks=11, max_overtakes=0)
    harness.accept("a", 24)
    harness.plan()
    harness.accept("big", 20)
    harness.accept("little", 4)
    found, explanation = blocker(harness, "little"), only(harness, "little")
    assert (found.kind, found.needed, found.other) == (BlockerKind.QUEUE_ORDER, 1, "big")
    assert explanation.position == 2
    assert found.text.endswith("the first of them, big, was passed 0 times, so nobody may pass it")
    harness.plan()
    assert harness.running() == ["a"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_position_is_the_policys(policy):
    harness = Harness(workers=0, policy=policy)
    harness.add_worker()
    harness.core.drain_worker("w0", harness.now)
    for i in range(3):
        harness.accept(f"r{i}", 4, priority=-i)
    expected = [1, 2, 3] if policy == "fcfs" else [3, 2, 1]
    assert [only(harness, f"r{i}").position for i in range(3)] == expected


def test_the_start_is_estimated_by_the_rate_of_those_that_left():
    harness = Harness(max_num_seqs=1)
    for name in ("a", "b", "c"):
        harness.accept(name, 4, max_tokens=1)
    harness.plan()
    assert only(harness, "b").estimated_start_s is None
    harness.answer()
    # One left, which counts for a tenth of a request a second.
    assert only(harness, "b").estimated_start_s == 0.0
    harness.plan()
    assert only(harness, "c").estimated_start_s == pytest.approx(10.0)


def test_a_timeline_tells_of_a_move_to_another_worker():
    harness = Harness()
    harness.now = 5.0
    harness.accept("a", 8, max_tokens=3)
    harness.now = 6.0
    harness.step()
    harness.now = 7.0
    harness.lose()
    harness.now = 8.0
    harness.add_worker("w1")
    harness.step("w1")
    assert moments(only(harness, "a")) == [
        (0.0, "queued", "", ""),
        (1.0, "admitted", "w0", "0 cached tokens"),
        (1.0, "first_token", "", ""),
        (2.0, "preempted", "w0", "worker_lost"),
        (3.0, "resumed", "w1", "0 cached tokens"),
    ]
    harness.now = 9.0
    harness.step("w1")
    ended = only(harness, "a")
    assert (ended.state.status, ended.finish_reason) == (Status.FINISHED, "length")
    assert (ended.state.output_tokens, ended.state.preemptions, ended.state.blocks) == (3, 1, 0)
    assert moments(ended)[-1] == (4.0, "finished", "w1", "length")
    assert len(ended.timeline) == 6


def test_one_that_is_cancelled_while_it_waits_has_a_timeline_too():
    harness = Harness()
    harness.accept("a", 4)
    harness.now = 2.0
    harness.cancel("a")
    assert moments(only(harness, "a")) == [(0.0, "queued", "", ""), (2.0, "finished", "", "cancelled")]


def test_a_name_that_is_used_again_means_the_last_request():
    harness = Harness()
    harness.accept("a", 4, max_tokens=1, n=2)
    harness.run()
    assert [each.state.index for each in harness.core.explain("a", 0.0)] == [0, 1]
    harness.accept("a", 9)
    (live,) = harness.core.explain("a", 0.0)
    assert (live.state.prompt_tokens, live.finish_reason) == (9, "")


def test_a_candidate_that_ended_is_told_of_beside_its_live_siblings():
    harness = Harness()
    harness.accept("a", 4, n=2)
    harness.plan()
    harness.cancel("a", 1)
    first, second = harness.core.explain("a", 0.0)
    assert (first.finish_reason, second.finish_reason) == ("", "cancelled")


def test_only_the_last_ones_are_remembered():
    harness = Harness()
    harness.core._lifecycle.history = History(kept=2)
    for name in "abc":
        harness.accept(name, 4, max_tokens=1)
        harness.run()
    assert [len(harness.core.explain(name, 0.0)) for name in "abc"] == [0, 1, 1]
    assert harness.core._lifecycle.history._live == {}


def test_explaining_at_any_time_changes_no_plan():
    def run(ask: bool) -> list[tuple[list[int], list[int], list[int]]]:
        harness = Harness(workers=2, num_blocks=17, max_num_batched_tokens=24, watermark=0.1)
        for i in range(12):
            harness.accept(f"r{i}", [*range(4 * (i % 5)), *range(i, i + 6)], max_tokens=9, n=1 + i % 2)
        for _ in range(60):
            for worker_id in harness.workers:
                for i in range(12 if ask else 0):
                    harness.core.explain(f"r{i}", harness.now)
                harness.step(worker_id)
        harness.assert_all_right()
        return [(p.slots.tolist(), p.num_tokens.tolist(), p.block_ids.tolist()) for p in harness.plans]

    assert run(ask=True) == run(ask=False)


def test_chunks_and_the_steps_of_moments_are_told():
    harness = Harness(max_num_batched_tokens=8, max_num_seqs=4)
    harness.now = 1.0
    harness.accept("a", 20, max_tokens=3)
    harness.now = 2.0
    for _ in range(3):
        harness.step()
    told = only(harness, "a")
    assert told.chunks == ((1.0, 1, 8, 1.0), (1.0, 2, 8, 1.0), (1.0, 3, 4, 1.0))
    assert [(each.what, each.step) for each in told.timeline] == [
        ("queued", 0),
        ("admitted", 1),
        ("first_token", 3),
    ]
    harness.run()
    ended = only(harness, "a")
    assert ended.chunks == told.chunks
    assert (ended.timeline[-1].what, ended.timeline[-1].step) == ("finished", 5)


def test_a_chunk_ends_with_the_result_of_its_step():
    harness = Harness(max_num_batched_tokens=8, max_num_seqs=4, depth=2, enable_prefix_caching=False)
    harness.now = 1.0
    harness.accept("a", 12, max_tokens=9)
    for at, call in ((2.0, "plan"), (3.0, "plan"), (4.0, "answer"), (6.0, "answer")):
        harness.now = at
        getattr(harness, call)()
    assert only(harness, "a").chunks == ((1.0, 1, 8, 3.0), (2.0, 2, 4, 5.0))
    harness.plan()
    harness.lose()
    harness.add_worker("w1")
    harness.now = 7.0
    harness.plan("w1")
    harness.lose("w1")
    harness.add_worker("w1")
    harness.now = 8.0
    harness.plan("w1")
    harness.now = 9.0
    harness.answer("w1")
    harness.now = 20.0
    harness.run()
    # The one in the middle was lost with its worker.
    assert [(chunk.at_s, chunk.ended_s) for chunk in only(harness, "a").chunks[2:]] == [
        (6.0, None),
        (7.0, 8.0),
        (20.0 - 1.0, 19.0),
    ]


def test_tokens_that_are_computed_again_are_chunks_too():
    harness = Harness(enable_prefix_caching=False)
    harness.accept("a", 8, max_tokens=3)
    harness.step()
    harness.lose()
    harness.add_worker("w1")
    harness.run()
    assert [chunk.tokens for chunk in only(harness, "a").chunks] == [8, 9]


def test_chunks_beyond_the_most_count_for_the_last(monkeypatch):
    monkeypatch.setattr("scheduler_service.core.history.MOST_CHUNKS", 2)
    harness = Harness(max_num_batched_tokens=8, max_num_seqs=4)
    harness.accept("a", 30, max_tokens=1)
    harness.run()
    assert [(chunk.step, chunk.tokens) for chunk in only(harness, "a").chunks] == [(1, 8), (4, 22)]


def test_first_tokens_are_told_once():
    harness = Harness()
    harness.accept("a", 4, max_tokens=2, n=2)
    harness.now = 3.0
    harness.run()
    assert harness.core.take_first_tokens() == [3.0, 3.0]
    assert harness.core.take_first_tokens() == []
