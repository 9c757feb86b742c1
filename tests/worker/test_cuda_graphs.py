"""Decodes that are replayed from graphs give what eager ones give, whatever the graph was captured on."""

import dataclasses
import random

import pytest
import torch
from fake_cuda_graphs import FakeCapture, FakeDeviceBackend
from fake_scheduler import FakeScheduler
from worker.conftest import MAX_MODEL_LEN, VOCAB_SIZE

from worker_service.cuda_graphs import row_counts, uses_graphs
from worker_service.errors import NotCapturableError
from worker_service.executor import Executor
from worker_service.kv_memory import KvMemory
from worker_service.plan import Limits

MAX_NEW = 12
PROMPTS = {
    name: tuple(random.Random(length).randrange(3, VOCAB_SIZE) for _ in range(length))
    for name, length in {"a": 1, "b": 5, "c": 17, "d": 33, "e": 52}.items()
}
architectures = pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gemma2", "gemma3"])


@pytest.fixture
def make_graphs(loaded):
    """An executor whose decodes of up to 4 rows are captured, and what captured them."""

    def make(architecture: str = "llama", counts=(1, 2, 4)) -> tuple[Executor, FakeCapture]:
        model = dataclasses.replace(loaded(architecture), backend=FakeDeviceBackend)
        limits = Limits(
            num_slots=8,
            num_blocks=60,
            block_size=8,
            max_batched_tokens=512,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=model.vocab_size,
        )
        kv = KvMemory(model.layers, limits.num_blocks, limits.block_size, model.kv_dtype, model.device)
        executor, capture = Executor(model, kv, limits), FakeCapture()
        executor.capture_decodes(capture, counts)
        return executor, capture

    return make


@architectures
def test_tokens_are_those_of_generate(architecture, make_graphs, generate):
    executor, capture = make_graphs(architecture)
    scheduler = FakeScheduler(executor)
    for name, prompt in PROMPTS.items():
        scheduler.add(name, list(prompt))
    scheduler.step([("e", 40)])
    scheduler.step([("e", 12), ("a", 1)])  # a chunk: not from a graph
    assert capture.replays == 0
    for rows in ("e", "ea", "ae", "e"):  # numbers of rows with and without a graph of their own
        scheduler.step([(name, 1) for name in rows])
    scheduler.step([("c", 17), ("b", 5), ("e", 1)])
    for rows in ("ecb", "bcea", "c"):
        scheduler.step([(name, 1) for name in rows])
    assert capture.replays == 7
    scheduler.preempt("c")
    scheduler.run(budget=64, max_new=MAX_NEW)
    outputs = scheduler.outputs()
    assert outputs == {name: generate(architecture, prompt, MAX_NEW) for name, prompt in PROMPTS.items()}
    assert len({token for tokens in outputs.values() for token in tokens}) >= 8


def test_five_rows_have_no_graph_and_are_right_all_the_same(make_graphs, generate):
    executor, capture = make_graphs()
    scheduler = FakeScheduler(executor)
    for name, prompt in PROMPTS.items():
        scheduler.add(name, list(prompt))
    scheduler.step([(name, len(prompt)) for name, prompt in PROMPTS.items()])
    scheduler.step([(name, 1) for name in PROMPTS])
    assert capture.replays == 0
    assert scheduler.outputs() == {name: generate("llama", prompt, 2) for name, prompt in PROMPTS.items()}


def test_sampled_tokens_are_fed_back_on_the_device(make_graphs, generate):
    """Plans that are ahead of results: the host knows no token when the graph is replayed."""
    executor, capture = make_graphs()
    scheduler = FakeScheduler(executor)
    names = ["b", "d", "c"]
    for name in names:
        scheduler.add(name, list(PROMPTS[name]))
    plans = [scheduler.plan([(name, len(PROMPTS[name])) for name in names])]
    plans += [scheduler.plan([(name, 1) for name in names]) for _ in range(MAX_NEW - 1)]
    for plan in plans:
        scheduler.apply(plan, scheduler.execute(plan))
    assert capture.replays == MAX_NEW - 1
    assert scheduler.outputs() == {name: generate("llama", PROMPTS[name], MAX_NEW) for name in names}


