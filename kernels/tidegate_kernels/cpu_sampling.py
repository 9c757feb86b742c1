"""The choice of one token for each row on CPUs, compiled by numba: the most likely, or a draw from what
filters leave of its distribution; and what changes logits before that.

Owns the same result as plain sorting gives, without any sort: filters look for the least weight that stays,
among the few tokens that can. A row's token depends on that row alone. Rows are shared out over threads.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from tidegate_kernels.cpu_rows import (
    CHUNK,
    GROUP,
    Floats,
    exponentiate,
    find_edge,
    list_from,
    mass_from,
    on_threads,
    scan,
)

_TINY = np.float32(1e-38)
_HUGE = np.float32(np.finfo(np.float32).max)
_NARROWING = np.float32(0.125)  # of the least weight, from one try to the next


def choose_rows(
    logits: Tensor,
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float32],
    min_p: NDArray[np.float32],
    uniform: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """A token id for each row of logits `[S, V]` fp32, contiguous, on the CPU, and whether the row is finite.

    The columns are `[S]`. Temperature 0 takes the first most likely token. Otherwise `top_k` (0: all),
    `top_p` and `min_p` filter one after the other, equal logits by token id; the draw is by inverse CDF in
    the order of token ids. Rows that are not finite get some token.
    """
    if logits.dtype != torch.float32 or logits.device.type != "cpu" or not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous fp32 on the CPU, not {logits.dtype} on {logits.device}")
    rows = np.arange(len(logits))
    tokens, finite = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.bool_)
    on_threads(
        _choose_rows, logits.numpy(), (), rows, temperature, top_k, top_p, min_p, uniform, tokens, finite
    )
    return tokens, finite


def most_likely_rows(logits: Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """What `choose_rows` gives where every temperature is 0."""
    tokens, finite = np.empty(len(logits), np.int64), np.empty(len(logits), np.bool_)
    on_threads(_most_likely_rows, logits.numpy(), (), np.arange(len(logits)), tokens, finite)
    return tokens, finite


def finite_rows(logits: Tensor, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether all is finite in `rows` `[N]` of logits `[S, V]` fp32 on the CPU: `[N]`."""
    finite = np.zeros(len(rows), np.bool_)
    on_threads(_finite_rows, logits.numpy(), (), rows, finite)
    return finite


def penalize_rows(
    logits: Tensor,
    rows: NDArray[np.int64],
    marks: Tensor,
    factors: Tensor,
    seen: NDArray[np.int32],
    num_seen: NDArray[np.int64],
    states: NDArray[np.int64],
) -> None:
    """Penalizes `rows` `[N]` of logits `[S, V]` fp32 on the CPU, in place, by the state at `states` `[N]`.

    State by request: 0 for a token that prompt and outputs do not have, else 1 + how often it was given
    (`marks` `[P, V]` int32); the ids that have a mark (`seen` `[P, V]`, of which `num_seen` `[P]` count); and
    `factors` `[P, 3]`: repetition, presence, frequency.
    """
    shared = (marks.numpy(), factors.numpy(), seen, num_seen)
    on_threads(_penalize_rows, logits.numpy(), shared, rows, states)


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
def _finite_rows(logits: Floats, rows: NDArray[np.int64], finite: NDArray[np.bool_]) -> None:
    maxima = np.empty((logits.shape[1] + GROUP - 1) // GROUP, np.float32)
    for n in range(len(rows)):
        finite[n] = scan(logits[rows[n]], maxima)[1]


@njit(cache=True, nogil=True)
def _most_likely_rows(
    logits: Floats, rows: NDArray[np.int64], tokens: NDArray[np.int64], finite: NDArray[np.bool_]
) -> None:
    maxima = np.empty((logits.shape[1] + GROUP - 1) // GROUP, np.float32)
    for n in range(len(rows)):
        row = logits[rows[n]]
        highest, finite[n] = scan(row, maxima)
        tokens[n] = _first(row, maxima, highest)


@njit(cache=True, nogil=True)
def _first(row: Floats, maxima: Floats, highest: np.float32) -> int:
    for group in range(len(maxima)):
        if maxima[group] == highest:
            for i in range(group * GROUP, min((group + 1) * GROUP, len(row))):
                if row[i] == highest:
                    return i
    return 0  # the highest is NaN


@njit(cache=True, nogil=True)
def _floor(
    weights: Floats, maxima: Floats, total: float, top_k: int, top_p: float, min_p: np.float32
) -> np.float32:
    """Tokens with less weight can't survive the filters, nor change what else does. Above 0."""
    if 0 < top_k <= len(maxima):  # the k-th largest of some tokens is not above the k-th largest of all
        return max(_TINY, find_edge(maxima, False, top_k)[0])
    if top_k > 0:
        return _TINY
    lowest = max(_TINY, min_p)
    if top_p >= 1:
        return lowest
    floor, mass, wanted = np.float32(1), 0.0, top_p * total
    while floor > lowest and mass < wanted:
        floor = max(floor * _NARROWING, lowest)
        mass = 0.0
        for group in range(len(maxima)):
            if maxima[group] >= floor:
                mass += mass_from(weights[group * GROUP : min((group + 1) * GROUP, len(weights))], floor)
    return floor


@njit(cache=True, nogil=True)
def _cut(ids: NDArray[np.int32], weights: Floats, by_mass: bool, wanted: float) -> int:
    """Keeps the heaviest tokens, equal ones by id, until there are `wanted` of them, or of their mass.

    Moves them to the front, still in the order of ids, and returns their number.
    """
    edge, above = find_edge(weights, by_mass, wanted)
    missing = (wanted - above) / (edge if by_mass else 1)
    equal = math.ceil(min(missing, float(len(weights))))  # of those on the edge, how many stay
    count = 0
    for i in range(len(weights)):
        if weights[i] > edge or (weights[i] == edge and equal > 0):
            equal -= weights[i] == edge
            ids[count], weights[count] = ids[i], weights[i]
            count += 1
    return count


@njit(cache=True, nogil=True)
def _pick(ids: NDArray[np.int32], weights: Floats, min_p: np.float32, uniform: float) -> int:
    """Of the tokens of at least `min_p`, the first where the mass up to it is above the uniform's share."""
    target, reached = uniform * mass_from(weights, min_p), 0.0
    chosen = 0
    for i in range(len(ids)):
        if weights[i] >= min_p:
            chosen = ids[i]
            reached += weights[i]
            if reached > target:
                break
    return chosen


@njit(cache=True, nogil=True)
def _pick_from_all(weights: Floats, sums: Floats, total: float, uniform: float) -> int:
    """As `_pick`, of all tokens that have weight, with the sums of chunks known."""
    target, reached = uniform * total, 0.0
    chunk = 0
    while chunk < len(sums) - 1 and reached + sums[chunk] <= target:
        reached += sums[chunk]
        chunk += 1
    chosen = 0
    for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(weights))):
        if weights[i] > 0:
            chosen = i
            reached += weights[i]
            if reached > target:
                break
    return chosen


