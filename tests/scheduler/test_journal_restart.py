"""kill -9 of the scheduler under streams: with its journal, a new one goes on with every request."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import grpc
import pytest
from engine_harness import VOCAB
from fake_worker import FakeWorker, expected_tokens
from sample_tokenizers import tokenizer_json
from service_process import ServiceProcess

from scheduler_service.core.sampling import candidate_seed
from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc
from tidegate.worker.v1 import worker_pb2
from tidegate_client import AsyncClient, FinishReason, RetryPolicy, UnavailableError
from tidegate_client.stream import Progress

PROMPT = [1, 2, 3, 4, 5]
PATIENT = RetryPolicy(initial_backoff_s=0.05, max_backoff_s=0.2, reattach_s=60.0)


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(step_delay_s=0.005, num_blocks=4097)
    await worker.start()
    yield worker
    assert worker.violations == []
    await worker.stop()


def free_port() -> int:
    """A TCP port of this machine that nobody uses now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Restarts:
    """A scheduler that is killed and started again at the same port."""

    def __init__(self, folder: Path, worker: FakeWorker, *flags: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.journal = folder / "journal.sqlite3"
        self._flags = (
            *("--worker", worker.address, "--worker-backoff-max", "0.1"),
            *("--journal", str(self.journal), "--port", str(self.port), *flags),
        )
        self.process: ServiceProcess | None = None

    async def start(self) -> None:
        """Starts it."""
        (self.folder / "ready.json").unlink(missing_ok=True)
        self.process = ServiceProcess(self.folder, *self._flags)
        await self.process.__aenter__()
        await until(lambda: has_logged(self, "readiness_changed"))

    async def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.process.send_signal(signal.SIGKILL)
        await self.process.__aexit__()


@pytest.fixture
async def scheduler(tmp_path: Path, worker: FakeWorker) -> AsyncIterator[Restarts]:
    restarts = Restarts(tmp_path, worker)
    await restarts.start()
    yield restarts
    with contextlib.suppress(ProcessLookupError):
        await restarts.kill()


async def until(condition: Callable[[], object], results: Sequence[asyncio.Task] = ()) -> None:
    """Waits until a condition holds. None of `results` may have ended before that."""
    async with asyncio.timeout(30):
        while not condition():
            for result in results:
                assert not result.done(), result.result()
            await asyncio.sleep(0.005)


def num_tokens(stream: Progress) -> int:
    """Tokens of candidate 0 so far."""
    return sum(entry.num_tokens for entry in stream.received() if entry.index == 0)


def has_logged(scheduler: Restarts, event: str) -> bool:
    assert scheduler.process is not None
    return any(entry["event"] == event for entry in scheduler.process.events())


async def test_every_stream_gets_exactly_its_tokens_through_two_kills(scheduler):
    max_tokens = 300
    async with AsyncClient(scheduler.address, retry=PATIENT) as client:
        streams = [
            client.generate(PROMPT, seed=seed, max_tokens=max_tokens, n=2 if seed % 4 == 0 else 1)
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


async def test_a_request_that_nobody_came_back_for_is_finished_and_kept(scheduler):
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        request = pb.GenerateRequest(
            request_id="kept",
            token_ids=pb.TokenIds(ids=PROMPT),
            sampling=pb.SamplingParams(seed=7),
            stopping=pb.StoppingParams(max_tokens=60),
            output=pb.OutputParams(logprobs=1),
        )
        call = stub.Generate(request)
        received: list[int] = []
        while len(received) < 10:
            received += (await call.read()).delta.token_ids
        await scheduler.kill()
    await scheduler.start()
    assert scheduler.process is not None
    await until(lambda: has_logged(scheduler, "request_finished"))
    for _ in range(2):  # it is there for as long as the journal keeps it
        rest, logprobs, kinds = [], 0, []
        attach = pb.AttachRequest(
            request_id="kept", received=[pb.Received(index=0, num_tokens=len(received))]
        )
        async for response in scheduler.process.stub.Attach(attach):
            kinds.append(response.event.WhichOneof("event"))
            rest += response.event.delta.token_ids
            logprobs += len(response.event.delta.logprobs)
        assert received + rest == expected_tokens(7, len(PROMPT), 60, VOCAB)
        assert logprobs == len(rest)
        assert (kinds[0], kinds[-1]) == ("admitted", "finished")


async def test_a_second_stream_is_refused_while_the_first_one_has_the_request(scheduler):
    assert scheduler.process is not None
    stub = scheduler.process.stub
    request = pb.GenerateRequest(
        request_id="mine", token_ids=pb.TokenIds(ids=PROMPT), stopping=pb.StoppingParams(max_tokens=400)
    )
    call = stub.Generate(request)
    await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Attach(pb.AttachRequest(request_id="mine")).read()
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    call.cancel()


async def test_a_client_that_closed_its_stream_finds_nothing(scheduler):
    assert scheduler.process is not None
    stub = scheduler.process.stub
    request = pb.GenerateRequest(
        request_id="gone", token_ids=pb.TokenIds(ids=PROMPT), stopping=pb.StoppingParams(max_tokens=400)
    )
    call = stub.Generate(request)
    await call.read()
    call.cancel()
    await until(lambda: has_logged(scheduler, "request_finished"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Attach(pb.AttachRequest(request_id="gone")).read()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_without_reattaching_the_loss_is_raised(scheduler):
    never = RetryPolicy(reattach_s=0.0)
    async with AsyncClient(scheduler.address, retry=never) as client:
        stream = client.generate(PROMPT, max_tokens=400)
        await anext(stream)
        await scheduler.kill()
        with pytest.raises(UnavailableError):
            await stream.result()


async def test_text_is_right_at_the_seam_and_stop_strings_are_found_across_it(tmp_path):
    """The sample tokenizer's text has characters of several tokens; each token ends a delta."""
    files = worker_pb2.TokenizerFiles(tokenizer_json=tokenizer_json("byte_level"))
    worker = FakeWorker(step_delay_s=0.01, tokenizer=files, vocab_size=400)
    await worker.start()
    scheduler = Restarts(tmp_path, worker)
    await scheduler.start()
    try:
        async with AsyncClient(scheduler.address, retry=PATIENT) as client:
            calm = client.generate(PROMPT, seed=3, max_tokens=80)
            whole = (await calm.result()).text
            stop = whole[-12:-8]
            before_stop = whole[: whole.index(stop)]
            plain = client.generate(PROMPT, seed=3, max_tokens=80, token_ids=False)
            stopped = client.generate(PROMPT, seed=3, max_tokens=80, stop=stop)
            results = [asyncio.create_task(stream.result()) for stream in (plain, stopped)]
            await until(lambda: min(len(plain.text), len(stopped.text)) >= len(whole) // 4, results)
            await scheduler.kill()
            await scheduler.start()
            plain_end, stopped_end = await asyncio.wait_for(asyncio.gather(*results), 60)
            assert plain_end.text == whole
            assert stopped_end.text == before_stop
            assert stopped_end.finished.reason is FinishReason.STOP
            assert stopped_end.finished.stop == stop
    finally:
        await scheduler.kill()
        await worker.stop()
    assert worker.violations == []