def test_rows_that_do_not_sample_are_left_out(make_graphs, generate):
    """Prompts in chunks of one token beside a decode: a step of decodes by its shape."""
    executor, capture = make_graphs()
    scheduler = FakeScheduler(executor)
    for name in "cab":
        scheduler.add(name, list(PROMPTS[name]))
    scheduler.step([("c", 17)])
    for _ in range(4):
        assert scheduler.step([("b", 1), ("c", 1)]).keys() == {"c"}
    assert scheduler.step([("b", 1), ("a", 1), ("c", 1)]).keys() == {"a", "b", "c"}
    assert capture.replays == 5
    assert scheduler.outputs() == {
        "a": generate("llama", PROMPTS["a"], 1),
        "b": generate("llama", PROMPTS["b"], 1),
        "c": generate("llama", PROMPTS["c"], 6),
    }


def test_rows_that_fill_up_touch_nothing_but_the_null_block(make_graphs):
    executor, capture = make_graphs()
    scheduler = FakeScheduler(executor)
    for name in "bcd":
        scheduler.add(name, list(PROMPTS[name]))
    scheduler.step([(name, len(PROMPTS[name])) for name in "bcd"])
    kv = executor._kv
    before = [cache.clone() for cache in (*kv.keys, *kv.values)]
    plan = scheduler.plan([(name, 1) for name in "bcd"])
    scheduler.apply(plan, scheduler.execute(plan))
    assert capture.replays == 1
    written = {(0, 0)}
    for name in "bcd":
        request = scheduler.requests[name]
        position = len(PROMPTS[name])
        written.add((request.blocks[position // 8], position % 8))
    for old, new in zip(before, (*kv.keys, *kv.values), strict=True):
        changed = (old != new).any(-1).any(1).nonzero().tolist()  # [blocks, block_size]
        assert {tuple(place) for place in changed} <= written
        assert len(changed) >= 3
        assert new.isfinite().all()


def test_the_largest_graph_is_captured_first_and_progress_is_told(make_graphs, loaded):
    executor, _ = make_graphs()
    shares, order = [], []

    def capture(run):
        order.append(run.args[0])
        return FakeCapture()(run)

    executor.capture_decodes(capture, (1, 8, 2), shares.append)
    assert order == [8, 2, 1]
    assert shares == [1 / 3, 2 / 3, 1.0]


def test_a_model_that_cannot_be_captured_runs_as_before(make_graphs, loaded, generate):
    executor, capture = make_graphs()
    executor._graphs = None

    def refuse(run):
        raise NotCapturableError("its modules wait for the device within a step")

    with pytest.raises(NotCapturableError):
        executor.capture_decodes(refuse)
    scheduler = FakeScheduler(executor)
    scheduler.add("b", list(PROMPTS["b"]))
    scheduler.run(budget=64, max_new=3)
    assert capture.replays == 0
    assert scheduler.outputs()["b"] == generate("llama", PROMPTS["b"], 3)


def test_numbers_of_rows():
    assert row_counts(1) == (1,)
    assert row_counts(3) == (1, 2, 3)
    assert row_counts(20) == (1, 2, 4, 8, 16, 20)
    assert row_counts(256) == (1, 2, 4, *range(8, 257, 8))
    assert row_counts(300) == (1, 2, 4, *range(8, 257, 8), 288, 300)
    assert row_counts(4096)[-2:] == (480, 512)


def test_graphs_are_for_triton_on_cuda(loaded):
    model = loaded("llama")
    on_cuda = dataclasses.replace(model, device=torch.device("cuda"), backend_name="triton")
    assert uses_graphs(on_cuda, "auto")
    assert not uses_graphs(on_cuda, "off")
    assert not uses_graphs(dataclasses.replace(on_cuda, backend_name="reference"), "auto")
    assert not uses_graphs(model, "auto")
