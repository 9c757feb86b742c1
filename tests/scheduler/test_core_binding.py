"""Which worker takes a candidate: the one where it costs the fewest milliseconds."""

from __future__ import annotations

import pytest
from core_harness import Harness

from scheduler_service.core.binding import Binding
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import ConfigError
from scheduler_service.core.step_time import StepCost

PRICES = StepCost(base_ms=10.0, token_ms=0.5, context_ms=0.01, pair_ms=0.0)
STEM = [*range(10, 50)]  # 10 blocks of 4


def harness(workers: int = 2, **options: object) -> Harness:
    """Workers whose prices are known."""
    h = Harness(workers=workers, num_blocks=2000, **options)
    for worker in h.core._workers.values():
        worker.step_time.cost = PRICES
    return h


def cost_ms(h: Harness, worker_id: str, request, num_computed: int = 0, num_left: int = 0) -> float:
    binding = Binding("cost", h.core._lifecycle.estimates)
    return binding.cost_ms(h.core._workers[worker_id], request, num_computed, num_left, h.now)


def takers(h: Harness, order: list[str]) -> dict[str, list[str]]:
    """Who takes what where workers are asked in this order until none gives a plan."""
    taken: dict[str, list[str]] = {worker_id: [] for worker_id in order}
    asked = order
    while asked:
        plans = {worker_id: h.plan(worker_id) for worker_id in asked}
        for worker_id, plan in plans.items():
            taken[worker_id] += [] if plan is None else [each.request_id for each in plan.admitted]
        asked = [worker_id for worker_id, plan in plans.items() if plan is not None]
    return taken


def test_on_an_idle_worker_a_candidate_costs_its_own_prompt():
    h = harness()
    request = h.accept("a", 100, 20)
    assert cost_ms(h, "w0", request) == pytest.approx(0.5 * 100 + 0.01 * 100)
    assert cost_ms(h, "w0", request, num_computed=80) == pytest.approx(0.5 * 20 + 0.01 * 100)


def test_those_that_run_there_are_delayed_by_its_prompt_and_delay_its_output():
    h = harness(1)
    h.accept("x", 30, 50)
    h.accept("y", 50, 50)
    h.step("w0")
    h.step("w0")
    request = h.accept("a", 100, 20)
    own = 0.5 * 100 + 0.01 * 100
    others = 2 * 0.5 + 0.01 * (31 + 51)
    assert cost_ms(h, "w0", request) == pytest.approx(own + 2 * own + 20 * others)


def test_outputs_are_taken_to_be_as_long_as_the_tenants_were():
    h = harness(1)
    h.accept("past", 4, 10)
    h.run()
    h.accept("x", 30, 500)
    h.step("w0")
    request = h.accept("a", 1, 400)
    others = 0.5 + 0.01 * 30
    assert cost_ms(h, "w0", request) == pytest.approx(2 * 0.51 + 10 * others)
    stranger = h.accept("b", 1, 400, tenant="new")
    assert cost_ms(h, "w0", stranger) == pytest.approx(2 * 0.51 + 128 * others)


def test_steps_in_flight_are_waited_for_as_far_as_they_are_not_over():
    h = harness(depth=2)
    h.accept("x", 100, 50)
    h.plan("w0")  # 10 + 0.5 * 100 + 0.01 * 100 = 61 ms
    h.plan("w0")  # 10 + 0.5 + 0.01 * 101 = 11.51 ms
    request = h.accept("a", 1, 1)
    idle = 2 * 0.51 + 1 * (0.5 + 1.01)  # of x, which decodes
    assert cost_ms(h, "w0", request) == pytest.approx(61 + 11.51 + idle)
    h.now += 0.05
    assert cost_ms(h, "w0", request) == pytest.approx(11 + 11.51 + idle)
    h.answer("w0")
    assert cost_ms(h, "w0", request) == pytest.approx(11.51 + idle)


def test_a_step_that_is_overdue_is_expected_to_take_as_long_again():
    h = harness(depth=2)
    h.accept("x", 100, 50)
    h.plan("w0")
    request = h.accept("a", 1, 1)
    h.now += 0.061
    at_its_time = cost_ms(h, "w0", request)
    h.now += 1.0
    assert cost_ms(h, "w0", request) == pytest.approx(at_its_time + 1000)


def test_prompts_that_are_being_computed_are_ahead():
    h = harness(max_num_batched_tokens=100)
    h.accept("x", 400, 1)
    h.plan("w0")
    h.answer("w0")
    request = h.accept("a", 1, 1)
    own, others = 0.51, 0.5 + 0.01 * 100
    assert cost_ms(h, "w0", request) == pytest.approx(0.5 * 300 + 2 * own + others)


