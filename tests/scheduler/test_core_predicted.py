"""admission = predicted: who is let in can finish, so that nobody is preempted."""

from __future__ import annotations

from core_harness import EOS, MACHINE, Harness
from hypothesis import given
from hypothesis import strategies as st


def predicted(**options: object) -> Harness:
    return Harness(**{"admission": "predicted", "num_blocks": 13, "block_size": 4, **options})


def admitted(plan) -> list[str]:
    return [a.request_id for a in plan.admitted]


def preemptions(h: Harness) -> int:
    return h.core.state(h.now).counters.preemptions


def test_two_that_cannot_both_finish_run_one_after_the_other():
    """Each needs 8 of 12 blocks in the end."""
    h = predicted()
    h.accept("a", 8, 24)
    h.accept("b", 8, 24)
    assert admitted(h.plan()) == ["a"]
    h.answer()
    h.run()
    h.assert_all_right()
    assert preemptions(h) == 0


def test_the_watermark_alone_lets_both_in_and_preempts():
    h = predicted(admission="watermark")
    h.accept("a", 8, 24)
    h.accept("b", 8, 24)
    assert admitted(h.plan()) == ["a", "b"]
    h.answer()
    h.run()
    h.assert_all_right()
    assert preemptions(h) > 0


def test_one_that_ends_soon_makes_room_for_the_growth_of_another():
    """12 blocks: the short one holds 3 at most and is gone before the long one needs them."""
    h = predicted()
    h.accept("long", 8, 36)
    h.accept("short", 8, 4)
    assert admitted(h.plan()) == ["long", "short"]
    h.answer()
    h.run()
    h.assert_all_right()
    assert preemptions(h) == 0


def test_a_request_that_is_alone_is_always_let_in():
    h = predicted()
    h.accept("a", 8, 41)
    assert admitted(h.plan()) == ["a"]


def test_short_outputs_in_the_past_let_more_in():
    h = predicted(enable_prefix_caching=False)
    stops = frozenset(range(64))
    for i in range(20):
        h.accept(f"past{i}", 4, 24, eos_token_ids=stops, tenant="brief")
        h.run()
    h.accept("a", 8, 24, tenant="brief")
    h.accept("b", 8, 24, tenant="brief")
    assert admitted(h.plan()) == ["a", "b"]


def test_the_past_of_another_tenant_says_nothing():
    h = predicted(enable_prefix_caching=False)
    for i in range(20):
        h.accept(f"past{i}", 4, 24, eos_token_ids=frozenset(range(64)), tenant="brief")
        h.run()
    h.accept("a", 8, 24, tenant="wordy")
    h.accept("b", 8, 24, tenant="wordy")
    assert admitted(h.plan()) == ["a"]


def test_one_that_outgrows_its_forecast_counts_with_its_longest_length():
    h = predicted(enable_prefix_caching=False)
    for i in range(20):
        h.accept(f"past{i}", 4, 24, eos_token_ids=frozenset(range(64)), tenant="brief")
        h.run()
    h.accept("long_after_all", 8, 36, tenant="brief")
    for _ in range(3):
        h.step()
    h.accept("b", 8, 24, tenant="wordy")
    assert admitted(h.plan()) == []


def test_a_shared_prefix_counts_once():
    """8 blocks of prefix and 2 of their own each: 12 blocks are enough for two, not for two times 10."""
    h = predicted()
    prefix = [7] * 32
    h.accept("a", [*prefix, 1], 4)
    h.step()
    h.accept("b", [*prefix, 2], 4)
    assert admitted(h.plan()) == ["b"]
    h.answer()
    h.run()
    h.assert_all_right()


@MACHINE
@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=25),
    max_tokens=st.integers(1, 16),
    ends=st.booleans(),
)
def test_nobody_is_preempted_where_no_output_is_longer_than_expected(prompts, max_tokens, ends):
    """All of one length; or each tenant new, so that max_tokens is what is expected."""
    h = predicted(enable_prefix_caching=False, check=False)
    for i, prompt in enumerate(prompts):
        eos = frozenset({EOS, 2, 3}) if ends else frozenset()
        h.accept(f"r{i}", prompt, max_tokens, tenant=f"t{i}" if ends else "t", eos_token_ids=eos)
        if i % 3 == 0:
            h.step()
    h.run()
    h.assert_all_right()
    assert preemptions(h) == 0
