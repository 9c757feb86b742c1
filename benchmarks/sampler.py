"""What sampling costs: 64 rows of the demo model's vocabulary, as a share of the step.

    python -m benchmarks.sampler [--rows 64] [--rounds 15] [--threads 2] [--dtype bfloat16]

The forward and the sampler of each mix take turns. The share is of the whole step, forward and sampling.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as a worker's entry point does

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.worker_step import Case, make_inputs, make_kv
from worker_service import demo_model
from worker_service.fused.decoder import FusedDecoder
from worker_service.plan import Admission, Sampling
from worker_service.sampler import Sampler

PROMPT = np.arange(200, 328, dtype=np.int32)
BIASED, BIASES = np.array([5, 7], np.int32), np.array([1, -1], np.float32)
MIXES: dict[str, list[Sampling]] = {
    "greedy": [Sampling()],
    "temperature": [Sampling(temperature=0.8)],
    "top_p": [Sampling(temperature=0.8, top_p=0.95)],
    "top_k": [Sampling(temperature=0.8, top_k=50)],
    "min_p": [Sampling(temperature=0.8, min_p=0.05)],
    "penalties": [Sampling(presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.1)],
    "logprobs": [Sampling(logprobs=5)],
    "mixed": [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=0.8, top_k=40),
        Sampling(temperature=0.9, top_k=100, top_p=0.95, min_p=0.02),
        Sampling(temperature=0.6, presence_penalty=0.5, frequency_penalty=0.3),
        Sampling(repetition_penalty=1.1, logprobs=5),
        Sampling(temperature=0.8, top_p=0.95, bias_token_ids=BIASED, bias_values=BIASES),
    ],
}


def make_sampler(kinds: list[Sampling], rows: int, vocab_size: int) -> Sampler:
    """A sampler whose slots take the kinds in turn."""
    sampler = Sampler(rows, vocab_size, torch.device("cpu"))
    for slot in range(rows):
        sampler.admit(
            Admission(
                slot=slot,
                request_id=str(slot),
                token_ids=PROMPT,
                num_prompt_tokens=len(PROMPT),
                num_computed_tokens=0,
                block_ids=np.empty(0, np.int32),
                sampling=kinds[slot % len(kinds)],
            )
        )
    return sampler


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "int8"], default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    dtype = getattr(torch, options.dtype)
    loaded = torch.bfloat16 if dtype == torch.int8 else dtype
    module = AutoModelForCausalLM.from_pretrained(demo_model.prepare(), dtype=loaded)
    decoder = FusedDecoder(module, dtype, threads=options.threads)
    kv = make_kv(loaded)
    layers = list(zip(kv.keys, kv.values, strict=True))
    ids, positions, batch, keep = make_inputs(Case(options.rows, 128, 1))

    slots = np.arange(options.rows, dtype=np.int32)
    forwards: list[float] = []
    samplings: dict[str, list[float]] = {name: [] for name in MIXES}
    with torch.inference_mode():
        logits = decoder.forward(ids, positions, batch, layers, keep)
        samplers = {
            name: make_sampler(kinds, options.rows, logits.shape[-1]) for name, kinds in MIXES.items()
        }
        for step in range(options.rounds):
            for name, sampler in samplers.items():
                begun = time.perf_counter()
                logits = decoder.forward(ids, positions, batch, layers, keep)
                forwards.append(time.perf_counter() - begun)
                outputs = np.full(options.rows, step, np.int64)
                begun = time.perf_counter()
                sampled = sampler.sample(logits, slots, outputs + len(PROMPT), outputs)
                sampled.token_ids.tolist()
                samplings[name].append(time.perf_counter() - begun)

    forward_ms = statistics.median(forwards) * 1e3
    print(f"{options.rows} rows, {options.dtype}, {options.threads} threads: forward {forward_ms:.1f} ms")
    print(f"{'rows':<12} {'sampling ms':>11} {'of the step':>11}")
    for name, times in samplings.items():
        sampling_ms = statistics.median(times) * 1e3
        print(f"{name:<12} {sampling_ms:>11.2f} {sampling_ms / (sampling_ms + forward_ms):>11.1%}")


if __name__ == "__main__":
    main()
