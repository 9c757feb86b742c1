"""The whole scheduler service over real gRPC, with workers that sample from a hash: text, limits, leaks."""

import asyncio
import math

import grpc
import pytest
from fake_engine import CHATML
from fake_worker import FakeWorker, expected_tokens
from google.protobuf.duration_pb2 import Duration
from grpc_status import rpc_status
from sample_tokenizers import library_tokenizer, tokenizer_json

from scheduler_service.config import ServiceConfig
from scheduler_service.core.sampling import candidate_seed
from scheduler_service.server import Service
from scheduler_service.telemetry import Telemetry
from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc
from tidegate.worker.v1 import worker_pb2

KIND = "byte_level"


class Stack:
    """A service, its workers and a client."""

    def __init__(self, **options) -> None:
        config = ServiceConfig(port=0, drain_window=0, worker_backoff_max=0.2, **options)
        self.service = Service(config, Telemetry())
        self.engine = self.service.engine
        self.library = library_tokenizer(KIND)
        self.worker: FakeWorker | None = None

    async def start(self) -> None:
        await self.service.start()
        options = [("grpc.max_send_message_length", 16 << 20)]
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.service.port}", options)
        self.stub = pb_grpc.InferenceServiceStub(self.channel)

    async def add_worker(self, **fields) -> FakeWorker:
        files = worker_pb2.TokenizerFiles(tokenizer_json=tokenizer_json(KIND), chat_template=CHATML)
        size = self.library.get_vocab_size()
        self.worker = FakeWorker(vocab_size=size, tokenizer=files, **fields)
        await self.service.fleet.register(await self.worker.start())
        await self.until(lambda: self.engine.ready)
        return self.worker

    async def stop(self) -> None:
        await self.channel.close()
        await self.service.stop(0)
        if self.worker is not None:
            await self.worker.stop()
            assert self.worker.violations == []

    async def until(self, condition) -> None:
        async with asyncio.timeout(15):
            while not condition():  # noqa: ASYNC110 - polled from outside
                await asyncio.sleep(0.005)

    @property
    def blocks_used(self) -> int:
        return sum(worker.blocks_used for worker in self.engine.state().workers)

    async def at_rest(self) -> None:
        """All is free again, and the core is sound."""
        await self.until(lambda: self.blocks_used == 0)
        state = self.engine.state()
        assert (state.running_requests, state.waiting_requests, state.waiting_tokens) == (0, 0, 0)
        assert self.engine.violations() == []

    def outputs(self, prompt: list[int], seed: int, max_tokens: int, index: int = 0) -> list[int]:
        seed = candidate_seed(seed, index)
        return expected_tokens(seed, len(prompt), max_tokens, self.library.get_vocab_size())


@pytest.fixture
async def stack():
    stack = Stack()
    await stack.start()
    await stack.add_worker()
    yield stack
    await stack.stop()


def request(seed=1, max_tokens=20, stop=(), **fields):
    if not {"text", "token_ids", "chat"} & set(fields):
        fields["text"] = "The quick brown fox"
    return pb.GenerateRequest(
        **{
            "sampling": pb.SamplingParams(seed=seed),
            "stopping": pb.StoppingParams(max_tokens=max_tokens, stop=stop),
            **fields,
        }
    )


async def collect(call):
    """Responses, and by candidate text, ids and end."""
    text, ids, ends = {}, {}, {}
    responses = []
    async for response in call:
        responses.append(response)
        kind = response.WhichOneof("event")
        if kind == "delta":
            index = response.delta.index
            assert index not in ends
            text[index] = text.get(index, "") + response.delta.text
            ids[index] = ids.get(index, []) + list(response.delta.token_ids)
        elif kind == "finished":
            assert response.finished.index not in ends
            ends[response.finished.index] = response.finished
    return responses, text, ids, ends


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    error = caught.value

    class View:
        code, details = error.code, error.details

        @staticmethod
        def trailing_metadata():
            return tuple(error.trailing_metadata())

    info = next(packed for packed in rpc_status.from_call(View).details if "ErrorInfo" in packed.type_url)
    return error, info


