"""A worker that executes plans on symbols in place of tensors.

It does what the step protocol says a worker does. Each KV cell holds a digest of all tokens up to its
position, so a block that is shared, copied, reused or read wrongly shows.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass

import numpy as np

from scheduler_service.core.step import Admission, StepPlan, StepResult
from scheduler_service.core.worker import WorkerSpec

VOCAB = 64


def digest(before: int, token: int) -> int:
    """State of the fake model after one more token."""
    return zlib.crc32(int(token).to_bytes(4, "little"), before)


def fake_token(seed: int, state: int) -> int:
    """What the fake model says after the tokens that led to `state`."""
    return zlib.crc32(seed.to_bytes(8, "little"), state) % VOCAB


@dataclass
class FakeSlot:
    """A request on board of a fake worker."""

    admission: Admission
    tokens: list[int]
    blocks: list[int]
    computed: int


class FakeWorker:
    """A worker that executes plans in order, whenever it is told to."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.slots: dict[int, FakeSlot] = {}
        self.cells: dict[tuple[int, int], int] = {}  # (block, offset) -> digest of the prefix that it ends
        self.host_cells: dict[tuple[int, int], int] = {}  # the same of host blocks
        self.inbox: deque[StepPlan] = deque()
        self.seq = 0
        self.fail: set[tuple[str, int]] = set()  # candidates whose next token is not finite

    def execute(self) -> StepResult:
        plan = self.inbox.popleft()
        self.seq += 1
        assert plan.seq == self.seq
        for slot in plan.released.tolist():
            del self.slots[slot]
        self._swap(plan)
        self._copy(plan)
        for admission in plan.admitted:
            self._admit(admission)
        slots = plan.slots.tolist()
        assert len(set(slots)) == len(slots) and slots, "rows must be distinct, and some"
        assert int(plan.num_tokens.min()) >= 1
        assert int(plan.num_tokens.sum()) <= self.spec.max_batched_tokens
        assert plan.block_rows.tolist() == sorted(plan.block_rows.tolist())
        for row, block in zip(plan.block_rows.tolist(), plan.block_ids.tolist(), strict=True):
            self.slots[slots[row]].blocks.append(block)
        return self._forward(plan)

    def _swap(self, plan: StepPlan) -> None:
        out, out_to = plan.swap_out_blocks.tolist(), plan.swap_out_host_blocks.tolist()
        back, back_to = plan.swap_in_host_blocks.tolist(), plan.swap_in_blocks.tolist()
        assert len(set(out_to)) == len(out_to) and len(set(back_to)) == len(back_to)
        assert all(0 <= block < self.spec.num_host_blocks for block in out_to + back)
        assert all(0 < block < self.spec.num_blocks for block in out + back_to)
        self._move(self.cells, out, self.host_cells, out_to)
        self._move(self.host_cells, back, self.cells, back_to)

    def _copy(self, plan: StepPlan) -> None:
        self._move(self.cells, plan.copy_sources.tolist(), self.cells, plan.copy_destinations.tolist())

    def _move(self, source: dict, blocks: list[int], destination: dict, to: list[int]) -> None:
        pairs = list(zip(blocks, to, strict=True))
        size = self.spec.block_size
        read = {(dst, i): source.get((src, i)) for src, dst in pairs for i in range(size)}
        for cell, value in read.items():
            if value is None:
                destination.pop(cell, None)
            else:
                destination[cell] = value

    def _admit(self, admission: Admission) -> None:
        assert admission.slot not in self.slots, "the slot is taken"
        assert 0 <= admission.slot < self.spec.num_slots
        assert admission.token_ids.dtype == np.int32 and admission.block_ids.dtype == np.int32
        tokens, blocks = admission.token_ids.tolist(), admission.block_ids.tolist()
        assert 0 <= admission.num_computed_tokens < len(tokens)
        self.slots[admission.slot] = FakeSlot(admission, tokens, blocks, admission.num_computed_tokens)

    def _forward(self, plan: StepPlan) -> StepResult:
        rows = [
            (self.slots[s], n) for s, n in zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True)
        ]
        written: set[tuple[int, int]] = set()
        for slot, num in rows:  # every write of a layer before any read
            state = self._state(slot.tokens, slot.computed)
            for position in range(slot.computed, slot.computed + num):
                state = digest(state, slot.tokens[position])
                cell = self._cell(slot, position)
                assert cell not in written, "two rows write one cell"
                written.add(cell)
                self.cells[cell] = state
            slot.computed += num
        result_slots, result_tokens, failed = [], [], set()
        for slot, _ in rows:
            self._check_reads(slot)
            if slot.computed == len(slot.tokens):
                if (slot.admission.request_id, slot.admission.index) in self.fail:
                    failed.add(len(result_slots))
                token = fake_token(slot.admission.sampling.seed, self._state(slot.tokens, slot.computed))
                slot.tokens.append(token)
                result_slots.append(slot.admission.slot)
                result_tokens.append(token)
        as_column = lambda values: np.array(values, np.int32)  # noqa: E731
        return StepResult(plan.seq, as_column(result_slots), as_column(result_tokens), frozenset(failed))

    def _state(self, tokens: list[int], count: int) -> int:
        state = 0
        for token in tokens[:count]:
            state = digest(state, token)
        return state

    def _cell(self, slot: FakeSlot, position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.spec.block_size)
        assert 0 < slot.blocks[block] < self.spec.num_blocks, "the null block is never written"
        return slot.blocks[block], offset

    def _check_reads(self, slot: FakeSlot) -> None:
        state = 0
        for position in range(slot.computed):
            state = digest(state, slot.tokens[position])
            assert self.cells.get(self._cell(slot, position)) == state, "a row reads KV of another prefix"
