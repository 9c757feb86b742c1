"""The requests that a served model is measured with.

Owns their shapes and counts. Prompts are random token ids, so that counts are exact and no two requests share
a prefix by accident. Knows nothing of clients or clocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

# The first ids of a vocabulary are often special tokens.
_FIRST_ORDINARY_TOKEN = 256


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, and how many tokens to generate."""

    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A number of streams, and the requests that they share."""

    title: str
    concurrency: int
    build: Callable[[random.Random, int], list[Request]]
    """From a random generator and the vocabulary's size."""


def _tokens(rng: random.Random, vocab_size: int, count: int) -> list[int]:
    return rng.choices(range(min(_FIRST_ORDINARY_TOKEN, vocab_size // 2), vocab_size), k=count)


def alike(
    count: int, prompt_tokens: int, output_tokens: int
) -> Callable[[random.Random, int], list[Request]]:
    def build(rng: random.Random, vocab_size: int) -> list[Request]:
        return [Request(_tokens(rng, vocab_size, prompt_tokens), output_tokens) for _ in range(count)]

    return build


def _mixed(rng: random.Random, vocab_size: int) -> list[Request]:
    requests = alike(24, 1000, 32)(rng, vocab_size) + alike(24, 32, 128)(rng, vocab_size)
    rng.shuffle(requests)
    return requests


def _shared_prefix(rng: random.Random, vocab_size: int) -> list[Request]:
    prefix = _tokens(rng, vocab_size, 802)
    return [Request(prefix + _tokens(rng, vocab_size, 30), 32) for _ in range(48)]


WORKLOADS = {
    "W1": Workload("one stream: 5 x (128 in, 128 out)", 1, alike(5, 128, 128)),
    "W2": Workload("short: 64 x (64 in, 64 out)", 16, alike(64, 64, 64)),
    "W3": Workload("mixed: 24 x (1000 in, 32 out) + 24 x (32 in, 128 out)", 16, _mixed),
    "W4": Workload("shared prefix: 48 x (802 common + 30 in, 32 out)", 8, _shared_prefix),
}
