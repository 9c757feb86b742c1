"""Paged attention and KV write in plain torch: right on every device, and what fast backends are held to.

Owns the meaning of the two operations. Makes no promise of speed.

Caches are `[num_blocks, kv_heads, block_size, head_dim]`; H query heads share KVH key and value heads in
order, so that query head h reads head h // (H // KVH). A cache of a one-byte type (fp8 e4m3) holds keys and
values divided by a scale: what is stored times `key_scale` or `value_scale` gives the true number. Caches of
other types have the scale 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tidegate_kernels.attention_batch import AttentionBatch


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Puts each token's key and value (`[T, KVH, D]`) into its slot of the caches, in the caches' type."""
    block_size = key_cache.shape[2]
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")  # [T]
    offsets = slot_mapping % block_size  # [T]
    key_cache[blocks, :, offsets] = _stored(key, key_scale, key_cache.dtype)
    value_cache[blocks, :, offsets] = _stored(value, value_scale, value_cache.dtype)


def _stored(tokens: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Numbers as a cache of this type holds them. e4m3 has no infinity: what is too large becomes 448."""
    if dtype.itemsize > 1:
        return tokens.to(dtype)
    most = torch.finfo(dtype).max
    return (tokens.float() * (1.0 / scale)).clamp(-most, most).to(dtype)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Causal attention of every new token (`[T, H, D]`) over its row's cached keys and values: `[T, H, D]`.

    The step's own keys and values must be in the caches already. With a `window`, a token at position p sees
    the keys k with p - window < k <= p. With a `softcap`, scores become tanh(score / softcap) * softcap
    before masking. Softmax and sums are in fp32, whatever the type of query and caches.
    """
    output = torch.empty_like(query)
    block_size = key_cache.shape[2]
    starts = batch.query_starts_host.tolist()
    for row, seq_len in enumerate(batch.seq_lens_host.tolist()):
        begin, end = starts[row], starts[row + 1]
        first_query = seq_len - (end - begin)  # position of the row's first new token
        first_key = 0 if window is None else max(0, first_query - window + 1)
        first_block = first_key // block_size
        blocks = batch.block_tables[row, first_block : -(-seq_len // block_size)]
        first_key = first_block * block_size
        keys = _gather(key_cache, blocks, seq_len - first_key) * key_scale
        values = _gather(value_cache, blocks, seq_len - first_key) * value_scale
        query_positions = torch.arange(first_query, seq_len, device=query.device)
        key_positions = torch.arange(first_key, seq_len, device=query.device)
        hidden = key_positions[None, :] > query_positions[:, None]  # [N, L]
        if window is not None:
            hidden |= key_positions[None, :] <= query_positions[:, None] - window
        output[begin:end] = _attend(query[begin:end], keys, values, hidden, scale, softcap)
    return output


def _gather(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first `length` tokens that lie in `blocks`, in fp32: `[KVH, length, D]`."""
    _, kv_heads, _, head_dim = cache.shape
    tokens = cache[blocks].transpose(0, 1).reshape(kv_heads, -1, head_dim)
    return tokens[:, :length].float()


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """One row: query `[N, H, D]`, keys and values `[KVH, L, D]`, hidden `[N, L]` -> `[N, H, D]`."""
    num_queries, heads, head_dim = query.shape
    kv_heads = keys.shape[0]
    grouped = query.float().view(num_queries, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = grouped @ keys[:, None].transpose(-1, -2) * scale  # [KVH, G, N, L]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    mixed = weights @ values[:, None]  # [KVH, G, N, D]
    return mixed.permute(2, 0, 1, 3).reshape(num_queries, heads, head_dim).to(query.dtype)
