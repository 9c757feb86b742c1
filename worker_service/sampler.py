"""Owns sampling: from a step's logits to one token for each row, with the parameters of its slot.

Works on the device and never waits for it. A batch pays only for what some row of it uses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_service.draw import DrawColumns, are_finite, choose, most_likely
from worker_service.grammars import TokenMasks
from worker_service.logprobs import SampledLogprobs, take_logprobs
from worker_service.penalties import Penalties
from worker_service.plan import Admission, Int32, Int64, Sampling
from worker_service.uniform import uniform

# Finite, so that a row of nothing else stays a number. A token that is only banned, until min_tokens, is the
# last resort of a row whose grammar forbids all others.
_FORBIDDEN = torch.finfo(torch.float32).min
_BANNED = _FORBIDDEN / 2


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """A step's tokens, on the device."""

    token_ids: Tensor  # [S] int64
    finite: Tensor  # [S] bool: else a logit was not, and the token means nothing
    logprobs: SampledLogprobs | None


class Sampler:
    """Samples for slots whose parameters it was told at admission."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int32)
        self._top_p = np.ones(num_slots, np.float32)
        self._min_p = np.zeros(num_slots, np.float32)
        self._seed = np.zeros(num_slots, np.uint64)
        self._logprobs = np.full(num_slots, -1, np.int32)
        self._min_tokens = np.zeros(num_slots, np.int64)
        self._has_bias = np.zeros(num_slots, np.bool_)
        self._plain = np.ones(num_slots, np.bool_)
        self._sampling: list[Sampling] = [Sampling()] * num_slots
        self._penalties = Penalties(num_slots, vocab_size, device)

    def admit(self, request: Admission) -> None:
        """Takes the parameters of a request that enters its slot."""
        slot, s = request.slot, request.sampling
        self._temperature[slot] = s.temperature
        self._top_k[slot] = s.top_k
        self._top_p[slot] = s.top_p
        self._min_p[slot] = s.min_p
        self._seed[slot] = s.seed
        self._logprobs[slot] = s.logprobs
        self._min_tokens[slot] = s.min_tokens if len(s.banned_token_ids) else 0
        self._has_bias[slot] = len(s.bias_token_ids) > 0
        self._plain[slot] = s.is_plain
        self._sampling[slot] = s
        self._penalties.admit(request)

    def release(self, slots: Int32) -> None:
        """Frees what was kept for slots."""
        self._penalties.release(slots)

    def clear(self) -> None:
        """Frees what was kept for every slot."""
        self._penalties.clear()

    def sample(
        self,
        logits: Tensor,
        slots: Int32,
        positions: Int64,
        num_outputs: Int64,
        masks: TokenMasks | None = None,
    ) -> Sampled:
        """A token for each row of logits `[S, V]`, which may be overwritten.

        `slots`, `positions` (of the token to sample) and `num_outputs` (sampled before it) are `[S]` columns.
        Log-probabilities are those without `masks`.
        """
        logits = logits.float().contiguous()  # a decoder may give the front of wider rows
        if masks is None and self._plain[slots].all():
            return Sampled(*most_likely(logits), None)
        penalized = self._penalties.used_by(slots)
        biased = self._has_bias[slots]
        banned = num_outputs < self._min_tokens[slots]
        masked = np.zeros(len(slots), np.bool_)
        if masks is not None:
            masked[masks.rows] = True
        wanted = np.flatnonzero(self._logprobs[slots] >= 0)
        raw, at = logits, wanted
        if (penalized | biased | banned | masked)[wanted].any():
            raw, at = self._copy(logits, wanted), np.arange(len(wanted))
        overwritten = np.flatnonzero(banned | masked)  # what was not finite may not be seen afterwards
        were_finite = are_finite(logits, overwritten) if len(overwritten) else None
        self._adjust(logits, slots, penalized, biased, banned)
        if masks is not None:
            masks.apply(logits, _FORBIDDEN)
        token_ids, finite = choose(logits, self._draw_columns(slots, positions))
        if were_finite is not None:
            finite[self._index(overwritten)] = were_finite
        if penalized.any():
            self._penalties.record(slots, token_ids)
        logprobs = None
        if len(wanted):
            chosen, counts = token_ids[self._index(wanted)], self._logprobs[slots[wanted]]
            logprobs = take_logprobs(raw, at, chosen, wanted.astype(np.int32), counts)
        return Sampled(token_ids, finite, logprobs)

    def _copy(self, logits: Tensor, rows: NDArray[np.intp]) -> Tensor:
        if self._device.type == "cpu":  # numpy wakes no threads beside those that sample
            return torch.from_numpy(logits.numpy()[rows])
        return logits[self._index(rows)]

    def _index(self, rows: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(rows.astype(np.int64, copy=False)).to(self._device)

    def _draw_columns(self, slots: Int32, positions: Int64) -> DrawColumns:
        temperature = self._temperature[slots]
        draws = temperature.any()
        return DrawColumns(
            temperature=temperature,
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            uniform=uniform(self._seed[slots], positions) if draws else np.zeros(len(slots)),
        )

    def _adjust(
        self,
        logits: Tensor,
        slots: Int32,
        penalized: NDArray[np.bool_],
        biased: NDArray[np.bool_],
        banned: NDArray[np.bool_],
    ) -> None:
        """Applies penalties, biases and bans to the logits of the rows that have some, in place."""
        if penalized.any():
            self._penalties.apply(logits, slots)
        if biased.any():
            rows = np.flatnonzero(biased)
            chosen = [self._sampling[slots[row]] for row in rows]
            at = self._pairs(rows, [s.bias_token_ids for s in chosen])
            logits[at] += torch.from_numpy(np.concatenate([s.bias_values for s in chosen])).to(self._device)
        if banned.any():
            rows = np.flatnonzero(banned)
            ids = [self._sampling[slots[row]].banned_token_ids for row in rows]
            logits[self._pairs(rows, ids)] = _BANNED

    def _pairs(self, rows: np.ndarray, ids: list[Int32]) -> tuple[Tensor, Tensor]:
        """Index of (row, id) for each row and each of its ids."""
        row_index = np.repeat(rows, [len(i) for i in ids])
        id_index = np.concatenate(ids).astype(np.int64)
        return self._index(row_index), self._index(id_index)


def warm_up(device: torch.device) -> None:
    """Compiles what the first requests on a CPU would wait for: seconds, unless that was done before."""
    if device.type == "cpu":
        sampler = Sampler(1, 8, device)
        empty, zero = np.empty(0, np.int32), np.zeros(1, np.int64)
        every = Sampling(temperature=1.0, top_k=2, presence_penalty=1.0, logprobs=1)
        sampler.admit(Admission(0, "", np.zeros(1, np.int32), 1, 0, empty, every))
        slot = np.zeros(1, np.int32)
        masks = TokenMasks(slot, np.ones((1, 1), np.int32), None, slot)
        sampler.sample(torch.zeros(1, 8), slot, zero, zero, masks)