async def test_text_is_what_decoding_all_tokens_gives(stack):
    prompt = stack.library.encode("The quick brown fox").ids
    for seed in range(5):
        responses, text, ids, ends = await collect(stack.stub.Generate(request(seed, max_tokens=60)))
        assert responses[0].admitted.prompt_tokens == len(prompt)
        assert ids[0] == stack.outputs(prompt, seed, 60)
        assert text[0] == stack.library.decode(ids[0])
        assert (ends[0].reason, ends[0].usage.output_tokens) == (pb.FINISH_REASON_LENGTH, 60)
    await stack.at_rest()


async def test_candidates_each_have_their_own_tokens(stack):
    prompt = stack.library.encode("The quick brown fox").ids
    responses, text, ids, ends = await collect(stack.stub.Generate(request(7, n=4)))
    assert [response.WhichOneof("event") for response in responses].count("admitted") == 1
    assert ids == {index: stack.outputs(prompt, 7, 20, index) for index in range(4)}
    assert text == {index: stack.library.decode(ids[index]) for index in range(4)}
    assert sorted(ends) == [0, 1, 2, 3]
    await stack.at_rest()


async def test_a_stop_string_ends_the_candidate_where_it_is_complete(stack):
    prompt = stack.library.encode("The quick brown fox").ids
    expected = stack.outputs(prompt, 3, 100)
    whole = stack.library.decode(expected)
    windows = (whole[start : start + 4] for start in range(40, len(whole)))
    stop = next(window for window in windows if "\ufffd" not in window)
    _, text, ids, ends = await collect(stack.stub.Generate(request(3, max_tokens=100, stop=[stop])))
    used = next(n for n in range(1, 101) if stop in stack.library.decode(expected[:n]))
    assert text[0] == whole[: whole.index(stop)]
    assert ids[0] == expected[:used]
    assert (ends[0].reason, ends[0].stop_string) == (pb.FINISH_REASON_STOP, stop)
    assert ends[0].usage.output_tokens == used
    await stack.at_rest()


async def test_logprobs_come_with_each_token(stack):
    responses, _, ids, _ = await collect(stack.stub.Generate(request(output=pb.OutputParams(logprobs=2))))
    entries = [entry for response in responses for entry in response.delta.logprobs]
    assert [entry.sampled.token_id for entry in entries] == ids[0]
    assert [entry.sampled.logprob for entry in entries] == [-0.5] * 20
    assert {len(entry.top) for entry in entries} == {2}


async def test_closing_the_stream_frees_its_blocks_by_the_next_step():
    stack = Stack()
    await stack.start()
    worker = await stack.add_worker(step_delay_s=0.02)
    try:
        call = stack.stub.Generate(request(max_tokens=400, n=3))
        async for response in call:
            if response.WhichOneof("event") == "delta":
                break
        assert stack.blocks_used > 0
        call.cancel()
        await stack.until(lambda: stack.blocks_used == 0)
        num_plans = len(worker.plans)
        await asyncio.sleep(0.2)
        assert len(worker.plans) <= num_plans + 2  # what was in flight, and the release
        await stack.at_rest()
    finally:
        await stack.stop()


async def test_cancel_by_name_finishes_the_stream():
    stack = Stack()
    await stack.start()
    await stack.add_worker(step_delay_s=0.01)
    try:
        call = stack.stub.Generate(request(max_tokens=400, request_id="x"))
        reader = asyncio.create_task(collect(call))
        await stack.until(lambda: stack.blocks_used > 0)
        assert (await stack.stub.Cancel(pb.CancelRequest(request_id="x"))).found
        _, _, ids, ends = await reader
        assert ends[0].reason == pb.FINISH_REASON_CANCELLED
        assert ends[0].usage.output_tokens >= len(ids.get(0, []))
        await stack.at_rest()
    finally:
        await stack.stop()


