"""kill -9 of the scheduler under streams: with its journal, a new one goes on with every request."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from engine_harness import VOCAB
from fake_worker import FakeWorker, expected_tokens
from sample_tokenizers import tokenizer_json
from service_process import ServiceProcess

from scheduler_service.config import ServiceConfig
from scheduler_service.core.sampling import candidate_seed
from scheduler_service.server import Service, _open_journal
from scheduler_service.telemetry import Telemetry
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

    async def start(self, ready: bool = True) -> None:
        """Starts it, and waits until it has its worker."""
        (self.folder / "ready.json").unlink(missing_ok=True)
        self.process = ServiceProcess(self.folder, *self._flags)
        await self.process.__aenter__()
        if ready:
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


async def test_streams_go_on_after_a_drain_that_ran_out_of_time(tmp_path, worker):
    scheduler = Restarts(tmp_path, worker, "--drain-window", "0", "--drain-timeout", "0.2")
    await scheduler.start()
    async with AsyncClient(scheduler.address, retry=PATIENT) as client:
        streams = [client.generate(PROMPT, seed=seed, max_tokens=300) for seed in range(4)]
        results = [asyncio.create_task(stream.result()) for stream in streams]
        await until(lambda: min(map(num_tokens, streams)) >= 10, results)
        scheduler.process.process.terminate()
        assert await scheduler.process.exit_status() == 0
        assert has_logged(scheduler, "drain_timed_out")
        assert not any(result.done() for result in results)
        await scheduler.process.channel.close()
        await scheduler.start()
        await asyncio.wait_for(asyncio.gather(*results), 60)
        await scheduler.kill()
    for seed, stream in enumerate(streams):
        (generation,) = stream.generations()
        expected = expected_tokens(candidate_seed(seed, 0), len(PROMPT), 300, VOCAB)
        assert list(generation.token_ids) == expected


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


async def test_a_request_belongs_to_its_tenant_after_a_restart_too(tmp_path, worker):
    tokens = tmp_path / "tokens"
    tokens.write_text("alice-token-0123456789 alice\nbob-token-0123456789 bob\n")
    scheduler = Restarts(tmp_path, worker, "--token-file", str(tokens))
    await scheduler.start()
    try:
        async with AsyncClient(scheduler.address, token="alice-token-0123456789", retry=None) as client:
            stream = client.generate(PROMPT, seed=5, max_tokens=100)
            while stream.admitted is None or num_tokens(stream) < 10:
                await anext(stream)
            await scheduler.kill()
        await scheduler.start()
        attach = pb.AttachRequest(request_id=stream.admitted.request_id, received=stream.received())

        def call(token: str):
            assert scheduler.process is not None
            return scheduler.process.stub.Attach(attach, metadata=[("authorization", f"Bearer {token}")])

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call("bob-token-0123456789").read()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        rest = [t async for r in call("alice-token-0123456789") for t in r.event.delta.token_ids]
        had = [token for delta in stream._deltas[0] for token in delta.token_ids]
        assert had + rest == expected_tokens(5, len(PROMPT), 100, VOCAB)
    finally:
        await scheduler.kill()


async def test_other_weights_do_not_go_on_with_a_request(scheduler, worker):
    assert scheduler.process is not None
    request = pb.GenerateRequest(
        request_id="r", token_ids=pb.TokenIds(ids=PROMPT), stopping=pb.StoppingParams(max_tokens=400)
    )
    await scheduler.process.stub.Generate(request).read()
    await scheduler.kill()
    worker.fingerprint = "fp-2"
    await scheduler.start()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in scheduler.process.stub.Attach(pb.AttachRequest(request_id="r")):
            pass
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert has_logged(scheduler, "request_not_restored")


async def test_a_name_stays_taken_while_its_request_waits_to_be_restored(scheduler, worker):
    assert scheduler.process is not None
    request = pb.GenerateRequest(
        request_id="r", token_ids=pb.TokenIds(ids=PROMPT), stopping=pb.StoppingParams(max_tokens=400)
    )
    await scheduler.process.stub.Generate(request).read()
    await scheduler.kill()
    await scheduler.start()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scheduler.process.stub.Generate(request).read()
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_a_journal_that_cannot_be_read_does_not_keep_the_service_down(tmp_path, worker):
    scheduler = Restarts(tmp_path, worker)
    scheduler.journal.write_bytes(b"something else" * 1000)
    await scheduler.start()
    try:
        assert has_logged(scheduler, "journal_damaged")
        async with AsyncClient(scheduler.address) as client:
            generation = await client.generate(PROMPT, seed=5, max_tokens=10).result()
        assert list(generation.token_ids) == expected_tokens(5, len(PROMPT), 10, VOCAB)
    finally:
        await scheduler.kill()
    assert len(list(tmp_path.glob("journal.sqlite3.damaged-*"))) == 1


async def test_without_a_journal_nothing_is_written_and_nothing_is_found(tmp_path, worker):
    flags = ("--worker", worker.address, "--journal-off", "--port", str(free_port()))
    async with ServiceProcess(tmp_path, *flags) as process:
        call = process.stub.Generate(
            pb.GenerateRequest(
                request_id="r", token_ids=pb.TokenIds(ids=PROMPT), stopping=pb.StoppingParams(max_tokens=5)
            ),
            wait_for_ready=True,
        )
        with contextlib.suppress(grpc.aio.AioRpcError):  # no worker yet
            async for _ in call:
                pass
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await process.stub.Attach(pb.AttachRequest(request_id="r")).read()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert list(tmp_path.glob("*sqlite*")) == []


async def test_epochs_rise_over_a_restart_whose_clock_has_jumped_back(tmp_path, worker, monkeypatch):
    """Workers refuse a stream whose epoch is not higher than the last one's."""

    async def epoch_at(time_ns: int) -> int:
        clock = SimpleNamespace(time_ns=lambda: time_ns)
        monkeypatch.setattr("scheduler_service.workers.time", clock)
        config = ServiceConfig(port=0, worker=(worker.address,), journal=tmp_path / "journal")
        service = Service(config, Telemetry(), _open_journal(config))
        await service.start()
        await until(lambda: service.engine.ready)
        await service.stop()
        return worker.hellos[-1].scheduler_epoch

    now_ns = time.time_ns()
    first = await epoch_at(now_ns)
    assert first == now_ns
    assert await epoch_at(now_ns - 10**15) == first + 1
    assert await epoch_at(now_ns + 10**9) == now_ns + 10**9
