"""InferenceService over real gRPC: refusals, failures and malformed bytes have a code and details."""

import math

import grpc
import pytest
from fake_engine import FakeEngine, served_model
from google.protobuf.duration_pb2 import Duration
from inference_rpc import failure, serving, submitted
from sample_tokenizers import library_tokenizer

from scheduler_service.core.admission import RefusalReason, Refused
from scheduler_service.core.events import FinishReason
from tidegate.inference.v1 import inference_pb2 as pb
from tidegate.inference.v1 import inference_pb2_grpc as pb_grpc

METHOD = "/tidegate.inference.v1.InferenceService/"


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

    async def test_text_with_a_token_that_only_the_tokenizer_knows(self, engine, stub):
        first = library_tokenizer("byte_level").token_to_id("added word")
        engine.served["tiny"] = served_model(vocab_size=first)
        for prompt in (
            {"text": "added word"},
            {"chat": {"messages": [{"role": "user", "content": "added word"}]}},
        ):
            error, details = await failure(stub.Generate(pb.GenerateRequest(**prompt)))
            [violation] = details["BadRequest"].field_violations
            assert (error.code(), violation.field) == (grpc.StatusCode.INVALID_ARGUMENT, *prompt)
            assert f"has id {first}; tiny knows 0 to {first - 1}" in violation.description
        assert engine.specs == []
        await self.still_answers(engine, stub)

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