BAD = [
    (request(text=""), "INVALID_REQUEST"),
    (request(token_ids=pb.TokenIds(ids=[5] * 600)), "CONTEXT_TOO_LONG"),
    (request(max_tokens=512), "CONTEXT_TOO_LONG"),
    (request(max_tokens=0), "INVALID_REQUEST"),
    (request(sampling=pb.SamplingParams(temperature=-1)), "INVALID_REQUEST"),
    (request(sampling=pb.SamplingParams(temperature=math.nan)), "INVALID_REQUEST"),
    (request(sampling=pb.SamplingParams(top_p=0)), "INVALID_REQUEST"),
    (request(token_ids=pb.TokenIds(ids=[1_000_000])), "INVALID_REQUEST"),
    (request(text="x" * 10_000_000), "INVALID_REQUEST"),
    (request(stop=["s"] * 10_000), "INVALID_REQUEST"),
    (request(model="nope"), "MODEL_NOT_FOUND"),
    (request(adapter="lora"), "INVALID_REQUEST"),
]


async def test_after_every_bad_request_the_service_answers_and_the_core_is_sound(stack):
    from google.rpc import error_details_pb2

    for bad, reason in BAD:
        error, packed = await refused(stack.stub.Generate(bad))
        info = error_details_pb2.ErrorInfo()
        packed.Unpack(info)
        code = grpc.StatusCode.NOT_FOUND if reason == "MODEL_NOT_FOUND" else grpc.StatusCode.INVALID_ARGUMENT
        assert (error.code(), info.reason) == (code, reason)
    raw = stack.channel.unary_stream("/tidegate.inference.v1.InferenceService/Generate")
    error, _ = await refused(raw(b"\x1a\x02\xff\xfe"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    _, _, ids, _ = await collect(stack.stub.Generate(request()))
    assert len(ids[0]) == 20
    await stack.at_rest()


async def test_limits_of_the_queue_and_names_in_use():
    stack = Stack(max_num_queued_reqs=1, max_num_seqs=1, max_num_batched_tokens=64)
    await stack.start()
    await stack.add_worker(step_delay_s=0.01)
    try:
        running = stack.stub.Generate(request(max_tokens=400, request_id="a"))
        await running.read()
        waiting = stack.stub.Generate(request(max_tokens=5, request_id="b"))
        await waiting.initial_metadata()
        error, _ = await refused(stack.stub.Generate(request(request_id="a")))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        error, _ = await refused(stack.stub.Generate(request(request_id="c")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_num_queued_reqs = 1" in error.details()
        running.cancel()
        _, _, ids, _ = await collect(waiting)
        assert len(ids[0]) == 5
        await stack.at_rest()
    finally:
        await stack.stop()


async def test_without_a_worker_requests_are_unavailable_and_wait_only_for_one_that_was_there():
    stack = Stack()
    await stack.start()
    try:
        error, _ = await refused(stack.stub.Generate(request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert len((await stack.stub.ListModels(pb.ListModelsRequest())).models) == 0
        worker = await stack.add_worker()
        models = (await stack.stub.ListModels(pb.ListModelsRequest())).models
        assert [(model.name, model.ready_workers, model.has_chat_template) for model in models] == [
            ("fake", 1, True)
        ]
        await worker.stop()
        await stack.until(lambda: not stack.engine.ready)
        error, _ = await refused(stack.stub.Generate(request(queue_timeout=Duration(nanos=50_000_000))))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "none is connected" in error.details()
        await stack.at_rest()
    finally:
        await stack.stop()


async def test_a_queue_timeout_with_a_busy_worker_is_deadline_exceeded():
    stack = Stack(max_num_seqs=1, max_num_batched_tokens=64)
    await stack.start()
    await stack.add_worker(step_delay_s=0.01)
    try:
        running = stack.stub.Generate(request(max_tokens=400))
        await running.read()
        error, _ = await refused(stack.stub.Generate(request(queue_timeout=Duration(nanos=50_000_000))))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "queue timeout of 0.05 s" in error.details()
        running.cancel()
        await stack.at_rest()
    finally:
        await stack.stop()
