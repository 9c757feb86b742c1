"""The sampler's parameters do what they say, row by row, whatever shares the batch."""

import numpy as np
import pytest
import torch
from fake_scheduler import FakeScheduler, greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor
from worker.conftest import VOCAB_SIZE

from tidegate_kernels.cpu_sampling import penalize_rows
from worker_service.logprobs import take_logprobs
from worker_service.penalties import penalize
from worker_service.plan import Admission, Sampling
from worker_service.sampler import Sampler

V = 24
CPU = torch.device("cpu")


def admission(slot: int, sampling: Sampling, tokens=(3,), num_prompt: int | None = None) -> Admission:
    return Admission(
        slot=slot,
        request_id=f"r{slot}",
        token_ids=np.array(tokens, np.int32),
        num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
        num_computed_tokens=0,
        block_ids=np.empty(0, np.int32),
        sampling=sampling,
    )


def sample(sampler, logits, slots, positions=None, num_outputs=None):
    n = len(slots)
    return sampler.sample(
        torch.as_tensor(logits, dtype=torch.float32).reshape(n, -1).clone(),  # it is overwritten
        np.array(slots, np.int32),
        np.array(positions if positions is not None else [1] * n, np.int64),
        np.array(num_outputs if num_outputs is not None else [0] * n, np.int64),
    )


def one(sampling: Sampling, logits, tokens=(3,), num_prompt=None, num_outputs=0, position=1):
    sampler = Sampler(4, len(logits), CPU)
    sampler.admit(admission(2, sampling, tokens, num_prompt))
    return sample(sampler, [logits], [2], [position], [num_outputs])


def peak(*ranked: int) -> list[float]:
    """Logits whose order of tokens is `ranked`, one apart."""
    logits = [-5.0] * V
    for rank, token in enumerate(ranked):
        logits[token] = 5.0 - rank
    return logits


def test_greedy_takes_the_most_likely_token():
    assert one(Sampling(), peak(7, 4)).token_ids.tolist() == [7]


def test_bias_moves_a_token():
    ids, values = np.array([4, 9], np.int32), np.array([1.5, -100], np.float32)
    sampling = Sampling(bias_token_ids=ids, bias_values=values)
    assert one(sampling, peak(7, 4)).token_ids.tolist() == [4]
    assert one(sampling, peak(9, 7, 5)).token_ids.tolist() == [7]


@pytest.mark.parametrize(("num_outputs", "token"), [(0, 4), (2, 4), (3, 7), (4, 7)])
def test_min_tokens_bans_end_tokens_until_reached(num_outputs, token):
    sampling = Sampling(banned_token_ids=np.array([7, 8], np.int32), min_tokens=3)
    assert one(sampling, peak(7, 8, 4), num_outputs=num_outputs).token_ids.tolist() == [token]


def test_a_ban_on_the_whole_vocabulary_still_gives_a_token():
    everything = np.arange(V, dtype=np.int32)
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, top_p=0.9, banned_token_ids=everything, min_tokens=1)
        assert 0 <= one(sampling, peak(1)).token_ids.item() < V


def test_presence_and_frequency_count_outputs_only():
    tokens, num_prompt = [7, 7, 4, 4], 2  # prompt 7 7, outputs 4 4
    logits = peak(4, 7)
    assert one(Sampling(presence_penalty=0.9), logits, tokens, num_prompt).token_ids.tolist() == [4]
    assert one(Sampling(presence_penalty=1.1), logits, tokens, num_prompt).token_ids.tolist() == [7]
    assert one(Sampling(frequency_penalty=0.45), logits, tokens, num_prompt).token_ids.tolist() == [4]
    assert one(Sampling(frequency_penalty=0.55), logits, tokens, num_prompt).token_ids.tolist() == [7]


def test_repetition_penalty_is_that_of_transformers():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, V, generator=generator)
    history = torch.randint(V, (40, 9), generator=generator)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(history, logits.clone())
    sampler = Sampler(40, V, CPU)
    for slot in range(40):
        sampler.admit(admission(slot, Sampling(repetition_penalty=1.7), history[slot].tolist(), 4))
    sampled = sample(sampler, logits, list(range(40)))
    assert sampled.token_ids.tolist() == expected.argmax(-1).tolist()
    assert (expected.argmax(-1) != logits.argmax(-1)).any()


def test_penalties_follow_the_tokens_sampled_here():
    sampler = Sampler(2, V, CPU)
    sampler.admit(admission(1, Sampling(frequency_penalty=0.6)))
    seen = [sample(sampler, [peak(9, 4)], [1]).token_ids.item() for _ in range(6)]
    # 9 leads by 1: it is given until it was given twice more often than 4.
    assert seen == [9, 9, 4, 9, 4, 9]


