"""Owns `Worker`: what this process is, from loading its model to its end, whoever asks."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from enum import Enum

import torch

from worker_service.config import WorkerConfig
from worker_service.executor import Executor, run_largest_step
from worker_service.host_memory import HostMemory, count_host_blocks
from worker_service.kv_memory import KvMemory, bytes_per_token, plan_capacity
from worker_service.logs import log_event
from worker_service.model import Model, load_model
from worker_service.plan import Limits
from worker_service.step_thread import StepThread

_LOGGER = logging.getLogger(__name__)


class Phase(Enum):
    """What the worker is doing."""

    LOADING = "loading"
    WARMING_UP = "warming_up"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """All that is there once the worker is ready."""

    model: Model
    limits: Limits
    kv_bytes_per_token: int
    steps: StepThread
    block_copy_ns: int = 0  # to host memory or back; 0: there is none


class Worker:
    """The process's state. `load` runs on a thread of its own; others read the attributes that it sets."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.incarnation = secrets.token_hex(8)
        self.phase = Phase.LOADING
        self.progress = 0.0  # of the phase, 0 to 1
        self.detail = "starting"
        self.engine: Engine | None = None

    def load(self) -> Engine:
        """Loads the model and allocates KV memory. Raises UnsupportedModelError, KvMemoryError, OSError."""
        config = self.config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        model = load_model(config, self._report)
        self.phase = Phase.WARMING_UP
        self._report(0.0, "sizing KV memory")
        token_bytes = bytes_per_token(model.layers, model.dtype)
        capacity = plan_capacity(
            config,
            token_bytes,
            model.max_model_len,
            model.device,
            profile=lambda: run_largest_step(model, config.max_num_batched_tokens, config.max_num_seqs),
        )
        if capacity.max_model_len < model.max_model_len:
            event = "lowered max_model_len to what KV memory holds"
            log_event(_LOGGER, logging.WARNING, event, max_model_len=capacity.max_model_len)
        num_host_blocks = count_host_blocks(config.host_memory, token_bytes * config.block_size)
        limits = Limits(
            num_slots=config.max_num_seqs,
            num_blocks=capacity.num_blocks,
            block_size=config.block_size,
            max_batched_tokens=config.max_num_batched_tokens,
            max_model_len=capacity.max_model_len,
            vocab_size=model.vocab_size,
            num_host_blocks=num_host_blocks,
        )
        kv = KvMemory(model.layers, limits.num_blocks, limits.block_size, model.dtype, model.device)
        host = HostMemory(kv, num_host_blocks) if num_host_blocks else None
        block_copy_ns = host.measure_copy_ns() if host else 0
        steps = StepThread(Executor(model, kv, limits, host), torch.get_num_threads())
        self.engine = Engine(model, limits, token_bytes, steps, block_copy_ns)
        self._report(1.0, "ready")
        return self.engine

    def _report(self, progress: float, detail: str) -> None:
        self.progress, self.detail = progress, detail
