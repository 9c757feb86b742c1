"""A Tidegate scheduler as what is measured, through its own client."""

from __future__ import annotations

import time

from tidegate_client.aio import AsyncClient
from tidegate_client.bench.passage import Passage
from tidegate_client.bench.prompts import Prompt
from tidegate_client.bench.target import Answer
from tidegate_client.errors import TidegateError


class GrpcTarget:
    """Generates greedily. The client must not try again: a retry would hide a refusal in a latency."""

    def __init__(self, client: AsyncClient, model: str, *, ignore_eos: bool) -> None:
        self._client = client
        self._model = model
        self._ignore_eos = ignore_eos

    async def send(self, prompt: Prompt, output_tokens: int, due_s: float) -> Answer:
        """Sends one request."""
        arrivals_s: list[float] = []
        counts: list[int] = []
        token_ids: list[int] = []
        try:
            stream = self._client.generate(
                prompt,
                model=self._model,
                max_tokens=output_tokens,
                temperature=0.0,
                ignore_eos=self._ignore_eos,
            )
            async for delta in stream:
                if delta.token_ids:
                    arrivals_s.append(time.perf_counter())
                    counts.append(len(delta.token_ids))
                    token_ids += delta.token_ids
        except TidegateError as error:
            return Answer(Passage.failed(due_s, time.perf_counter(), error.code, error.message), [])
        usage = stream.first().finished.usage
        if self._ignore_eos and usage.output_tokens != output_tokens:
            return Answer(Passage.short(due_s, time.perf_counter(), usage.output_tokens, output_tokens), [])
        passage = Passage(
            due_s,
            time.perf_counter(),
            tuple(arrivals_s),
            tuple(counts),
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.output_tokens,
        )
        return Answer(passage, stream.text if isinstance(prompt, str) else token_ids)
