"""Nothing lost: workers are killed, stopped, cut off, slowed, drained and restarted under load.

Every request finishes with the tokens of an undisturbed run, each of them once. TIDEGATE_CHAOS_FAULTS and
TIDEGATE_CHAOS_SEED make the run longer and another one; `make chaos` does that.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest
from e2e.chaos.cluster import launch
from e2e.chaos.faults import Chaos
from e2e.chaos.load import Load, mixed_cases, undisturbed
from e2e.conftest import VOCAB_SIZE

NUM_FAULTS = int(os.environ.get("TIDEGATE_CHAOS_FAULTS", "20"))
SEED = int(os.environ.get("TIDEGATE_CHAOS_SEED", "1"))
NUM_STREAMS = 32
# Growth of the scheduler's memory over the run, in MiB. What it keeps of a fault would add up to more.
MOST_GROWTH_MIB = 24

# Blocks are scarce, so that preemptions come on top.
WORKER = {"num_blocks": 160, "max_num_seqs": 24, "max_num_batched_tokens": 256, "drain_timeout_s": 30}
SCHEDULER = {
    "max_num_seqs": 24,
    "max_num_batched_tokens": 256,
    "worker_step_timeout": 1.0,
    "worker_hello_timeout": 1.0,
    "worker_backoff_max": 0.5,
    "log_level": "warning",
}


@pytest.mark.slow
@pytest.mark.timeout(120 + 10 * NUM_FAULTS)
async def test_chaos_loses_nothing(tiny_model, tmp_path):
    cases = mixed_cases(64, VOCAB_SIZE, SEED)
    async with launch(tmp_path, tiny_model("llama"), 3, WORKER, SCHEDULER, SEED) as cluster:
        cases, expected = await undisturbed(cluster.client, cases)
        assert len({str(outputs) for outputs in expected}) > 50  # outputs differ, so equality means something
        load = Load(cluster.client, cases, expected)
        chaos = Chaos(cluster, random.Random(SEED))
        resident_mib: list[float] = []

        async def look() -> None:
            resident_mib.append(cluster.scheduler.resident_mib())
            assert load.wrong == []
            await cluster.state()

        running = asyncio.create_task(load.run(NUM_STREAMS))
        try:
            await chaos.run(NUM_FAULTS, look)
            await cluster.ready()
            load.stop.set()
            await asyncio.wait_for(running, 120)
        finally:
            running.cancel()
            print(f"seed {SEED}: {load.finished} requests through {len(chaos.history)} faults")
            print(*chaos.history, sep="\n")
        assert load.wrong == []
        state = await cluster.check_empty()
        assert state.counters.requests_failed == 0
        assert state.counters.requests_moved > 0
        warm = resident_mib[len(resident_mib) // 4]
        print(f"moved {state.counters.requests_moved}, preempted {state.counters.preemptions}")
        print(f"scheduler's memory: {warm:.1f} MiB after a quarter, {max(resident_mib):.1f} MiB at most")
        assert max(resident_mib) - warm < MOST_GROWTH_MIB


async def test_a_stopped_worker_is_fenced_and_serves_again(tiny_model, tmp_path):
    cases = mixed_cases(16, VOCAB_SIZE, seed=5)
    async with launch(tmp_path, tiny_model("llama"), 2, WORKER, SCHEDULER) as cluster:
        cases, expected = await undisturbed(cluster.client, cases)
        load = Load(cluster.client, cases, expected)
        running = asyncio.create_task(load.run(16))
        stopped = cluster.nodes[0]
        await cluster.until(lambda state: all(w.running_requests for w in state.workers))
        stopped.process.send(signal.SIGSTOP)
        state = await cluster.until(lambda state: any("step timeout" in w.last_error for w in state.workers))
        assert state.counters.requests_moved > 0
        stopped.process.send(signal.SIGCONT)
        await cluster.ready()
        await cluster.until(lambda state: all(w.running_requests for w in state.workers))
        load.stop.set()
        await running
        assert load.wrong == []
        await cluster.check_empty()
        # The worker has seen two streams, and the second one's epoch is the higher one.
        epochs = [event["epoch"] for event in stopped.process.events() if event["event"] == "stream opened"]
        assert len(epochs) == 2 and epochs[0] < epochs[1]


async def test_requests_outlive_the_loss_of_all_workers(tiny_model, tmp_path):
    cases = mixed_cases(12, VOCAB_SIZE, seed=6)
    async with launch(tmp_path, tiny_model("llama"), 2, WORKER, SCHEDULER) as cluster:
        cases, expected = await undisturbed(cluster.client, cases)
        running = asyncio.gather(*(case.run(cluster.client) for case in cases))
        await cluster.until(lambda state: state.running_requests > 0)
        for node in cluster.nodes:
            await node.process.kill()
        state = await cluster.until(lambda state: not state.running_requests)
        assert state.waiting_requests > 0
        cluster.nodes[1].process.start()
        assert await running == expected
        await cluster.check_empty()
