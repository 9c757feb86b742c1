"""The synchronous client: streams, cancellation, errors, retries, deadlines."""

import gc
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest
from fake_server import FakeInference, abort, admitted, delta, failing, finished, hello
from google.rpc import code_pb2

from tidegate.inference.v1 import inference_pb2 as pb
from tidegate_client import (
    AdminClient,
    Admitted,
    ChatMessage,
    Client,
    DeadlineExceededError,
    Delta,
    FinishReason,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestCancelledError,
    RetryPolicy,
    ServerError,
    UnavailableError,
)

QUICK = RetryPolicy(max_attempts=3, initial_backoff_s=0.01, max_backoff_s=0.02)


def test_a_stream_yields_deltas_and_then_has_text_usage_and_timings(client: Client) -> None:
    with client.generate("Once upon", max_tokens=2) as stream:
        assert list(stream) == [Delta(0, "Hello", (10,), ()), Delta(0, " world", (11,), ())]
    assert stream.text == "Hello world"
    assert stream.admitted == Admitted("r1", "fake", 5, 2)
    assert stream.finished.reason is FinishReason.LENGTH
    assert stream.finished.stop is None
    usage, timings = stream.finished.usage, stream.finished.timings
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens, usage.preemptions) == (5, 2, 2, 1)
    assert (timings.queue_s, timings.prefill_s, timings.decode_s) == (0.005, 0.02, 0.5)
    assert (timings.preempted_s, timings.time_to_first_token_s) == (0.0, 0.025)


def test_result_reads_the_rest_of_the_stream(client: Client) -> None:
    stream = client.chat("Hi")
    assert next(stream).text == "Hello"
    generation = stream.result()
    assert (generation.text, generation.token_ids) == ("Hello world", (10, 11))
    assert generation.finished is stream.finished


def test_candidates_are_kept_apart(client: Client, server: FakeInference) -> None:
    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield admitted()
        yield delta("a", 1, index=0)
        yield delta("b", 2, index=1)
        yield finished(index=1, reason=pb.FINISH_REASON_STOP)
        yield delta("c", 3, index=0)
        yield finished(index=0)

    server.answer = answer
    stream = client.generate("x", n=2)
    assert [d.index for d in stream] == [0, 1, 0]
    first, second = stream.generations()
    assert (first.text, first.token_ids, first.finished.reason) == ("ac", (1, 3), FinishReason.LENGTH)
    assert (second.text, second.token_ids, second.finished.reason) == ("b", (2,), FinishReason.STOP)


def test_logprobs_and_what_stopped_it_are_read(client: Client, server: FakeInference) -> None:
    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        event = delta("a", 1)
        entry = event.delta.logprobs.add()
        entry.sampled.MergeFrom(pb.TokenLogprob(token_id=1, logprob=-0.5, text="a"))
        entry.top.add(token_id=2, logprob=-0.25, text="b")
        yield event
        end = finished(reason=pb.FINISH_REASON_STOP)
        end.finished.stop_string = "\n\n"
        yield end

    server.answer = answer
    generation = client.generate("x", logprobs=1, stop="\n\n").result()
    (entry,) = generation.logprobs
    assert (entry.sampled.token_id, entry.sampled.logprob, entry.sampled.text) == (1, -0.5, "a")
    assert [(top.token_id, top.logprob, top.text) for top in entry.top] == [(2, -0.25, "b")]
    assert generation.finished.stop == "\n\n"
    assert server.requests[0].output.logprobs == 1


def test_every_option_arrives_where_the_protocol_has_it(client: Client, server: FakeInference) -> None:
    client.generate(
        [1, 2, 3],
        model="fake",
        request_id="mine",
        temperature=0.0,
        top_k=5,
        top_p=0.5,
        min_p=0.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        seed=2**63,
        logit_bias={7: -100.0},
        max_tokens=9,
        min_tokens=1,
        stop=["a", "b"],
        stop_token_ids=[4],
        ignore_eos=True,
        text=False,
        token_ids=False,
        logprobs=0,
        skip_special_tokens=False,
        n=1,
        priority=-3,
        queue_timeout_s=1.5,
        tenant="t",
        cache_salt="s",
        adapter="",
        timeout_s=20.0,
        metadata=[("traceparent", "00-1-2-01")],
    ).result()
    expected = pb.GenerateRequest(
        model="fake",
        request_id="mine",
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        sampling=pb.SamplingParams(
            temperature=0.0,
            top_k=5,
            top_p=0.5,
            min_p=0.25,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.5,
            seed=2**63,
            logit_bias={7: -100.0},
        ),
        stopping=pb.StoppingParams(
            max_tokens=9, min_tokens=1, stop=["a", "b"], stop_token_ids=[4], ignore_eos=True
        ),
        output=pb.OutputParams(text=False, token_ids=False, logprobs=0, skip_special_tokens=False),
        n=1,
        priority=-3,
        tenant="t",
        cache_salt="s",
    )
    expected.queue_timeout.FromMilliseconds(1500)
    assert server.requests == [expected]
    assert server.metadata[0]["traceparent"] == "00-1-2-01"
    assert 10 < server.timeouts_s[0] <= 20


