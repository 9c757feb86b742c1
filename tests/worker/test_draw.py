"""Draws equal those of a plain loop over one row's tokens, and follow the distribution."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_service.draw import DrawColumns, are_finite, choose, draw_by_sort, most_likely
from worker_service.uniform import uniform


def plain_draw(logits, temperature, top_k, top_p, min_p, u) -> int:
    """One row, one token at a time, in float64."""
    highest = max(logits)
    weights = [(float(np.exp((x - highest) / temperature)), i) for i, x in enumerate(logits)]
    if top_k or top_p < 1:
        weights.sort(key=lambda pair: (-pair[0], pair[1]))
        if top_k:
            weights = weights[:top_k]
        total, before, kept = sum(w for w, _ in weights), 0.0, []
        for weight, token in weights:
            if before >= top_p * total:
                break
            kept.append((weight, token))
            before += weight
        weights = kept
    weights = sorted(((w, i) for w, i in weights if w >= min_p), key=lambda pair: pair[1])
    target, reached = u * sum(w for w, _ in weights), 0.0
    for weight, token in weights:
        reached += weight
        if reached > target:
            return token
    return weights[-1][1]


def columns(rows) -> DrawColumns:
    return DrawColumns(
        temperature=np.array([r["temperature"] for r in rows], np.float32),
        top_k=np.array([r["top_k"] for r in rows], np.int32),
        top_p=np.array([r["top_p"] for r in rows], np.float32),
        min_p=np.array([r["min_p"] for r in rows], np.float32),
        uniform=np.array([r["u"] for r in rows], np.float64),
    )


def draw_rows(logits, columns):
    return choose(logits, columns)[0]


both_ways = pytest.mark.parametrize("draw", [draw_rows, draw_by_sort])

row_strategy = st.fixed_dictionaries(
    {
        # Multiples of a quarter: exact in fp32 and with many ties, as bf16 logits have.
        "logits": st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=12, max_size=12),
        "temperature": st.sampled_from([0.25, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 12]),
        "top_p": st.sampled_from([1.0, 0.96875, 0.75, 0.3125, 2.0**-10]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        "u": st.integers(0, 2**20 - 1).map(lambda n: (n + 0.5) / 2**20),
    }
)


@both_ways
@settings(max_examples=150, deadline=None)
@given(rows=st.lists(row_strategy, min_size=1, max_size=6))
def test_equals_a_plain_loop_alone_and_in_a_batch(draw, rows):
    logits = torch.tensor([row["logits"] for row in rows])
    together = draw(logits, columns(rows)).tolist()
    alone = [draw(logits[i : i + 1], columns([row])).item() for i, row in enumerate(rows)]
    assert together == alone
    for row, token in zip(rows, together, strict=True):
        arguments = (row["temperature"], row["top_k"], row["top_p"], row["min_p"])
        # fp32 against float64: where the uniform falls on the edge of two tokens, either is right.
        near = {plain_draw(row["logits"], *arguments, row["u"] + e) for e in (-2e-7, 0, 2e-7)}
        assert token in near


CASES = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "all": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
}


@both_ways
@pytest.mark.parametrize("case", CASES)
def test_frequencies_follow_the_filtered_distribution(draw, case):
    settings_of_row = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **CASES[case]}
    logits = [0.0, 2.0, 1.0, -1.0, 3.0, 2.5, -3.0, 0.5]
    draws = 20_000
    numbers = uniform(np.full(draws, 99, np.uint64), np.arange(draws))
    rows = [{**settings_of_row, "u": u} for u in numbers]
    tokens = draw(torch.tensor([logits]).expand(draws, -1).contiguous(), columns(rows)).numpy()

    weights = np.exp((np.array(logits) - max(logits)) / settings_of_row["temperature"])
    order = np.argsort(-weights, kind="stable")
    rank = np.argsort(order, kind="stable")
    if settings_of_row["top_k"]:
        weights = np.where(rank < settings_of_row["top_k"], weights, 0)
    before = np.cumsum(weights[order]) - weights[order]
    weights = np.where((before < settings_of_row["top_p"] * weights.sum())[rank], weights, 0)
    weights = np.where(weights >= settings_of_row["min_p"], weights, 0)
    expected = draws * weights / weights.sum()
    observed = np.bincount(tokens, minlength=len(logits))
    assert (observed[expected == 0] == 0).all()
    kept = expected > 0
    chi_square = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    # 7 degrees of freedom at most: above 29.9 once in ten thousand. The numbers are fixed.
    assert chi_square < 29.9
    assert kept.sum() >= 3


@both_ways
def test_wide_vocabulary_keeps_every_candidate(draw):
    """The candidates that a CPU ranks are those that a whole sort would leave."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(24, 5_000, generator=generator) * 2
    logits[::2] = (logits[::2] * 4).round() / 4  # ties
    numbers = uniform(np.arange(24, dtype=np.uint64), np.arange(24))
    rows = [
        {
            "temperature": 1.0,
            "top_k": [0, 50, 3, 400, 0][i % 5],
            "top_p": [0.9, 0.5, 1.0, 0.999][i % 4],
            "min_p": [0.0, 0.0, 0.0, 0.01][i % 4],
            "u": numbers[i],
        }
        for i in range(24)
    ]
    expected = [
        plain_draw(
            logits[i].tolist(), r["temperature"], r["top_k"], np.float32(r["top_p"]), r["min_p"], r["u"]
        )
        for i, r in enumerate(rows)
    ]
    assert draw(logits, columns(rows)).tolist() == expected