def test_penalties_of_the_cpu_are_those_of_every_device():
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(9, 800, generator=generator)
    marks = torch.randint(0, 4, (5, 800), generator=generator, dtype=torch.int32)
    seen, num_seen = np.full((5, 800), -1, np.int32), (marks > 0).sum(-1).numpy()
    for state, count in enumerate(num_seen):
        seen[state, :count] = marks[state].nonzero().flatten().flip(0)
    factors = torch.tensor(
        [[1.3, 0.0, 0.0], [1.0, 0.5, 0.2], [0.7, -1.0, 1.5], [1.1, 0.2, -0.3], [1.0, 0.0, 2.0]]
    )
    rows, states = np.array([8, 2, 5]), np.array([1, 4, 2])
    here, anywhere = logits.clone(), logits.clone()
    penalize_rows(here, rows, marks, factors, seen, num_seen, states)
    penalize(anywhere, rows, marks, factors, states)
    torch.testing.assert_close(here, anywhere)
    assert (here != logits).any(-1).nonzero().flatten().tolist() == [2, 5, 8]


def test_a_slot_forgets_the_request_before():
    sampler = Sampler(2, V, CPU)
    strong = Sampling(
        presence_penalty=50, bias_token_ids=np.array([1], np.int32), bias_values=np.array([90], np.float32)
    )
    sampler.admit(admission(0, strong, [9, 9], 1))
    assert sample(sampler, [peak(9, 4)], [0]).token_ids.tolist() == [1]
    sampler.release(np.array([0], np.int32))
    sampler.admit(admission(0, Sampling(presence_penalty=0.5), [3], 1))
    assert sample(sampler, [peak(9, 4)], [0]).token_ids.tolist() == [9]
    sampler.clear()
    sampler.admit(admission(0, Sampling()))
    assert sample(sampler, [peak(9, 4)], [0]).token_ids.tolist() == [9]


