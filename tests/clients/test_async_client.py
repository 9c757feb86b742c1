"""The asynchronous client: what differs from the synchronous one is how it waits and how it ends."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from fake_server import FakeInference, abort, admitted, delta, failing, finished
from google.rpc import code_pb2

from tidegate.inference.v1 import inference_pb2 as pb
from tidegate_client import (
    AsyncClient,
    DeadlineExceededError,
    Delta,
    InvalidRequestError,
    NotFoundError,
    RequestCancelledError,
    RetryPolicy,
    ServerError,
    UnavailableError,
)

QUICK = RetryPolicy(max_attempts=3, initial_backoff_s=0.01, max_backoff_s=0.02)


@pytest.fixture
async def async_client(server: FakeInference) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address, retry=QUICK) as client:
        yield client


async def ended(server: FakeInference) -> bool:
    return await asyncio.to_thread(server.call_ended.wait, 10)


async def test_a_stream_yields_deltas_and_then_has_its_text(async_client: AsyncClient) -> None:
    async with async_client.generate("Once upon", max_tokens=2) as stream:
        assert [d async for d in stream] == [Delta(0, "Hello", (10,), ()), Delta(0, " world", (11,), ())]
    assert stream.text == "Hello world"
    assert stream.finished.usage.output_tokens == 2


async def test_many_streams_run_at_once(async_client: AsyncClient, server: FakeInference) -> None:
    generations = await asyncio.gather(*(async_client.chat(f"{i}").result() for i in range(6)))
    assert [generation.text for generation in generations] == ["Hello world"] * 6
    assert sorted(request.chat.messages[0].content for request in server.requests) == list("012345")


async def test_leaving_the_block_cancels_the_request(
    async_client: AsyncClient, server: FakeInference
) -> None:
    server.answer = server.hang
    async with async_client.generate("x") as stream:
        assert (await anext(stream)).text == "Hello"
    assert await ended(server)


async def test_dropping_the_stream_cancels_the_request(
    async_client: AsyncClient, server: FakeInference
) -> None:
    server.answer = server.hang
    stream = async_client.generate("x")
    await anext(stream)
    del stream
    gc.collect()
    assert await ended(server)


async def test_after_cancel_the_stream_ends_without_an_error(
    async_client: AsyncClient, server: FakeInference
) -> None:
    server.answer = server.hang
    stream = async_client.generate("x")
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream, None))
    await asyncio.sleep(0.05)
    stream.cancel()
    assert await waiting is None
    with pytest.raises(RequestCancelledError):
        await stream.result()
    assert await ended(server)


async def test_cancelling_the_task_cancels_the_request(
    async_client: AsyncClient, server: FakeInference
) -> None:
    server.answer = server.hang
    task = asyncio.create_task(async_client.generate("x").result())
    assert await asyncio.to_thread(server.call_started.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await ended(server)


async def test_closing_the_client_ends_its_streams(server: FakeInference) -> None:
    server.answer = server.hang
    client = AsyncClient(server.address)
    stream = client.generate("x")
    await anext(stream)
    await client.close()
    with pytest.raises(RequestCancelledError):
        await anext(stream)


async def test_errors_carry_their_details(async_client: AsyncClient, server: FakeInference) -> None:
    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        abort(context, code_pb2.INVALID_ARGUMENT, "top_p = 0", violations={"sampling.top_p": "above 0"})
        yield

    server.answer = answer
    with pytest.raises(InvalidRequestError) as caught:
        await async_client.generate("x").result()
    assert [(v.field, v.description) for v in caught.value.violations] == [("sampling.top_p", "above 0")]


async def test_unavailable_is_tried_again_before_the_first_event(
    async_client: AsyncClient, server: FakeInference
) -> None:
    server.answer = failing(2)
    assert (await async_client.generate("x").result()).text == "Hello world"
    assert len(server.requests) == 3
    server.answer = failing(3)
    with pytest.raises(UnavailableError):
        await async_client.generate("x").result()
    assert len(server.requests) == 6


async def test_a_stream_that_has_begun_is_never_tried_again(
    async_client: AsyncClient, server: FakeInference
) -> None:
    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield admitted()
        yield delta("Hello", 10)
        abort(context, code_pb2.UNAVAILABLE, "shutting down")

    server.answer = answer
    with pytest.raises(UnavailableError, match="shutting down"):
        await async_client.generate("x").result()
    assert len(server.requests) == 1


async def test_the_deadline_ends_the_stream(async_client: AsyncClient, server: FakeInference) -> None:
    server.answer = server.hang
    with pytest.raises(DeadlineExceededError):
        await async_client.generate("x", timeout_s=0.2).result()


async def test_a_clean_end_without_an_end_of_every_candidate_is_an_error(async_client: AsyncClient) -> None:
    with pytest.raises(ServerError, match="1 of 2 candidates finished"):
        await async_client.generate("x", n=2).result()


async def test_calls_with_one_answer(async_client: AsyncClient) -> None:
    assert (await async_client.tokenize("abc")).token_ids == (97, 98, 99)
    assert await async_client.detokenize([97, 98]) == "ab"
    assert [model.name for model in await async_client.list_models()] == ["a", "b"]
    assert await async_client.cancel("r1") is True
    with pytest.raises(NotFoundError):
        await async_client.tokenize("abc", model="other")


async def test_a_calls_own_metadata_is_sent_with_it(async_client: AsyncClient, server: FakeInference) -> None:
    mine = [("authorization", "Bearer mine")]
    await async_client.list_models(metadata=mine)  # two pages
    await async_client.tokenize("x", metadata=mine)
    await async_client.detokenize([65], metadata=mine)
    await async_client.cancel("r1", metadata=mine)
    assert [m["authorization"] for m in server.metadata] == ["Bearer mine"] * 5


async def test_each_candidates_end_can_be_asked_for(async_client: AsyncClient, server: FakeInference) -> None:
    server.answer = lambda request, context: iter(
        [admitted(), delta("a", 1), finished(1, output_tokens=7), delta("b", 2), finished(0, output_tokens=2)]
    )
    stream = async_client.generate("x", n=2)
    await anext(stream)
    assert stream.finished_at(1) is None
    await anext(stream)
    assert stream.finished_at(0) is None
    assert stream.finished_at(1).usage.output_tokens == 7
    await stream.result()
    assert stream.finished_at(0).usage.output_tokens == 2
