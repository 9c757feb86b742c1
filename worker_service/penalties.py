"""Owns what penalties need to know: which tokens each request has seen and how often it gave each.

Only slots that use a penalty have state, a row of the vocabulary each; it stays on the device. On a CPU there
is a list of the tokens seen as well: few of a vocabulary, so that a step need not read all of a row.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidegate_kernels.cpu_sampling import penalize_rows
from worker_service.plan import Admission, Int32


class Penalties:
    """Repetition penalty over prompt and outputs; presence and frequency penalty over outputs."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._row_of = np.full(num_slots, -1, np.int64)  # by slot: row of the arrays below
        self._free: list[int] = []
        # [P, V] 0 for a token not seen, else 1 + how often it was given
        self._marks = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._factors = torch.zeros((0, 3), device=device)  # [P, 3] repetition, presence, frequency
        self._seen = np.empty((0, vocab_size), np.int32)  # [P, V] ids with a mark; only on CPUs
        self._num_seen = np.zeros(0, np.int64)  # [P] of them

    def admit(self, request: Admission) -> None:
        """Starts the state of a request, if it uses a penalty."""
        s = request.sampling
        self.release(np.array([request.slot], np.int32))
        if not s.penalizes:
            return
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._row_of[request.slot] = row
        seen = np.unique(request.token_ids)
        marks = np.bincount(request.token_ids[request.num_prompt_tokens :], minlength=self._vocab_size)
        marks[seen] += 1
        self._marks[row] = torch.from_numpy(marks).to(self._device)
        factors = (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
        self._factors[row] = torch.tensor(factors, device=self._device)
        if self._device.type == "cpu":
            self._seen[row, : len(seen)], self._num_seen[row] = seen, len(seen)

    def release(self, slots: Int32) -> None:
        """Ends the state of slots that have some."""
        rows = self._row_of[slots]
        self._free.extend(rows[rows >= 0].tolist())
        self._row_of[slots] = -1

    def clear(self) -> None:
        """Ends all state."""
        self.release(np.flatnonzero(self._row_of >= 0).astype(np.int32))

    def used_by(self, slots: Int32) -> NDArray[np.bool_]:
        """Whether each of the slots uses a penalty."""
        return self._row_of[slots] >= 0

    def apply(self, logits: Tensor, slots: Int32) -> None:
        """Changes, in place, the logits (`[S, V]` fp32) of those slots that use a penalty."""
        rows = self._row_of[slots]
        at = np.flatnonzero(rows >= 0)
        if self._device.type == "cpu":
            penalize_rows(logits, at, self._marks, self._factors, self._seen, self._num_seen, rows[at])
        else:
            penalize(logits, at, self._marks, self._factors, rows[at])

    def record(self, slots: Int32, token_ids: Tensor) -> None:
        """Counts the tokens (`[S]` int64 on the device) that the slots just sampled."""
        rows = self._row_of[slots]
        at = np.flatnonzero(rows >= 0)
        rows = rows[at]
        index = torch.from_numpy(rows).to(self._device)
        chosen = token_ids[torch.from_numpy(at).to(self._device)]
        marks = self._marks[index, chosen]
        self._marks[index, chosen] = marks.clamp(min=1) + 1
        if self._device.type == "cpu":
            new = marks.numpy() == 0
            rows = rows[new]
            self._seen[rows, self._num_seen[rows]] = chosen.numpy()[new]
            self._num_seen[rows] += 1

    def _grow(self) -> None:
        old = len(self._marks)
        extra = max(old, 4)
        zeros = torch.zeros((extra, self._vocab_size), dtype=torch.int32, device=self._device)
        self._marks = torch.cat((self._marks, zeros))
        self._factors = torch.cat((self._factors, torch.zeros((extra, 3), device=self._device)))
        if self._device.type == "cpu":
            seen = np.empty((old + extra, self._vocab_size), np.int32)  # memory that is not used yet is free
            longest = self._num_seen.max(initial=0)
            seen[:old, :longest] = self._seen[:, :longest]
            self._seen = seen
            self._num_seen = np.concatenate((self._num_seen, np.zeros(extra, np.int64)))
        self._free.extend(range(old, old + extra))


def penalize(
    logits: Tensor, rows: NDArray[np.intp], marks: Tensor, factors: Tensor, states: NDArray[np.int64]
) -> None:
    """As `tidegate_kernels.cpu_sampling.penalize_rows`, on any device and without lists."""
    at, state = (torch.from_numpy(index).to(logits.device) for index in (rows, states))
    chosen, given = logits[at], (marks[state] - 1).clamp(min=0)  # [N, V]
    repetition, presence, frequency = factors[state].unsqueeze(-1).unbind(1)  # [N, 1] each
    penalized = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
    chosen = torch.where(marks[state] > 0, penalized, chosen)
    logits[at] = chosen - (frequency * given + presence * (given > 0))
