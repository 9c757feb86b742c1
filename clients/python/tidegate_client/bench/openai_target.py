"""Any server with OpenAI's HTTP API as what is measured, so that others are held against the same clock.

Owns the reading of its event streams. An event that has text counts as one token in the gaps between tokens,
since the protocol doesn't say how many it holds; totals come from the server's usage.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tidegate_client.bench.errors import EndpointError, PlanError
from tidegate_client.bench.passage import Passage
from tidegate_client.bench.prompts import Prompt
from tidegate_client.bench.target import Answer


@dataclass(slots=True)
class _Stream:
    """What has come of one answer."""

    arrivals_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = str(event["error"])
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if text:
                self.arrivals_s.append(time.perf_counter())
                self.texts.append(text)


class OpenAITarget:
    """Generates greedily through /v1/completions, or /v1/chat/completions with the prompt as a user's.

    url: with or without /v1. Closing it is the caller's.
    """

    def __init__(
        self, url: str, model: str, *, chat: bool, ignore_eos: bool, api_key: str | None = None
    ) -> None:
        self._path = "chat/completions" if chat else "completions"
        self._chat = chat
        self._model = model
        self._ignore_eos = ignore_eos
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A connection for each request: some servers offer to keep one alive and then close it.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1") + "/v1/",
            headers=headers,
            limits=limits,
            timeout=None,  # noqa: S113 - a slow answer is what we measure
        )

    async def find_model(self) -> None:
        """Takes the only model that is served unless one was named. Raises BenchError."""
        if self._model:
            return
        try:
            answer = await self._client.get("models")
            names = [str(entry["id"]) for entry in answer.raise_for_status().json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            message = f"{self._client.base_url}models can't be read: {error!r}; name the model with --model"
            raise EndpointError(message) from None
        if len(names) != 1:
            raise PlanError(f"models {', '.join(names) or 'none'} are served; name one with --model")
        self._model = names[0]

    async def send(self, prompt: Prompt, output_tokens: int, due_s: float) -> Answer:
        """Sends one request."""
        stream = _Stream()
        try:
            async with self._client.stream(
                "POST", self._path, json=self._body(prompt, output_tokens)
            ) as answer:
                if answer.status_code != httpx.codes.OK:
                    text = (await answer.aread()).decode(errors="replace")
                    return _failed(due_s, f"HTTP {answer.status_code}", text)
                async for event in _events(answer.aiter_lines()):
                    stream.take(event)
        except (httpx.HTTPError, ValueError) as error:
            return _failed(due_s, type(error).__name__, str(error))
        if stream.error or not stream.arrivals_s:
            return _failed(due_s, "STREAM", stream.error or "the stream ended without text")
        passage = _passage(stream, due_s)
        if self._ignore_eos and passage.output_tokens != output_tokens:
            return Answer(Passage.short(due_s, passage.ended_s, passage.output_tokens, output_tokens), "")
        # What was generated for token ids is known as text only: nothing can be sent after it.
        return Answer(passage, "".join(stream.texts) if isinstance(prompt, str) else [])

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    def _body(self, prompt: Prompt, output_tokens: int) -> dict[str, Any]:
        body = {
            "model": self._model,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True  # not OpenAI's, but understood by servers of open models
        if self._chat:
            return {**body, "messages": [{"role": "user", "content": prompt}]}
        return {**body, "prompt": prompt}


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def _passage(stream: _Stream, due_s: float) -> Passage:
    usage = stream.usage
    return Passage(
        due_s,
        time.perf_counter(),
        tuple(stream.arrivals_s),
        (1,) * len(stream.arrivals_s),
        usage.get("prompt_tokens", 0),
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        usage.get("completion_tokens", len(stream.arrivals_s)),
    )


def _failed(due_s: float, error: str, message: str) -> Answer:
    return Answer(Passage.failed(due_s, time.perf_counter(), error, message[:500]), "")
