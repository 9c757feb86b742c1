"""Log-probabilities on CPUs, compiled by numba: of one token of each row, and of its most likely ones."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from tidegate_kernels.cpu_rows import BLOCK, exponentiate, largest, on_threads, total_of


def logprob_rows(
    logits: Tensor, token_ids: NDArray[np.int64], num_top: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Of logits `[M, V]` fp32 on the CPU: log-probabilities of `token_ids` `[M]`, and the `num_top` highest.

    Returns `[M]`, `[M, num_top]` falling, equal ones by id, and their token ids `[M, num_top]`.
    """
    rows = len(logits)
    sampled = np.empty(rows, np.float32)
    top = np.empty((rows, num_top), np.float32)
    top_ids = np.empty((rows, num_top), np.int64)
    on_threads(_logprob_rows, logits.numpy(), (), np.arange(rows), token_ids, sampled, top, top_ids)
    return sampled, top, top_ids


@njit(cache=True, nogil=True)
def _leaders(row: NDArray[np.float32], maxima: NDArray[np.float32], num_top: int) -> NDArray[np.int64]:
    """Keys that sort by falling logit, then by id, of all tokens that can be among the `num_top` first."""
    floor = np.float32(-np.inf)
    if 0 < num_top <= len(maxima):  # the k-th largest of some tokens is not above the k-th largest of all
        floor = np.sort(maxima)[len(maxima) - num_top]
    bits = row.view(np.int32)
    keys = np.empty(len(row) + 1, np.int64)
    count = 0
    for block in range(len(maxima)):
        if maxima[block] < floor:
            continue
        for i in range(block * BLOCK, min((block + 1) * BLOCK, len(row))):
            # As integers, floats below 0 order the wrong way round.
            order = bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))
            keys[count] = (-np.int64(order) << 32) | i
            count += row[i] >= floor
    return np.sort(keys[:count])


@njit(cache=True, nogil=True)
def _logprob_rows(
    logits: NDArray[np.float32],
    rows: NDArray[np.int64],
    token_ids: NDArray[np.int64],
    sampled: NDArray[np.float32],
    top: NDArray[np.float32],
    top_ids: NDArray[np.int64],
) -> None:
    vocab_size, num_top = logits.shape[1], top.shape[1]
    maxima = np.empty((vocab_size + BLOCK - 1) // BLOCK, np.float32)
    weights, exponents = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.int32)
    for n in range(len(rows)):
        row = logits[rows[n]]
        highest = largest(row)
        total = 0.0
        for block in range(len(maxima)):
            part = row[block * BLOCK : min((block + 1) * BLOCK, vocab_size)]
            exponentiate(part, highest, np.float32(1), weights, exponents)
            total += total_of(weights[: len(part)])
            maxima[block] = largest(part)
        mass = np.float64(highest) + np.log(total)
        sampled[n] = row[token_ids[n]] - mass
        leaders = _leaders(row, maxima, num_top)
        for rank in range(num_top):
            token = leaders[rank] & 0xFFFFFFFF if rank < len(leaders) else rank  # not finite: any
            top_ids[n, rank] = token
            top[n, rank] = row[token] - mass
