"""One client, several schedulers: they take turns, the living serve, a stream goes on where its own is."""

import asyncio
from collections.abc import Callable, Iterator

import grpc
import pytest
from fake_server import FakeInference, abort, admitted, delta, finished
from google.rpc import code_pb2

from tidegate.inference.v1 import inference_pb2 as pb
from tidegate_client import AsyncClient, Client, InvalidRequestError, RetryPolicy, Tls, UnavailableError

QUICK = RetryPolicy(max_attempts=5, initial_backoff_s=0.01, max_backoff_s=0.02, reattach_s=5.0)

Generate = Callable[[int], list[str]]


@pytest.fixture
def servers() -> Iterator[tuple[FakeInference, FakeInference]]:
    pair = FakeInference(), FakeInference()
    yield pair
    for fake in pair:
        fake.call_ended.set()
        fake.stop()


def addresses(servers: tuple[FakeInference, ...]) -> str:
    return ",".join(fake.address.replace("127.0.0.1", "localhost") for fake in servers)


def until_both_are_connected(servers: tuple[FakeInference, ...], send: Callable[[], object]) -> None:
    for _ in range(1000):
        send()
        if all(fake.requests for fake in servers):
            return
    pytest.fail("one scheduler gets nothing")


def test_they_take_turns(servers: tuple[FakeInference, FakeInference]) -> None:
    with Client(addresses(servers)) as client:
        until_both_are_connected(servers, lambda: client.generate("x").result())
        before = [len(fake.requests) for fake in servers]
        for _ in range(10):
            client.generate("x").result()
        assert [len(fake.requests) - count for fake, count in zip(servers, before, strict=True)] == [5, 5]


def test_they_take_turns_with_the_async_client(servers: tuple[FakeInference, FakeInference]) -> None:
    async def run() -> None:
        async with AsyncClient(addresses(servers)) as client:
            for _ in range(1000):
                await client.generate("x").result()
                if all(fake.requests for fake in servers):
                    return
            pytest.fail("one scheduler gets nothing")

    asyncio.run(run())


def test_the_living_one_serves_alone(servers: tuple[FakeInference, FakeInference]) -> None:
    with Client(addresses(servers), retry=QUICK) as client:
        until_both_are_connected(servers, lambda: client.generate("x").result())
        servers[0].stop()
        before = len(servers[1].requests)
        for _ in range(4):
            assert client.generate("x").result().text == "Hello world"
        assert len(servers[1].requests) == before + 4


def attach_with(server: FakeInference, others: FakeInference) -> None:
    """A stream breaks everywhere; only `server` knows how it goes on."""

    def breaking(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield admitted("r1")
        yield delta("a", 1)
        context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    def rest(request: pb.AttachRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield admitted("r1")
        yield delta("b", 2)
        yield finished()

    def unknown(request: pb.AttachRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        abort(context, code_pb2.NOT_FOUND, "unknown", reason="REQUEST_NOT_FOUND")
        yield finished()

    server.answer = others.answer = breaking
    server.attach_answer, others.attach_answer = rest, unknown


@pytest.mark.parametrize("knowing", [0, 1])
def test_a_broken_stream_goes_on_at_the_one_that_knows_it(
    servers: tuple[FakeInference, FakeInference], knowing: int
) -> None:
    attach_with(servers[knowing], servers[1 - knowing])
    with Client(addresses(servers), retry=QUICK) as client:
        assert client.generate("x").result().token_ids == (1, 2)


def test_a_stream_that_none_knows_ends_with_its_loss(servers: tuple[FakeInference, FakeInference]) -> None:
    attach_with(servers[0], servers[1])
    servers[0].attach_answer = servers[1].attach_answer
    with (
        Client(addresses(servers), retry=RetryPolicy(initial_backoff_s=0.01, reattach_s=0.2)) as client,
        pytest.raises(UnavailableError, match="Socket closed"),
    ):
        client.generate("x").result()


@pytest.mark.parametrize("address", ["a:1,b", "localhost:1,nowhere.invalid:2", "localhost:1,"])
def test_addresses_that_are_none_are_refused(address: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"is not host:port|has no IPv4 address"):
        Client(address)


def test_tls_needs_one_name_for_all() -> None:
    with pytest.raises(InvalidRequestError, match="dns:///NAME:PORT"):
        Client("localhost:1,localhost:2", tls=Tls())


def test_a_token_goes_unencrypted_only_if_all_are_on_this_machine() -> None:
    Client("localhost:1,127.0.0.1:2", token="secret").close()
    with pytest.raises(InvalidRequestError, match="unencrypted"):
        Client("localhost:1,192.0.2.7:2", token="secret")