def test_uniform_is_a_function_of_seed_and_position():
    seeds = np.array([0, 0, 1, 2**64 - 1], np.uint64)
    positions = np.array([0, 1, 0, 7])
    together = uniform(seeds, positions)
    assert ((together >= 0) & (together < 1)).all()
    assert len(set(together)) == 4
    for i in range(4):
        assert uniform(seeds[i : i + 1], positions[i : i + 1])[0] == together[i]
    # Fixed for good: a request that moves to another worker must go on with the same numbers.
    known = [0.28176129772258496, 0.6524484863740322, 0.8628561488610587, 0.8702003993250379]
    assert together.tolist() == known


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_uniforms_are_even_and_uncorrelated(along):
    count = 40_000
    seeds = np.arange(count, dtype=np.uint64) if along == "seeds" else np.full(count, 5, np.uint64)
    positions = np.zeros(count, np.int64) if along == "seeds" else np.arange(count)
    numbers = uniform(seeds, positions)
    observed, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert ((observed - count / 20) ** 2 / (count / 20)).sum() < 52.4  # 19 degrees, once in 20,000
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


@both_ways
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_a_banned_token_is_never_drawn(draw, filters):
    logits = torch.full((3, 700), torch.finfo(torch.float32).min)
    logits[0, 699] = logits[1, 0] = logits[2, 300] = -50.0
    row = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
    for u in (0.0, 0.5, 1 - 2.0**-53):
        assert draw(logits, columns([{**row, "u": u}] * 3)).tolist() == [699, 0, 300]


def test_rows_that_draw_and_rows_that_do_not_on_several_threads():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, 1_000, generator=generator)
    logits[::4, 300] = logits[::4].amax(-1)  # ties of the most likely
    numbers = uniform(np.arange(40, dtype=np.uint64), np.arange(40))
    kinds = columns(
        [
            {
                "temperature": [0.0, 0.7][i % 2],
                "top_k": 0,
                "top_p": [1.0, 0.8][i % 3 % 2],
                "min_p": 0.0,
                "u": u,
            }
            for i, u in enumerate(numbers)
        ]
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        together, finite = choose(logits, kinds)
    finally:
        torch.set_num_threads(threads)
    drawing = np.arange(1, 40, 2)
    assert together[::2].tolist() == logits[::2].argmax(-1).tolist()
    assert together[1::2].tolist() == draw_by_sort(logits[1::2], kinds.at(drawing)).tolist()
    assert finite.all()


def test_rows_that_are_not_finite_get_some_token():
    logits = torch.zeros(3, 600)
    logits[0], logits[1, 5], logits[2, 7] = float("nan"), float("inf"), float("-inf")
    row = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "u": 0.5}
    for filters in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}):
        tokens, finite = choose(logits, columns([{**row, **filters}] * 3))
        assert ((tokens >= 0) & (tokens < 600)).all()
        assert not finite.any()


def test_a_row_is_finite_when_every_value_is():
    logits = torch.full((8, 700), -3e38)
    logits[0], logits[1, 699] = -0.0, 3.4e38
    for row, bad in ((3, float("nan")), (4, -float("nan")), (5, float("inf")), (7, float("-inf"))):
        logits[row, 650] = bad
    assert are_finite(logits, np.arange(7, -1, -1)).tolist() == [
        False,
        True,
        False,
        False,
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize("top_p", [1 - 2.0**-24, 2.0**-30])
@pytest.mark.parametrize("top_k", [0, 900, 3])
def test_filters_at_their_ends_keep_all_or_one(top_p, top_k):
    """Where rounding decides whether all of the mass was reached, and where the first token is enough."""
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(20, 3_000, generator=generator) * 5
    rows = [
        {"temperature": 1.0, "top_k": top_k, "top_p": top_p, "min_p": 0.0, "u": u}
        for u in uniform(np.arange(20, dtype=np.uint64), np.arange(20))
    ]
    tokens = draw_rows(logits, columns(rows)).tolist()
    if top_p < 0.5:
        assert tokens == logits.argmax(-1).tolist()
    else:
        plain = [{**row, "top_p": 1.0} for row in rows]
        assert tokens == draw_by_sort(logits, columns(plain)).tolist()


@given(
    st.lists(
        st.lists(
            st.one_of(
                st.integers(-40, 40).map(lambda n: n / 4), st.sampled_from([float("nan"), float("inf")])
            ),
            min_size=70,
            max_size=70,
        ),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=50, deadline=None)
def test_the_most_likely_tokens_are_those_of_temperature_0(rows):
    logits = torch.tensor(rows)
    greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "u": 0.0}
    tokens, finite = most_likely(logits)
    expected_tokens, expected_finite = choose(logits, columns([greedy] * len(rows)))
    assert finite.tolist() == expected_finite.tolist() == logits.isfinite().all(-1).tolist()
    assert tokens.tolist() == expected_tokens.tolist()
    assert tokens[finite].tolist() == logits[finite].argmax(-1).tolist()
