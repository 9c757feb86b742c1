"""Each field that is out of range is named with its value and what is allowed; all at once."""

import math

import pytest
from fake_engine import served_model
from google.protobuf.duration_pb2 import Duration

from scheduler_service.errors import Reason, ServiceError
from scheduler_service.prompt_validation import check_detokenize, check_tokenize
from scheduler_service.validation import check_generate
from tidegate.inference.v1 import inference_pb2 as pb

MODELS = {"tiny": served_model()}
NAN, INF = math.nan, math.inf


def refusal(check, request, models=MODELS):
    with pytest.raises(ServiceError) as caught:
        check(request, models)
    return caught.value


def described(error):
    return {field.subject: field.description for field in error.fields}


def sampling(**fields):
    return {"sampling": pb.SamplingParams(**fields)}


def stopping(**fields):
    return {"stopping": pb.StoppingParams(**fields)}


CASES = [
    (sampling(temperature=-1), "sampling.temperature", "temperature is -1; allowed: 0 to 2"),
    (sampling(temperature=2.5), "sampling.temperature", "temperature is 2.5; allowed: 0 to 2"),
    (sampling(temperature=NAN), "sampling.temperature", "temperature is nan; allowed: 0 to 2"),
    (sampling(temperature=INF), "sampling.temperature", "temperature is inf; allowed: 0 to 2"),
    (sampling(top_p=0), "sampling.top_p", "top_p is 0; allowed: above 0 to 1"),
    (sampling(top_p=1.5), "sampling.top_p", "top_p is 1.5; allowed: above 0 to 1"),
    (sampling(top_p=NAN), "sampling.top_p", "top_p is nan; allowed: above 0 to 1"),
    (sampling(min_p=-0.5), "sampling.min_p", "min_p is -0.5; allowed: 0 to 1"),
    (
        sampling(presence_penalty=2.5),
        "sampling.presence_penalty",
        "presence_penalty is 2.5; allowed: -2 to 2",
    ),
    (
        sampling(frequency_penalty=-INF),
        "sampling.frequency_penalty",
        "frequency_penalty is -inf; allowed: -2 to 2",
    ),
    (
        sampling(repetition_penalty=0),
        "sampling.repetition_penalty",
        "repetition_penalty is 0; allowed: above 0 to 10",
    ),
    (
        sampling(repetition_penalty=11),
        "sampling.repetition_penalty",
        "repetition_penalty is 11; allowed: above 0 to 10",
    ),
    (sampling(logit_bias={500: 1}), "sampling.logit_bias[500]", "id is 500; allowed: 0 to 499"),
    (sampling(logit_bias={5: 101}), "sampling.logit_bias[5]", "bias is 101; allowed: -100 to 100"),
    (sampling(logit_bias={5: NAN}), "sampling.logit_bias[5]", "bias is nan; allowed: -100 to 100"),
    (
        sampling(logit_bias=dict.fromkeys(range(1025), 1.0)),
        "sampling.logit_bias",
        "1025 entries; allowed: at most 1024",
    ),
    (stopping(max_tokens=0), "stopping.max_tokens", "max_tokens is 0; allowed: at least 1"),
    (stopping(max_tokens=4, min_tokens=5), "stopping.min_tokens", "min_tokens is 5; allowed: 0 to 4"),
    (stopping(stop=["a", ""]), "stopping.stop[1]", "0 characters; allowed: 1 to 256"),
    (stopping(stop=["a" * 257]), "stopping.stop[0]", "257 characters; allowed: 1 to 256"),
    (stopping(stop=["a"] * 17), "stopping.stop", "17 strings; allowed: at most 16"),
    (stopping(stop=["a"] * 10_000), "stopping.stop", "10000 strings; allowed: at most 16"),
    (stopping(stop_token_ids=[1, 500]), "stopping.stop_token_ids[1]", "id is 500; allowed: 0 to 499"),
    (stopping(stop_token_ids=range(65)), "stopping.stop_token_ids", "65 ids; allowed: at most 64"),
    ({"output": pb.OutputParams(logprobs=21)}, "output.logprobs", "logprobs is 21; allowed: 0 to 20"),
    ({"n": 0}, "n", "n is 0; allowed: 1 to 64"),
    ({"n": 65}, "n", "n is 65; allowed: 1 to 64"),
    ({"queue_timeout": Duration()}, "queue_timeout", "queue_timeout is 0 s; allowed: above 0 to 86400 s"),
    (
        {"queue_timeout": Duration(seconds=-1)},
        "queue_timeout",
        "queue_timeout is -1 s; allowed: above 0 to 86400 s",
    ),
    (
        {"queue_timeout": Duration(seconds=86_401)},
        "queue_timeout",
        "queue_timeout is 86401 s; allowed: above 0 to 86400 s",
    ),
    (
        {"request_id": "a b"},
        "request_id",
        "request_id is 'a b'; allowed: at most 128 characters of [A-Za-z0-9._:-]",
    ),
    (
        {"request_id": "a\n"},
        "request_id",
        r"request_id is 'a\n'; allowed: at most 128 characters of [A-Za-z0-9._:-]",
    ),
    (
        {"request_id": "x" * 129},
        "request_id",
        f"request_id is '{'x' * 64}'... (129 characters); allowed: at most 128 characters of [A-Za-z0-9._:-]",
    ),
    ({"tenant": "t" * 129}, "tenant", "129 characters; allowed: at most 128"),
    ({"cache_salt": "t" * 129}, "cache_salt", "129 characters; allowed: at most 128"),
    ({"adapter": "lora"}, "adapter", "adapter is 'lora'; this server has none, leave it empty"),
    ({"text": ""}, "text", "the prompt is empty; allowed: at least 1 token"),
    (
        {"text": "x" * 10_000_000},
        "text",
        "10000000 characters; allowed: at most 65536 for a context of 128 tokens",
    ),
    ({"token_ids": pb.TokenIds()}, "token_ids.ids", "the prompt is empty; allowed: at least 1 token"),
    ({"token_ids": pb.TokenIds(ids=[1, 500, 2**32 - 1])}, "token_ids.ids[1]", "id is 500; allowed: 0 to 499"),
    ({"token_ids": pb.TokenIds(ids=[2**32 - 1])}, "token_ids.ids[0]", "id is 4294967295; allowed: 0 to 499"),
    ({"chat": pb.ChatMessages()}, "chat.messages", "0 messages; allowed: 1 to 10000"),
    (
        {"chat": pb.ChatMessages(messages=[pb.ChatMessage(content="x")])},
        "chat.messages[0].role",
        "role is empty; name who speaks",
    ),
    (
        {"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="u", content="x" * 70_000)])},
        "chat.messages",
        "70001 characters; allowed: at most 65536 for a context of 128 tokens",
    ),
]


@pytest.mark.parametrize(("fields", "subject", "description"), CASES, ids=lambda value: str(value)[:40])
def test_a_field_out_of_range_is_named_with_its_numbers(fields, subject, description):
    prompt = {} if {"text", "token_ids", "chat"} & set(fields) else {"text": "x"}
    error = refusal(check_generate, pb.GenerateRequest(**prompt, **fields))
    assert error.reason is Reason.INVALID_REQUEST
    assert described(error) == {subject: description}
    assert error.message == f"{subject}: {description}"


@pytest.mark.parametrize(
    "fields",
    [
        sampling(temperature=0),
        sampling(temperature=2, top_p=1, min_p=1, top_k=2**32 - 1, repetition_penalty=10),
        sampling(presence_penalty=-2, frequency_penalty=2, seed=0, logit_bias={0: -100, 499: 100}),
        stopping(max_tokens=1, min_tokens=1, stop=["x" * 256] * 16, stop_token_ids=[499] * 64),
        {"output": pb.OutputParams(logprobs=20)},
        {"n": 64, "priority": -(2**31), "queue_timeout": Duration(seconds=86_400)},
        {"request_id": "x" * 128, "tenant": "ü" * 128, "cache_salt": "s" * 128, "model": "tiny"},
    ],
)
def test_the_ends_of_ranges_are_allowed(fields):
    check_generate(pb.GenerateRequest(text="x", **fields), MODELS)


def test_no_prompt_is_refused():
    assert described(refusal(check_generate, pb.GenerateRequest())) == {
        "prompt": "the prompt is not set; set exactly one of its fields"
    }


def test_all_that_is_wrong_is_told_at_once():
    request = pb.GenerateRequest(n=0, adapter="x", model="nope", **sampling(temperature=NAN, top_p=0))
    error = refusal(check_generate, request)
    assert set(described(error)) == {"n", "adapter", "sampling.temperature", "sampling.top_p", "prompt"}
    assert error.message.endswith("; and 2 more")


def test_unknown_fields_are_ignored():
    data = pb.GenerateRequest(text="x").SerializeToString() + b"\xf8\x3f\x01"  # field 1023, a varint
    assert check_generate(pb.GenerateRequest.FromString(data), MODELS).model.name == "tiny"


def test_a_top_k_beyond_the_vocabulary_keeps_all():
    assert check_generate(pb.GenerateRequest(text="x", **sampling(top_k=500)), MODELS).sampling.top_k == 0


class TestModels:
    def test_no_worker_yet_is_unavailable_with_a_retry_time(self):
        error = refusal(check_generate, pb.GenerateRequest(text="x"), {})
        assert (error.reason, error.retry_after_s) == (Reason.NO_WORKER, 1.0)

    def test_an_unknown_model_is_not_found_and_the_served_ones_are_named(self):
        error = refusal(check_generate, pb.GenerateRequest(text="x", model="nope"))
        assert error.reason is Reason.MODEL_NOT_FOUND
        assert error.message == "model 'nope' is not served; served: 'tiny'"

    def test_an_unset_model_is_refused_where_several_are_served(self):
        models = {name: served_model(name) for name in ("b", "a")}
        error = refusal(check_generate, pb.GenerateRequest(text="x"), models)
        assert described(error) == {"model": "empty, but 2 models are served: 'a', 'b'"}
        assert check_generate(pb.GenerateRequest(text="x", model="b"), models).model.name == "b"

    def test_text_needs_a_tokenizer_and_chat_a_template(self):
        bare = {"bare": served_model("bare", kind=None)}
        has_none = "model 'bare' has no tokenizer; send token_ids and set output.text to false"
        assert described(refusal(check_generate, pb.GenerateRequest(text="x"), bare)) == {"text": has_none}
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), output=pb.OutputParams(text=True))
        assert described(refusal(check_generate, request, bare)) == {"output.text": has_none}
        chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user")])
        plain = {"tiny": served_model(chat_template="")}
        assert described(refusal(check_generate, pb.GenerateRequest(chat=chat), plain)) == {
            "chat": "model 'tiny' has no chat template; use text or token_ids"
        }

    def test_stop_strings_need_text(self):
        request = pb.GenerateRequest(text="x", output=pb.OutputParams(text=False), **stopping(stop=["a"]))
        assert "stopping.stop" in described(refusal(check_generate, request))


