"""Executes steps: a plan in, a result out. Owns the state between steps: slots, KV memory, sampler.

Not thread-safe: one thread executes, in the order of the plans. Knows nothing of gRPC or of streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from worker_service.attention import PagedStep, RecordingStep
from worker_service.batch import HostBatch, lay_out, upload
from worker_service.cuda_graphs import Capture, DecodeGraphs, row_counts
from worker_service.grammars import Grammars, TokenMasks, read_vocabulary
from worker_service.host_memory import HostMemory
from worker_service.kv_memory import KvMemory
from worker_service.model import Model
from worker_service.plan import Int32, Limits, Plan, Result, Timings
from worker_service.sampler import Sampled, Sampler
from worker_service.slots import SlotTable
from worker_service.transfer import put


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A step whose work the device has, but whose tokens the host may not have yet."""

    plan: Plan
    slots: Int32  # [S] that sampled
    sampled: Sampled | None  # None: no row sampled
    masks: TokenMasks | None  # None: no row that sampled has a grammar
    started_ns: int
    forward_ns: int
    sampling_ns: int


class Executor:
    """Runs the model for plans. `launch` and `collect` are apart so that a GPU never waits for the host."""

    def __init__(self, model: Model, kv: KvMemory, limits: Limits, host: HostMemory | None = None) -> None:
        self.model = model
        self.limits = limits
        self.steps = 0
        self._kv = kv
        self._host = host
        self._slots = SlotTable(limits)
        self._sampler = Sampler(limits.num_slots, limits.vocab_size, model.device)
        vocabulary = read_vocabulary(model.tokenizer.tokenizer_json, limits.vocab_size, model.eos_token_ids)
        self.grammars = Grammars(vocabulary, limits.vocab_size, model.device)
        self._last_tokens = torch.zeros(limits.num_slots, dtype=torch.int64, device=model.device)
        self._graphs: DecodeGraphs | None = None
        self._finished_ns = 0

    @torch.inference_mode()
    def capture_decodes(
        self,
        capture: Capture,
        counts: Sequence[int] | None = None,
        report: Callable[[float], None] = lambda share: None,
    ) -> None:
        """Captures decodes of so many rows each, of all that are of use by default, before the first step.

        Reports the share that is done. Raises NotCapturableError, and then steps run as before.
        """
        limits = self.limits
        counts = counts or row_counts(min(limits.num_slots, limits.max_batched_tokens))
        graphs = DecodeGraphs(self.model, self._kv, limits, self._last_tokens, capture, counts, report)
        self._graphs = graphs

    @property
    def overlaps(self) -> bool:
        """Whether launched work goes on while the host does something else."""
        return self.model.device.type == "cuda"

    def prepare(self, plan: Plan) -> None:
        """Begins what a plan needs that can be done before its turn. For any thread."""
        for request in plan.admitted:
            self.grammars.prepare(request)

    def execute(self, plan: Plan) -> Result:
        """Runs a step to its end. Raises PlanError where the plan does not fit the slots' state."""
        return self.collect(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: Plan) -> LaunchedStep:
        """Applies the plan and starts its forward and sampling. Raises PlanError, and then must be reset."""
        started_ns = time.monotonic_ns()
        sampling_rows = self._apply(plan)
        slots = plan.slots[sampling_rows]
        if not len(plan.slots):
            return LaunchedStep(plan, slots, None, None, started_ns, started_ns, started_ns)
        pending_masks = self.grammars.start_masks(slots)
        batch = lay_out(self._slots, plan, sampling_rows, self._kv.block_size)
        forward_ns = time.monotonic_ns()
        logits = self._forward(batch)
        sampling_ns = time.monotonic_ns()
        masks = None if pending_masks is None else pending_masks.result()
        sampled = self._sample(logits, slots, masks) if len(slots) else None
        return LaunchedStep(plan, slots, sampled, masks, started_ns, forward_ns, sampling_ns)

    def collect(self, step: LaunchedStep) -> Result:
        """Waits for a launched step's tokens."""
        tokens = failed = lost = np.empty(0, np.int32)
        logprobs = None
        if step.sampled is not None:
            tokens = step.sampled.token_ids.cpu().numpy().astype(np.int32)
            failed = np.flatnonzero(~step.sampled.finite.cpu().numpy()).astype(np.int32)
            if step.masks is not None and len(step.masks.lost):
                lost = step.masks.lost
                failed = np.union1d(failed, lost)
            if step.sampled.logprobs is not None:
                logprobs = step.sampled.logprobs.to_columns()
        elif self.overlaps:
            torch.cuda.synchronize(self.model.device)
        finished_ns = time.monotonic_ns()
        gap_ns = max(0, step.started_ns - self._finished_ns) if self._finished_ns else 0
        self._finished_ns = finished_ns
        self.steps += 1
        timings = Timings(
            received_ns=step.plan.received_ns,
            started_ns=step.started_ns,
            forward_ns=step.forward_ns,
            sampling_ns=step.sampling_ns,
            finished_ns=finished_ns,
            gap_ns=gap_ns,
        )
        return Result(step.plan.seq, step.slots, tokens, failed, logprobs, timings, lost)

    def reset(self) -> None:
        """Empties every slot, for a new stream."""
        self._slots.clear()
        self._sampler.clear()
        self.grammars.clear()
        self._finished_ns = 0

    def _apply(self, plan: Plan) -> Int32:
        """Applies a plan in the protocol's order; returns the indices of the rows that sample."""
        self._slots.release(plan)
        self._sampler.release(plan.released)
        self.grammars.release(plan.released)
        if self._host is not None:
            self._host.swap_out(plan.swap_out_blocks, plan.swap_out_host_blocks)
            self._host.swap_in(plan.swap_in_host_blocks, plan.swap_in_blocks)
        self._kv.copy_blocks(plan.copy_sources, plan.copy_destinations)
        self._slots.admit(plan)
        for request in plan.admitted:
            self._sampler.admit(request)
            self.grammars.admit(request)
        self._slots.append_blocks(plan)
        return self._slots.advance(plan)

    def _forward(self, batch: HostBatch) -> torch.Tensor:
        """Logits of the rows that sample, from a captured graph if there is one for the step."""
        if self._graphs is not None and self._graphs.take(batch):
            return self._graphs.forward(batch)
        on_device = upload(batch, self._last_tokens)
        step = PagedStep(self.model.backend, self._kv, on_device.attention)
        return self.model.forward(step, on_device.token_ids, on_device.positions, on_device.sampled_tokens)

    def _sample(self, logits: torch.Tensor, slots: Int32, masks: TokenMasks | None) -> Sampled:
        positions = self._slots.num_known[slots].astype(np.int64) - 1  # it is counted as known already
        num_outputs = positions - self._slots.num_prompt[slots]
        sampled = self._sampler.sample(logits, slots, positions, num_outputs, masks)
        if masks is not None:
            self.grammars.note_sampled(slots, masks.rows, sampled.token_ids)
        put(self._last_tokens, slots, sampled.token_ids)
        return sampled


@torch.inference_mode()
def run_largest_step(model: Model, max_batched_tokens: int, max_num_seqs: int) -> None:
    """Runs a forward of as many tokens, and as much sampling, as a plan may ask for. Attends to nothing."""
    logits = _run_tokens(model, max_batched_tokens, min(max_num_seqs, max_batched_tokens))
    logits.float().sort(-1)


@torch.inference_mode()
def run_largest_graph(model: Model, max_num_seqs: int) -> None:
    """Takes the memory that captured decodes will hold on to. Attends to nothing."""
    rows = row_counts(max_num_seqs)[-1]
    _run_tokens(model, rows, rows).clone()


def _run_tokens(model: Model, tokens: int, kept: int) -> torch.Tensor:
    """Logits of the first `kept` of some tokens."""
    device = model.device
    token_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    positions = torch.arange(tokens, device=device) % model.max_model_len
    return model.forward(RecordingStep(), token_ids, positions, torch.arange(kept, device=device))
