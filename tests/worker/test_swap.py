"""Host memory holds all that was copied to it, and a request that was copied out and in goes on as if not."""

import numpy as np
import psutil
import pytest
import torch
from fake_scheduler import FakeScheduler, int32

from worker_service.config import WorkerConfig
from worker_service.errors import KvMemoryError, PlanError
from worker_service.executor import Executor
from worker_service.host_memory import HostMemory, count_host_blocks
from worker_service.kv_memory import KvMemory, LayerShape
from worker_service.plan import Limits
from worker_service.plan_codec import decode_plan

LAYERS = (LayerShape(2, 8, None), LayerShape(1, 16, 64))
BLOCK = 1000  # bytes


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def filled(dtype: torch.dtype, num_blocks: int = 40) -> KvMemory:
    """Every block of every layer holds other values."""
    kv = KvMemory(LAYERS, num_blocks, block_size=4, dtype=dtype, device=torch.device("cpu"))
    for number, cache in enumerate((*kv.keys, *kv.values)):
        cache[:] = torch.randn(cache.shape, generator=torch.Generator().manual_seed(number))
    return kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num", [1, 16, 21])
def test_blocks_come_back_bit_by_bit_wherever_they_go(dtype, num):
    kv = filled(dtype)
    host = HostMemory(kv, num_blocks=24)
    before = [cache.clone() for cache in (*kv.keys, *kv.values)]
    random = np.random.default_rng(num)
    blocks = random.choice(np.arange(1, 40), num, replace=False).astype(np.int32)
    places = random.choice(24, num, replace=False).astype(np.int32)
    back = random.choice(np.arange(1, 40), num, replace=False).astype(np.int32)
    host.swap_out(blocks, places)
    for cache in (*kv.keys, *kv.values):
        cache.zero_()
    host.swap_in(places, back)
    untouched = np.setdiff1d(np.arange(40), back)
    for cache, old in zip((*kv.keys, *kv.values), before, strict=True):
        assert torch.equal(cache[back], old[blocks])
        assert not cache[untouched].any()


def test_host_blocks_keep_their_contents_when_read():
    kv = filled(torch.float32)
    host = HostMemory(kv, num_blocks=2)
    first = kv.keys[0][1].clone()
    host.swap_out(column(1), column(1))
    kv.keys[0].zero_()
    host.swap_in(column(1, 1), column(5, 9))
    assert torch.equal(kv.keys[0][5], first) and torch.equal(kv.keys[0][9], first)


def test_measuring_leaves_the_kv_as_it_was():
    kv = filled(torch.float32)
    before = [cache.clone() for cache in (*kv.keys, *kv.values)]
    assert HostMemory(kv, num_blocks=3).measure_copy_ns() >= 1
    for cache, old in zip((*kv.keys, *kv.values), before, strict=True):
        assert torch.equal(cache, old)


def test_the_smallest_of_both_tiers_can_be_measured():
    assert HostMemory(filled(torch.float32, num_blocks=2), num_blocks=1).measure_copy_ns() >= 1


@pytest.mark.parametrize(("size", "blocks"), [(0, 0), (BLOCK, 1), (7 * BLOCK + 999, 7)])
def test_as_many_blocks_as_fit(size, blocks):
    assert count_host_blocks(size, BLOCK) == blocks


def test_memory_for_no_host_block_is_refused_with_numbers():
    with pytest.raises(KvMemoryError, match=r"--host-memory of 999 bytes.*one takes 1,000"):
        count_host_blocks(999, BLOCK)


def test_more_than_the_machine_has_is_refused_with_numbers(monkeypatch):
    class FakeMemory:
        available = 5000

    monkeypatch.setattr(psutil, "virtual_memory", FakeMemory)
    with pytest.raises(KvMemoryError, match=r"asks for 6,000 bytes, and 5,000 are free"):
        count_host_blocks(6000, BLOCK)


def test_the_option_takes_units_and_is_off_by_default():
    assert WorkerConfig(model="m").host_memory == 0
    assert WorkerConfig(model="m", host_memory="2MiB").host_memory == 2 << 20


@pytest.mark.parametrize("value", ["-1", "lots"])
def test_a_size_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match="host_memory"):
        WorkerConfig(model="m", host_memory=value)


