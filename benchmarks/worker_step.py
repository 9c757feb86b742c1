"""Milliseconds per step of the worker's forward alone: through transformers, and by the fused decoder.

    python benchmarks/worker_step.py [--dtypes bfloat16,int8] [--generic bfloat16] [--rounds 5] [--threads 2]
        [--shared-only]

Decodes of 1 to 64 rows at a context of 128 tokens, of 1 to 16 at 1,000, and prefills of 256 and 1,000; then
decodes that begin with the same blocks, as behind one system prompt, against rows with blocks of their own.
The paths (and what is compared with and without) take turns within each case, so that what else the machine
does meets both: trust the ratios. `cpu` is the processor time of all threads in the cheapest step, which a
busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tidegate_kernels.attention_batch import AttentionBatch
from worker_service import demo_model
from worker_service.attention import PagedStep
from worker_service.config import WorkerConfig
from worker_service.fused.decoder import FusedDecoder
from worker_service.kv_memory import KvMemory, LayerShape
from worker_service.model import Model, load_model

BLOCK_SIZE = 16
NUM_BLOCKS = 16 * 64  # 16 rows of 1,024 tokens, or 64 of 256


@dataclass(frozen=True)
class Case:
    """Rows that each have `context` tokens cached and compute `new` more."""

    rows: int
    context: int
    new: int
    shared: int = 0  # tokens, whole blocks, that all rows begin with

    def __str__(self) -> str:
        shared = f", {self.shared:,} shared" if self.shared else ""
        if self.new == 1:
            return f"decode, {self.rows} rows of {self.context:,}{shared}"
        return f"prefill of {self.new:,}"


CASES = [
    *(Case(rows, 128, 1) for rows in (1, 4, 8, 16, 64)),
    *(Case(rows, 1000, 1) for rows in (1, 4, 16)),
    *(Case(1, 0, tokens) for tokens in (256, 1000)),
]

# With and without: the second is the first, but each row has blocks of its own.
SHARED_CASES = [
    (Case(rows, context, 1, shared), Case(rows, context, 1))
    for rows, context, shared in ((2, 832, 800), (8, 832, 800), (16, 960, 928))
]


def make_inputs(case: Case) -> tuple[Tensor, Tensor, AttentionBatch, Tensor]:
    """Token ids, positions, batch and the rows that sample, with blocks scattered over the memory."""
    rng = np.random.default_rng(0)
    width = -(-(case.context + case.new) // BLOCK_SIZE)
    tables = (1 + rng.permutation(NUM_BLOCKS)[: case.rows * width]).reshape(case.rows, width).astype(np.int32)
    tables[:, : case.shared // BLOCK_SIZE] = tables[0, : case.shared // BLOCK_SIZE]
    positions = np.tile(np.arange(case.context, case.context + case.new), case.rows)
    rows = np.repeat(np.arange(case.rows), case.new)
    slots = tables[rows, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = np.arange(case.rows + 1, dtype=np.int32) * case.new
    lengths = np.full(case.rows, case.context + case.new, np.int32)
    batch = AttentionBatch.from_host(starts, lengths, tables, slots)
    ids = torch.from_numpy(rng.integers(0, 40_000, len(positions)))
    return ids, torch.from_numpy(positions), batch, torch.from_numpy(starts[1:].astype(np.int64) - 1)


def make_kv(dtype: torch.dtype) -> KvMemory:
    """KV memory of the demo model for the largest case."""
    layers = [LayerShape(kv_heads=3, head_dim=64, window=None)] * 30
    kv = KvMemory(layers, NUM_BLOCKS + 1, BLOCK_SIZE, dtype, torch.device("cpu"))
    for cache in (*kv.keys, *kv.values):
        cache.normal_()  # memory that was never written would be one page, read again and again
    return kv


class Generic:
    """The model through transformers."""

    def __init__(self, model: Model, kv: KvMemory) -> None:
        self.model, self.kv = model, kv

    def __call__(self, ids: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor) -> Tensor:
        """Logits of the rows that sample."""
        return self.model.forward(PagedStep(self.model.backend, self.kv, batch), ids, positions, rows)


class Fused:
    """The fused decoder with weights of one type."""

    def __init__(self, folder: str, dtype: torch.dtype, threads: int, kv: KvMemory) -> None:
        loaded = torch.float32 if dtype == torch.float32 else torch.bfloat16
        self.decoder = FusedDecoder(
            AutoModelForCausalLM.from_pretrained(folder, dtype=loaded), dtype, threads=threads
        )
        self.kv = list(zip(kv.keys, kv.values, strict=True))

    def __call__(self, ids: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor) -> Tensor:
        """Logits of the rows that sample."""
        return self.decoder.forward(ids, positions, batch, self.kv, rows)


def measure(
    paths: dict[str, Callable[..., Tensor]], case: Case, rounds: int
) -> dict[str, tuple[float, float]]:
    """Of each path the median time and the least processor time of a step, both in ms."""
    inputs = make_inputs(case)
    walls: dict[str, list[float]] = {name: [] for name in paths}
    cpus: dict[str, list[float]] = {name: [] for name in paths}
    steps = 1 if case.new > 1 else 3
    for path in paths.values():
        path(*inputs)
    for _ in range(rounds):
        for name, path in paths.items():
            for _ in range(steps):
                wall, cpu = time.perf_counter(), time.process_time()
                path(*inputs)
                walls[name].append(1e3 * (time.perf_counter() - wall))
                cpus[name].append(1e3 * (time.process_time() - cpu))
    return {name: (statistics.median(walls[name]), min(cpus[name])) for name in paths}


def compare_shared(paths: dict[str, Callable[..., Tensor]], rounds: int) -> None:
    """Prints what sharing saves of a step: the median ratio of neighbouring steps with and without."""
    print("\nsteps with shared blocks, against blocks of each row's own (median ratio of neighbouring steps)")
    print("| step | " + " | ".join(paths) + " |")
    print("|---" * (1 + len(paths)) + "|")
    for cases in SHARED_CASES:
        inputs = [make_inputs(case) for case in cases]
        cells = []
        for path in paths.values():
            ratios = []
            for index in range(3 * rounds + 1):
                times = []
                for columns in inputs:
                    start = time.perf_counter()
                    path(*columns)
                    times.append(time.perf_counter() - start)
                if index:  # the first round warms up
                    ratios.append(times[0] / times[1])
            cells.append(f"{statistics.median(ratios):.2f}")
        print(f"| {cases[0]} | " + " | ".join(cells) + " |", flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", default="bfloat16,int8", help="of the fused decoder's weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--generic", default="bfloat16", help="type for transformers; none leaves it out")
    parser.add_argument("--shared-only", action="store_true", help="only the cases with shared blocks")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = str(demo_model.prepare())
    paths: dict[str, Callable[..., Tensor]] = {}
    if options.generic != "none":
        settings = {"model": folder, "device": "cpu", "dtype": options.generic}
        model = load_model(WorkerConfig.model_validate(settings), lambda share, text: None)
        paths[f"generic {options.generic}"] = Generic(model, make_kv(getattr(torch, options.generic)))
    kv = make_kv(torch.bfloat16)
    for name in options.dtypes.split(","):
        paths[f"fused {name}"] = Fused(folder, getattr(torch, name), options.threads, kv)
    print(f"median ms per step (cpu: least processor time), {options.threads} threads")
    print("| step | " + " | ".join(paths) + " |")
    print("|---" * (1 + len(paths)) + "|")
    for case in [] if options.shared_only else CASES:
        results = measure(paths, case, options.rounds)
        cells = [f"{wall:.1f} (cpu {cpu:.1f})" for wall, cpu in results.values()]
        print(f"| {case} | " + " | ".join(cells) + " |", flush=True)
    compare_shared(paths, options.rounds)


if __name__ == "__main__":
    main()