def test_many_penalized_slots_keep_their_own_counts():
    """The state grows as slots need it, and rows are used again."""
    sampler = Sampler(40, V, CPU)
    for slot in range(40):
        outputs = [slot % V] * 3
        sampler.admit(admission(slot, Sampling(frequency_penalty=2.0), [3, *outputs], 1))
    for slot in range(0, 40, 2):
        sampler.release(np.array([slot], np.int32))
    for slot in range(0, 40, 2):
        sampler.admit(admission(slot, Sampling(frequency_penalty=2.0), [3, (slot + 1) % V], 1))
    logits = torch.zeros(40, V)
    penalized = [slot % V if slot % 2 else (slot + 1) % V for slot in range(40)]
    for slot, token in enumerate(penalized):
        logits[slot, token], logits[slot, (token + 2) % V] = 1.0, 0.5
    tokens = sample(sampler, logits, list(range(40))).token_ids.tolist()
    assert tokens == [(token + 2) % V for token in penalized]


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_of_wide_rows_are_those_of_log_softmax(num_top):
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(9, 5_000, generator=generator) * 4 - 3
    logits[3:6] = (logits[3:6] * 2).round() / 2  # ties
    logits[7] = -2.0
    token_ids = torch.randint(5_000, (9,), generator=generator)
    at = np.arange(8, -1, -1)
    taken = take_logprobs(logits, at, token_ids, at.astype(np.int32), np.full(9, num_top, np.int32))
    truth = logits[torch.from_numpy(at)].double().log_softmax(-1)
    order = torch.sort(truth, dim=-1, descending=True, stable=True).indices[:, :num_top]
    assert taken.top_token_ids.tolist() == order.tolist()
    torch.testing.assert_close(taken.top_values.double(), truth.gather(-1, order), atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(
        taken.sampled.double(), truth.gather(-1, token_ids[:, None]).squeeze(-1), atol=2e-6, rtol=1e-6
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_not_finite_fail_their_row_only(bad, temperature):
    sampler = Sampler(4, V, CPU)
    for slot in range(3):
        sampler.admit(
            admission(slot, Sampling(temperature=temperature, top_k=1, presence_penalty=0.1, logprobs=2))
        )
    logits = torch.tensor([peak(5), peak(6), peak(7)])
    logits[1, 3] = bad
    sampled = sample(sampler, logits, [0, 1, 2])
    assert sampled.finite.tolist() == [True, False, True]
    assert sampled.token_ids[[0, 2]].tolist() == [5, 7]
    assert 0 <= sampled.token_ids[1] < V


def test_logprobs_are_of_the_models_own_distribution():
    sampler = Sampler(4, V, CPU)
    sampler.admit(admission(0, Sampling(logprobs=-1)))
    sampler.admit(admission(1, Sampling(logprobs=0, temperature=0.01)))
    bias = {"bias_token_ids": np.array([4], np.int32), "bias_values": np.array([50], np.float32)}
    sampler.admit(admission(2, Sampling(logprobs=3, **bias)))
    sampler.admit(admission(3, Sampling(logprobs=1, presence_penalty=0.2)))
    logits = torch.tensor([peak(5), peak(6), peak(7, 2, 4), peak(8)])
    sampled = sample(sampler, logits, [0, 1, 2, 3])
    columns = sampled.logprobs.to_columns()
    truth = logits.log_softmax(-1).numpy()
    assert sampled.token_ids.tolist() == [5, 6, 4, 8]
    assert columns.rows.tolist() == [1, 2, 3]
    assert columns.sampled.tolist() == pytest.approx([truth[1, 6], truth[2, 4], truth[3, 8]])
    assert columns.top_offsets.tolist() == [0, 0, 3, 4]
    assert columns.top_token_ids.tolist() == [7, 2, 4, 8]
    assert columns.top_values.tolist() == pytest.approx([*truth[2, [7, 2, 4]], truth[3, 8]])


sampling_strategy = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    top_k=st.sampled_from([0, 0, 3, 10]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.05]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    seed=st.integers(0, 2**64 - 1),
    bias_token_ids=st.just(np.array([5], np.int32)),
    bias_values=st.just(np.array([1.0], np.float32)),
    banned_token_ids=st.just(np.array([2, 6], np.int32)),
    min_tokens=st.integers(0, 3),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(sampling_strategy, min_size=2, max_size=5), st.integers(0, 1000))
def test_tokens_alone_are_those_in_a_batch(requests, seed):
    """Several steps, in a batch of all kinds and each by itself: the same tokens."""
    steps = 4
    logits = torch.randn(steps, len(requests), V, generator=torch.Generator().manual_seed(seed))

    def run(members: list[int]) -> dict[int, list[int]]:
        sampler = Sampler(len(requests), V, CPU)
        for slot in members:
            sampler.admit(admission(slot, requests[slot], [3, 4, 5]))
        tokens = [
            sample(sampler, logits[i, members], members, [3 + i] * len(members), [i] * len(members)).token_ids
            for i in range(steps)
        ]
        return {slot: [int(t[row]) for t in tokens] for row, slot in enumerate(members)}

    together = run(list(range(len(requests))))
    alone = {}
    for slot in reversed(range(len(requests))):
        alone |= run([slot])
    assert together == alone


KNOBS = {"temperature": 1.0, "top_p": 0.95, "presence_penalty": 0.5, "repetition_penalty": 1.1}


def test_seeded_tokens_alone_in_a_batch_and_after_preemption(make_executor):
    """Through the model: the tokens of a seeded request depend on nothing but itself."""

    def scheduler(seed: int) -> FakeScheduler:
        made = FakeScheduler(make_executor("llama", 8), seed)
        made.add("x", list(range(30, 50)), greedy(**KNOBS, seed=11))
        return made

    alone = scheduler(0)
    alone.run(budget=64, max_new=20)
    crowd = scheduler(1)
    for i in range(5):
        crowd.add(f"y{i}", list(range(i + 3, 40 + 3 * i)), greedy(**KNOBS, seed=i))
    crowd.run(budget=37, max_new=20, order=["y0", "y1", "x", "y2", "y3", "y4"])
    moved = scheduler(2)
    moved.run(budget=7, max_new=9)
    moved.preempt("x")
    moved.run(budget=11, max_new=20)
    tokens = alone.outputs()["x"]
    assert crowd.outputs()["x"] == moved.outputs()["x"] == tokens
    assert len(set(tokens)) >= 6
    other = FakeScheduler(make_executor("llama", 8))
    other.add("x", list(range(30, 50)), greedy(**KNOBS, seed=12))
    other.run(budget=64, max_new=20)
    assert other.outputs()["x"] != tokens


def test_logprobs_through_the_executor(make_executor):
    scheduler = FakeScheduler(make_executor("llama"))
    scheduler.add("quiet", [5, 6, 7])
    scheduler.add("told", [5, 6, 7], greedy(logprobs=2))
    result = scheduler.execute(scheduler.plan([("quiet", 3), ("told", 3)]))
    columns = result.logprobs
    assert columns.rows.tolist() == [1]
    assert columns.top_offsets.tolist() == [0, 2]
    assert columns.top_token_ids[0] == result.token_ids[1]
    assert columns.top_values[0] == columns.sampled[0] > columns.top_values[1]
    assert result.token_ids.max() < VOCAB_SIZE


@pytest.mark.parametrize(
    "other",
    [
        Sampling(repetition_penalty=2.5),
        Sampling(presence_penalty=9.0),
        Sampling(frequency_penalty=9.0),
        Sampling(bias_token_ids=np.array([7], np.int32), bias_values=np.array([9.0], np.float32)),
        Sampling(banned_token_ids=np.array([3], np.int32), min_tokens=1),
        Sampling(temperature=1e-3, top_k=1),
        Sampling(logprobs=0),
    ],
)
def test_a_greedy_batch_with_one_other_row_heeds_that_row(other):
    assert Sampling().is_plain and Sampling(min_tokens=4).is_plain and not other.is_plain
    sampler = Sampler(3, V, CPU)
    for slot, sampling in enumerate((Sampling(), other, Sampling(top_k=4, top_p=0.5, seed=9))):
        sampler.admit(admission(slot, sampling, [3, 3], 1))
    logits = torch.zeros(3, V)
    logits[:, 3], logits[:, 7] = 2.0, 1.0
    sampled = sample(sampler, logits, [0, 1, 2])
    changed = other.penalizes or len(other.bias_token_ids) + len(other.banned_token_ids) > 0
    assert sampled.token_ids.tolist() == [3, 7 if changed else 3, 3]
    assert (sampled.logprobs is not None) == (other.logprobs == 0)