def test_without_options_the_request_says_nothing_but_the_prompt(
    client: Client, server: FakeInference
) -> None:
    client.generate("Hi", seed=None).result()
    client.chat([{"role": "system", "content": "Be brief."}, ChatMessage("user", "Hi")]).result()
    plain, chat = server.requests
    assert plain == pb.GenerateRequest(text="Hi")
    turns = [pb.ChatMessage(role="system", content="Be brief."), pb.ChatMessage(role="user", content="Hi")]
    assert chat == pb.GenerateRequest(chat=pb.ChatMessages(messages=turns))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"top_k": -1}, "sampling.top_k"),
        ({"max_tokens": 2.5}, "stopping.max_tokens"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"stop": [1]}, "stopping.stop"),
        ({"stop_token_ids": [-1]}, "stopping.stop_token_ids"),
        ({"logit_bias": {-1: 0.0}}, "sampling.logit_bias"),
        ({"queue_timeout_s": float("inf")}, "queue_timeout_s"),
        ({"tenant": "\ud800"}, "tenant"),
    ],
)
def test_what_a_message_cannot_hold_is_refused_with_its_field(
    client: Client, options: dict, field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.generate("x", **options)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert caught.value.message.startswith(f"{field} = ")


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "user"}], "chat.messages[0]"),
        ([{"role": "user", "content": 5}], "chat.messages[0].content"),
        ([ChatMessage("user", "\ud800")], "chat.messages[0].content"),
    ],
)
def test_a_malformed_message_is_refused_with_its_place(client: Client, messages: list, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.chat(messages)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_an_unknown_option_is_named_with_the_nearest_known_one(client: Client) -> None:
    with pytest.raises(TypeError, match="no option 'temprature'; did you mean temperature"):
        client.generate("x", temprature=1.0)


def test_leaving_the_block_cancels_the_request(client: Client, server: FakeInference) -> None:
    server.answer = server.hang
    with client.generate("x") as stream:
        next(stream)
        assert not server.call_ended.is_set()
    assert server.call_ended.wait(timeout=10)


def test_dropping_the_stream_cancels_the_request(client: Client, server: FakeInference) -> None:
    server.answer = server.hang
    stream = client.generate("x")
    next(stream)
    del stream
    gc.collect()
    assert server.call_ended.wait(timeout=10)


def test_closing_the_client_ends_its_streams(server: FakeInference) -> None:
    server.answer = server.hang
    client = Client(server.address)
    stream = client.generate("x")
    next(stream)
    client.close()
    with pytest.raises(RequestCancelledError):
        next(stream)
    assert server.call_ended.wait(timeout=10)


def test_after_cancel_the_stream_ends_without_an_error_and_has_no_result(
    client: Client, server: FakeInference
) -> None:
    server.answer = server.hang
    stream = client.generate("x")
    next(stream)
    stream.cancel()
    assert list(stream) == []
    assert (stream.text, stream.finished) == ("Hello", None)
    with pytest.raises(RequestCancelledError):
        stream.result()


def test_an_error_carries_reason_numbers_and_fields(client: Client, server: FakeInference) -> None:
    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        abort(
            context,
            code_pb2.INVALID_ARGUMENT,
            "the prompt has 9000 tokens; the limit is 8192",
            reason="CONTEXT_TOO_LONG",
            metadata={"tokens": "9000", "limit": "8192"},
            violations={"prompt": "9000 tokens, at most 8192"},
        )
        yield

    server.answer = answer
    with pytest.raises(InvalidRequestError) as caught:
        client.generate("x").result()
    error = caught.value
    assert str(error) == "INVALID_ARGUMENT: the prompt has 9000 tokens; the limit is 8192"
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "CONTEXT_TOO_LONG")
    assert error.metadata == {"tokens": "9000", "limit": "8192"}
    assert [(v.field, v.description) for v in error.violations] == [("prompt", "9000 tokens, at most 8192")]
    assert len(server.requests) == 1


def test_unavailable_is_tried_again_before_the_first_event(server: FakeInference) -> None:
    server.answer = failing(2)
    with Client(server.address, retry=QUICK) as client:
        assert client.generate("x").result().text == "Hello world"
    assert len(server.requests) == 3