@njit(cache=True, nogil=True)
def _choose_rows(
    logits: Floats,
    rows: NDArray[np.int64],
    temperature: Floats,
    top_k: NDArray[np.int32],
    top_p: Floats,
    min_p: Floats,
    uniform: NDArray[np.float64],
    tokens: NDArray[np.int64],
    finite: NDArray[np.bool_],
) -> None:
    vocab_size = logits.shape[1]
    weights = np.empty(vocab_size, np.float32)
    maxima = np.empty((vocab_size + GROUP - 1) // GROUP, np.float32)
    sums = np.empty((vocab_size + CHUNK - 1) // CHUNK, np.float32)
    ids, kept = np.empty(vocab_size + 1, np.int32), np.empty(vocab_size + 1, np.float32)
    for n in range(len(rows)):
        row = logits[rows[n]]
        highest, finite[n] = scan(row, maxima)
        if temperature[n] == 0 or not finite[n]:
            tokens[n] = _first(row, maxima, highest)
            continue
        inverse = min(np.float32(1) / temperature[n], _HUGE)  # times 0 it must be 0
        total = exponentiate(row, highest, inverse, weights, sums)
        if top_k[n] == 0 and top_p[n] >= 1 and min_p[n] <= 0:
            tokens[n] = _pick_from_all(weights, sums, total, uniform[n])
            continue
        scan(weights, maxima)
        floor = _floor(weights, maxima, total, top_k[n], top_p[n], min_p[n])
        count = list_from(weights, maxima, floor, ids, kept)
        if 0 < top_k[n] < count:
            count = _cut(ids[:count], kept[:count], False, top_k[n])
        if top_p[n] < 1:
            mass = total if top_k[n] == 0 else mass_from(kept[:count], _TINY)
            count = _cut(ids[:count], kept[:count], True, top_p[n] * mass)
        tokens[n] = _pick(ids[:count], kept[:count], min_p[n], uniform[n])


@njit(cache=True, nogil=True)
def _penalize_rows(
    logits: Floats,
    marks: NDArray[np.int32],
    factors: Floats,
    seen: NDArray[np.int32],
    num_seen: NDArray[np.int64],
    rows: NDArray[np.int64],
    states: NDArray[np.int64],
) -> None:
    for n in range(len(rows)):
        row, state = logits[rows[n]], states[n]
        repetition, presence, frequency = factors[state]
        for token in seen[state, : num_seen[state]]:
            x = row[token] / repetition if row[token] > 0 else row[token] * repetition
            given = marks[state, token] - 1
            row[token] = x - (frequency * np.float32(given) + presence) if given > 0 else x


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
