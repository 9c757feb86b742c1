"""The journal where frontends are processes of their own: what is true of one process is true of three."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from engine_harness import VOCAB
from fake_worker import FakeWorker, expected_tokens
from sample_tokenizers import tokenizer_json
from test_journal_restart import PATIENT, PROMPT, Restarts, has_logged, num_tokens, until

from scheduler_service.core.sampling import candidate_seed
from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.worker.v1 import worker_pb2
from tidegate_client import AsyncClient, FinishReason

FRONTENDS = ("--frontends", "2", "--admin-port", "0")


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    files = worker_pb2.TokenizerFiles(tokenizer_json=tokenizer_json("byte_level"))
    worker = FakeWorker(step_delay_s=0.005, num_blocks=4097, tokenizer=files)
    await worker.start()
    yield worker
    assert worker.violations == []
    await worker.stop()


@pytest.fixture
async def scheduler(tmp_path: Path, worker: FakeWorker) -> AsyncIterator[Restarts]:
    restarts = Restarts(tmp_path, worker, *FRONTENDS)
    await restarts.start()
    yield restarts
    with contextlib.suppress(ProcessLookupError):
        await restarts.kill()


async def test_every_stream_gets_exactly_its_tokens_through_two_kills(scheduler):
    max_tokens = 300
    async with contextlib.AsyncExitStack() as stack:
        # Connections are spread over the frontends.
        clients = [
            await stack.enter_async_context(AsyncClient(scheduler.address, retry=PATIENT)) for _ in range(8)
        ]
        streams = [
            clients[seed % 8].generate(PROMPT, seed=seed, max_tokens=max_tokens, n=2 if seed % 4 == 0 else 1)
            for seed in range(16)
        ]
        results = [asyncio.create_task(stream.result()) for stream in streams]
        for progress in (10, 50):
            await until(lambda least=progress: min(map(num_tokens, streams)) >= least, results)
            await scheduler.kill()
            await scheduler.start()
        await asyncio.wait_for(asyncio.gather(*results), 60)
    for seed, stream in enumerate(streams):
        for generation in stream.generations():
            own_seed = candidate_seed(seed, generation.index)
            expected = expected_tokens(own_seed, len(PROMPT), max_tokens, VOCAB)
            assert list(generation.token_ids) == expected
            assert generation.finished.reason is FinishReason.LENGTH
            assert generation.finished.usage.output_tokens == max_tokens


async def test_text_and_stop_strings_go_on_across_the_seam(scheduler, worker):
    async with AsyncClient(scheduler.address, retry=PATIENT) as client:
        whole = (await client.generate(PROMPT, seed=3, max_tokens=120).result()).text
        stop = whole[-12:-8]
        before_stop = whole[: whole.index(stop)]
        plain = client.generate(PROMPT, seed=3, max_tokens=120, token_ids=False)
        stopped = client.generate(PROMPT, seed=3, max_tokens=120, stop=stop)
        results = [asyncio.create_task(stream.result()) for stream in (plain, stopped)]
        await until(lambda: min(len(plain.text), len(stopped.text)) >= len(whole) // 8, results)
        await scheduler.kill()
        await scheduler.start()
        plain_end, stopped_end = await asyncio.wait_for(asyncio.gather(*results), 60)
    assert plain_end.text == whole
    assert stopped_end.text == before_stop
    assert (stopped_end.finished.reason, stopped_end.finished.stop) == (FinishReason.STOP, stop)


def request(request_id: str, max_tokens: int, **fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        token_ids=pb.TokenIds(ids=PROMPT),
        sampling=pb.SamplingParams(seed=7),
        stopping=pb.StoppingParams(max_tokens=max_tokens),
        output=pb.OutputParams(text=False, **fields),
    )


async def code_of_attach(scheduler: Restarts, request_id: str) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scheduler.process.stub.Attach(pb.AttachRequest(request_id=request_id)).read()
    return caught.value.code()


async def test_one_stream_has_a_request_and_one_that_was_closed_is_gone(scheduler):
    call = scheduler.process.stub.Generate(request("mine", 400))
    await call.read()
    assert await code_of_attach(scheduler, "mine") is grpc.StatusCode.ALREADY_EXISTS
    call.cancel()
    await until(lambda: has_logged(scheduler, "request_finished"))
    assert await code_of_attach(scheduler, "mine") is grpc.StatusCode.NOT_FOUND
    assert await code_of_attach(scheduler, "never") is grpc.StatusCode.NOT_FOUND


async def test_what_nobody_came_back_for_is_kept_with_its_logprobs(scheduler):
    call = scheduler.process.stub.Generate(request("kept", 60, logprobs=1))
    received: list[int] = []
    while len(received) < 10:
        received += (await call.read()).delta.token_ids
    await scheduler.kill()
    await scheduler.start()
    await until(lambda: has_logged(scheduler, "request_finished"))
    for _ in range(2):
        rest, logprobs, kinds = [], 0, []
        had = [pb.Received(index=0, num_tokens=len(received))]
        async for response in scheduler.process.stub.Attach(
            pb.AttachRequest(request_id="kept", received=had)
        ):
            kinds.append(response.event.WhichOneof("event"))
            rest += response.event.delta.token_ids
            logprobs += len(response.event.delta.logprobs)
        assert received + rest == expected_tokens(7, len(PROMPT), 60, VOCAB)
        assert logprobs == len(rest)
        assert (kinds[0], kinds[-1]) == ("admitted", "finished")


async def test_a_client_that_leaves_again_before_its_request_is_back_does_not_end_it(scheduler, worker):
    """No worker is there after the restart, so that attaching waits."""
    call = scheduler.process.stub.Generate(request("patient", 200))
    received: list[int] = []
    while len(received) < 10:
        received += (await call.read()).delta.token_ids
    address = worker.address
    await worker.stop()
    await scheduler.kill()
    scheduler.process = None
    await scheduler.start(ready=False)
    attach = pb.AttachRequest(request_id="patient", received=[pb.Received(index=0, num_tokens=len(received))])
    leaving = scheduler.process.stub.Attach(attach)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(leaving.read())), 0.3)
    leaving.cancel()
    await worker.start(int(address.rpartition(":")[2]))
    rest = [
        token
        async for response in scheduler.process.stub.Attach(attach)
        for token in response.event.delta.token_ids
    ]
    assert received + rest == expected_tokens(7, len(PROMPT), 200, VOCAB)
