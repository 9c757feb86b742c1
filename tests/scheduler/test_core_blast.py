"""Many requests at once on too little memory: random order, exact tokens, nothing left over."""

from __future__ import annotations

import random

import pytest
from core_harness import EOS, Harness

from scheduler_service.core.policies import POLICIES

BASE = {
    "num_blocks": 30,
    "block_size": 4,
    "num_slots": 8,
    "max_batched_tokens": 32,
    "max_num_batched_tokens": 32,
}


def blast(h: Harness, rng: random.Random, num_requests: int, loss: float = 0.0) -> None:
    """Submits all along, plans and answers in random order, now and then loses a worker and gets one back."""
    submitted = 0
    num_workers = len(h.workers)
    while submitted < num_requests or h.core.requests(h.now, limit=1):
        h.now += 0.01
        if submitted < num_requests and rng.random() < 0.5:
            stem = [rng.randrange(3)] * rng.randrange(0, 40)
            prompt = [*stem, *(rng.randrange(64) for _ in range(rng.randrange(1, 10)))]
            eos = frozenset([EOS] if rng.random() < 0.5 else [])
            options = {"n": rng.choice([1, 1, 1, 3]), "priority": rng.randrange(4), "eos_token_ids": eos}
            options["tenant"] = rng.choice("aab")
            h.accept(f"r{submitted}", prompt, rng.randrange(1, 50), **options)
            submitted += 1
        worker_id = rng.choice(sorted(h.workers))
        for _ in range(rng.randrange(1, 3)):
            h.plan(worker_id)
        if h.workers[worker_id].inbox and rng.random() < 0.8:
            h.answer(worker_id)
        if rng.random() < loss:
            h.lose(worker_id)
            h.add_worker(worker_id)
        if rng.random() < 0.1:
            h.core.check()
        assert len(h.workers) == num_workers


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(2))
def test_blast_under_memory_pressure_gives_every_candidate_its_tokens(seed, depth, policy):
    h = Harness(depth=depth, policy=policy, max_num_seqs=8, watermark=0.05, check=False, **BASE)
    blast(h, random.Random(seed), 30)
    h.assert_all_right()
    h.assert_empty()
    assert h.core.state(h.now).counters.preemptions > 0
    assert h.core.state(h.now).counters.prefix_hit_tokens > 0


@pytest.mark.parametrize("seed", range(3))
def test_blast_with_workers_that_die_loses_and_repeats_no_token(seed):
    h = Harness(depth=2, workers=3, max_num_seqs=8, check=False, **BASE)
    blast(h, random.Random(100 + seed), 40, loss=0.03)
    h.assert_all_right()
    h.assert_empty()
    assert h.core.state(h.now).counters.requests_moved > 0


@pytest.mark.parametrize("threshold", [3, 9])
def test_blast_with_long_prefill_threshold(threshold):
    h = Harness(depth=2, max_num_seqs=8, long_prefill_token_threshold=threshold, check=False, **BASE)
    blast(h, random.Random(threshold), 40)
    h.assert_all_right()
    h.assert_empty()


def test_blast_without_prefix_caching():
    h = Harness(depth=2, max_num_seqs=8, enable_prefix_caching=False, check=False, **BASE)
    blast(h, random.Random(7), 40)
    h.assert_all_right()
    h.assert_empty()
    assert h.core.state(h.now).counters.prefix_hit_tokens == 0
    assert h.core.state(h.now).workers[0].blocks_cached == 0


def test_no_memory_grows_over_many_requests():
    h = Harness(depth=2, max_num_seqs=8, check=False, **BASE)
    core = h.core
    for round_number in range(200):
        h.accept(f"r{round_number}", 9, 3, deadline=h.now + 1e9, queue_timeout_s=1e9)
        if round_number % 3 == 0:
            h.cancel(f"r{round_number}")
        h.run()
        h.plans.clear()
        h.now += 1
    assert core._lifecycle.requests == {}
    assert len(core._lifecycle.expiries._entries) <= 130
    assert len(core._lifecycle.models["fake"].queue._heap._entries) <= 130
    h.assert_empty()