class TestContext:
    def options(self, **fields):
        return check_generate(pb.GenerateRequest(text="x", **fields), MODELS)

    def test_prompt_and_output_beyond_the_context_are_refused_with_all_numbers(self):
        with pytest.raises(ServiceError) as caught:
            self.options(**stopping(max_tokens=100)).stopping(29, 1024)
        error = caught.value
        assert error.reason is Reason.CONTEXT_TOO_LONG
        assert error.metadata == {"prompt_tokens": "29", "max_tokens": "100", "max_model_len": "128"}
        assert described(error) == {
            "stopping.max_tokens": "29 prompt tokens + max_tokens 100 = 129, more than the model's 128; "
            "allowed here: 1 to 99"
        }
        assert self.options(**stopping(max_tokens=99)).stopping(29, 1024).max_tokens == 99

    @pytest.mark.parametrize("length", [128, 129, 5000])
    def test_a_prompt_that_leaves_no_room_is_refused(self, length):
        with pytest.raises(ServiceError) as caught:
            self.options().stopping(length, 1024)
        assert described(caught.value) == {
            "prompt": f"{length} tokens leave no room for output in the model's 128; shorten the prompt to "
            "at most 127 tokens"
        }

    def test_too_many_token_ids_are_refused_before_they_are_looked_at(self):
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1] * 128))
        error = refusal(check_generate, request)
        assert (error.reason, error.metadata["prompt_tokens"]) == (Reason.CONTEXT_TOO_LONG, "128")

    def test_min_tokens_may_not_exceed_the_default_of_max_tokens(self):
        options = self.options(**stopping(min_tokens=33))
        assert options.stopping(10, 33).min_tokens == 33
        with pytest.raises(ServiceError, match="min_tokens is 33; allowed: 0 to 32"):
            options.stopping(10, 32)


