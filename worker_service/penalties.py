"""Owns what penalties need to know: which tokens each request has seen and how often it gave each.

Only slots that use a penalty have state, a row of the vocabulary each; it stays on the device.
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
        self._row_of = np.full(num_slots, -1, np.int64)  # by slot: row of the tensors below
        self._free: list[int] = []
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)  # [P, V] outputs
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)  # [P, V]
        self._factors = torch.zeros((0, 3), device=device)  # [P, 3] repetition, presence, frequency

    def admit(self, request: Admission) -> None:
        """Starts the state of a request, if it uses a penalty."""
        s = request.sampling
        self.release(np.array([request.slot], np.int32))
        if s.repetition_penalty == 1 and s.presence_penalty == 0 and s.frequency_penalty == 0:
            return
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._row_of[request.slot] = row
        tokens = torch.tensor(request.token_ids, dtype=torch.int64, device=self._device)
        prompt, outputs = tokens[: request.num_prompt_tokens], tokens[request.num_prompt_tokens :]
        self._counts[row] = torch.bincount(outputs, minlength=self._vocab_size).to(torch.int32)
        self._in_prompt[row] = False
        self._in_prompt[row, prompt] = True
        factors = (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
        self._factors[row] = torch.tensor(factors, device=self._device)

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
            penalize_rows(logits, at, self._counts, self._in_prompt, self._factors, rows[at])
        else:
            penalize(logits, at, self._counts, self._in_prompt, self._factors, rows[at])

    def record(self, slots: Int32, token_ids: Tensor) -> None:
        """Counts the tokens (`[S]` int64 on the device) that the slots just sampled."""
        at, rows = self._rows(slots)
        self._counts[rows, token_ids[at]] += 1

    def _rows(self, slots: Int32) -> tuple[Tensor, Tensor]:
        """Of the slots with state: their indices in `slots`, and their rows."""
        rows = self._row_of[slots]
        at = np.flatnonzero(rows >= 0)
        return torch.from_numpy(at).to(self._device), torch.from_numpy(rows[at]).to(self._device)

    def _grow(self) -> None:
        old = len(self._counts)
        extra = max(old, 4)
        zeros = torch.zeros((extra, self._vocab_size), dtype=torch.int32, device=self._device)
        self._counts = torch.cat((self._counts, zeros))
        self._in_prompt = torch.cat((self._in_prompt, zeros.bool()))
        self._factors = torch.cat((self._factors, torch.zeros((extra, 3), device=self._device)))
        self._free.extend(range(old, old + extra))


def penalize(
    logits: Tensor,
    rows: NDArray[np.intp],
    counts: Tensor,
    in_prompt: Tensor,
    factors: Tensor,
    states: NDArray[np.int64],
) -> None:
    """As `tidegate_kernels.cpu_sampling.penalize_rows`, on any device."""
    at, state = (torch.from_numpy(index).to(logits.device) for index in (rows, states))
    chosen, given = logits[at], counts[state]  # [N, V]
    repetition, presence, frequency = factors[state].unsqueeze(-1).unbind(1)  # [N, 1] each
    penalized = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
    chosen = torch.where(in_prompt[state] | (given > 0), penalized, chosen)
    logits[at] = chosen - (frequency * given + presence * (given > 0))
