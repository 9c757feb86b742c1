"""The gateway as OpenAI's own Python client sees it."""

import asyncio
import math

import openai
import pytest
from fake_server import FakeInference, admitted, delta, finished
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


def logprobs_of(text: str, logprob: float, *top: tuple[str, float]) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        sampled=pb.TokenLogprob(token_id=1, text=text, logprob=logprob),
        top=[pb.TokenLogprob(token_id=2, text=t, logprob=p) for t, p in top],
    )


def two_candidates(request, context):
    yield admitted()
    yield delta("a", 1, index=0)
    yield delta("b", 2, index=1)
    yield finished(1, pb.FINISH_REASON_STOP, output_tokens=1)
    yield delta("c", 3, index=0)
    yield finished(0, output_tokens=2)


def echo_prompt(request, context):
    yield admitted()
    yield delta(f"<{request.text or list(request.token_ids.ids)}>", 1)
    yield finished(output_tokens=1)


def test_a_chat_has_its_text_its_end_and_its_usage(
    openai_client: openai.OpenAI, server: FakeInference
) -> None:
    answer = openai_client.chat.completions.create(model="fake", messages=HI)
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    assert answer.id == server.requests[0].request_id
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello world")
    assert choice.finish_reason == "length"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 2, 7)
    assert usage.prompt_tokens_details.cached_tokens == 2


def test_a_chats_messages_come_to_the_scheduler_as_turns(
    openai_client: openai.OpenAI, server: FakeInference
) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three", "refusal": None, "tool_calls": None},
        {"role": "user", "content": ""},
    ]
    openai_client.chat.completions.create(model="", messages=messages)
    chat = server.requests[0].chat
    assert [(turn.role, turn.content) for turn in chat.messages] == [
        ("system", "be brief"),
        ("user", "one two"),
        ("assistant", "three"),
        ("user", ""),
    ]
    assert server.requests[0].model == ""


def test_a_streamed_chat_has_the_role_once_and_no_usage_unasked(openai_client: openai.OpenAI) -> None:
    chunks = list(openai_client.chat.completions.create(model="fake", messages=HI, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [d.role for d in deltas] == ["assistant", None, None]
    assert "".join(d.content or "" for d in deltas) == "Hello world"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "length"]
    assert [chunk.usage for chunk in chunks] == [None] * 3
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_stream_ends_with_usage_if_asked(openai_client: openai.OpenAI, kind: str) -> None:
    options = {"model": "fake", "stream": True, "stream_options": {"include_usage": True}}
    if kind == "chat":
        chunks = list(openai_client.chat.completions.create(messages=HI, **options))
    else:
        chunks = list(openai_client.completions.create(prompt="hi", **options))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 7
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_an_asynchronous_client_streams_many_at_once(gateway: RunningGateway) -> None:
    async def texts() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as client:

            async def text() -> str:
                stream = await client.chat.completions.create(model="fake", messages=HI, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(text() for _ in range(6)))

    assert asyncio.run(texts()) == ["Hello world"] * 6


def test_the_helper_for_streams_puts_a_chat_together(
    openai_client: openai.OpenAI, server: FakeInference
) -> None:
    server.answer = lambda request, context: iter(
        [admitted(), delta("Hello", 1), delta(" world", 2), finished(reason=pb.FINISH_REASON_STOP)]
    )
    with openai_client.chat.completions.stream(model="fake", messages=HI) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == "Hello world"


@pytest.mark.parametrize("streams", [False, True])
def test_each_of_n_choices_has_its_text_and_its_end(
    openai_client: openai.OpenAI, server: FakeInference, streams: bool
) -> None:
    server.answer = two_candidates
    options = {"model": "fake", "prompt": "x", "n": 2}
    if streams:
        chunks = list(openai_client.completions.create(**options, stream=True))
        choices = [chunk.choices[0] for chunk in chunks]
        texts = {i: "".join(c.text for c in choices if c.index == i) for i in (0, 1)}
        ends = {c.index: c.finish_reason for c in choices if c.finish_reason}
        # The end of a choice is told before others go on.
        assert [(c.index, c.text, c.finish_reason) for c in choices[2:4]] == [(0, "c", None), (1, "", "stop")]
    else:
        answer = openai_client.completions.create(**options)
        texts = {choice.index: choice.text for choice in answer.choices}
        ends = {choice.index: choice.finish_reason for choice in answer.choices}
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 3)
    assert texts == {0: "ac", 1: "b"}
    assert ends == {0: "length", 1: "stop"}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("one", ["<one>"]),
        (["one", "two"], ["<one>", "<two>"]),
        ([1, 2, 3], ["<[1, 2, 3]>"]),
        ([[1], [2, 3]], ["<[1]>", "<[2, 3]>"]),
    ],
)
def test_each_prompt_of_several_has_its_choice(
    openai_client: openai.OpenAI, server: FakeInference, prompt: object, texts: list[str], streams: bool
) -> None:
    server.answer = echo_prompt
    answer = openai_client.completions.create(model="fake", prompt=prompt, stream=streams)
    if streams:
        choices = [chunk.choices[0] for chunk in answer]
        assert ["".join(c.text for c in choices if c.index == i) for i in range(len(texts))] == texts
        assert sorted(c.index for c in choices if c.finish_reason) == list(range(len(texts)))
    else:
        assert [choice.text for choice in answer.choices] == texts
        assert answer.usage.prompt_tokens == 5 * len(texts)
    assert len({request.request_id for request in server.requests}) == len(texts)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("prompt", "echo"), [("ab ", "ab "), ([97, 98], "ab")])
