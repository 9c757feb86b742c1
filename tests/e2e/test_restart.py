"""kill -9 of the scheduler under load, with a real model: every client gets what it would have got anyway."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from e2e.chaos.processes import SchedulerProcess, WorkerProcess, free_port
from e2e.conftest import VOCAB_SIZE
from e2e.deployment import random_prompts

from tidegate_client import AsyncClient, RetryPolicy

NUM_STREAMS = 16
MAX_TOKENS = 150
# Blocks are scarce, so that preemptions come on top.
WORKER = ("--num-blocks", "160", "--max-num-seqs", "12", "--max-num-batched-tokens", "256")
PATIENT = RetryPolicy(max_attempts=1000, initial_backoff_s=0.05, max_backoff_s=0.3)


class Scheduler(SchedulerProcess):
    """A scheduler that comes back at the same port."""

    def __init__(self, folder: Path, port: int, frontends: int) -> None:
        flags = (
            "--journal",
            str(folder / "journal.sqlite3"),
            "--drain-window",
            "0",
            "--queue-timeout",
            "600",
        )
        if frontends:
            flags += ("--frontends", str(frontends), "--admin-port", str(free_port()))
        super().__init__(folder, flags)
        self._flags = [*self._flags, "--port", str(port)]

    async def start(self) -> None:
        """Starts it, and waits until it listens."""
        self._ready_file.unlink(missing_ok=True)
        await super().start()


def options(number: int) -> dict[str, object]:
    """Every other stream is greedy; some have two candidates, and penalties that need all earlier tokens."""
    sampling = {"temperature": 0.0} if number % 2 else {"temperature": 0.9, "seed": number}
    return {
        **sampling,
        "n": 2 if number % 5 == 0 else 1,
        "repetition_penalty": 1.2 if number % 3 == 0 else 1.0,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
    }


@pytest.mark.slow
@pytest.mark.parametrize("frontends", [0, 2])
async def test_no_stream_notices_that_the_scheduler_was_killed(tiny_model, tmp_path, frontends):
    prompts = random_prompts(NUM_STREAMS, 60, VOCAB_SIZE)
    scheduler = Scheduler(tmp_path, free_port(), frontends)
    await scheduler.start()
    flags = ("--model", str(tiny_model("llama")), "--dtype", "float32", "--device", "cpu", "--threads", "1")
    worker = WorkerProcess(
        tmp_path / "worker.log", free_port(), (*flags, *WORKER, "--scheduler", scheduler.admin_address)
    )
    worker.start()
    try:
        async with AsyncClient(scheduler.address, retry=PATIENT) as client:

            def start(number: int):
                return client.generate(prompts[number], **options(number))

            calm = [start(number) for number in range(NUM_STREAMS)]
            await asyncio.gather(*(stream.result() for stream in calm))
            streams = [start(number) for number in range(NUM_STREAMS)]
            results = [asyncio.create_task(stream.result()) for stream in streams]
            for share in (0.1, 0.5):
                async with asyncio.timeout(60):
                    while num_tokens(streams) < share * num_tokens(calm):  # noqa: ASYNC110
                        await asyncio.sleep(0.005)
                assert not all(result.done() for result in results)
                await scheduler.close()
                await scheduler.start()
            await asyncio.wait_for(asyncio.gather(*results), 120)
    finally:
        await worker.kill()
        await scheduler.close()
    for expected, stream in zip(calm, streams, strict=True):
        assert [g.token_ids for g in stream.generations()] == [g.token_ids for g in expected.generations()]
    restored = [event for event in scheduler.events() if event["event"] == "request_restored"]
    assert len(restored) >= NUM_STREAMS // 2


def num_tokens(streams) -> int:
    """Tokens that have come on all streams."""
    return sum(entry.num_tokens for stream in streams for entry in stream.received())