@pytest.fixture
def swapping(loaded):
    """A scheduler whose executor has host memory."""
    model = loaded("llama")
    limits = Limits(
        num_slots=4,
        num_blocks=40,
        block_size=4,
        max_batched_tokens=64,
        max_model_len=160,
        vocab_size=model.vocab_size,
        num_host_blocks=12,
    )
    kv = KvMemory(model.layers, limits.num_blocks, limits.block_size, model.kv_dtype, model.device)
    return FakeScheduler(Executor(model, kv, limits, HostMemory(kv, limits.num_host_blocks)))


def test_a_request_goes_on_after_its_blocks_were_out_and_another_took_them(swapping, generate):
    scheduler, prompts = swapping, {"a": list(range(3, 16)), "b": list(range(90, 139))}
    expected = {name: generate("llama", tuple(prompt), 8) for name, prompt in prompts.items()}
    scheduler.add("a", prompts["a"])
    scheduler.step([("a", 13)])
    scheduler.step([("a", 1)])
    request = scheduler.requests["a"]
    old, computed = list(request.blocks), request.computed
    scheduler.preempt("a")

    # One plan copies a's blocks out and gives them to b, and computes what b has.
    others = [block for block in range(1, 40) if block not in old]
    scheduler.free_blocks, scheduler._freed = old + others[:9], []  # what b needs
    scheduler.add("b", prompts["b"])
    plan = scheduler.plan([("b", 49)])
    plan.swap_out_blocks = int32(old)
    plan.swap_out_host_blocks = int32([7, 2, 11, 0][: len(old)])
    assert set(old) <= set(scheduler.requests["b"].blocks)
    scheduler.apply(plan, scheduler.execute(plan))

    # A later one copies them back elsewhere.
    scheduler.free_blocks = others[9:]
    fresh = [scheduler.free_blocks.pop() for _ in old]
    request.blocks, request.computed = fresh, computed
    plan = scheduler.plan([("a", 1), ("b", 1)])
    plan.swap_in_host_blocks = int32([7, 2, 11, 0][: len(old)])
    plan.swap_in_blocks = int32(fresh)
    scheduler.apply(plan, scheduler.execute(plan))
    scheduler.run(64, 8)
    assert scheduler.outputs() == expected


def test_a_worker_without_host_memory_says_what_is_missing(make_executor):
    executor = make_executor()
    scheduler = FakeScheduler(executor)
    scheduler.add("a", [5, 6, 7])
    plan = scheduler.plan([("a", 3)])
    plan.swap_out_blocks = plan.swap_out_host_blocks = int32([1])
    with pytest.raises(PlanError, match=r"swap_out_host_blocks = 1: there is no host memory.*--host-memory"):
        decode_plan(plan, executor.limits)


@pytest.mark.parametrize(
    ("changes", "column_name"),
    [
        ({"swap_out_blocks": [1]}, "swap_out_blocks"),
        ({"swap_out_blocks": [0], "swap_out_host_blocks": [1]}, "swap_out_blocks"),
        ({"swap_out_blocks": [40], "swap_out_host_blocks": [1]}, "swap_out_blocks"),
        ({"swap_out_blocks": [1], "swap_out_host_blocks": [12]}, "swap_out_host_blocks"),
        ({"swap_out_blocks": [1], "swap_out_host_blocks": [-1]}, "swap_out_host_blocks"),
        ({"swap_out_blocks": [1, 2], "swap_out_host_blocks": [3, 3]}, "swap_out_host_blocks"),
        ({"swap_in_blocks": [1, 2], "swap_in_host_blocks": [3]}, "swap_in_blocks"),
        ({"swap_in_blocks": [2, 2], "swap_in_host_blocks": [3, 4]}, "swap_in_blocks"),
        ({"swap_in_blocks": [2], "swap_in_host_blocks": [99]}, "swap_in_host_blocks"),
    ],
)
def test_copies_that_cannot_be_are_named(swapping, changes, column_name):
    swapping.add("a", [5, 6, 7])
    plan = swapping.plan([("a", 3)])
    for name, values in changes.items():
        setattr(plan, name, int32(values))
    with pytest.raises(PlanError, match=f"{column_name} = "):
        decode_plan(plan, swapping.limits)
