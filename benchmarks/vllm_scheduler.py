"""vLLM's scheduler on the cases of scheduler_step.py. That starts this file with the Python of an environment
that has vLLM, so nothing of ours is imported here.

It reads lines of JSON from its input and answers each with one line of milliseconds of processor time:

    ["decodes", running, waiting]        builds a case
    ["step", case, steps]                some more steps of that case: schedule + update
    ["submit", requests]                 requests of CONTEXT tokens: hashes and queue
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import numpy as np
import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

VOCAB = 32_000
BLOCK_SIZE = 16
CONTEXT = 1000
MAX_TOKENS = 4096
_BUDGET = 1 << 21


class Requests:
    """Makes requests with prefix hashes, as vLLM's engine does."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
        self._sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)

    def prompt(self, num_tokens: int) -> list[int]:
        """Random tokens."""
        tokens: list[int] = self.rng.integers(0, VOCAB, num_tokens).tolist()
        return tokens

    def make(self, name: str, prompt: list[int]) -> Any:
        """One request; its prompt is hashed here."""
        return Request(name, prompt, self._sampling, None, block_hasher=self._hasher)


def scheduler(model: str, seats: int) -> Any:
    """A scheduler whose memory holds all that may run."""
    config = VllmConfig(
        model_config=ModelConfig(model=model, dtype="bfloat16", max_model_len=8192),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=_BUDGET,
            max_model_len=8192,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        device_config=DeviceConfig("cpu"),
    )
    num_blocks = seats * 6144 // BLOCK_SIZE
    config.cache_config.num_gpu_blocks = num_blocks
    layer = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], layer)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )


class Decodes:
    """One case: requests that decode, and others that wait."""

    def __init__(self, model: str, num_running: int, num_waiting: int) -> None:
        self._requests = Requests()
        self._scheduler = scheduler(model, num_running)
        lengths = self._requests.rng.integers(CONTEXT - 256, CONTEXT + 256, num_running).tolist()
        for i, length in enumerate([*lengths, *[32] * num_waiting]):
            self._scheduler.add_request(self._requests.make(f"r{i}", self._requests.prompt(length)))
        self._num_running = num_running
        self.step()

    def step(self) -> float:
        """Milliseconds of one step."""
        tokens = [[token] for token in self._requests.rng.integers(0, VOCAB, self._num_running).tolist()]
        began = time.thread_time_ns()
        scheduled = self._scheduler.schedule()
        between = time.thread_time_ns()
        names = list(scheduled.num_scheduled_tokens)
        if len(names) != self._num_running:
            raise RuntimeError(f"{len(names)} requests were scheduled where {self._num_running} run")
        output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, tokens)
        resumed = time.thread_time_ns()
        self._scheduler.update_from_output(scheduled, output)
        return (between - began + time.thread_time_ns() - resumed) / 1e6


def submits(model: str, num_requests: int) -> list[float]:
    """Milliseconds of each request, from token ids to the queue."""
    requests, queue = Requests(), scheduler(model, 256)
    times = []
    for i, prompt in enumerate([requests.prompt(CONTEXT) for _ in range(num_requests + 20)]):
        began = time.thread_time_ns()
        queue.add_request(requests.make(f"r{i}", prompt))
        times.append((time.thread_time_ns() - began) / 1e6)
    return times[20:]


def main(model: str) -> None:
    """Answers until the input ends."""
    cases: list[Decodes] = []
    # vLLM writes to standard output at times; ours is kept apart.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        match json.loads(line):
            case ["decodes", running, waiting]:
                cases.append(Decodes(model, running, waiting))
                gc.collect()
                gc.freeze()
                times = []
            case ["step", index, steps]:
                times = [cases[index].step() for _ in range(steps)]
            case ["submit", count]:
                times = submits(model, count)
        print(json.dumps(times), file=answers)


if __name__ == "__main__":
    main(sys.argv[1])