def test_attempts_are_bounded(server: FakeInference) -> None:
    server.answer = failing(3, reason="NO_WORKER")
    with Client(server.address, retry=QUICK) as client, pytest.raises(UnavailableError) as caught:
        client.generate("x").result()
    assert caught.value.reason == "NO_WORKER"
    assert len(server.requests) == 3


def test_a_full_queue_is_tried_again_only_if_it_names_a_time(server: FakeInference) -> None:
    with Client(server.address, retry=QUICK) as client:
        server.answer = failing(1, code_pb2.RESOURCE_EXHAUSTED, reason="QUEUE_FULL", retry_after_ms=20)
        assert client.generate("x").result().text == "Hello world"
        assert len(server.requests) == 2
        server.answer = failing(1, code_pb2.RESOURCE_EXHAUSTED, reason="QUEUE_FULL")
        with pytest.raises(OverloadedError) as caught:
            client.generate("x").result()
        assert (caught.value.reason, caught.value.retry_after_s) == ("QUEUE_FULL", None)
        assert len(server.requests) == 3


def test_a_time_longer_than_the_policy_or_the_deadline_allows_is_not_waited_for(
    server: FakeInference,
) -> None:
    server.answer = failing(9, code_pb2.RESOURCE_EXHAUSTED, retry_after_ms=60_000)
    with Client(server.address) as client, pytest.raises(OverloadedError) as caught:
        client.generate("x").result()
    assert caught.value.retry_after_s == 60.0
    patient = RetryPolicy(max_retry_after_s=120.0)
    with Client(server.address, retry=patient, timeout_s=30.0) as client, pytest.raises(OverloadedError):
        client.generate("x").result()
    assert len(server.requests) == 2


def test_without_a_policy_nothing_is_tried_again(server: FakeInference) -> None:
    server.answer = failing(1)
    with Client(server.address, retry=None) as client, pytest.raises(UnavailableError):
        client.generate("x").result()
    assert len(server.requests) == 1


def test_a_stream_that_has_begun_is_never_tried_again(server: FakeInference) -> None:
    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield admitted()
        yield delta("Hello", 10)
        abort(context, code_pb2.UNAVAILABLE, "shutting down")

    server.answer = answer
    with Client(server.address, retry=QUICK) as client:
        stream = client.generate("x")
        with pytest.raises(UnavailableError, match="shutting down"):
            stream.result()
    assert stream.text == "Hello"
    assert len(server.requests) == 1


def test_the_deadline_ends_the_stream(client: Client, server: FakeInference) -> None:
    server.answer = server.hang
    stream = client.generate("x", timeout_s=0.2)
    with pytest.raises(DeadlineExceededError):
        stream.result()
    assert stream.text == "Hello"


def test_a_clean_end_without_an_end_of_every_candidate_is_an_error(
    client: Client, server: FakeInference
) -> None:
    server.answer = hello
    with pytest.raises(ServerError, match="1 of 2 candidates finished"):
        client.generate("x", n=2).result()


def test_nobody_at_the_address_is_unavailable() -> None:
    with Client("127.0.0.1:1", retry=QUICK) as client, pytest.raises(UnavailableError):
        client.generate("x").result()


def test_calls_with_one_answer(client: Client, server: FakeInference) -> None:
    assert client.tokenize("abc").token_ids == (97, 98, 99)
    assert client.tokenize([ChatMessage("user", "ab")]).max_model_len == 512
    assert client.detokenize([97, 98]) == "ab"
    assert [model.name for model in client.list_models()] == ["a", "b"]
    assert client.cancel("r1") is True
    assert client.cancel("other") is False
    assert server.cancelled_ids == ["r1", "other"]
    with pytest.raises(NotFoundError, match="no model 'other'") as caught:
        client.tokenize("abc", model="other")
    assert caught.value.reason == "MODEL_NOT_FOUND"


def test_the_address_comes_from_the_environment(
    server: FakeInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_ADDRESS", server.address)
    with Client() as client:
        assert client.detokenize([97]) == "a"


def test_admins_see_state_and_requests(server: FakeInference) -> None:
    with AdminClient(server.address) as admin:
        assert admin.state().running_requests == 1
        assert [request.request_id for request in admin.requests()] == ["r1", "r2"]
        assert admin.drain_worker("w1") == 3
        assert admin.reset_prefix_cache() == 7
        with pytest.raises(NotFoundError, match="no worker 'w9'"):
            admin.drain_worker("w9")


def test_importing_the_client_is_light() -> None:
    heavy = ["torch", "transformers", "numpy", "scheduler_service", "worker_service", "typer", "rich"]
    script = f"import sys, tidegate_client; print([name for name in {heavy} if name in sys.modules])"
    printed = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout
    assert printed == "[]\n"
