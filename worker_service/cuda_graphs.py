"""Owns decode steps as CUDA graphs: one for each of some numbers of rows, captured at start and replayed.

A small model's decode keeps a GPU busy for less time than the host takes to launch its kernels one by one; a
graph launches them all at once. Steps with chunks of prompts, or with more rows, are none of this file's.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tidegate_kernels.attention_batch import AttentionBatch
from worker_service.attention import PagedStep
from worker_service.batch import HostBatch
from worker_service.errors import NotCapturableError
from worker_service.kv_memory import KvMemory
from worker_service.model import Model
from worker_service.plan import Limits
from worker_service.transfer import to_device

MOST_ROWS = 512  # beyond, a step computes for longer than its launches take
_NO_SLOT = -1
_TOKEN_ID, _FED_BACK_SLOT, _POSITION, _KV_SLOT, _LENGTH = range(5)
# A row that only fills up: token 0 at position 0, alone in the null block, which nobody reads.
_PADDING = np.array([[0], [_NO_SLOT], [0], [0], [1]])

# Runs a function, whose tensors never move, and returns what runs the same work on the device again.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


def row_counts(max_rows: int) -> tuple[int, ...]:
    """The numbers of rows to capture: 1, 2, 4, 8, 16, 24, ... 256, then every 32nd, up to `max_rows`.

    A step of fewer rows is filled up to the next number.
    """
    most = min(max_rows, MOST_ROWS)
    counts = {1, 2, 4, *range(8, 257, 8), *range(288, MOST_ROWS + 1, 32)}
    return (*sorted(count for count in counts if count < most), most)


class DecodeGraphs:
    """Decodes of a model on KV memory. `last_tokens` [slots] int64 has the token that each slot sampled last.

    What it computes is what the eager forward computes; rows that fill up write to the null block alone. All
    graphs share memory and logits, so one step runs at a time.
    """

    def __init__(
        self,
        model: Model,
        kv: KvMemory,
        limits: Limits,
        last_tokens: Tensor,
        capture: Capture,
        counts: Sequence[int],
        report: Callable[[float], None] = lambda share: None,
    ) -> None:
        """Captures a graph for each of `counts` rows, and reports the share that is done.

        Raises NotCapturableError where the model's modules wait for the device.
        """
        self.counts = tuple(sorted(counts))
        self._model = model
        self._kv = kv
        self._max_model_len = limits.max_model_len
        self._last_tokens = last_tokens
        device, most = model.device, self.counts[-1]
        self._columns = torch.from_numpy(_PADDING.repeat(most, axis=1)).to(device)  # [5, most] int64
        self._tables = torch.zeros(most, limits.max_blocks_per_request, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._every_row = torch.arange(most, device=device)
        self._logits = torch.empty_like(self._compute(most))  # [most, V]
        self._replays: dict[int, Callable[[], None]] = {}
        for done, rows in enumerate(reversed(self.counts)):  # the largest first: the others fit its memory
            self._replays[rows] = capture(functools.partial(self._decode, rows))
            report((done + 1) / len(self.counts))

    def take(self, batch: HostBatch) -> bool:
        """Whether a graph computes this step."""
        return batch.decodes and batch.rows <= self.counts[-1]

    def forward(self, batch: HostBatch) -> Tensor:
        """Logits `[S, V]` of the rows that sample, valid until the next call. Asks for `take` first."""
        rows = batch.rows
        captured = self.counts[bisect.bisect_left(self.counts, rows)]
        tables = batch.attention.block_tables.numpy()
        columns = _PADDING.repeat(captured, axis=1)
        columns[_TOKEN_ID, :rows] = batch.token_ids
        columns[_FED_BACK_SLOT, batch.fed_back_tokens] = (
            batch.fed_back_slots
        )  # row and token are the same here
        columns[_POSITION, :rows] = batch.positions
        columns[_KV_SLOT, :rows] = batch.attention.slot_mapping.numpy()
        columns[_LENGTH, :rows] = batch.attention.seq_lens_host
        padded = np.zeros((captured, tables.shape[1]), np.int32)
        padded[:rows] = tables
        sent = to_device((torch.from_numpy(columns), torch.from_numpy(padded)), self._model.device)
        self._columns[:, :captured].copy_(sent[0])
        self._tables[:captured, : tables.shape[1]].copy_(sent[1])
        self._replays[captured]()
        if len(batch.sampled_tokens) == rows:
            return self._logits[:rows]
        return self._logits[torch.from_numpy(batch.sampled_tokens).to(self._model.device)]

    def _decode(self, rows: int) -> None:
        """What is captured."""
        self._logits[:rows].copy_(self._compute(rows))

    def _compute(self, rows: int) -> Tensor:
        """Logits of the first `rows` rows: `[rows, V]`. The host reads nothing that differs between steps."""
        columns = self._columns[:, :rows]
        slots = columns[_FED_BACK_SLOT]
        fed_back = self._last_tokens[slots.clamp_min(0)]
        token_ids = torch.where(slots == _NO_SLOT, columns[_TOKEN_ID], fed_back)
        attention = AttentionBatch(
            query_starts=self._starts[: rows + 1],
            seq_lens=columns[_LENGTH].to(torch.int32),
            block_tables=self._tables[:rows],
            slot_mapping=columns[_KV_SLOT],
            max_query_len=1,
            max_seq_len=self._max_model_len,
            query_starts_host=np.arange(rows + 1, dtype=np.int32),
            seq_lens_host=np.ones(rows, np.int32),
        )
        step = PagedStep(self._model.backend, self._kv, attention)
        return self._model.forward(step, token_ids, columns[_POSITION], self._every_row[:rows])


class CudaCapture:
    """A `Capture` by CUDA: all graphs on one stream, in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs it once, which compiles its kernels, then captures it. Raises NotCapturableError."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _run_without_waiting(run)
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                run()
        return graph.replay


def _run_without_waiting(run: Callable[[], None]) -> None:
    """Runs it where waiting for the device is an error: in a capture that would break more than this run."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        raise NotCapturableError("its modules wait for the device within a step") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def uses_graphs(model: Model, wanted: str) -> bool:
    """Whether decodes are to be captured. Attention must then read all lengths on the device."""
    return wanted == "auto" and model.device.type == "cuda" and model.backend_name == "triton"
