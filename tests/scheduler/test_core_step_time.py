"""The step-time model: what it learns, how fast it forgets, and what it never believes."""

from __future__ import annotations

import random

import pytest
from core_harness import Harness
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.step_time import StepSize, StepTime, row_size

BASE_MS, TOKEN_MS, CONTEXT_MS, PAIR_MS = 12.0, 0.25, 2e-3, 5e-5


def true_ms(size: StepSize, scale: float = 1.0) -> float:
    added = TOKEN_MS * size.tokens + CONTEXT_MS * size.context + PAIR_MS * size.pairs
    return scale * (BASE_MS + added)


def decode(rng: random.Random) -> StepSize:
    rows = rng.randint(1, 32)
    return StepSize(rows, sum(rng.randint(1, 2000) for _ in range(rows)), 0)


def chunk(rng: random.Random) -> StepSize:
    return decode(rng).plus(row_size(rng.choice([0, 500, 3000]), rng.choice([30, 100, 500, 1500])))


def mixed(rng: random.Random) -> StepSize:
    return decode(rng) if rng.random() < 0.7 else chunk(rng)


def learn(model: StepTime, steps: int, draw=mixed, noise=0.0, scale=1.0, seed=0) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        step = draw(rng)
        model.note(step, true_ms(step, scale) * rng.uniform(1 - noise, 1 + noise))


def worst_error(model: StepTime, scale: float = 1.0) -> float:
    rng = random.Random(99)
    steps = [mixed(rng) for _ in range(200)]
    return max(abs(model.predict_ms(step) / true_ms(step, scale) - 1) for step in steps)


EIGHT = StepSize(8, 8000, 0)


def test_a_row_has_its_tokens_its_context_and_the_pairs_beyond_one_reading_of_it():
    assert row_size(999, 1) == (1, 1000, 0)  # a decode attends to all that is before it, and to itself
    assert row_size(10, 3) == (3, 13, 11 + 12)
    assert row_size(0, 4) == (4, 4, 1 + 2 + 3)
    assert EIGHT.plus(row_size(10, 3)) == (11, 8013, 23)
    assert row_size(10, 0) == (0, 0, 0)


def test_exact_times_give_the_coefficients_of_the_worker():
    model = StepTime()
    learn(model, 800)
    assert model.cost == pytest.approx((BASE_MS, TOKEN_MS, CONTEXT_MS, PAIR_MS), rel=0.02)


def test_few_steps_are_enough_for_a_first_idea():
    model = StepTime()
    learn(model, 40)
    assert worst_error(model) < 0.3


def test_noise_is_averaged():
    model = StepTime()
    learn(model, 1000, noise=0.3)
    assert worst_error(model) < 0.1
    assert 0.1 < model.deviation < 0.2  # the mean of |uniform(-0.3, 0.3)| is 0.15


def test_a_step_that_took_a_hundred_times_too_long_hardly_counts():
    model = StepTime()
    learn(model, 400, noise=0.05)
    for _ in range(3):
        model.note(EIGHT, 100 * true_ms(EIGHT))
    assert worst_error(model) < 0.1


def test_a_worker_that_becomes_slower_for_good_is_followed():
    model = StepTime()
    learn(model, 400, noise=0.05)
    learn(model, 1500, noise=0.05, scale=2.0, seed=1)
    assert worst_error(model, scale=2.0) < 0.1


def test_steps_that_are_all_alike_leave_no_coefficient_negative_or_wild():
    model = StepTime()
    for _ in range(2000):
        model.note(EIGHT, true_ms(EIGHT))
    assert model.predict_ms(EIGHT) == pytest.approx(true_ms(EIGHT), rel=0.01)
    assert min(model.cost) >= 0
    # What they cannot tell apart stays near what it was: nearly all is the base.
    assert model.cost.base_ms > 0.5 * true_ms(EIGHT)


def test_an_hour_of_decodes_does_not_wash_out_what_is_known_of_prefills():
    model = StepTime()
    learn(model, 400, noise=0.05)
    before = model.prefill_ms(500, 1000)
    learn(model, 5_000, draw=lambda rng: StepSize(8, 8 * rng.randint(900, 1100), 0), noise=0.2, seed=2)
    assert model.prefill_ms(500, 1000) == pytest.approx(before, rel=0.15)


def test_times_that_mean_nothing_are_not_noted():
    model = StepTime()
    for measured in (0.0, -1.0, float("nan"), float("inf")):
        model.note(EIGHT, measured)
    model.note(StepSize(0, 0, 0), 1.0)
    assert model.num_steps == 0


def test_before_any_step_it_has_an_idea():
    model = StepTime()
    assert model.predict_ms(row_size(0, 1)) > 0
    assert model.prefill_ms(1000) > model.prefill_ms(100) > 0


@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.integers(0, 100_000), st.floats(1e-6, 1e6)),
        min_size=1,
        max_size=40,
    )
)
def test_no_times_make_a_coefficient_negative(steps):
    model = StepTime()
    for tokens, computed, ms in steps:
        model.note(row_size(computed, tokens), ms)
        assert all(0 <= value < float("inf") for value in model.cost)


@pytest.mark.parametrize("computed", [0, 700, 20_000])
@pytest.mark.parametrize("limit_ms", [0.3, 5.0, 80.0, 3000.0])
def test_the_most_tokens_within_a_limit_are_just_within_it(limit_ms, computed):
    model = StepTime()
    learn(model, 400)
    most = model.most_tokens(limit_ms, computed)
    assert model.prefill_ms(most, computed) <= limit_ms * 1.000001
    assert model.prefill_ms(most + 1, computed) > limit_ms


def test_nothing_fits_where_no_time_is_left():
    model = StepTime()
    assert model.most_tokens(0.0) == model.most_tokens(-3.0, 100) == 0


def test_the_same_steps_give_the_same_coefficients():
    models = [StepTime(), StepTime()]
    for model in models:
        learn(model, 300, noise=0.2)
    assert models[0].cost == models[1].cost


@pytest.mark.parametrize("depth", [1, 2])
def test_each_result_is_noted_with_the_size_of_its_plan(depth, monkeypatch):
    noted = []
    monkeypatch.setattr(StepTime, "note", lambda self, size, ms: noted.append(size))
    h = Harness(depth=depth, max_num_batched_tokens=16, block_size=4)
    h.accept("a", 20, 3)
    h.run()
    assert noted == [row_size(0, 16), row_size(16, 4), row_size(20, 1), row_size(21, 1)]


def test_the_size_of_a_plan_is_the_sum_of_its_rows():
    h = Harness(max_num_batched_tokens=64)
    h.accept("a", 10, 9)
    h.step()
    h.accept("b", 7, 9)
    h.accept("c", 5, 9)
    h.plan()
    (step,) = h.core._workers["w0"].in_flight
    assert step.size == row_size(10, 1).plus(row_size(0, 7)).plus(row_size(0, 5))


def test_nearly_all_steps_are_within_the_high_multiple_of_their_prediction():
    model, rng = StepTime(), random.Random(5)
    above = []
    for _ in range(6000):
        step = mixed(rng)
        measured_ms = true_ms(step) * rng.lognormvariate(0, 0.2)
        above.append(measured_ms > model.high * model.predict_ms(step))
        model.note(step, measured_ms)
    assert sum(above[2000:]) / 4000 == pytest.approx(0.05, abs=0.02)
    assert 1.25 < model.high < 1.6  # exp(1.645 * 0.2) = 1.39


def test_a_steady_worker_needs_no_margin():
    model = StepTime()
    learn(model, 3000)
    assert model.high < 1.02