def test_candidates_that_are_left_to_a_worker_count_as_running_there():
    h = harness()
    request = h.accept("a", 100, 20)
    own, others = 51.0, 3 * 0.5
    assert cost_ms(h, "w0", request, num_left=3) == pytest.approx(4 * own + 3 * own + 20 * others)


def test_a_long_prefix_draws_a_candidate_to_a_worker_that_runs_others():
    h = harness()
    h.accept("x", [*STEM, 1], 30)
    h.step("w0")
    h.accept("a", [*STEM, 2], 10)  # w0: 0.9 twice, and 10 * 0.9; w1: 20.9
    assert takers(h, ["w1", "w0"]) == {"w1": [], "w0": ["a"]}


def test_a_short_prefix_does_not():
    h = harness()
    h.accept("x", [*STEM[:8], 1], 200)
    h.step("w0")
    h.accept("a", [*STEM[:8], 2], 100)  # w0: 0.6 twice, and 100 * 0.6; w1: 4.6
    assert takers(h, ["w0", "w1"]) == {"w0": [], "w1": ["a"]}


def test_the_longer_the_output_the_more_the_company_counts():
    for max_tokens, taker in ((10, "w0"), (100, "w1")):
        h = harness()
        h.accept("x", [*STEM, 1], 200)
        h.step("w0")
        h.accept("a", [*STEM, 2], max_tokens)
        assert [name for name, taken in takers(h, ["w0", "w1"]).items() if taken] == [taker]


def test_the_faster_worker_takes_more():
    h = harness()
    h.core._workers["w1"].step_time.cost = StepCost(20.0, 1.5, 0.03, 0.0)
    for i in range(8):
        h.accept(f"r{i}", 40, 40)
    taken = takers(h, ["w1", "w0"])
    assert (len(taken["w0"]), len(taken["w1"])) == (5, 3)


def test_a_worker_that_hangs_draws_nobody_however_long_a_prefix_it_has():
    h = harness(depth=2)
    h.accept("x", [*STEM, 1], 30)
    h.plan("w0")
    h.answer("w0")
    h.plan("w0")
    h.accept("early", [*STEM, 2], 1)
    assert h.plan("w1") is None  # w0 will soon be done
    h.now += 5.0
    assert [each.request_id for each in h.plan("w1").admitted] == ["early"]


def test_a_worker_without_a_seat_is_no_better():
    h = harness(max_num_seqs=1)
    h.accept("x", [*STEM, 1], 30)
    h.step("w0")
    h.accept("a", [*STEM, 2], 1)
    assert takers(h, ["w1"]) == {"w1": ["a"]}


def test_a_difference_within_the_margin_moves_nobody():
    h = harness()
    h.core._workers["w1"].step_time.cost = StepCost(10.0, 0.48, 0.01, 0.0)
    h.accept("a", 100, 1)
    assert takers(h, ["w0"]) == {"w0": ["a"]}  # 51 ms, and 49 on the other
    h.core._workers["w1"].step_time.cost = StepCost(10.0, 0.4, 0.01, 0.0)
    h.accept("b", 100, 1)
    assert h.plan("w0") is None


@pytest.mark.parametrize("order", [["w0", "w1", "w2"], ["w2", "w1", "w0"]])
def test_somebody_always_takes_it(order):
    h = harness(3)
    for i in range(9):
        h.accept(f"r{i}", [*STEM[: 4 * (i % 4)], 3, i], 20)
    taken = takers(h, order)
    assert sorted(name for names in taken.values() for name in names) == [f"r{i}" for i in range(9)]
    h.run()
    h.assert_all_right()


def test_the_rules_to_compare_with():
    h = harness(binding="load")
    h.accept("x", [*STEM, 1], 30)
    h.step("w0")
    h.accept("a", [*STEM, 2], 1)
    assert takers(h, ["w0", "w1"]) == {"w0": [], "w1": ["a"]}
    h = harness(binding="prefix")
    h.accept("x", [*STEM[:8], 1], 200)
    h.step("w0")
    h.accept("a", [*STEM[:8], 2], 200)
    assert takers(h, ["w1", "w0"]) == {"w1": [], "w0": ["a"]}


def test_an_unknown_rule_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match="binding is 'hash'; allowed: one of cost, load, prefix"):
        SchedulerConfig(binding="hash")
