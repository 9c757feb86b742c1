"""What types of KV cost, on the demo model: processor time of a decode step, and likeness to wider KV.

    python benchmarks/kv_types.py [--parts time,likeness] [--rounds 4]

- time: the fused decoder on one thread, weights and KV of each type in turn within each case. The least
  processor time of a step is told, which a busy machine disturbs least.
- likeness: the model in its checkpoint's type, by transformers' modules and attention in plain torch, which
  reads all keys and values from KV in chunks of 8 tokens: KL in nats against KV in the model's own type.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.precision import PROMPTS
from benchmarks.worker_step import BLOCK_SIZE, Case, Fused, make_kv, measure
from tidegate_kernels.attention_batch import AttentionBatch
from worker_service import demo_model
from worker_service.attention import PagedStep
from worker_service.config import WorkerConfig
from worker_service.kv_memory import KvMemory
from worker_service.model import Model, load_model

CASES = (Case(1, 128, 1), Case(1, 1000, 1), Case(16, 128, 1), Case(16, 1000, 1))
WEIGHTS = (torch.float32, torch.bfloat16, torch.int8)
KV_ON_CPUS = (torch.float32, torch.bfloat16)
NARROW = (torch.float8_e4m3fn,)
CHUNK = 8


def name_of(dtype: torch.dtype) -> str:
    """Without torch's name."""
    return str(dtype).removeprefix("torch.")


def compare_times(folder: str, rounds: int) -> None:
    """Prints the processor time of decode steps by type."""
    torch.set_num_threads(1)
    memories = {dtype: make_kv(dtype) for dtype in KV_ON_CPUS}
    paths = {
        f"{name_of(weights)} | {name_of(kv)}": Fused(folder, weights, 1, memory)
        for weights in WEIGHTS
        for kv, memory in memories.items()
    }
    times = [measure(dict(paths), case, rounds) for case in CASES]
    print("| weights | KV | " + " | ".join(f"{case}, ms" for case in CASES) + " |")
    print("|---" * (2 + len(CASES)) + "|")
    for name in paths:
        print(f"| {name} | " + " | ".join(f"{time[name][1]:.1f}" for time in times) + " |", flush=True)


def read_all(model: Model, dtype: torch.dtype, token_ids: list[int]) -> Tensor:
    """Log-probabilities after each token: `[T, V]`."""
    count = len(token_ids)
    table = np.arange(1, -(-count // BLOCK_SIZE) + 1, dtype=np.int32)[None]
    kv = KvMemory(model.layers, table.size + 1, BLOCK_SIZE, dtype, model.device)
    chunks = []
    for begin in range(0, count, CHUNK):
        positions = np.arange(begin, min(count, begin + CHUNK))
        size, end = len(positions), int(positions[-1]) + 1
        blocks = table[0, positions // BLOCK_SIZE].astype(np.int64)
        batch = AttentionBatch.from_host(
            np.array([0, size], np.int32),
            np.array([end], np.int32),
            table,
            blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        )
        step = PagedStep(model.backend, kv, batch)
        ids, at = torch.tensor(token_ids[begin:end]), torch.from_numpy(positions)
        chunks.append(model.forward(step, ids, at, torch.arange(size)))
    return torch.cat(chunks).float().log_softmax(-1)


def compare_likeness(folder: str) -> None:
    """Prints how far narrow KV takes the distributions, over short prompts and three texts of 100 tokens."""
    options = {"model": folder, "decoder": "generic", "attention_backend": "reference"}
    model = load_model(WorkerConfig.model_validate(options), lambda share, text: None)
    encode = AutoTokenizer.from_pretrained(folder).encode
    joined = encode(" ".join(PROMPTS))
    texts = [encode(prompt) for prompt in PROMPTS[:16]] + [joined[at : at + 100] for at in (0, 100, 200)]
    wide = torch.cat([read_all(model, model.dtype, text) for text in texts])
    print(f"\nagainst KV in {name_of(model.dtype)}, the type of the weights: {len(wide)} positions")
    for dtype in NARROW:
        narrow = torch.cat([read_all(model, dtype, text) for text in texts])
        kl = (wide.exp() * (wide - narrow)).sum(-1)
        same = (wide.argmax(-1) == narrow.argmax(-1)).float().mean()
        print(f"{name_of(dtype)}: mean KL {kl.mean():.4f}, largest {kl.max():.2f}, same likeliest {same:.1%}")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="time,likeness")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    folder = str(demo_model.prepare())
    if "time" in options.parts.split(","):
        compare_times(folder, options.rounds)
    if "likeness" in options.parts.split(","):
        compare_likeness(folder)


if __name__ == "__main__":
    main()
