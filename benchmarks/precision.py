"""How far bf16 and int8 weights take the demo model from fp32: mean KL, and where greedy texts part.

    python benchmarks/precision.py [--new-tokens 32] [--threads 2]

The fused decoder continues 32 prompts greedily in fp32, and each type then reads the same texts. Up to
the first position whose likeliest token differs, the type would have written the very same text, so that this
is where its own greedy text parts. KL is of fp32's distributions against the type's, in nats, over all new
tokens.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tidegate_kernels.attention_batch import AttentionBatch
from worker_service import demo_model
from worker_service.fused.decoder import FusedDecoder
from worker_service.kv_memory import KvMemory, LayerShape

BLOCK_SIZE = 16
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "In 1969, the first humans landed on the Moon. The mission was called",
    "The quick brown fox",
    "To bake a loaf of bread, you need flour, water,",
    "SELECT name, price FROM products WHERE",
    "Dear Ms. Taylor,\n\nThank you for your letter of",
    "Water is a molecule that consists of",
    "import numpy as np\n\nx = np.",
    "The mitochondrion is the",
    "Translate to French: Good morning. ->",
    "1, 1, 2, 3, 5, 8, 13,",
    '{"name": "gate", "open": true, "levels": [',
    "The three laws of motion were written by",
    "A haiku about the tide:\n",
    "My grandmother always told me that",
    "The main difference between a list and a tuple in Python is",
    "Photosynthesis turns light into",
    "Breaking news: scientists have found",
    "The stock market fell today because",
    "How to tie a bowline: first,",
    "User: My computer does not start.\nAssistant:",
    "The population of Japan is about",
    "Shakespeare wrote Hamlet around the year",
    "for (int i = 0; i < n; i++) {",
    "An equilateral triangle has three",
    "La mer est",
    "The opposite of hot is cold. The opposite of tall is",
    "Chapter 1\n\nIt was raining when",
    "E = mc^2 says that",
)


@dataclass(frozen=True)
class Distance:
    """How far a type is from fp32 over all prompts."""

    mean_kl: float  # nats
    largest_kl: float
    agreeing: float  # share of positions with the same likeliest token
    partings: list[int]  # of each prompt: tokens before its greedy text parts from fp32's

    def unparted(self, new_tokens: int) -> int:
        """Prompts whose whole text is the same."""
        return sum(parting == new_tokens for parting in self.partings)


class Texts:
    """Token sequences in KV memory, each in blocks of its own, computed by one decoder."""

    def __init__(self, decoder: FusedDecoder, kv_dtype: torch.dtype, sequences: int, most: int) -> None:
        shape = decoder.shape
        layers = [LayerShape(shape.kv_heads, shape.head_dim, None)] * shape.layers
        width = -(-most // BLOCK_SIZE)
        self.decoder = decoder
        self.kv = KvMemory(layers, sequences * width + 1, BLOCK_SIZE, kv_dtype, torch.device("cpu"))
        self.tables = (1 + np.arange(sequences * width, dtype=np.int32)).reshape(sequences, width)

    def read(self, rows: list[int], begin: list[int], tokens: list[list[int]], wanted: int) -> Tensor:
        """Logits after the last `wanted` of each row's `tokens`, from `begin` on: `[R * wanted, V]`."""
        counts = [len(new) for new in tokens]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        positions = np.concatenate([np.arange(b, b + n) for b, n in zip(begin, counts, strict=True)])
        tables = self.tables[rows]
        blocks = tables[np.repeat(np.arange(len(rows)), counts), positions // BLOCK_SIZE].astype(np.int64)
        lengths = np.array([b + n for b, n in zip(begin, counts, strict=True)], np.int32)
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = AttentionBatch.from_host(starts, lengths, tables, slots)
        keep = torch.cat([torch.arange(end - wanted, end) for end in starts[1:].tolist()])
        ids = torch.tensor([token for new in tokens for token in new])
        at = torch.from_numpy(positions)
        return self.decoder.forward(ids, at, batch, self.kv.layers, keep).clone()


def load_decoder(folder: str, dtype: torch.dtype, threads: int) -> FusedDecoder:
    """The demo model as a worker has it: int8 comes from the checkpoint's bf16."""
    loaded = torch.float32 if dtype == torch.float32 else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=loaded)
    return FusedDecoder(model, dtype, threads=threads)


def continue_greedily(decoder: FusedDecoder, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """The prompts with as many more tokens each, in fp32."""
    texts = [list(prompt) for prompt in prompts]
    rows = list(range(len(texts)))
    memory = Texts(decoder, torch.float32, len(texts), max(map(len, texts)) + new_tokens)
    begin, new = [0] * len(texts), texts
    for _ in range(new_tokens):
        chosen = memory.read(rows, begin, new, 1).argmax(-1).tolist()
        begin = [len(text) for text in texts]
        new = [[token] for token in chosen]
        texts = [text + one for text, one in zip(texts, new, strict=True)]
    return texts


def distributions(decoder: FusedDecoder, texts: list[list[int]], new_tokens: int) -> list[Tensor]:
    """Of each text the log-probabilities at its last `new_tokens` tokens: `[new_tokens, V]`."""
    kv_dtype = torch.float32 if decoder.dtype == torch.float32 else torch.bfloat16
    memory = Texts(decoder, kv_dtype, 1, max(map(len, texts)))
    return [memory.read([0], [0], [text[:-1]], new_tokens).log_softmax(-1) for text in texts]


def compare(expected: list[Tensor], found: list[Tensor]) -> Distance:
    """A type's distributions with those of fp32."""
    divergences, same, partings = [], [], []
    for exact, other in zip(expected, found, strict=True):
        divergences.append((exact.exp() * (exact - other)).sum(-1))
        agree = exact.argmax(-1) == other.argmax(-1)
        same.append(agree)
        parted = (~agree).nonzero()
        partings.append(int(parted[0]) if len(parted) else len(agree))
    every = torch.cat(divergences)
    return Distance(float(every.mean()), float(every.max()), float(torch.cat(same).float().mean()), partings)


@torch.inference_mode()
def measure(new_tokens: int, threads: int) -> dict[str, Distance]:
    """Both types' distances."""
    folder = str(demo_model.prepare())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    exact = load_decoder(folder, torch.float32, threads)
    texts = continue_greedily(exact, prompts, new_tokens)
    expected = distributions(exact, texts, new_tokens)
    exact.close()
    distances = {}
    for dtype in (torch.bfloat16, torch.int8):
        decoder = load_decoder(folder, dtype, threads)
        found = distributions(decoder, texts, new_tokens)
        distances[str(dtype).removeprefix("torch.")] = compare(expected, found)
        decoder.close()
    return distances


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    columns = (
        "type",
        "mean KL",
        "largest KL",
        "same likeliest token",
        "whole text the same",
        "parts at token",
    )
    print("| " + " | ".join(columns) + f" |\n{'|---' * len(columns)}|")
    for name, distance in measure(options.new_tokens, options.threads).items():
        whole = f"{distance.unparted(options.new_tokens)} of {len(distance.partings)}"
        parted = sorted(parting for parting in distance.partings if parting < options.new_tokens)
        partings = f"{parted[0] + 1} (median {statistics.median(parted) + 1:.0f})" if parted else "none"
        print(
            f"| {name} | {distance.mean_kl:.2g} | {distance.largest_kl:.2g} | {distance.agreeing:.1%} | "
            f"{whole} | {partings} |"
        )


if __name__ == "__main__":
    main()
