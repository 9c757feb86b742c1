"""When a candidate ends: end of text, stop ids, length, stop strings; in this order, from min_tokens on."""

from __future__ import annotations

import numpy as np
import pytest
from core_harness import EOS, Harness

from scheduler_service.core.events import FinishReason, TokenBatch
from scheduler_service.core.step import StepResult, TokenLogprobs


def say(h: Harness, *token_ids: int, **columns: object):
    """Answers the oldest plan with these tokens, whatever the fake model would say."""
    plan = h.workers["w0"].inbox.popleft()
    slots = np.array(list(plan.slots.tolist()), np.int32)
    result = StepResult(plan.seq, slots, np.array(token_ids, np.int32), **columns)
    return h.note(h.core.apply("w0", result, h.now))


def outputs(h: Harness, *token_ids: int, **options: object):
    """A candidate that is told these tokens one by one; its Finished, if it came."""
    options.setdefault("max_tokens", 9)
    h.accept("a", 3, **options)
    for token_id in token_ids:
        if h.plan() is None:
            break
        say(h, token_id)
    return h.seen["a", 0].finished


def test_end_of_text_ends_with_its_id_and_counts_as_output():
    h = Harness()
    end = outputs(h, 5, EOS, eos_token_ids=frozenset([EOS]))
    assert (end.reason, end.stop_token_id, end.usage.output_tokens) == (FinishReason.STOP, EOS, 2)
    assert h.seen["a", 0].tokens == [5, EOS]


def test_stop_ids_end_too():
    end = outputs(Harness(), 5, 6, stop_token_ids=frozenset([6, 7]))
    assert (end.reason, end.stop_token_id) == (FinishReason.STOP, 6)


def test_an_id_that_is_not_named_does_not_end():
    assert outputs(Harness(), 5, EOS, 6) is None


@pytest.mark.parametrize("extra", [0, 4, 60])
def test_any_number_of_stop_ids_works(extra):
    stops = frozenset([9, *range(64 - extra, 64)]) - {5}
    end = outputs(Harness(), 5, 9, stop_token_ids=stops)
    assert (end.reason, end.stop_token_id) == (FinishReason.STOP, 9)


def test_length_ends_after_max_tokens():
    end = outputs(Harness(), 5, 6, 7, max_tokens=3)
    assert (end.reason, end.stop_token_id, end.usage.output_tokens) == (FinishReason.LENGTH, None, 3)


def test_a_stop_on_the_last_allowed_token_is_a_stop():
    end = outputs(Harness(), 5, EOS, max_tokens=2, eos_token_ids=frozenset([EOS]))
    assert end.reason is FinishReason.STOP


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_below_min_tokens_no_id_ends(min_tokens, expected):
    ids = frozenset([EOS])
    end = outputs(Harness(), EOS, EOS, EOS, EOS, min_tokens=min_tokens, eos_token_ids=ids)
    assert (end.reason, end.usage.output_tokens) == (FinishReason.STOP, expected)


def test_min_tokens_holds_for_stop_ids_as_well():
    end = outputs(Harness(), 6, 6, 6, min_tokens=2, stop_token_ids=frozenset([6]))
    assert end.usage.output_tokens == 2


def test_length_ends_below_min_tokens():
    end = outputs(Harness(), EOS, EOS, max_tokens=2, min_tokens=2, eos_token_ids=frozenset([EOS]))
    assert end.usage.output_tokens == 2


def test_one_ends_and_the_others_go_on():
    h = Harness()
    for name in "abc":
        h.accept(name, 3, 9, eos_token_ids=frozenset([EOS]))
    h.plan()
    say(h, 5, EOS, 6)
    assert h.running() == ["a", "c"]
    plan = h.plan()
    assert (plan.released.tolist(), plan.slots.tolist()) == ([1], [0, 2])


def test_the_token_comes_before_the_end_in_one_list():
    h = Harness()
    h.accept("a", 3, 1)
    h.plan()
    batch, end = say(h, 5)
    assert isinstance(batch, TokenBatch)
    assert [c.request_id for c in batch.candidates] == ["a"] and list(batch.token_ids) == [5]
    assert end.request_id == "a"


def test_a_stop_string_ends_with_the_tokens_that_were_shown():
    h = Harness()
    h.accept("a", 3, 9)
    for token in (5, 6, 7):
        h.plan()
        say(h, token)
    (end,) = h.core.stop("a", 0, 2, 0.0)
    assert (end.reason, end.stop_token_id, end.usage.output_tokens) == (FinishReason.STOP, None, 2)
    h.assert_empty()


def test_a_stop_string_found_while_a_step_is_in_flight_drops_its_token():
    h = Harness(depth=2)
    h.accept("a", 3, 9)
    h.plan()
    h.plan()
    say(h, 5)
    h.note(h.core.stop("a", 0, 1, 0.0))
    assert say(h, 6) == []
    assert h.seen["a", 0].tokens == [5]
    h.assert_empty()


def test_a_stop_that_comes_after_the_end_changes_nothing():
    h = Harness()
    h.accept("a", 3, 1)
    h.run()
    assert h.core.stop("a", 0, 1, 0.0) == []
    assert h.core.stop("nobody", 0, 1, 0.0) == []


def test_a_stop_past_the_tokens_given_is_refused():
    h = Harness()
    h.accept("a", 3, 9)
    with pytest.raises(ValueError, match="num_tokens is 1; the candidate has 0"):
        h.core.stop("a", 0, 1, 0.0)
    h.core.check()


def test_rows_that_are_not_finite_end_their_candidate_only():
    h = Harness()
    for name in "abc":
        h.accept(name, 3, 2)
    h.plan()
    say(h, 5, 0, 6, failed_rows=frozenset([1]))
    end = h.seen["b", 0].finished
    assert (end.reason, end.usage.output_tokens) == (FinishReason.ERROR, 0)
    assert "not finite" in end.detail
    assert (h.seen["a", 0].tokens, h.seen["b", 0].tokens, h.seen["c", 0].tokens) == ([5], [], [6])
    h.plan()
    say(h, 5, 6)
    h.assert_empty()
    assert h.core.state(0.0).counters.requests_failed == 1


def test_logprobs_keep_to_their_candidates():
    h = Harness()
    for name in "ab":
        h.accept(name, 3, 9)
    h.plan()
    (batch,) = say(h, 5, 6, logprobs={1: TokenLogprobs(-0.5, ((6, -0.5),))})
    assert batch.logprobs == {1: TokenLogprobs(-0.5, ((6, -0.5),))}


def test_logprobs_move_with_their_candidates_when_rows_are_dropped():
    h = Harness(depth=2)
    for name in "abc":
        h.accept(name, 3, 9)
    h.plan()
    h.cancel("a")
    logprobs = {i: TokenLogprobs(-float(i)) for i in range(3)}
    (batch,) = say(h, 5, 6, 7, logprobs=logprobs)
    assert [c.request_id for c in batch.candidates] == ["b", "c"]
    assert batch.logprobs == {0: TokenLogprobs(-1.0), 1: TokenLogprobs(-2.0)}


def test_the_sink_comes_back_with_every_event():
    h = Harness()
    sink = object()
    h.accept("a", 3, 1, sink=sink)
    plan = h.core.plan("w0", 0.0)
    (admitted,) = h.core.drain_events()
    h.workers["w0"].inbox.append(plan)
    batch, end = h.core.apply("w0", h.workers["w0"].execute(), 0.0)
    assert admitted.sink is sink and batch.candidates[0].sink is sink and end.sink is sink
