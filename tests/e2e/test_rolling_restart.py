"""A rolling restart: three workers replaced one after the other under load, and no client notices."""

from __future__ import annotations

import asyncio

from e2e.chaos.cluster import launch, restart
from e2e.chaos.load import Load, mixed_cases, undisturbed
from e2e.conftest import VOCAB_SIZE

WORKER = {"num_blocks": 400, "max_num_seqs": 24, "max_num_batched_tokens": 256, "drain_timeout_s": 30}


async def test_a_rolling_restart_loses_no_token(tiny_model, tmp_path):
    cases = mixed_cases(48, VOCAB_SIZE, seed=2)
    async with launch(tmp_path, tiny_model("llama"), 3, WORKER) as cluster:
        cases, expected = await undisturbed(cluster.client, cases)
        load = Load(cluster.client, cases, expected)
        running = asyncio.create_task(load.run(32))
        for node in cluster.nodes:
            await cluster.until(lambda state: all(w.running_requests for w in state.workers))
            await restart(cluster, node)
        load.stop.set()
        await running
        assert load.wrong == []
        assert load.finished >= 32
        state = await cluster.check_empty()
        assert state.counters.requests_moved > 0
        assert state.counters.requests_failed == 0
