"""InferenceService over real gRPC: streams, cancellation, and the calls beside generation."""

import asyncio

import grpc
import pytest
from fake_engine import FakeEngine, logprobs, prompt_ids, served_model
from google.protobuf.duration_pb2 import Duration
from inference_rpc import failure, serving, submitted, until
from sample_tokenizers import library_tokenizer

from scheduler_service.core.events import FinishReason
from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc

TEXT = "The quick brown fox\njumps: 你好 😀."


@pytest.fixture
def engine():
    return FakeEngine(served_model())


@pytest.fixture
async def channel(engine):
    async with serving(engine) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return pb_grpc.InferenceServiceStub(channel)


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
