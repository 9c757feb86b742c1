"""Builds paged caches with known contents, and the dense attention that backends are compared with."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tidegate_kernels.attention_batch import AttentionBatch


@dataclass(frozen=True)
class Shape:
    """What a case looks like. `rows` are (tokens already cached, new tokens)."""

    rows: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Case:
    """A filled cache, the new tokens' queries, and the dense tensors that the cache was filled from."""

    shape: Shape
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: AttentionBatch
    keys: list[Tensor]  # a row: [L, KVH, D]
    values: list[Tensor]

    @property
    def options(self) -> dict[str, float | int | None]:
        scale = self.shape.head_dim**-0.5
        return {"scale": scale, "window": self.shape.window, "softcap": self.shape.softcap}


def make_case(shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    """Scatters random keys and values over randomly chosen blocks; all that no token owns is NaN."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    seq_lens = np.array([old + new for old, new in shape.rows], dtype=np.int32)
    query_lens = np.array([new for _, new in shape.rows], dtype=np.int32)
    row_blocks = -(-seq_lens // shape.block_size)
    num_blocks = int(row_blocks.sum()) + 3
    free = rng.permutation(np.arange(1, num_blocks)).astype(np.int32)
    tables = np.zeros((len(seq_lens), int(row_blocks.max()) + 2), dtype=np.int32)
    cache_shape = (num_blocks, shape.kv_heads, shape.block_size, shape.head_dim)
    key_cache = torch.full(cache_shape, float("nan"), dtype=dtype)
    value_cache = torch.full(cache_shape, float("nan"), dtype=dtype)
    keys, values, slots, used = [], [], [], 0
    for row, length in enumerate(seq_lens):
        tables[row, : row_blocks[row]] = free[used : used + row_blocks[row]]
        used += row_blocks[row]
        positions = np.arange(length)
        row_slots = tables[row, positions // shape.block_size].astype(np.int64) * shape.block_size
        row_slots += positions % shape.block_size
        slots.append(row_slots[length - query_lens[row] :])
        dense = torch.randn(2, int(length), shape.kv_heads, shape.head_dim, generator=generator).to(dtype)
        for cache, tokens in zip((key_cache, value_cache), dense, strict=True):
            for position in positions:
                slot = int(row_slots[position])
                cache[slot // shape.block_size, :, slot % shape.block_size] = tokens[position]
        keys.append(dense[0])
        values.append(dense[1])
    query = torch.randn(int(query_lens.sum()), shape.heads, shape.head_dim, generator=generator).to(dtype)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    batch = AttentionBatch.from_host(starts, seq_lens, tables, np.concatenate(slots))
    return Case(shape, query, key_cache, value_cache, batch, keys, values)


def dense_attention(case: Case) -> Tensor:
    """Attention one query and one head at a time, in fp64, straight from its definition."""
    shape = case.shape
    output = torch.empty(case.query.shape, dtype=torch.float64)
    token = 0
    for (old, new), keys, values in zip(shape.rows, case.keys, case.values, strict=True):
        for position in range(old, old + new):
            low = 0 if shape.window is None else max(0, position - shape.window + 1)
            for head in range(shape.heads):
                kv_head = head // (shape.heads // shape.kv_heads)
                seen = keys[low : position + 1, kv_head].double()
                scores = seen @ case.query[token, head].double() * shape.head_dim**-0.5
                if shape.softcap is not None:
                    scores = torch.tanh(scores / shape.softcap) * shape.softcap
                weights = torch.softmax(scores, dim=0)
                output[token, head] = weights @ values[low : position + 1, kv_head].double()
            token += 1
    return output


DECODES = ((0, 1), (4, 1), (15, 1), (16, 1), (130, 1))
CHUNKS = ((0, 7), (9, 23), (33, 1), (64, 16))
MIXED = ((40, 1), (0, 37), (17, 1), (30, 11))

SHAPES = {
    "mha-decode": Shape(DECODES, heads=3, kv_heads=3, head_dim=64, block_size=16),
    "gqa-decode": Shape(DECODES, heads=9, kv_heads=3, head_dim=64, block_size=8),
    "mqa-decode-80": Shape(DECODES, heads=7, kv_heads=1, head_dim=80, block_size=32),
    "gqa-decode-256": Shape(DECODES, heads=8, kv_heads=2, head_dim=256, block_size=128),
    "gqa-decode-window": Shape(DECODES, heads=4, kv_heads=2, head_dim=128, block_size=16, window=17),
    "mha-decode-40-softcap": Shape(DECODES, heads=2, kv_heads=2, head_dim=40, block_size=64, softcap=5.0),
    "gqa-chunks": Shape(CHUNKS, heads=6, kv_heads=2, head_dim=64, block_size=16),
    "mqa-chunks-40": Shape(CHUNKS, heads=5, kv_heads=1, head_dim=40, block_size=8),
    "gqa-chunks-window-softcap": Shape(
        CHUNKS, heads=4, kv_heads=2, head_dim=80, block_size=16, window=9, softcap=3.0
    ),
    "gqa-mixed": Shape(MIXED, heads=9, kv_heads=3, head_dim=64, block_size=16),
    "gqa-mixed-128-window": Shape(MIXED, heads=8, kv_heads=4, head_dim=128, block_size=128, window=20),
    "mha-mixed-256": Shape(MIXED, heads=2, kv_heads=2, head_dim=256, block_size=32, softcap=20.0),
}
