"""InferenceService over real gRPC: streams, statuses with details, cancellation, malformed bytes."""

import asyncio
import math

import grpc
import pytest
from fake_engine import FakeConfig, FakeEngine, logprobs, prompt_ids, served_model
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from sample_tokenizers import library_tokenizer

from scheduler_service.core.admission import RefusalReason, Refused
from scheduler_service.core.events import FinishReason
from scheduler_service.frontend import Frontend
from scheduler_service.inference_api import InferenceApi
from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc

METHOD = "/tidegate.inference.v1.InferenceService/"
TEXT = "The quick brown fox\njumps: 你好 😀."


@pytest.fixture
def engine():
    return FakeEngine(served_model())


@pytest.fixture
async def channel(engine):
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 16 << 20)])
    InferenceApi(Frontend(engine, FakeConfig())).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


@pytest.fixture
def stub(channel):
    return pb_grpc.InferenceServiceStub(channel)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the fake engine has no event for it
            await asyncio.sleep(0.002)


async def submitted(engine, call):
    """Waits until the request has reached the engine."""
    await call.initial_metadata()
    return engine.spec


async def failure(call):
    """Code, details by type name, and the error itself."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "read"):
            async for _ in call:
                pass
        else:
            await call
    error = caught.value
    status = rpc_status.from_call(_SyncView(error))
    details = {}
    for packed in status.details:
        name = packed.type_url.rsplit(".", 1)[-1]
        details[name] = detail = getattr(error_details_pb2, name)()
        packed.Unpack(detail)
    return error, details


class _SyncView:
    """An aio error as rpc_status.from_call wants it."""

    def __init__(self, error):
        self.trailing_metadata = lambda: tuple(error.trailing_metadata())
        self.code = error.code
        self.details = error.details


class TestGenerate:
    async def test_a_stream_carries_all_events(self, engine, stub):
        call = stub.Generate(
            pb.GenerateRequest(text="Hi", request_id="r1", output=pb.OutputParams(logprobs=1))
        )
        await submitted(engine, call)
        ids = library_tokenizer("byte_level").encode(TEXT).ids
        engine.admit(cached_tokens=1)
        engine.push(ids, logprobs=[logprobs(-0.5, [(ids[0], -0.25)]) for _ in ids])
        engine.finish(FinishReason.STOP, stop_token_id=1)
        responses = [response async for response in call]
        kinds = [response.WhichOneof("event") for response in responses]
        assert kinds == ["admitted", "delta", "finished"]
        assert responses[0].admitted == pb.Admitted(
            request_id="r1", model="tiny", prompt_tokens=len(prompt_ids(engine.spec)), cached_tokens=1
        )
        delta = responses[1].delta
        assert (delta.index, delta.text, list(delta.token_ids)) == (0, TEXT, ids)
        assert [entry.sampled.token_id for entry in delta.logprobs] == ids
        assert delta.logprobs[0].sampled == pb.TokenLogprob(token_id=ids[0], logprob=-0.5, text="The")
        assert delta.logprobs[1].top[0] == pb.TokenLogprob(token_id=ids[0], logprob=-0.25, text="The")
        finished = responses[2].finished
        assert (finished.reason, finished.WhichOneof("stop"), finished.stop_token_id) == (
            pb.FINISH_REASON_STOP,
            "stop_token_id",
            1,
        )
        assert finished.usage == pb.Usage(
            prompt_tokens=len(prompt_ids(engine.spec)), cached_tokens=3, output_tokens=len(ids), preemptions=1
        )
        assert finished.timings == pb.Timings(
            queue=Duration(nanos=500_000_000),
            prefill=Duration(seconds=1, nanos=250_000_000),
            decode=Duration(seconds=2),
            preempted=Duration(nanos=125_000_000),
            time_to_first_token=Duration(seconds=1, nanos=750_000_000),
        )
        assert await call.code() is grpc.StatusCode.OK

    async def test_the_request_s_name_comes_with_the_initial_metadata(self, engine, stub):
        call = stub.Generate(pb.GenerateRequest(text="Hi"))
        metadata = dict(await call.initial_metadata())
        assert metadata["tidegate-request-id"] == engine.spec.request_id
        call.cancel()

    async def test_a_stop_string_is_reported(self, engine, stub):
        call = stub.Generate(pb.GenerateRequest(text="Hi", stopping=pb.StoppingParams(stop=["fox"])))
        await submitted(engine, call)
        engine.admit()
        engine.push(library_tokenizer("byte_level").encode(TEXT).ids)
        responses = [response async for response in call]
        assert "".join(response.delta.text for response in responses) == "The quick brown "
        assert responses[-1].finished.stop_string == "fox"

    async def test_the_rpc_s_deadline_is_the_request_s(self, engine, stub):
        call = stub.Generate(pb.GenerateRequest(text="Hi"), timeout=30)
        spec = await submitted(engine, call)
        assert 25 < spec.deadline - engine.now() < 31  # gRPC rounds timeouts up
        call.cancel()
        call = stub.Generate(pb.GenerateRequest(text="Hi"))
        assert (await submitted(engine, call)).deadline is None
        call.cancel()

    @pytest.mark.parametrize("state", ["queued", "admitted", "streaming"])
    async def test_a_client_that_goes_cancels_at_once(self, engine, stub, state):
        call = stub.Generate(pb.GenerateRequest(text="Hi", n=2))
        spec = await submitted(engine, call)
        if state != "queued":
            engine.admit()
            await call.read()
        if state == "streaming":
            engine.push([5])
            await call.read()
        call.cancel()
        await until(lambda: engine.cancelled == [spec.request_id])
        assert engine.live == {}

    async def test_a_client_s_own_deadline_cancels(self, engine, stub):
        call = stub.Generate(pb.GenerateRequest(text="Hi"), timeout=0.3)
        spec = await submitted(engine, call)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: engine.cancelled == [spec.request_id])

    async def test_a_client_that_does_not_read_gets_everything_later(self, engine, stub):
        call = stub.Generate(pb.GenerateRequest(text="Hi"))
        await submitted(engine, call)
        ids = library_tokenizer("byte_level").encode(TEXT).ids
        for _ in range(3000):
            engine.push(ids)
            await asyncio.sleep(0)
        engine.finish()
        text, token_ids = [], []
        async for response in call:
            text.append(response.delta.text)
            token_ids.extend(response.delta.token_ids)
        assert token_ids == ids * 3000
        assert "".join(text) == TEXT * 3000

    async def test_cancel_ends_the_stream_with_finished_and_is_idempotent(self, engine, stub):
        call = stub.Generate(pb.GenerateRequest(text="Hi", request_id="x"))
        await submitted(engine, call)
        assert (await stub.Cancel(pb.CancelRequest(request_id="x"))).found is True
        responses = [response async for response in call]
        assert [response.finished.reason for response in responses] == [pb.FINISH_REASON_CANCELLED]
        assert (await stub.Cancel(pb.CancelRequest(request_id="x"))).found is False
        _, details = await failure(stub.Cancel(pb.CancelRequest()))
        assert details["BadRequest"].field_violations[0].field == "request_id"


INVALID = [
    ({"text": ""}, "text"),
    ({}, "prompt"),
    ({"text": "fox " * 200}, "prompt"),
    ({"text": "x", "stopping": pb.StoppingParams(max_tokens=0)}, "stopping.max_tokens"),
    ({"text": "x", "sampling": pb.SamplingParams(temperature=-1)}, "sampling.temperature"),
    ({"text": "x", "sampling": pb.SamplingParams(temperature=math.nan)}, "sampling.temperature"),
    ({"text": "x", "sampling": pb.SamplingParams(top_p=0)}, "sampling.top_p"),
    ({"token_ids": pb.TokenIds(ids=[500])}, "token_ids.ids[0]"),
    ({"text": "x" * 10_000_000}, "text"),
    ({"text": "x", "stopping": pb.StoppingParams(stop=["s"] * 10_000)}, "stopping.stop"),
    ({"text": "x", "n": 65}, "n"),
    ({"text": "x", "adapter": "a"}, "adapter"),
]


class TestFailures:
    @pytest.mark.parametrize(("fields", "subject"), INVALID, ids=[subject for _, subject in INVALID])
    async def test_bad_fields(self, engine, stub, fields, subject):
        error, details = await failure(stub.Generate(pb.GenerateRequest(**fields)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details["ErrorInfo"].domain == "tidegate.dev"
        assert [violation.field for violation in details["BadRequest"].field_violations] == [subject]
        assert engine.specs == []
        await self.still_answers(engine, stub)

    async def still_answers(self, engine, stub):
        engine.refusal = None
        call = stub.Generate(pb.GenerateRequest(text="Hi"))
        await submitted(engine, call)
        engine.admit()
        engine.push([5])
        engine.finish()
        assert len([response async for response in call]) == 3

    @pytest.mark.parametrize("rpc", ["Generate", "Cancel", "Tokenize", "Detokenize", "ListModels"])
    @pytest.mark.parametrize("kind", ["invalid_utf8", "truncated", "garbage"])
    async def test_bytes_that_are_no_message(self, engine, channel, stub, rpc, kind):
        tag = b"\x12" if rpc == "ListModels" else b"\x0a"  # the first string field
        data = {"invalid_utf8": tag + b"\x02\xff\xfe", "truncated": tag + b"\x7fshort", "garbage": b"\xff"}[
            kind
        ]
        make = channel.unary_stream if rpc == "Generate" else channel.unary_unary
        error, details = await failure(make(METHOD + rpc, request_serializer=None)(data))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details["BadRequest"].field_violations[0].field == "request"
        assert f"{rpc}Request" in error.details()
        await self.still_answers(engine, stub)

    @pytest.mark.parametrize(
        ("refused", "code", "reason", "kinds"),
        [
            (
                Refused("r", RefusalReason.DUPLICATE_ID),
                grpc.StatusCode.ALREADY_EXISTS,
                "REQUEST_ID_IN_USE",
                {"ErrorInfo"},
            ),
            (
                Refused("r", RefusalReason.QUEUE_FULL_REQUESTS, 1, 8, 8, 1.5),
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "QUEUE_FULL",
                {"ErrorInfo", "RetryInfo", "QuotaFailure"},
            ),
            (
                Refused("r", RefusalReason.TOO_MANY_BLOCKS, 9, 0, 8),
                grpc.StatusCode.INVALID_ARGUMENT,
                "KV_MEMORY_TOO_SMALL",
                {"ErrorInfo", "BadRequest"},
            ),
            (
                Refused("r", RefusalReason.DRAINING),
                grpc.StatusCode.UNAVAILABLE,
                "DRAINING",
                {"ErrorInfo", "RetryInfo"},
            ),
        ],
    )
    async def test_refusals_of_the_core(self, engine, stub, refused, code, reason, kinds):
        engine.refusal = lambda spec: refused
        error, details = await failure(stub.Generate(pb.GenerateRequest(text="Hi")))
        assert (error.code(), details["ErrorInfo"].reason, set(details)) == (code, reason, kinds)
        await self.still_answers(engine, stub)

    async def test_a_retry_time_is_in_the_details_and_the_trailer(self, engine, stub):
        engine.refusal = lambda spec: Refused("r", RefusalReason.QUEUE_FULL_REQUESTS, 1, 8, 8, 1.5)
        error, details = await failure(stub.Generate(pb.GenerateRequest(text="Hi")))
        assert details["RetryInfo"].retry_delay == Duration(seconds=1, nanos=500_000_000)
        assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "1500"

    async def test_models_and_states_of_the_service(self, engine, stub):
        error, details = await failure(stub.Generate(pb.GenerateRequest(text="x", model="nope")))
        assert (error.code(), details["ErrorInfo"].reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        engine.draining = True
        error, details = await failure(stub.Generate(pb.GenerateRequest(text="x")))
        assert (error.code(), details["ErrorInfo"].reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        engine.draining, engine.served = False, {}
        error, details = await failure(stub.Generate(pb.GenerateRequest(text="x")))
        assert (error.code(), set(details)) == (grpc.StatusCode.UNAVAILABLE, {"ErrorInfo", "RetryInfo"})

    async def test_prompt_and_output_beyond_the_context(self, engine, stub):
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5] * 100), stopping=pb.StoppingParams(max_tokens=29)
        )
        error, details = await failure(stub.Generate(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details["ErrorInfo"].reason == "CONTEXT_TOO_LONG"
        assert dict(details["ErrorInfo"].metadata) == {
            "prompt_tokens": "100",
            "max_tokens": "29",
            "max_model_len": "128",
        }

    @pytest.mark.parametrize(
        ("reason", "code"),
        [
            (FinishReason.DEADLINE, grpc.StatusCode.DEADLINE_EXCEEDED),
            (FinishReason.QUEUE_TIMEOUT, grpc.StatusCode.DEADLINE_EXCEEDED),
            (FinishReason.ERROR, grpc.StatusCode.INTERNAL),
        ],
    )
    async def test_ends_that_are_failures(self, engine, stub, reason, code):
        call = stub.Generate(pb.GenerateRequest(text="Hi"))
        await submitted(engine, call)
        engine.finish(reason, detail="secret cause")
        error, details = await failure(call)
        assert error.code() is code
        assert "secret" not in str(error)
        assert set(details) == {"ErrorInfo"}

    async def test_a_bug_is_told_by_an_incident_id_alone(self, engine, stub, caplog):
        def bug(spec):
            raise RuntimeError("secret cause")

        engine.refusal = bug
        error, details = await failure(stub.Generate(pb.GenerateRequest(text="Hi")))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in str(error)
        assert set(details) == {"ErrorInfo"}
        assert dict(details["ErrorInfo"].metadata)["incident_id"] in error.details()
        assert any("secret cause" in str(record.exc_info) for record in caplog.records)
        await self.still_answers(engine, stub)

    async def test_a_template_s_refusal_reaches_the_client(self, engine, stub):
        template = "{{ raise_exception('Only one system message is supported') }}"
        engine.served = {"tiny": served_model(chat_template=template)}
        chat = pb.ChatMessages(messages=[pb.ChatMessage(role="system", content="x")])
        for call in (
            stub.Generate(pb.GenerateRequest(chat=chat)),
            stub.Tokenize(pb.TokenizeRequest(chat=chat)),
        ):
            error, details = await failure(call)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert details["ErrorInfo"].reason == "CHAT_TEMPLATE_FAILED"
            violation = details["BadRequest"].field_violations[0]
            assert (violation.field, violation.description) == (
                "chat",
                "Only one system message is supported",
            )


class TestOtherRpcs:
    async def test_tokenize_and_detokenize(self, stub):
        library = library_tokenizer("byte_level")
        answer = await stub.Tokenize(pb.TokenizeRequest(text=TEXT))
        assert (list(answer.token_ids), answer.max_model_len) == (library.encode(TEXT).ids, 128)
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=answer.token_ids))).text == TEXT
        chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hi")])
        ids = (await stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
        rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        request = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=False)
        assert (await stub.Detokenize(request)).text == rendered
        request.skip_special_tokens = True
        assert (await stub.Detokenize(request)).text == "user\nHi\nassistant\n"

    async def test_special_tokens_are_added_to_text_unless_refused(self, engine, stub):
        engine.served = {"llama": served_model("llama", kind="byte_fallback")}
        with_bos = (await stub.Tokenize(pb.TokenizeRequest(text="fox"))).token_ids
        without = (await stub.Tokenize(pb.TokenizeRequest(text="fox", add_special_tokens=False))).token_ids
        assert list(with_bos) == [1, *without]

    async def test_models_are_listed_in_pages(self, engine, stub):
        engine.served = {
            name: served_model(name, ready_workers=i, chat_template="x" if i else "")
            for i, name in enumerate(["a", "b", "c"])
        }
        page = await stub.ListModels(pb.ListModelsRequest(page_size=2))
        assert [(model.name, model.ready_workers, model.has_chat_template) for model in page.models] == [
            ("a", 0, False),
            ("b", 1, True),
        ]
        assert (page.models[0].max_model_len, page.models[0].vocab_size) == (128, 500)
        del engine.served["b"]  # a page token outlives the model that it names
        last = await stub.ListModels(pb.ListModelsRequest(page_size=2, page_token=page.next_page_token))
        assert ([model.name for model in last.models], last.next_page_token) == (["c"], "")
        everything = await stub.ListModels(pb.ListModelsRequest(page_size=5000))
        assert ([model.name for model in everything.models], everything.next_page_token) == (["a", "c"], "")
        engine.served = {}
        assert len((await stub.ListModels(pb.ListModelsRequest())).models) == 0

    @pytest.mark.parametrize(
        ("fields", "field"), [({"page_size": -1}, "page_size"), ({"page_token": "?"}, "page_token")]
    )
    async def test_bad_pages(self, stub, fields, field):
        error, details = await failure(stub.ListModels(pb.ListModelsRequest(**fields)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert [violation.field for violation in details["BadRequest"].field_violations] == [field]
