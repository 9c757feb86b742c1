"""The gateway in front of a real scheduler and worker with the demo model."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import openai
import pytest
from e2e.deployment import Deployment, deploy
from running_gateway import RunningGateway

from worker_service.demo_model import prepare

TOKEN = "alice-0123456789abcdef"
ASK = [{"role": "user", "content": "Name three colours."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"paint_{thing}",
            "parameters": {
                "type": "object",
                "properties": {
                    "colour": {"enum": ["red", "green"]},
                    "coats": {"type": "integer", "maximum": 9},
                },
                "required": ["colour", "coats"],
                "additionalProperties": False,
            },
        },
    }
    for thing in ("wall", "door")
]


@dataclass(slots=True)
class Gated:
    deployment: Deployment
    gateway: RunningGateway
    client: openai.AsyncOpenAI
    model: str


@pytest.fixture
async def gated(tmp_path, monkeypatch) -> AsyncIterator[Gated]:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN} alice\n")
    monkeypatch.setenv("TIDEGATE_TOKEN", TOKEN)  # of the client that deploy() makes
    secret = tmp_path / "secret"
    secret.write_text("secret-0123456789abcdef")
    limits = {"max_num_queued_reqs": 4, "max_num_seqs": 2}
    scheduler = {"token_file": tokens, "secret_file": secret, **limits}
    worker = {"kv_memory": "256MiB", "max_num_seqs": 2, "secret_file": secret}
    async with deploy(prepare(), worker=worker, scheduler=scheduler) as deployment:
        [model] = await deployment.client.list_models()
        monkeypatch.delenv("TIDEGATE_TOKEN")
        address = f"127.0.0.1:{deployment.service.port}"
        gateway = await asyncio.to_thread(RunningGateway, address)
        try:
            url = f"{gateway.url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0) as client:
                yield Gated(deployment, gateway, client, model.name)
        finally:
            await asyncio.to_thread(gateway.stop)


@pytest.mark.slow
async def test_what_openais_client_gets_is_what_tidegates_gets(gated: Gated) -> None:
    await check_texts(gated)
    await check_logprobs(gated)
    await check_forms(gated)
    await check_agent(gated)
    await check_refusals(gated)
    await check_disconnect(gated)


async def check_texts(gated: Gated) -> None:
    expected = await gated.deployment.client.chat(
        "Name three colours.", temperature=0.0, max_tokens=24
    ).result()
    options = {"model": gated.model, "messages": ASK, "temperature": 0, "max_tokens": 24}
    answer = await gated.client.chat.completions.create(**options)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finished.reason.value
    assert answer.usage.prompt_tokens == expected.finished.usage.prompt_tokens
    assert answer.usage.completion_tokens == expected.finished.usage.output_tokens
    stream = await gated.client.chat.completions.create(**options, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == expected.text


async def check_logprobs(gated: Gated) -> None:
    answer = await gated.client.completions.create(
        model=gated.model, prompt="The sea is", temperature=0, max_tokens=4, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert len(logprobs.token_logprobs) == 4
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values())


async def check_forms(gated: Gated) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    answer = await gated.client.chat.completions.create(
        model=gated.model, messages=ASK, response_format=form, max_tokens=16
    )
    assert json.loads(answer.choices[0].message.content) in ("yes", "no")


async def check_agent(gated: Gated) -> None:
    """Two turns: a call that must be, then an answer that may call again or not, for several seeds."""
    options = {"model": gated.model, "tools": TOOLS, "max_tokens": 96}
    asked = {"messages": ASK, "tool_choice": "required", "parallel_tool_calls": False}
    answer = await gated.client.chat.completions.create(**options, **asked)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    [call] = message.tool_calls
    check_call(call)
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is painted."}
    for seed in range(4):
        stream = await gated.client.chat.completions.create(
            **options, messages=[*ASK, message, result], seed=seed, temperature=1.0, stream=True
        )
        chunks = [chunk.choices[0] async for chunk in stream]
        names = [call.function.name for chunk in chunks for call in chunk.delta.tool_calls or ()]
        text = "".join(chunk.delta.content or "" for chunk in chunks)
        assert text or any(names)
        assert "<tool_call>" not in text
        assert (chunks[-1].finish_reason == "tool_calls") <= any(names)


def check_call(call: openai.types.chat.ChatCompletionMessageToolCall) -> None:
    arguments = json.loads(call.function.arguments)
    assert call.function.name in ("paint_wall", "paint_door")
    assert arguments["colour"] in ("red", "green")
    assert arguments["coats"] <= 9


async def check_refusals(gated: Gated) -> None:
    options = {"model": gated.model, "prompt": "x", "max_tokens": 4}
    with pytest.raises(openai.AuthenticationError) as caught:
        await gated.client.with_options(api_key="wrong").completions.create(**options)
    assert caught.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as caught:
        await gated.client.completions.create(**options | {"model": "gpt-4"})
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        await gated.client.completions.create(**options | {"max_tokens": 10**6})
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(openai.BadRequestError) as caught:
        await gated.client.completions.create(**options, temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.RateLimitError) as caught:
        await gated.client.completions.create(**options, n=8)
    assert float(caught.value.response.headers["retry-after-ms"]) > 0
    with pytest.raises(openai.BadRequestError):
        await gated.client.chat.completions.create(
            model=gated.model,
            messages=ASK,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
            },
        )


async def check_disconnect(gated: Gated) -> None:
    options = {"model": gated.model, "prompt": ["x", "y"], "max_tokens": 2000, "stream": True}
    stream = await gated.client.completions.create(**options, extra_body={"ignore_eos": True})
    async for _ in stream:
        break
    state = gated.deployment.service.engine.state
    assert state().running_requests == 2
    await stream.close()
    await gated.deployment.until(lambda: state().running_requests == 0)
    assert gated.deployment.counters().output_tokens < 2000
    gated.deployment.check_empty()
