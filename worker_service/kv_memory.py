"""Owns the KV tensors of all layers, of which type they are, and how large."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from worker_service.config import WorkerConfig
from worker_service.errors import KvMemoryError, UnsupportedModelError
from worker_service.plan import Int32

_TORCH_NAMES = {"fp8_e4m3": "float8_e4m3fn"}
_FP8_CAPABILITY = (8, 9)
_CPU_SHARE = 0.4  # of the memory that is free, where --kv-memory is not set


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer keeps of each token, and how far back it looks."""

    kv_heads: int
    head_dim: int
    window: int | None  # tokens; None sees all
    key_scale: float = 1.0  # in fp8, what is stored times the scale is the number
    value_scale: float = 1.0


class KvMemory:
    """Keys and values by layer: `[num_blocks, kv_heads, block_size, head_dim]`. Block 0 is nobody's.

    `scales` has those of keys and values by layer, 1 where the type needs none. `plain` is keys, then values,
    in a type of the same size that everything can be copied in.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shapes = [(num_blocks, layer.kv_heads, block_size, layer.head_dim) for layer in layers]
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys = [_zeros(shape, dtype, device) for shape in shapes]
        self.values = [_zeros(shape, dtype, device) for shape in shapes]
        self.layers = list(zip(self.keys, self.values, strict=True))
        fp8 = dtype.itemsize == 1
        self.scales = [(one.key_scale, one.value_scale) if fp8 else (1.0, 1.0) for one in layers]
        caches = (*self.keys, *self.values)
        self.plain = [cache.view(torch.uint8) if fp8 else cache for cache in caches]

    def copy_blocks(self, sources: Int32, destinations: Int32) -> None:
        """Copies blocks pairwise in every layer; all are read before any is written."""
        if not len(sources):
            return
        device = self.keys[0].device
        read = torch.tensor(sources, dtype=torch.int64, device=device)
        write = torch.tensor(destinations, dtype=torch.int64, device=device)
        for cache in self.plain:
            cache[write] = cache[read]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        size = math.prod(shape) * dtype.itemsize
        return torch.zeros(size, dtype=torch.uint8, device=device).view(dtype).view(shape)
    # Memory that the system gives page by page as it is first written, so an idle worker stays small.
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """KV bytes of one token, all layers together."""
    return sum(2 * layer.kv_heads * layer.head_dim for layer in layers) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much the worker can hold."""

    num_blocks: int  # the null block included
    max_model_len: int  # tokens


def plan_capacity(
    config: WorkerConfig,
    token_bytes: int,
    max_model_len: int,
    device: torch.device,
    profiles: Sequence[Callable[[], None]],
) -> Capacity:
    """Number of blocks, and the longest request that they hold.

    `profiles` take CUDA memory that must stay free for steps, each beside the others; it is measured around
    them. Raises KvMemoryError where the blocks don't hold the max_model_len that was asked for; one that
    came from the model is lowered instead.
    """
    block_bytes = token_bytes * config.block_size
    useful = config.max_num_seqs * -(-max_model_len // config.block_size) + 1
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif device.type == "cuda":
        num_blocks = _cuda_bytes(config, device, profiles) // block_bytes
    elif config.kv_memory is not None:
        num_blocks = config.kv_memory // block_bytes
    else:
        num_blocks = min(useful, int(psutil.virtual_memory().available * _CPU_SHARE) // block_bytes)
    if device.type == "cpu":
        _check_free(num_blocks * block_bytes)
    held = max(0, num_blocks - 1) * config.block_size
    if held < max_model_len and (config.max_model_len is not None or num_blocks < 2):
        need = (-(-max_model_len // config.block_size) + 1) * block_bytes
        raise KvMemoryError(
            f"{num_blocks} KV blocks ({num_blocks * block_bytes:,} bytes) hold {held} tokens, and a request "
            f"may have {max_model_len}: that takes {need:,} bytes. Raise --kv-memory (on a GPU "
            "--gpu-memory-utilization), or lower --max-model-len"
        )
    return Capacity(num_blocks, min(held, max_model_len))


def _check_free(num_bytes: int) -> None:
    free = psutil.virtual_memory().available
    if num_bytes > free:
        raise KvMemoryError(
            f"KV memory would take {num_bytes:,} bytes, and {free:,} are free on this machine. Lower "
            "--kv-memory or --num-blocks"
        )


def _cuda_bytes(config: WorkerConfig, device: torch.device, profiles: Sequence[Callable[[], None]]) -> int:
    """Bytes that are left for KV within gpu_memory_utilization, after weights and what steps take."""
    for_steps = 0
    for profile in profiles:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        held_before = torch.cuda.memory_allocated(device)
        profile()
        torch.cuda.synchronize(device)
        for_steps += torch.cuda.max_memory_allocated(device) - held_before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * config.gpu_memory_utilization) - (total - free) - for_steps)


def choose_kv_dtype(
    config: WorkerConfig,
    model_dtype: torch.dtype,
    device: torch.device,
    backend_name: str,
    decoder_name: str,
) -> torch.dtype:
    """The type of KV by the options. Raises UnsupportedModelError.

    Attention computes in fp32 or, on a GPU, in the model's type, whatever the type of KV is.
    """
    name = config.kv_dtype
    if name == "auto":
        return torch.bfloat16 if config.quantization == "int8" else model_dtype
    dtype: torch.dtype = getattr(torch, _TORCH_NAMES.get(name, name))
    if decoder_name == "generic" and (dtype == model_dtype or backend_name == "reference"):
        return dtype
    told = f"--kv-dtype {name}"
    if device.type == "cpu":
        if dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedModelError(f"{told}: on a CPU, KV is float32 or bfloat16")
    elif dtype != torch.float8_e4m3fn or model_dtype != torch.bfloat16:
        raise UnsupportedModelError(
            f"{told}: on a GPU, KV is of the type of the weights, which is "
            f"{str(model_dtype).removeprefix('torch.')}, or fp8_e4m3 beside bfloat16; choose another --dtype"
        )
    elif torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        has = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise UnsupportedModelError(
            f"{told} needs a GPU of compute capability 8.9 or newer; this one has {has}"
        )
    return dtype
