"""Decodes from captured graphs against the same steps without: logits, on KV in the model's type and in fp8.

Each graph is captured on rows that only fill up, and then replayed for fewer rows of other lengths, twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import transformers

from benchmarks.gpu.correctness import MOST, Check
from benchmarks.gpu.generation import BLOCK_SIZE, TINY, capture_on, make_model
from tidegate_kernels.attention_batch import AttentionBatch
from worker_service.attention import PagedStep
from worker_service.batch import HostBatch, upload
from worker_service.cuda_graphs import DecodeGraphs
from worker_service.kv_memory import KvMemory
from worker_service.model import Model
from worker_service.plan import Limits

SHAPE = transformers.LlamaConfig(
    vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=8192,
)  # fmt: skip
COUNTS = (1, 8, 64)
STEPS = ([3000], [1], [17, 900, 8000, 1, 33], list(range(40, 4000, 70)))  # lengths of rows
TINY_COUNTS, TINY_STEPS = (1, 4), ([30], [5, 1, 17])


def check_graphs(device: torch.device, dry_run: bool) -> Iterator[Check]:
    """Each step as soon as it is done."""
    model = make_model(TINY if dry_run else SHAPE, device, "triton")
    kv_dtypes = [model.dtype]
    if not dry_run and torch.cuda.get_device_capability(device) >= (8, 9):
        kv_dtypes.append(torch.float8_e4m3fn)
    for kv_dtype in kv_dtypes:
        yield from _check_steps(model, kv_dtype, dry_run)


def _check_steps(model: Model, kv_dtype: torch.dtype, dry_run: bool) -> Iterator[Check]:
    steps, counts = (TINY_STEPS, TINY_COUNTS) if dry_run else (STEPS, COUNTS)
    blocks = 1 + max(sum(-(-length // BLOCK_SIZE) for length in lengths) for lengths in steps)
    longest = max(max(lengths) for lengths in steps)
    limits = Limits(counts[-1], blocks, BLOCK_SIZE, counts[-1], longest, model.vocab_size)
    kv = KvMemory(model.layers, blocks, BLOCK_SIZE, kv_dtype, model.device)
    for keys, values in kv.layers:
        keys[1:].copy_(torch.randn(keys[1:].shape, device=model.device))
        values[1:].copy_(torch.randn(values[1:].shape, device=model.device))
    last_tokens = torch.arange(limits.num_slots, device=model.device) + 3
    graphs = DecodeGraphs(model, kv, limits, last_tokens, capture_on(model.device), counts)
    for lengths in steps * 2:
        batch = _make_step(lengths)
        step = upload(batch, last_tokens)
        paged = PagedStep(model.backend, kv, step.attention)
        expected = model.forward(paged, step.token_ids, step.positions, step.sampled_tokens).float()
        found = graphs.forward(batch).float()
        error = float((found - expected).norm() / expected.norm())
        told = str(kv_dtype).removeprefix("torch.")
        yield Check(f"graph, {len(lengths)} rows, {told} KV", error, 2 * MOST[model.dtype])


def _make_step(lengths: list[int]) -> HostBatch:
    """One decode for each row, with blocks scattered over the caches, half of them of a sampled token."""
    rows, seq_lens = len(lengths), np.array(lengths, np.int32)
    used = -(-seq_lens // BLOCK_SIZE)
    order = 1 + np.random.default_rng(0).permutation(int(used.sum())).astype(np.int32)
    tables = np.zeros((rows, int(used.max())), np.int32)
    tables[np.arange(tables.shape[1]) < used[:, None]] = order
    positions = seq_lens.astype(np.int64) - 1
    last_blocks = tables[np.arange(rows), used - 1].astype(np.int64)
    fed_back = np.arange(0, rows, 2)
    return HostBatch(
        token_ids=np.full(rows, 5, np.int64),
        positions=positions,
        attention=AttentionBatch.from_host(
            query_starts=np.arange(rows + 1, dtype=np.int32),
            seq_lens=seq_lens,
            block_tables=tables,
            slot_mapping=last_blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        ),
        sampled_tokens=np.arange(rows),
        fed_back_tokens=fed_back,
        fed_back_slots=fed_back[::-1].copy(),
    )
