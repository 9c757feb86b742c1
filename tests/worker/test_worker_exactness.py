"""Greedy tokens through the executor equal those of transformers' generate, however the work is cut up."""

import random

import pytest
from fake_scheduler import FakeScheduler
from worker.conftest import CONFIGS, VOCAB_SIZE

MAX_NEW = 10
LENGTHS = {"a": 1, "b": 5, "c": 17, "d": 33, "e": 52}
PROMPTS = {
    name: tuple(random.Random(length).randrange(3, VOCAB_SIZE) for _ in range(length))
    for name, length in LENGTHS.items()
}

architectures = pytest.mark.parametrize("architecture", list(CONFIGS))


@pytest.fixture
def expected(generate):
    """What each prompt must give; varied enough that equality means something."""

    def expect(architecture: str) -> dict[str, list[int]]:
        outputs = {name: generate(architecture, prompt, MAX_NEW) for name, prompt in PROMPTS.items()}
        assert len({token for tokens in outputs.values() for token in tokens}) >= 8
        return outputs

    return expect


def scheduler_with_prompts(executor, seed: int = 0) -> FakeScheduler:
    scheduler = FakeScheduler(executor, seed)
    for name, prompt in PROMPTS.items():
        scheduler.add(name, list(prompt))
    return scheduler


@architectures
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_all_prompts_at_once(architecture, block_size, make_executor, expected):
    scheduler = scheduler_with_prompts(make_executor(architecture, block_size))
    scheduler.run(budget=512, max_new=MAX_NEW)
    assert scheduler.outputs() == expected(architecture)


@architectures
def test_chunks_mixed_with_decodes(architecture, make_executor, expected):
    scheduler = scheduler_with_prompts(make_executor(architecture, 8))
    scheduler.run(budget=13, max_new=MAX_NEW, order=["c", "a", "e", "b", "d"])
    assert scheduler.outputs() == expected(architecture)


@architectures
def test_one_token_at_a_time(architecture, make_executor, expected):
    scheduler = scheduler_with_prompts(make_executor(architecture, 16))
    scheduler.run(budget=1, max_new=MAX_NEW, order=["c", "b"])
    assert [scheduler.outputs()[name] for name in "bc"] == [expected(architecture)[name] for name in "bc"]


@architectures
def test_plans_ahead_of_results(architecture, make_executor, expected):
    scheduler = scheduler_with_prompts(make_executor(architecture))
    names = list(PROMPTS)
    plans = [scheduler.plan([(name, len(PROMPTS[name])) for name in names])]
    plans += [scheduler.plan([(name, 1) for name in names]) for _ in range(MAX_NEW - 1)]
    for plan in plans:
        scheduler.apply(plan, scheduler.execute(plan))
    assert scheduler.outputs() == expected(architecture)


@architectures
def test_shared_prefix_and_copied_block(architecture, make_executor, expected, generate):
    """A fork: full blocks by reference, the partial one as a copy, the last prompt token computed again."""
    scheduler = FakeScheduler(make_executor(architecture, 8))
    prompt = PROMPTS["e"]
    scheduler.add("first", list(prompt))
    scheduler.step([("first", len(prompt))])
    scheduler.add("fork", list(prompt))
    scheduler.share_prefix("fork", "first", len(prompt) - 1)
    # Another request with the same beginning only, and a different end.
    other = prompt[:24] + PROMPTS["b"]
    scheduler.add("prefix", list(other))
    scheduler.share_prefix("prefix", "first", 24)
    scheduler.step([("first", 1), ("fork", 1), ("prefix", len(other) - 24)])
    scheduler.run(budget=64, max_new=MAX_NEW)
    outputs = scheduler.outputs()
    assert outputs["first"] == outputs["fork"] == expected(architecture)["e"]
    assert outputs["prefix"] == generate(architecture, other, MAX_NEW)


@architectures
def test_preempted_and_resumed(architecture, make_executor, expected):
    """Slots and blocks change hands; a resumed request is recomputed with its outputs, in chunks."""
    scheduler = scheduler_with_prompts(make_executor(architecture, 8, num_blocks=30, num_slots=3))
    scheduler.step([("d", 33), ("c", 17)])
    for _ in range(3):
        scheduler.step([("d", 1), ("c", 1)])
    scheduler.preempt("d")
    scheduler.run(budget=40, max_new=MAX_NEW, order=["c", "e"])
    scheduler.preempt("c")
    scheduler.preempt("e")
    scheduler.run(budget=19, max_new=MAX_NEW, order=["b", "d", "a"])
    assert scheduler.outputs() == expected(architecture)


def test_steps_without_rows_and_without_samples(make_executor):
    scheduler = scheduler_with_prompts(make_executor())
    empty = scheduler.plan([])
    assert scheduler.apply(empty, scheduler.execute(empty)) == {}
    assert scheduler.step([("e", 20)]) == {}
    assert scheduler.step([("e", 20), ("a", 1)]).keys() == {"a"}


def test_copies_read_before_they_write(make_executor, generate):
    """Two blocks swap places: the tables say so, and nothing else changes."""
    scheduler = FakeScheduler(make_executor("llama", 8))
    scheduler.add("x", list(PROMPTS["c"]))
    scheduler.step([("x", 17)])
    request = scheduler.requests["x"]
    first, second = request.blocks[:2]
    scheduler.add("y", list(PROMPTS["c"]))
    scheduler.requests["y"].blocks = [second, first]
    scheduler.requests["y"].computed = 16
    scheduler._copies = [(first, second), (second, first)]
    scheduler.preempt("x")
    scheduler._freed = []
    scheduler.step([("y", 1)])
    scheduler.run(budget=8, max_new=MAX_NEW, order=["y"])
    assert scheduler.outputs()["y"] == generate("llama", PROMPTS["c"], MAX_NEW)


def test_reset_empties_every_slot(make_executor, expected):
    executor = make_executor()
    abandoned = scheduler_with_prompts(executor, seed=1)
    abandoned.step([("d", 20), ("c", 17), ("a", 1)])
    executor.reset()
    scheduler = scheduler_with_prompts(executor, seed=2)
    scheduler.run(budget=512, max_new=MAX_NEW)
    assert scheduler.outputs() == expected("llama")


def test_timings_follow_one_another(make_executor):
    scheduler = scheduler_with_prompts(make_executor())
    results = [scheduler.execute(scheduler.plan([("e", 26)])) for _ in range(2)]
    for result in results:
        t = result.timings
        assert t.received_ns <= t.started_ns <= t.forward_ns <= t.sampling_ns <= t.finished_ns
    first, second = (result.timings for result in results)
    assert first.gap_ns == 0
    assert second.gap_ns == second.started_ns - first.finished_ns
