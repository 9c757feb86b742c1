"""Refusals and failures of the scheduler, through the gateway: OpenAI's statuses, codes and retry times."""

import openai
import pytest
from fake_server import FakeInference, abort, admitted, delta, finished, hello
from google.rpc import code_pb2
from running_gateway import RunningGateway

from tidegate.inference.v1 import inference_pb2 as pb

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def server(shared_gateway: tuple[FakeInference, RunningGateway]) -> FakeInference:
    shared_gateway[0].reset()
    return shared_gateway[0]


@pytest.fixture
def gateway(shared_gateway: tuple[FakeInference, RunningGateway], server: FakeInference) -> RunningGateway:
    return shared_gateway[1]


@pytest.mark.parametrize(
    ("code", "reason", "status", "kind"),
    [
        (code_pb2.INVALID_ARGUMENT, "INVALID_REQUEST", 400, openai.BadRequestError),
        (code_pb2.UNAUTHENTICATED, "MISSING_TOKEN", 401, openai.AuthenticationError),
        (code_pb2.PERMISSION_DENIED, "TENANT_MISMATCH", 403, openai.PermissionDeniedError),
        (code_pb2.NOT_FOUND, "MODEL_NOT_FOUND", 404, openai.NotFoundError),
        (code_pb2.ALREADY_EXISTS, "REQUEST_ID_IN_USE", 409, openai.ConflictError),
        (code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL", 429, openai.RateLimitError),
        (code_pb2.CANCELLED, "", 499, openai.APIStatusError),
        (code_pb2.INTERNAL, "INTERNAL", 500, openai.InternalServerError),
        (code_pb2.UNAVAILABLE, "DRAINING", 503, openai.InternalServerError),
        (code_pb2.DEADLINE_EXCEEDED, "QUEUE_TIMEOUT", 503, openai.InternalServerError),
        (code_pb2.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", 504, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_each_refusal_has_its_status(
    openai_client: openai.OpenAI,
    server: FakeInference,
    code: int,
    reason: str,
    status: int,
    kind: type[openai.APIStatusError],
    streams: bool,
) -> None:
    server.answer = lambda request, context: abort(context, code, "these numbers: 5 > 4", reason=reason)
    with pytest.raises(kind) as caught:
        openai_client.chat.completions.create(model="fake", messages=HI, stream=streams)
    assert caught.value.status_code == status
    assert caught.value.body["message"] == "these numbers: 5 > 4"
    assert caught.value.param == ("model" if reason == "MODEL_NOT_FOUND" else None)


@pytest.mark.parametrize("streams", [False, True])
def test_a_full_queue_says_when_to_come_back(
    openai_client: openai.OpenAI, server: FakeInference, streams: bool
) -> None:
    server.answer = lambda request, context: abort(
        context, code_pb2.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL", retry_after_ms=2250
    )
    with pytest.raises(openai.RateLimitError) as caught:
        openai_client.completions.create(model="fake", prompt="x", stream=streams)
    headers = caught.value.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("3", "2250")
    assert caught.value.code == "rate_limit_exceeded"


def test_the_clients_own_retry_comes_back_when_it_was_told(
    gateway: RunningGateway, server: FakeInference
) -> None:
    calls = iter([1])

    def answer(request, context):
        if next(calls, None):
            abort(context, code_pb2.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL", retry_after_ms=20)
        yield from hello(request, context)

    server.answer = answer
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=1) as client:
        assert client.completions.create(model="fake", prompt="x").choices[0].text == "Hello world"
    assert len(server.requests) == 2


def test_a_context_that_is_too_long_has_openais_code_and_parameter(
    openai_client: openai.OpenAI, server: FakeInference
) -> None:
    server.answer = lambda request, context: abort(
        context,
        code_pb2.INVALID_ARGUMENT,
        "too long",
        reason="CONTEXT_TOO_LONG",
        violations={"stopping.max_tokens": "too long"},
    )
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(model="fake", messages=HI)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")


def test_a_failure_after_the_stream_began_is_its_last_event(
    openai_client: openai.OpenAI, server: FakeInference
) -> None:
    def answer(request, context):
        yield admitted()
        yield delta("Hello", 1)
        abort(context, code_pb2.INTERNAL, "incident 42", reason="INTERNAL")

    server.answer = answer
    texts = []
    with pytest.raises(openai.APIError, match="incident 42"):
        stream = openai_client.completions.create(model="fake", prompt="x", stream=True)
        texts.extend(chunk.choices[0].text for chunk in stream)
    assert texts == ["Hello"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_that_was_cancelled_by_name_is_an_error(
    openai_client: openai.OpenAI, server: FakeInference, streams: bool
) -> None:
    def answer(request, context):
        yield admitted()
        yield finished(reason=pb.FINISH_REASON_CANCELLED)

    server.answer = answer
    with pytest.raises(openai.APIStatusError) as caught:
        openai_client.completions.create(model="fake", prompt="x", stream=streams)
    assert caught.value.status_code == 499


def test_one_failing_prompt_of_several_fails_all(openai_client: openai.OpenAI, server: FakeInference) -> None:
    def answer(request, context):
        if request.text == "bad":
            abort(context, code_pb2.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL")
        yield from server.hang(request, context)

    server.answer = answer
    with pytest.raises(openai.RateLimitError):
        openai_client.completions.create(model="fake", prompt=["good", "bad"])
