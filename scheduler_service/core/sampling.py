"""Owns the sampling and stopping parameters of a request, every default resolved and every value checked."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Values are in range: the frontend has checked them."""

    temperature: float = 1.0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # uint64; candidate i of n uses candidate_seed(seed, i)
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # None sends none, 0 the sampled token's, k also the k most likely


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When a candidate ends. Stop strings are found by the frontend, which sees text."""

    max_tokens: int
    min_tokens: int = 0
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)  # empty with ignore_eos
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)


def candidate_seed(seed: int, index: int) -> int:
    """Seed of candidate `index`: the request's own for 0, a mixed one (splitmix64) for the others."""
    if index == 0:
        return seed
    mask = (1 << 64) - 1
    z = (seed + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
