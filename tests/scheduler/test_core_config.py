"""SchedulerConfig, WorkerSpec and RequestSpec: wrong values are named, with what is allowed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.errors import ConfigError
from scheduler_service.core.request import RequestSpec
from scheduler_service.core.sampling import SamplingParams, StoppingParams, candidate_seed
from scheduler_service.core.worker import WorkerSpec


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_num_batched_tokens", 0),
        ("max_num_batched_tokens", 2.5),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("target_itl_ms", 0.0),
        ("target_itl_ms", math.inf),
        ("binding", "hash"),
        ("watermark", 1.0),
        ("watermark", -0.01),
        ("watermark", math.nan),
        ("long_prefill_token_threshold", -1),
        ("max_num_queued_reqs", -1),
        ("max_num_queued_tokens", 0),
        ("pipeline_depth", 0),
        ("max_preemptions", -1),
        ("max_moves_without_progress", -1),
        ("overtaking_window", -1),
        ("max_overtakes", -1),
        ("max_num_queued_reqs_per_tenant", -1),
        ("max_num_queued_tokens_per_tenant", 0),
        ("admission", "open"),
        ("policy", "lifo"),
        ("priority_aging_s", 0),
        ("priority_aging_s", math.inf),
        ("tenant_weights", {"a": 1.0, "b": 0.0}),
        ("tenant_weights", {"a": math.nan}),
        ("hash_key", b""),
        ("hash_key", b"x" * 65),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_what_is_allowed(option, value):
    with pytest.raises(ConfigError) as error:
        SchedulerConfig(**{option: value})
    assert error.value.option == option
    assert str(error.value).startswith(f"{option} is ")
    assert "allowed: " in str(error.value)


def test_a_budget_below_the_number_of_sequences_is_a_contradiction():
    with pytest.raises(
        ConfigError, match=r"max_num_batched_tokens is 8; allowed: at least max_num_seqs \(9\)"
    ):
        SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=9)


def test_unknown_policy_lists_those_there_are():
    with pytest.raises(ConfigError, match="one of deadline, fair, fcfs, priority"):
        SchedulerConfig(policy="random")


def test_the_hash_key_is_random_unless_given_and_never_shown():
    assert SchedulerConfig().hash_key != SchedulerConfig().hash_key
    assert "secret" not in repr(SchedulerConfig(hash_key=b"secret"))


WORKER = {
    "worker_id": "w",
    "model": "m",
    "num_blocks": 9,
    "block_size": 4,
    "num_slots": 2,
    "max_batched_tokens": 8,
    "max_in_flight": 2,
    "max_model_len": 64,
    "vocab_size": 10,
}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_blocks", 1),
        ("block_size", 12),
        ("block_size", 0),
        ("num_slots", 0),
        ("max_batched_tokens", 0),
        ("max_in_flight", 0),
        ("max_model_len", 1),
        ("vocab_size", 0),
    ],
)
def test_a_wrong_worker_value_is_named(option, value):
    with pytest.raises(ConfigError, match=f"{option} is {value}"):
        WorkerSpec(**{**WORKER, option: value})


@pytest.mark.parametrize(("total", "fits"), [(2, True), (33, True), (34, False), (65, False)])
def test_what_fits_a_worker_needs_no_block_for_its_last_token(total, fits):
    assert WorkerSpec(**WORKER).fits(total) is fits  # 8 usable blocks of 4 hold 32 tokens


def test_max_model_len_limits_what_fits():
    spec = WorkerSpec(**{**WORKER, "num_blocks": 1000})
    assert spec.fits(64) and not spec.fits(65)


@pytest.mark.parametrize("prompt", [np.zeros(0, np.int32), np.zeros(3, np.int64), np.zeros((1, 3), np.int32)])
def test_a_prompt_must_be_a_row_of_int32(prompt):
    with pytest.raises(ValueError, match="prompt_token_ids"):
        RequestSpec(
            request_id="r",
            model="m",
            prompt_token_ids=prompt,
            sampling=SamplingParams(),
            stopping=StoppingParams(max_tokens=1),
        )


@pytest.mark.parametrize(("n", "max_tokens"), [(0, 1), (1, 0)])
def test_a_request_wants_at_least_one_candidate_and_token(n, max_tokens):
    with pytest.raises(ValueError, match="allowed: at least 1"):
        RequestSpec(
            request_id="r",
            model="m",
            prompt_token_ids=np.zeros(1, np.int32),
            sampling=SamplingParams(),
            stopping=StoppingParams(max_tokens=max_tokens),
            n=n,
        )


def test_candidates_draw_from_seeds_of_their_own():
    seeds = [candidate_seed(7, i) for i in range(64)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 64
    assert all(0 <= seed < 1 << 64 for seed in seeds)
