"""Owns what a worker is told of its spans: steps to record, and sampled requests that left their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SpanNotice:
    """Collects until it is sent. Columns as in the protocol's TraceNotice."""

    step_seqs: list[int] = field(default_factory=list)
    ended_slots: list[int] = field(default_factory=list)
    admitted_seqs: list[int] = field(default_factory=list)
    """For each slot, the plan that gave it to the request."""

    def add(self, step_seqs: Sequence[int], slot: int, admitted_seq: int) -> None:
        """A sampled request has left its slot, and wants these steps."""
        self.step_seqs.extend(step_seqs)
        self.ended_slots.append(slot)
        self.admitted_seqs.append(admitted_seq)
