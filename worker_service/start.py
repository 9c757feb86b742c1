"""Owns the way from options to an engine: the model, its KV memory, and the thread that executes steps.

It imports torch, which takes seconds: `worker.py` asks for it when the process listens already.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable

import torch

from worker_service.config import WorkerConfig
from worker_service.cuda_graphs import CudaCapture, uses_graphs
from worker_service.errors import KvMemoryError, NotCapturableError, UnsupportedModelError
from worker_service.executor import Executor, run_largest_graph, run_largest_step
from worker_service.host_memory import HostMemory, count_host_blocks
from worker_service.kv_memory import KvMemory, bytes_per_token, plan_capacity
from worker_service.logs import log_event
from worker_service.model import Model, load_model
from worker_service.plan import Limits
from worker_service.step_thread import StepThread
from worker_service.worker import Engine, Phase

_LOGGER = logging.getLogger(__name__)

# A step of 2,048 prompt tokens takes seconds on a CPU, for which decodes wait, and gives no more tokens a
# second than four of 512 do.
_BATCHED_TOKENS = {"cpu": 512, "cuda": 2_048}

# Told the phase, the share of it that is done, and a line for people.
Report = Callable[[Phase, float, str], None]


def start_engine(config: WorkerConfig, report: Report) -> Engine:
    """Loads the model and allocates KV memory. Raises UnsupportedModelError, KvMemoryError, OSError."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model = load_model(config, functools.partial(report, Phase.LOADING))
    report(Phase.WARMING_UP, 0.0, "sizing KV memory")
    max_batched_tokens = config.max_num_batched_tokens or max(
        _BATCHED_TOKENS[model.device.type], config.max_num_seqs
    )
    token_bytes = bytes_per_token(model.layers, model.kv_dtype)
    capacity = plan_capacity(
        config,
        token_bytes,
        model.max_model_len,
        model.device,
        _profiles(config, model, max_batched_tokens),
    )
    if capacity.max_model_len < model.max_model_len:
        event = "lowered max_model_len to what KV memory holds"
        log_event(_LOGGER, logging.WARNING, event, max_model_len=capacity.max_model_len)
    num_host_blocks = count_host_blocks(config.host_memory, token_bytes * config.block_size)
    limits = Limits(
        num_slots=config.max_num_seqs,
        num_blocks=capacity.num_blocks,
        block_size=config.block_size,
        max_batched_tokens=max_batched_tokens,
        max_model_len=capacity.max_model_len,
        vocab_size=model.vocab_size,
        num_host_blocks=num_host_blocks,
    )
    kv = KvMemory(model.layers, limits.num_blocks, limits.block_size, model.kv_dtype, model.device)
    host = HostMemory(kv, num_host_blocks) if num_host_blocks else None
    block_copy_ns = host.measure_copy_ns() if host else 0
    executor = Executor(model, kv, limits, host)
    if uses_graphs(model, config.cuda_graphs):
        _capture_decodes(executor, report)
    steps = StepThread(executor, torch.get_num_threads())
    engine = Engine(model, limits, token_bytes, steps, block_copy_ns)
    report(Phase.WARMING_UP, 1.0, "ready")
    return engine


def _profiles(config: WorkerConfig, model: Model, tokens: int) -> list[Callable[[], None]]:
    """What takes as much memory as steps of so many tokens will."""
    seqs = config.max_num_seqs
    profiles: list[Callable[[], None]] = [functools.partial(run_largest_step, model, tokens, seqs)]
    if uses_graphs(model, config.cuda_graphs):
        profiles.append(functools.partial(run_largest_graph, model, min(tokens, seqs)))
    return profiles


def _capture_decodes(executor: Executor, report: Report) -> None:
    """Makes CUDA graphs, unless the model can't have any.

    Raises KvMemoryError where they have no room, UnsupportedModelError where a capture breaks.
    """
    started = time.monotonic()
    try:
        executor.capture_decodes(
            CudaCapture(executor.model.device),
            report=lambda share: report(Phase.WARMING_UP, share, "capturing decodes into CUDA graphs"),
        )
    except NotCapturableError as error:
        event = "decodes are not captured into CUDA graphs"
        log_event(_LOGGER, logging.WARNING, event, reason=str(error))
    except torch.OutOfMemoryError as error:
        raise KvMemoryError(
            "the GPU has too little memory for CUDA graphs beside KV: lower --gpu-memory-utilization or "
            "--max-num-seqs, or set --cuda-graphs off"
        ) from error
    except (
        RuntimeError
    ) as error:  # torch's: what CUDA is left in after a broken capture is not to be relied on
        raise UnsupportedModelError(
            f"capturing its decodes into CUDA graphs failed: {error}. Set --cuda-graphs off"
        ) from error
    else:
        seconds = round(time.monotonic() - started, 1)
        log_event(_LOGGER, logging.INFO, "captured decodes into CUDA graphs", seconds=seconds)