def test_an_echo_begins_with_the_prompt(
    openai_client: openai.OpenAI, prompt: object, echo: str, streams: bool
) -> None:
    answer = openai_client.completions.create(model="fake", prompt=prompt, echo=True, stream=streams)
    text = "".join(c.choices[0].text for c in answer) if streams else answer.choices[0].text
    assert text == f"{echo}Hello world"


@pytest.mark.parametrize("streams", [False, True])
def test_log_probabilities_of_a_chat(
    openai_client: openai.OpenAI, server: FakeInference, streams: bool
) -> None:
    def answer(request, context):
        yield admitted()
        first = delta("é", 1)
        first.delta.logprobs.append(logprobs_of("é", -0.5, ("é", -0.5), ("e", -1.5)))
        yield first
        second = delta("", 2)
        second.delta.logprobs.append(logprobs_of("\ufffd", -2.0))
        yield second
        yield finished()

    server.answer = answer
    options = {"model": "fake", "messages": HI, "logprobs": True, "top_logprobs": 2}
    if streams:
        chunks = openai_client.chat.completions.create(**options, stream=True)
        content = [each for c in chunks if c.choices[0].logprobs for each in c.choices[0].logprobs.content]
    else:
        content = openai_client.chat.completions.create(**options).choices[0].logprobs.content
    assert server.requests[0].output.logprobs == 2
    assert [(each.token, each.logprob, each.bytes) for each in content] == [
        ("é", -0.5, [0xC3, 0xA9]),
        ("\ufffd", -2.0, None),
    ]
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("é", -0.5), ("e", -1.5)]


@pytest.mark.parametrize("streams", [False, True])
def test_log_probabilities_of_a_completion(
    openai_client: openai.OpenAI, server: FakeInference, streams: bool
) -> None:
    def answer(request, context):
        yield admitted()
        for text, logprob in [("ab", -0.25), ("c", -0.5)]:
            event = delta(text, 1)
            event.delta.logprobs.append(logprobs_of(text, logprob, ("x", -0.125)))
            yield event
        yield finished()

    server.answer = answer
    answer = openai_client.completions.create(model="fake", prompt="x", logprobs=1, stream=streams)
    found = [c.choices[0].logprobs for c in answer] if streams else [answer.choices[0].logprobs]
    found = [each for each in found if each]
    assert [token for each in found for token in each.tokens] == ["ab", "c"]
    assert [p for each in found for p in each.token_logprobs] == [-0.25, -0.5]
    assert [offset for each in found for offset in each.text_offset] == [0, 2]
    assert [top for each in found for top in each.top_logprobs] == [
        {"x": -0.125, "ab": -0.25},
        {"x": -0.125, "c": -0.5},
    ]


def test_models_are_listed_and_one_is_found_by_its_name(
    openai_client: openai.OpenAI, server: FakeInference
) -> None:
    server.models = ["a", "org/b"]
    assert [model.id for model in openai_client.models.list()] == ["a", "org/b"]
    model = openai_client.models.retrieve("org/b")
    assert (model.id, model.owned_by, model.max_model_len) == ("org/b", "tidegate", 512)
    with pytest.raises(openai.NotFoundError) as caught:
        openai_client.models.retrieve("c")
    assert caught.value.code == "model_not_found"


def test_sampled_values_survive_the_way_there(openai_client: openai.OpenAI, server: FakeInference) -> None:
    openai_client.chat.completions.create(
        model="fake",
        messages=HI,
        n=1,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=-1.5,
        frequency_penalty=1,
        seed=-1,
        logit_bias={"12": -100, "7": 2.5},
        stop=["a", "b"],
        max_completion_tokens=7,
        user="alice",
        extra_body={
            "top_k": 3,
            "min_p": 0.25,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [4],
            "skip_special_tokens": False,
            "priority": -2,
            "tenant": "t",
            "cache_salt": "s",
            "queue_timeout_s": 1.5,
            "timeout_s": 60,
            "add_generation_prompt": False,
        },
    )
    request = server.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1.5, 1)
    assert math.isclose(sampling.top_p, 0.9, rel_tol=1e-6)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (3, 0.25, 1.5)
    assert sampling.seed == 2**64 - 1
    assert dict(sampling.logit_bias) == {12: -100, 7: 2.5}
    stopping = request.stopping
    assert (list(stopping.stop), list(stopping.stop_token_ids)) == (["a", "b"], [4])
    assert (stopping.max_tokens, stopping.min_tokens, stopping.ignore_eos) == (7, 2, True)
    assert (request.output.token_ids, request.output.skip_special_tokens) == (False, False)
    assert not request.output.HasField("logprobs")
    assert (request.priority, request.tenant, request.cache_salt, request.n) == (-2, "t", "s", 1)
    assert request.queue_timeout.ToMilliseconds() == 1500
    assert not request.chat.add_generation_prompt
    assert 50 < server.timeouts_s[0] < 61


def test_what_is_left_out_is_left_to_the_scheduler(
    openai_client: openai.OpenAI, server: FakeInference
) -> None:
    openai_client.chat.completions.create(model="fake", messages=HI)
    request = server.requests[0]
    assert not request.HasField("n")
    assert request.sampling == pb.SamplingParams()
    assert request.stopping == pb.StoppingParams()


def test_a_completion_has_openais_16_tokens_by_default(
    openai_client: openai.OpenAI, server: FakeInference
) -> None:
    openai_client.completions.create(model="fake", prompt="x", best_of=1)
    assert server.requests[0].stopping.max_tokens == 16
