"""Log-probabilities on CPUs, compiled by numba: of one token of each row, and of its most likely ones."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from tidegate_kernels.cpu_rows import (
    CHUNK,
    GROUP,
    Floats,
    exponentiate,
    find_edge,
    in_order,
    list_from,
    on_threads,
    scan,
)


def logprob_rows(
    logits: Tensor, rows: NDArray[np.int64], token_ids: NDArray[np.int64], num_top: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Of `rows` `[M]` of logits `[S, V]` fp32 on the CPU: log-probabilities of `token_ids` `[M]`, and the
    `num_top` highest.

    Returns `[M]`, `[M, num_top]` falling, equal ones by id, and their token ids `[M, num_top]`.
    """
    sampled = np.empty(len(rows), np.float32)
    top = np.empty((len(rows), num_top), np.float32)
    top_ids = np.empty((len(rows), num_top), np.int64)
    on_threads(_logprob_rows, logits.numpy(), (), rows, token_ids, sampled, top, top_ids)
    return sampled, top, top_ids


@njit(cache=True, nogil=True)
def _leaders(
    row: Floats, maxima: Floats, num_top: int, ids: NDArray[np.int32], kept: Floats
) -> NDArray[np.int64]:
    """Keys that sort by falling logit, then by id, of all tokens that can be among the `num_top` first."""
    floor = np.float32(-np.inf)
    if num_top <= len(maxima):  # the k-th largest of some tokens is not above the k-th largest of all
        floor = find_edge(maxima, False, num_top)[0]
    count = list_from(row, maxima, floor, ids, kept)
    keys, bits = np.empty(count, np.int64), kept.view(np.int32)
    for i in range(count):
        keys[i] = (-np.int64(in_order(bits[i])) << 32) | ids[i]
    return np.sort(keys)


@njit(cache=True, nogil=True)
def _logprob_rows(
    logits: Floats,
    rows: NDArray[np.int64],
    token_ids: NDArray[np.int64],
    sampled: Floats,
    top: NDArray[np.float32],
    top_ids: NDArray[np.int64],
) -> None:
    vocab_size, num_top = logits.shape[1], top.shape[1]
    weights = np.empty(vocab_size, np.float32)
    maxima = np.empty((vocab_size + GROUP - 1) // GROUP, np.float32)
    sums = np.empty((vocab_size + CHUNK - 1) // CHUNK, np.float32)
    ids, kept = np.empty(vocab_size + 1, np.int32), np.empty(vocab_size + 1, np.float32)
    for n in range(len(rows)):
        row = logits[rows[n]]
        highest = scan(row, maxima)[0]
        mass = np.float64(highest) + np.log(exponentiate(row, highest, np.float32(1), weights, sums))
        sampled[n] = row[token_ids[n]] - mass
        if num_top > 0:
            leaders = _leaders(row, maxima, num_top, ids, kept)
            for rank in range(num_top):
                token = leaders[rank] & 0xFFFFFFFF if rank < len(leaders) else rank  # not finite: any
                top_ids[n, rank] = token
                top[n, rank] = row[token] - mass
