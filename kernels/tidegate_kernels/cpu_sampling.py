"""Draws of one token from each row's filtered distribution on CPUs, compiled by numba.

Owns the same result as plain sorting gives, without sorting a vocabulary: only tokens that can survive the
filters are ranked. A row's token depends on that row alone. Rows are shared out over threads.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from tidegate_kernels.cpu_rows import BLOCK, exponentiate, largest, on_threads, total_of

_TINY = np.float32(1e-38)
_INFINITE = np.int32(0x7F800000)  # as bits, NaN is above it
# Weights are at most 1: buckets by exponent and 5 bits of mantissa.
_BUCKET_SHIFT = 18
_BUCKETS = (0x3F800000 >> _BUCKET_SHIFT) + 1


def draw_rows(
    logits: Tensor,
    rows: NDArray[np.int64],
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float32],
    min_p: NDArray[np.float32],
    uniform: NDArray[np.float64],
) -> NDArray[np.int64]:
    """A token id for each of `rows` of finite logits `[S, V]` fp32, contiguous, on the CPU: `[N]`.

    The columns `[N]` are those of the rows, in their order. `top_k` (0: all), `top_p` and `min_p` filter one
    after the other, equal logits by token id; the draw is by inverse CDF in the order of token ids. Rows that
    are not finite get some token.
    """
    if logits.dtype != torch.float32 or logits.device.type != "cpu" or not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous fp32 on the CPU, not {logits.dtype} on {logits.device}")
    tokens = np.zeros(len(rows), np.int64)
    on_threads(_draw_rows, logits.numpy(), (), rows, temperature, top_k, top_p, min_p, uniform, tokens)
    return tokens


def most_likely(logits: Tensor, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Of `rows` `[N]` of logits `[S, V]` fp32 on the CPU: the first most likely token, and whether all are
    finite.
    """
    tokens, finite = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.bool_)
    on_threads(_most_likely, logits.numpy(), (), rows, tokens, finite)
    return tokens, finite


def penalize_rows(
    logits: Tensor,
    rows: NDArray[np.int64],
    counts: Tensor,
    in_prompt: Tensor,
    factors: Tensor,
    states: NDArray[np.int64],
) -> None:
    """Penalizes `rows` `[N]` of logits `[S, V]` fp32 on the CPU, in place, by the state at `states` `[N]`.

    State by request: how often each token was given (`counts` `[P, V]` int32), whether the prompt has it
    (`in_prompt` `[P, V]` bool), and `factors` `[P, 3]`: repetition, presence, frequency.
    """
    on_threads(
        _penalize_rows, logits.numpy(), (counts.numpy(), in_prompt.numpy(), factors.numpy()), rows, states
    )


def forbid_rows(
    logits: Tensor, rows: NDArray[np.int64], allowed: NDArray[np.int32], value: np.float32
) -> None:
    """Sets what `rows` `[N]` of logits `[S, V]` fp32 on the CPU may not choose to `value`, in place.

    `allowed` `[N, W]` has a bit for each token, 32 in a word from the lowest one on; W * 32 >= V.
    """
    if allowed.shape[1] * 32 < logits.shape[1]:
        raise ValueError(f"{allowed.shape[1]} words can't have a bit for each of {logits.shape[1]} tokens")
    on_threads(_forbid_rows, logits.numpy(), (value,), rows, allowed)


@njit(cache=True, nogil=True)
def _largest_magnitude(bits: NDArray[np.int32]) -> np.int32:
    largest = np.int32(0)
    for i in range(len(bits)):
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    return largest


@njit(cache=True, nogil=True)
def _most_likely(
    logits: NDArray[np.float32], rows: NDArray[np.int64], tokens: NDArray[np.int64], finite: NDArray[np.bool_]
) -> None:
    for n in range(len(rows)):
        row = logits[rows[n]]
        bits = row.view(np.int32)
        highest, best, magnitude = row[0], 0, np.int32(0)
        for begin in range(0, len(row), BLOCK):
            part = slice(begin, min(begin + BLOCK, len(row)))
            magnitude = max(magnitude, _largest_magnitude(bits[part]))
            highest_here = largest(row[part])
            if highest_here > highest:
                highest, best = highest_here, begin
        while best < len(row) - 1 and row[best] != highest:
            best += 1
        tokens[n], finite[n] = best, magnitude < _INFINITE


@njit(cache=True, nogil=True)
def _floor(
    weights: NDArray[np.float32],
    maxima: NDArray[np.float32],
    total: float,
    top_k: int,
    top_p: float,
    min_p: np.float32,
) -> np.float32:
    """Tokens with less weight can't survive the filters, nor change what else does. Above 0."""
    if 0 < top_k <= len(maxima):  # the k-th largest of some tokens is not above the k-th largest of all
        return max(_TINY, np.sort(maxima)[len(maxima) - top_k])
    if top_k == 0 and top_p >= 1:
        return max(_TINY, min_p)
    wanted_tokens = top_k if top_k > 0 else len(weights)
    wanted_mass = (
        top_p * total * (1 + 1e-6) if top_k == 0 else total
    )  # the margin covers the rounding of sums
    # Tokens and mass by the upper bits of the weight, then from the heaviest down.
    counts, masses = np.zeros(_BUCKETS, np.int64), np.zeros(_BUCKETS, np.float64)
    bits = weights.view(np.int32)
    for i in range(len(weights)):
        bucket = bits[i] >> _BUCKET_SHIFT
        counts[bucket] += 1
        masses[bucket] += weights[i]
    tokens, mass, bucket = 0, 0.0, _BUCKETS
    while bucket > 1 and tokens < wanted_tokens and mass < wanted_mass:
        bucket -= 1
        tokens += counts[bucket]
        mass += masses[bucket]
    edge = np.array([np.int32(bucket << _BUCKET_SHIFT)]).view(np.float32)[0]
    return max(_TINY, edge)


