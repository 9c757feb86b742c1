"""Whether a victim's KV is kept or computed again, and what is told of that."""

from __future__ import annotations

import re

import pytest
from core_harness import Harness
from swap_harness import events, step_until, swapped, two_on_little_memory, until_preempted

from scheduler_service.core.errors import ConfigError
from scheduler_service.core.events import Preempted, Resumed
from scheduler_service.core.step_time import row_size


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


@pytest.mark.parametrize(("most", "times"), [(8, 3), (1, 1)])
def test_a_request_is_preempted_a_bounded_number_of_times(most, times):
    h = Harness(num_blocks=13, block_size=2, max_preemptions=most, num_host_blocks=30, preemption_mode="swap")
    for name, prompt, max_tokens in (("a", 4, 20), ("b", 2, 20), ("c", 2, 4), ("last", 2, 20)):
        h.accept(name, prompt, max_tokens)
    h.run()
    h.assert_all_right()
    assert h.seen["last", 0].finished.usage.preemptions == times


def test_an_unknown_mode_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"preemption_mode.*'copy'.*auto, recompute, swap"):
        Harness(preemption_mode="copy")


@pytest.mark.parametrize(("option", "value"), [("num_host_blocks", -1), ("block_copy_ms", float("nan"))])
def test_a_worker_spec_that_makes_no_sense_is_refused(option, value):
    with pytest.raises(ConfigError, match=option):
        Harness(**{option: value})
