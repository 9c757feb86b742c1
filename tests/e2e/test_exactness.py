"""The floor under everything: in fp32, greedy tokens equal transformers', whatever shares the batch."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from e2e.conftest import ARCHITECTURES, VOCAB_SIZE
from e2e.deployment import Deployment, deploy, random_prompts


@dataclass(frozen=True)
class Setting:
    """What shares the batch, and what must have happened for the test to mean something."""

    worker: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    priorities: bool = False
    rounds: int = 1
    preempts: bool = False
    swaps: bool = False
    hits: bool = False


SWAP = {"preemption_mode": "swap", "watermark": 0.0}
SMALL_BUDGET = {"max_num_batched_tokens": 32, "max_num_seqs": 32}
SETTINGS = {
    "at_once": Setting(),
    "chunked": Setting(scheduler=SMALL_BUDGET),
    "block_8": Setting(worker={"block_size": 8}),
    "block_32": Setting(worker={"block_size": 32}),
    "preempted": Setting(preempts=True, scheduler={"watermark": 0.0}),
    "swapped": Setting(preempts=True, swaps=True, scheduler=SWAP, worker={"host_memory": "64MiB"}),
    "cached": Setting(rounds=2, hits=True),
    "forked": Setting(request={"n": 3}),
    "priority": Setting(scheduler={"scheduling_policy": "priority", **SMALL_BUDGET}, priorities=True),
    "depth_1": Setting(scheduler={"pipeline_depth": 1, **SMALL_BUDGET}),
    "depth_3": Setting(
        scheduler={"pipeline_depth": 3, "watermark": 0.0}, worker={"max_in_flight": 3}, preempts=True
    ),
}


async def run_setting(
    deployment: Deployment, setting: Setting, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Sends all prompts at once, as often as the setting says, and compares every candidate."""
    options = [{"priority": -(i % 4)} if setting.priorities else {} for i in range(len(prompts))]
    before = deployment.counters()
    for _ in range(setting.rounds):
        outputs = await deployment.generate_all(
            prompts, options, max_tokens=len(expected[0]), **setting.request
        )
        for prompt, candidates, tokens in zip(prompts, outputs, expected, strict=True):
            assert candidates == [tokens] * len(candidates), f"prompt of {len(prompt)} tokens"
    after = deployment.counters()
    if setting.preempts:
        assert after.preemptions > before.preemptions
    if setting.swaps:
        assert after.preemptions_kept > before.preemptions_kept
        assert after.swapped_out_blocks > before.swapped_out_blocks
        assert after.swapped_in_blocks > before.swapped_in_blocks
    if setting.hits:
        assert after.prefix_hit_tokens > before.prefix_hit_tokens
    deployment.check_empty()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", SETTINGS)
async def test_tiny_models_equal_generate(architecture, name, tiny_model, generated):
    setting = SETTINGS[name]
    folder = tiny_model(architecture)
    prompts = random_prompts(32, 300, VOCAB_SIZE)
    expected = generated(folder, prompts, 16)
    worker = {"num_blocks": 60 if setting.preempts else 2000, **setting.worker}
    async with deploy(folder, worker, setting.scheduler) as deployment:
        await run_setting(deployment, setting, prompts, expected)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in ("at_once", "preempted", "swapped") else pytest.mark.slow)
        for n in SETTINGS
    ],
)
async def test_smollm2_equals_generate(name, smollm2, smollm2_prompts, generated):
    setting = SETTINGS[name]
    expected = generated(smollm2, smollm2_prompts, 12)
    block_size = setting.worker.get("block_size", 16)
    num_blocks = (1700 if setting.preempts else 16000) // block_size
    worker = {"num_blocks": num_blocks, "threads": 2, **setting.worker}
    async with deploy(smollm2, worker, setting.scheduler) as deployment:
        await run_setting(deployment, setting, smollm2_prompts, expected)


