"""Owns the slot table: tokens, block tables and counters of the requests on board, in arrays indexed by slot.

Applies plans to it and checks all that needs a slot's state. Knows nothing of tensors or models.
"""

from __future__ import annotations

import numpy as np

from worker_service.errors import PlanError
from worker_service.plan import Admission, Int32, Limits, Plan


class SlotTable:
    """The requests on board. Arrays are public to read; only the methods write them."""

    def __init__(self, limits: Limits) -> None:
        slots = limits.num_slots
        self._limits = limits
        self.used = np.zeros(slots, np.bool_)
        # Large, but pages are only taken from the system once they are written.
        self.token_ids = np.empty((slots, limits.max_model_len), np.int32)  # as admitted
        self.block_table = np.zeros((slots, limits.max_blocks_per_request), np.int32)  # rest: null block
        self.num_blocks = np.zeros(slots, np.int32)
        self.num_admitted = np.zeros(slots, np.int32)  # tokens in token_ids; later ones were sampled here
        self.num_prompt = np.zeros(slots, np.int32)
        self.num_known = np.zeros(slots, np.int32)  # a token is known once it is sampled, on the host or not
        self.num_computed = np.zeros(slots, np.int32)

    def release(self, plan: Plan) -> None:
        """Frees the plan's released slots. Raises PlanError."""
        unused = plan.released[~self.used[plan.released]]
        if len(unused):
            raise PlanError(plan.seq, "released", int(unused[0]), "the slot is free")
        self.used[plan.released] = False
        self.block_table[plan.released] = 0

    def admit(self, plan: Plan) -> None:
        """Takes the plan's admitted requests on board. Raises PlanError."""
        for request in plan.admitted:
            if self.used[request.slot]:
                raise PlanError(plan.seq, "admitted.slot", request.slot, "the slot is taken")
            self._enter(request)

    def _enter(self, request: Admission) -> None:
        slot, tokens, blocks = request.slot, request.token_ids, request.block_ids
        self.used[slot] = True
        self.token_ids[slot, : len(tokens)] = tokens
        self.block_table[slot, : len(blocks)] = blocks
        self.num_blocks[slot] = len(blocks)
        self.num_admitted[slot] = len(tokens)
        self.num_prompt[slot] = request.num_prompt_tokens
        self.num_known[slot] = len(tokens)
        self.num_computed[slot] = request.num_computed_tokens

    def append_blocks(self, plan: Plan) -> None:
        """Appends the plan's blocks to its rows' tables. Raises PlanError."""
        self._require_used(plan)
        rows = plan.block_rows
        if not len(rows):
            return
        counts = np.bincount(rows, minlength=len(plan.slots)).astype(np.int32)  # [R]
        starts = np.cumsum(counts, dtype=np.int32) - counts
        slots = plan.slots[rows]
        columns = self.num_blocks[slots] + np.arange(len(rows), dtype=np.int32) - starts[rows]
        limit = self._limits.max_blocks_per_request
        if columns.max() >= limit:
            slot = int(slots[int(columns.argmax())])
            raise PlanError(plan.seq, "block_rows", f"slot {slot}", f"has more than {limit} blocks then")
        self.block_table[slots, columns] = plan.block_ids
        self.num_blocks[plan.slots] += counts

    def advance(self, plan: Plan) -> Int32:
        """Counts the plan's tokens as computed and returns the indices of the rows that sample.

        A row samples when its computed tokens reach the last known one; the token is then known. Raises
        PlanError where a row wants tokens that nobody knows yet, or that its blocks have no room for.
        """
        slots = plan.slots
        computed = self.num_computed[slots] + plan.num_tokens
        known = self.num_known[slots]
        room = np.minimum(self.num_blocks[slots] * self._limits.block_size, self._limits.max_model_len)
        if (computed > np.minimum(known, room)).any():
            self._require(plan, computed <= known, "known", known)
            self._require(plan, computed <= room, "in blocks and max_model_len", room)
        self.num_computed[slots] = computed
        sampling_rows = np.flatnonzero(computed == known).astype(np.int32)
        self.num_known[slots[sampling_rows]] += 1
        return sampling_rows

    def clear(self) -> None:
        """Empties every slot."""
        self.used[:] = False
        self.block_table[:] = 0

    def _require_used(self, plan: Plan) -> None:
        unused = plan.slots[~self.used[plan.slots]]
        if len(unused):
            raise PlanError(plan.seq, "slots", int(unused[0]), "the slot is free")

    def _require(self, plan: Plan, ok: np.ndarray, what: str, limit: Int32) -> None:
        if ok.all():
            return
        row = int(np.flatnonzero(~ok)[0])
        slot = int(plan.slots[row])
        why = f"slot {slot} has {self.num_computed[slot]} computed, and only {limit[row]} {what}"
        raise PlanError(plan.seq, "num_tokens", int(plan.num_tokens[row]), why)
