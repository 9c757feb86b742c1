"""Owns the load of chaos tests: requests with known tokens, streams that send them, what went wrong."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from e2e.deployment import random_prompts

from tidegate_client import AsyncClient, TidegateError

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.1}


@dataclass(frozen=True)
class Case:
    """A request."""

    prompt: Sequence[int]
    options: Mapping[str, Any]

    async def run(self, client: AsyncClient) -> list[list[int]]:
        """The tokens of each candidate, as they were streamed."""
        outputs: list[list[int]] = [[] for _ in range(self.options.get("n", 1))]
        stream = client.generate(list(self.prompt), ignore_eos=True, **self.options)
        async for delta in stream:
            outputs[delta.index].extend(delta.token_ids)
        counted = [generation.finished.usage.output_tokens for generation in stream.generations()]
        assert counted == [len(tokens) for tokens in outputs]
        return outputs


def mixed_cases(
    count: int, vocab_size: int, seed: int, max_tokens: tuple[int, int] = (40, 160)
) -> list[Case]:
    """Greedy and seeded sampling by turns; every eighth asks for two candidates."""
    rng = random.Random(seed)
    cases = []
    for i, prompt in enumerate(random_prompts(count, 160, vocab_size, seed)):
        sampling = {"temperature": 0.0} if i % 2 else {**SAMPLED, "seed": rng.getrandbits(32)}
        length = rng.randint(*max_tokens)
        options = {"max_tokens": length, "n": 2 if i % 8 == 4 else 1, **sampling}
        cases.append(Case(prompt, options))
    rng.shuffle(cases)
    return cases


async def run_all(client: AsyncClient, cases: Sequence[Case]) -> list[list[list[int]]]:
    """What each case gives, all at once."""
    return list(await asyncio.gather(*(case.run(client) for case in cases)))


async def undisturbed(client: AsyncClient, cases: Sequence[Case]) -> tuple[list[Case], list[list[list[int]]]]:
    """Cases, and what each gives when nothing goes wrong.

    Sums round differently in batches of another size, and where two tokens are equally likely up to that,
    either may come. So cases that differ between one large batch and small ones are left out; they are few.
    """
    together = await run_all(client, cases)
    kept, expected = [], []
    for i in range(0, len(cases), 4):
        apart = await run_all(client, cases[i : i + 4])
        for case, outputs, others in zip(cases[i : i + 4], apart, together[i : i + 4], strict=True):
            if outputs == others:
                kept.append(case)
                expected.append(outputs)
    assert len(kept) >= 0.95 * len(cases)
    return kept, expected


@dataclass
class Load:
    """Streams that send cases one after the other, each the next one that is due, until told to stop."""

    client: AsyncClient
    cases: Sequence[Case]
    expected: Sequence[list[list[int]]]
    finished: int = 0
    wrong: list[str] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, num_streams: int) -> None:
        """Returns when the streams have finished what they had when `stop` was set."""
        order = itertools.cycle(range(len(self.cases)))
        await asyncio.gather(*(self._stream(order) for _ in range(num_streams)))

    async def _stream(self, order: itertools.cycle[int]) -> None:
        while not self.stop.is_set():
            i = next(order)
            try:
                outputs = await self.cases[i].run(self.client)
            except TidegateError as error:
                self.wrong.append(f"case {i}: {error}")
                continue
            self.finished += 1
            if outputs != self.expected[i]:
                self.wrong.append(f"case {i}: {_difference(outputs, self.expected[i])}")


def _difference(outputs: list[list[int]], expected: list[list[int]]) -> str:
    for index, (got, wanted) in enumerate(zip(outputs, expected, strict=True)):
        if got != wanted:
            same = next(
                (i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b),
                min(len(got), len(wanted)),
            )
            return (
                f"candidate {index} differs from token {same} on; {len(got)} tokens, {len(wanted)} expected"
            )
    return "equal"