@pytest.mark.parametrize(
    ("decoder", "depth", "n", "caching"),
    [
        ("fused", 1, 1, True),
        ("fused", 2, 1, False),
        ("fused", 2, 3, True),
        ("fused", 3, 1, True),
        ("generic", 1, 3, True),
        ("generic", 2, 1, True),
        ("generic", 3, 1, False),
        ("generic", 3, 3, True),
    ],
)
async def test_requests_that_were_swapped_out_equal_generate(
    decoder, depth, n, caching, tiny_model, generated
):
    folder = tiny_model("llama")
    prompts = random_prompts(24, 300, VOCAB_SIZE, seed=7)  # some share their beginning
    expected = generated(folder, prompts, 40)  # long enough to outgrow the memory, whenever prompts arrive
    worker = {"decoder": decoder, "max_in_flight": depth, "num_blocks": 44, "host_memory": "8MiB"}
    scheduler = {"pipeline_depth": depth, "enable_prefix_caching": caching, **SWAP}
    setting = Setting(preempts=True, swaps=True, request={"n": n})
    async with deploy(folder, worker, scheduler) as deployment:
        await run_setting(deployment, setting, prompts, expected)


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_a_worker_that_leaves_moves_its_requests(depth, tiny_model, generated):
    folder = tiny_model("llama")
    prompts = random_prompts(24, 200, VOCAB_SIZE, seed=3)
    expected = generated(folder, prompts, 64)
    worker = {"num_blocks": 1000, "max_in_flight": depth}
    async with deploy(folder, worker, {"pipeline_depth": depth}, num_workers=2) as deployment:
        run = asyncio.create_task(deployment.generate_all(prompts, max_tokens=64))
        await deployment.until(lambda: deployment.counters().output_tokens >= 100)
        await deployment.stop_worker(0)
        assert await run == [[tokens] for tokens in expected]
        assert deployment.counters().requests_moved > 0
        deployment.check_empty()


async def test_seeded_sampling_is_the_same_alone_in_a_batch_and_after_preemption(tiny_model):
    folder = tiny_model("llama")
    prompts = random_prompts(24, 200, VOCAB_SIZE, seed=5)
    seeds = [{"seed": 1000 + i} for i in range(len(prompts))]
    sampling = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "max_tokens": 40, "repetition_penalty": 1.1}
    async with deploy(folder, {"num_blocks": 2000}) as roomy:
        alone = [await roomy.generate(p, **s, **sampling) for p, s in zip(prompts, seeds, strict=True)]
        together = await roomy.generate_all(prompts, seeds, **sampling)
    async with deploy(folder, {"num_blocks": 40}, {"watermark": 0.0}) as tight:
        preempted = await tight.generate_all(prompts, seeds, **sampling)
        assert tight.counters().preemptions > 0
    async with deploy(folder, {"num_blocks": 40, "host_memory": "8MiB"}, SWAP) as tight:
        swapped = await tight.generate_all(prompts, seeds, **sampling)
        assert tight.counters().swapped_in_blocks > 0
    assert together == alone
    assert preempted == alone
    assert swapped == alone
    assert len({tuple(tokens) for (tokens,) in alone}) > 20  # it does sample


async def test_candidates_of_a_seeded_request_differ_and_repeat(tiny_model):
    folder = tiny_model("llama")
    async with deploy(folder, {"num_blocks": 500}) as deployment:
        options = {"temperature": 1.0, "seed": 5, "max_tokens": 24}
        three = await deployment.generate(range(3, 60), n=3, **options)
        assert await deployment.generate(range(3, 60), n=3, **options) == three
        assert await deployment.generate(range(3, 60), n=1, **options) == three[:1]
        assert len({tuple(tokens) for tokens in three}) == 3
        deployment.check_empty()


async def test_closing_a_stream_frees_its_blocks(tiny_model):
    folder = tiny_model("llama")
    async with deploy(folder, {"num_blocks": 500}) as deployment:
        stream = deployment.client.generate(list(range(3, 100)), max_tokens=400, ignore_eos=True)
        async for _ in stream:
            break
        assert deployment.service.engine.state().workers[0].blocks_used > 0
        stream.cancel()
        steps = deployment.counters().steps
        await deployment.until(lambda: not deployment.service.engine.state().workers[0].blocks_used)
        # The cancel reaches the scheduler within the steps in flight; blocks are free with it.
        assert deployment.counters().steps - steps <= 4
        deployment.check_empty()