@njit(cache=True, nogil=True)
def _ranked(
    weights: NDArray[np.float32], maxima: NDArray[np.float32], floor: np.float32, keys: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Tokens of at least `floor` by falling weight, then by id: complement of the weight's bits, then id."""
    bits = weights.view(np.int32)
    count = 0
    for block in range(len(maxima)):
        if maxima[block] < floor:
            continue
        for i in range(block * BLOCK, min((block + 1) * BLOCK, len(weights))):
            keys[count] = (np.int64(0x7FFFFFFF - bits[i]) << 32) | i
            count += weights[i] >= floor
    return np.sort(keys[:count])


@njit(cache=True, nogil=True)
def _survivors(
    ranked: NDArray[np.int64],
    weights: NDArray[np.float32],
    total: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> NDArray[np.int64]:
    """Ids of the tokens that the filters leave, rising."""
    last = len(ranked)
    if top_k > 0:
        last = min(last, top_k)
        total = 0.0
        for rank in range(last):
            total += weights[ranked[rank] & 0xFFFFFFFF]
    before = 0.0
    kept = 0
    while kept < last and before < top_p * total:
        weight = weights[ranked[kept] & 0xFFFFFFFF]
        if weight < min_p:
            break
        before += weight
        kept += 1
    return np.sort(ranked[:kept] & 0xFFFFFFFF)


@njit(cache=True, nogil=True)
def _pick(ids: NDArray[np.int64], weights: NDArray[np.float32], uniform: float) -> int:
    """The first of `ids` at which the mass up to it is above the uniform's share."""
    total = 0.0
    for i in ids:
        total += weights[i]
    target, reached = uniform * total, 0.0
    for i in ids:
        reached += weights[i]
        if reached > target:
            return i
    return ids[-1] if len(ids) else 0


@njit(cache=True, nogil=True)
def _pick_from_all(
    weights: NDArray[np.float32], sums: NDArray[np.float64], total: float, uniform: float
) -> int:
    """As `_pick`, of all tokens that have weight, with the blocks' sums known."""
    target, reached = uniform * total, 0.0
    chosen = 0
    for block in range(len(sums)):
        if sums[block] == 0:
            continue
        if reached + sums[block] > target:
            for i in range(block * BLOCK, min((block + 1) * BLOCK, len(weights))):
                if weights[i] > 0:
                    chosen = i
                    reached += weights[i]
                    if reached > target:
                        return i
            return chosen  # only rounding leads here
        reached += sums[block]
        chosen = min((block + 1) * BLOCK, len(weights)) - 1
    while chosen > 0 and weights[chosen] == 0:
        chosen -= 1
    return chosen


@njit(cache=True, nogil=True)
def _draw_rows(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float32],
    min_p: NDArray[np.float32],
    uniform: NDArray[np.float64],
    tokens: NDArray[np.int64],
) -> None:
    vocab_size = logits.shape[1]
    blocks = (vocab_size + BLOCK - 1) // BLOCK
    weights = np.empty(vocab_size, np.float32)
    exponents = np.empty(BLOCK, np.int32)
    maxima, sums = np.empty(blocks, np.float32), np.empty(blocks, np.float64)
    keys = np.empty(vocab_size + 1, np.int64)
    for n in range(len(rows)):
        row = logits[rows[n]]
        highest = largest(row)
        total = 0.0
        for block in range(blocks):
            part = slice(block * BLOCK, min((block + 1) * BLOCK, vocab_size))
            exponentiate(row[part], highest, temperature[n], weights[part], exponents)
            maxima[block] = largest(weights[part])
            sums[block] = total_of(weights[part])
            total += sums[block]
        if top_k[n] > 0 or top_p[n] < 1 or min_p[n] > 0:
            floor = _floor(weights, maxima, total, top_k[n], top_p[n], min_p[n])
            ranked = _ranked(weights, maxima, floor, keys)
            ids = _survivors(ranked, weights, total, top_k[n], top_p[n], min_p[n])
            tokens[n] = _pick(ids, weights, uniform[n])
        else:
            tokens[n] = _pick_from_all(weights, sums, total, uniform[n])


@njit(cache=True, nogil=True)
def _penalize_rows(
    logits: NDArray[np.float32],
    counts: NDArray[np.int32],
    in_prompt: NDArray[np.bool_],
    factors: NDArray[np.float32],
    rows: NDArray[np.int64],
    states: NDArray[np.int64],
) -> None:
    for n in range(len(rows)):
        row, given, prompt = logits[rows[n]], counts[states[n]], in_prompt[states[n]]
        repetition, presence, frequency = factors[states[n]]
        for i in range(len(row)):
            if prompt[i] or given[i] > 0:
                x = row[i] / repetition if row[i] > 0 else row[i] * repetition
                if given[i] > 0:
                    x -= frequency * np.float32(given[i]) + presence
                row[i] = x


@njit(cache=True, nogil=True)
def _forbid_rows(
    logits: NDArray[np.float32], value: np.float32, rows: NDArray[np.int64], allowed: NDArray[np.int32]
) -> None:
    for n in range(len(rows)):
        row, bits = logits[rows[n]], allowed[n]
        whole = len(row) // 32
        for w in range(whole):
            word = bits[w]
            if word != -1:
                for i in range(32):  # of fixed length and without branches: vector code
                    row[w * 32 + i] = row[w * 32 + i] if word >> i & 1 else value
        for i in range(whole * 32, len(row)):
            if not bits[whole] >> (i - whole * 32) & 1:
                row[i] = value
