"""A stream whose scheduler ends goes on at the one that follows; both clients do that by themselves."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest
from fake_server import FakeInference, abort, admitted, delta, finished, hello
from google.rpc import code_pb2

from tidegate.inference.v1 import inference_pb2 as pb
from tidegate_client import AsyncClient, Client, RetryPolicy, TidegateError, UnavailableError

QUICK = RetryPolicy(max_attempts=3, initial_backoff_s=0.01, max_backoff_s=0.02, reattach_s=5.0)


@pytest.fixture(params=["sync", "async"])
def generate(request, server: FakeInference):
    """Runs a generation to its end with either client, and returns its stream."""

    async def in_loop(policy: RetryPolicy | None, options):
        async with AsyncClient(server.address, retry=policy) as client:
            stream = client.generate("x", **options)
            await stream.result()
            return stream

    def run(policy: RetryPolicy | None = QUICK, **options):
        if request.param == "async":
            return asyncio.run(in_loop(policy, options))
        with Client(server.address, retry=policy) as client:
            stream = client.generate("x", **options)
            stream.result()
            return stream

    return run


def lose(context: grpc.ServicerContext) -> None:
    """What a client sees of a scheduler that is killed."""
    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def breaking(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    yield admitted("r1")
    yield delta("Grüß", 10, 11)
    lose(context)


def rest(request: pb.AttachRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    yield admitted("r1")
    yield delta(" Gott", 12)
    yield finished(output_tokens=3)


def test_the_rest_comes_after_what_was_received(server, generate):
    server.answer, server.attach_answer = breaking, rest
    stream = generate()
    (generation,) = stream.generations()
    assert (generation.text, generation.token_ids) == ("Grüß Gott", (10, 11, 12))
    (request,) = server.attach_requests
    assert request.request_id == "r1"
    assert list(request.received) == [pb.Received(index=0, num_tokens=2, text_bytes=6)]
    assert len(server.requests) == 1


def test_the_server_is_told_of_candidates_that_have_ended(server, generate):
    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield admitted("r1")
        yield delta("a", 1, index=1)
        yield finished(index=1, output_tokens=1)
        lose(context)

    server.answer, server.attach_answer = answer, rest
    stream = generate(n=2)
    assert list(server.attach_requests[0].received) == [
        pb.Received(index=1, num_tokens=1, text_bytes=1, finished=True)
    ]
    assert [g.text for g in stream.generations()] == [" Gott", "a"]


def test_it_tries_until_the_scheduler_is_back_and_again_after_the_next_loss(server, generate):
    answers = iter(["down", "down", "part", "down", "rest"])

    def attach(request: pb.AttachRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        match next(answers):
            case "down":
                lose(context)
            case "part":
                yield admitted("r1")
                yield delta("!", 20)
                lose(context)
            case _:
                yield from rest(request, context)

    server.answer, server.attach_answer = breaking, attach
    (generation,) = generate().generations()
    assert generation.token_ids == (10, 11, 20, 12)
    assert [r.received[0].num_tokens for r in server.attach_requests] == [2, 2, 2, 3, 3]


def test_a_scheduler_that_still_has_the_old_stream_is_asked_again(server, generate):
    answers = iter([code_pb2.ALREADY_EXISTS])

    def attach(request: pb.AttachRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        code = next(answers, None)
        if code is not None:
            abort(context, code, "in use", reason="REQUEST_ID_IN_USE")
        yield from rest(request, context)

    server.answer, server.attach_answer = breaking, attach
    assert generate().text == "Grüß Gott"


@pytest.mark.parametrize("code", [code_pb2.NOT_FOUND, code_pb2.UNIMPLEMENTED])
def test_a_scheduler_that_does_not_know_the_request_leaves_the_loss(server, generate, code):
    def attach(request: pb.AttachRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        abort(context, code, "unknown")
        yield finished()

    server.answer, server.attach_answer = breaking, attach
    with pytest.raises(UnavailableError, match="Socket closed"):
        generate()
    assert len(server.attach_requests) == 1


def test_a_request_that_was_accepted_and_not_kept_is_sent_again(server, generate):
    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if len(server.requests) == 1:
            context.send_initial_metadata((("tidegate-request-id", "r7"),))
            lose(context)
        yield from hello(request, context)

    def attach(request: pb.AttachRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        abort(context, code_pb2.NOT_FOUND, "unknown")
        yield finished()

    server.answer, server.attach_answer = answer, attach
    assert generate().text == "Hello world"
    assert [request.request_id for request in server.attach_requests] == ["r7"]
    assert len(server.requests) == 2


def test_it_gives_up_in_time(server, generate):
    def attach(request: pb.AttachRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        lose(context)
        yield finished()

    server.answer, server.attach_answer = breaking, attach
    with pytest.raises(UnavailableError, match="Socket closed"):
        generate(RetryPolicy(initial_backoff_s=0.01, max_backoff_s=0.02, reattach_s=0.2))
    assert len(server.attach_requests) > 1


@pytest.mark.parametrize("policy", [None, RetryPolicy(reattach_s=0.0)])
def test_it_can_be_turned_off(server, generate, policy):
    server.answer, server.attach_answer = breaking, rest
    with pytest.raises(UnavailableError):
        generate(policy)
    assert server.attach_requests == []


def test_what_the_scheduler_says_for_itself_is_no_loss(server, generate):
    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield admitted("r1")
        abort(context, code_pb2.UNAVAILABLE, "no worker", reason="NO_WORKER")

    server.answer, server.attach_answer = answer, rest
    with pytest.raises(UnavailableError, match="no worker"):
        generate()
    assert server.attach_requests == []


def test_a_program_can_go_on_by_the_request_s_name(server: FakeInference):
    def answer(request: pb.AttachRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield admitted("r1")
        yield delta(" Gott", 12, index=1)
        yield finished(index=1, output_tokens=3)

    server.attach_answer = answer
    received = [pb.Received(index=0, finished=True), pb.Received(index=1, num_tokens=2, text_bytes=6)]
    with Client(server.address) as client:
        stream = client.attach("r1", received=received, n=2)
        assert [d.text for d in stream] == [" Gott"]
        assert [(g.index, g.text) for g in stream.generations()] == [(1, " Gott")]
    assert server.attach_requests == [pb.AttachRequest(request_id="r1", received=received)]
    server.attach_answer = None
    with Client(server.address) as client, pytest.raises(TidegateError) as caught:
        client.attach("r1").result()
    assert caught.value.code == "UNIMPLEMENTED"
    assert len(server.attach_requests) == 2  # it is never tried again