class TestTokenizeAndDetokenize:
    def test_tokenize_takes_an_empty_text_but_not_no_prompt(self):
        assert check_tokenize(pb.TokenizeRequest(text=""), MODELS).name == "tiny"
        assert set(described(refusal(check_tokenize, pb.TokenizeRequest()))) == {"prompt"}
        assert set(described(refusal(check_tokenize, pb.TokenizeRequest(text="x" * 70_000)))) == {"text"}

    def test_detokenize_checks_ids(self):
        assert check_detokenize(pb.DetokenizeRequest(), MODELS).name == "tiny"
        error = refusal(check_detokenize, pb.DetokenizeRequest(token_ids=[0, 499, 500]))
        assert described(error) == {"token_ids[2]": "id is 500; allowed: 0 to 499"}
        error = refusal(check_detokenize, pb.DetokenizeRequest(token_ids=[0] * (2**20 + 1)))
        assert described(error) == {"token_ids": "1048577 ids; allowed: 0 to 1048576"}

    @pytest.mark.parametrize(
        ("check", "request_type"),
        [(check_tokenize, pb.TokenizeRequest), (check_detokenize, pb.DetokenizeRequest)],
    )
    def test_models_are_looked_up(self, check, request_type):
        fields = {"text": "x"} if request_type is pb.TokenizeRequest else {}
        assert refusal(check, request_type(model="nope", **fields)).reason is Reason.MODEL_NOT_FOUND
        assert refusal(check, request_type(**fields), {}).reason is Reason.NO_WORKER
