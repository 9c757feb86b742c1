"""What CUDA graphs need, on a CPU: a graph that replays what it recorded, and attention for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tidegate_kernels import reference


class FakeGraph(TorchDispatchMode):
    """Records each operation with its tensors, and runs them again on the very same memory.

    As with CUDA's graphs, no Python runs in a replay, and what the host knew at the capture stays so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable[..., object], tuple, dict, object]] = []
        self.replays = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, recorded in self.operations:
            result = func(*args, **kwargs)
            if func._schema.is_mutable:
                continue
            inputs = {storage(tensor) for tensor in tensors((args, kwargs))}
            for old, new in zip(tensors(recorded), tensors(result), strict=True):
                if storage(old) not in inputs:  # a view shows what its base has by now
                    assert old.shape == new.shape
                    old.copy_(new)


def tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor)]


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class FakeCapture:
    """Captures with fake graphs, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        graph = FakeGraph()
        with graph:
            run()
        self.graphs.append(graph)
        return graph.replay

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.graphs)


class FakeDeviceBackend:
    """Reads lengths of decodes from tensors alone, as the Triton kernels do; chunks go to the reference."""

    write_kv = staticmethod(reference.write_kv)

    @staticmethod
    def paged_attention(query, key_cache, value_cache, batch, *, scale, window, softcap, **scales):
        if batch.max_query_len > 1:
            return reference.paged_attention(
                query, key_cache, value_cache, batch, scale=scale, window=window, softcap=softcap, **scales
            )
        assert scales == {"key_scale": 1.0, "value_scale": 1.0}
        rows, heads, head_dim = query.shape
        keys, values = (  # [R, KVH, L, D]
            cache[batch.block_tables].transpose(1, 2).flatten(2, 3) for cache in (key_cache, value_cache)
        )
        positions = torch.arange(keys.shape[2])
        lengths = batch.seq_lens[:, None]
        seen = positions < lengths  # [R, L]
        if window is not None:
            seen &= positions >= lengths - window
        grouped = query.view(rows, keys.shape[1], -1, head_dim)  # [R, KVH, G, D]
        scores = grouped @ keys.transpose(-1, -2) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
        return (weights @ values).view(rows, heads, head_dim)
