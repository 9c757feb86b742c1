"""Llama shapes with random weights: tokens/s against transformers' continuous batching, and idle time.

Both run the same modules in this process, from the same prompts, to the same number of greedy tokens. Ours
goes through the worker's executor and step thread, with two plans in flight as a scheduler has them; no gRPC.
"""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transformers
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from worker_service import attention, model_checks
from worker_service.attention import ATTENTION_NAME
from worker_service.cuda_graphs import Capture, CudaCapture
from worker_service.executor import Executor
from worker_service.forward import GenericForward
from worker_service.kv_memory import KvMemory
from worker_service.model import Model
from worker_service.plan import Admission, Int32, Limits, Plan, Result, Sampling
from worker_service.step_thread import Lease, StepThread
from worker_service.tokenizer_files import TokenizerFiles

BLOCK_SIZE = 16
MAX_BATCHED_TOKENS = 8192


@dataclass(frozen=True)
class Load:
    """Requests that all are there from the start."""

    requests: int
    prompt_tokens: int
    output_tokens: int

    @property
    def blocks(self) -> int:
        """KV blocks of one request."""
        return -(-(self.prompt_tokens + self.output_tokens) // BLOCK_SIZE)


SHAPES = {
    "Llama 1B": transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "Llama 8B": transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=8192,
    ),
}  # fmt: skip
TINY = transformers.LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512,
)  # fmt: skip
LOADS = (Load(1, 128, 128), Load(64, 256, 128), Load(256, 256, 128))
TINY_LOAD = Load(3, 20, 5)


def make_model(config: transformers.LlamaConfig, device: torch.device, backend: str) -> Model:
    """A model of random weights, as the worker would have loaded it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with device:
        module = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    module.train(False).requires_grad_(False)
    layers, vocab_size = model_checks.record_layers(module)
    name, kernels = attention.load_backend(backend, device)
    return Model(
        name="random",
        module=module,
        forward=GenericForward(module),
        decoder_name="generic",
        device=device,
        dtype=dtype,
        kv_dtype=dtype,
        backend=kernels,
        backend_name=name,
        layers=layers,
        vocab_size=vocab_size,
        max_model_len=config.max_position_embeddings,
        eos_token_ids=(),
        fingerprint="",
        tokenizer=TokenizerFiles(),
    )


def make_prompts(load: Load, vocab_size: int) -> list[list[int]]:
    """Random token ids."""
    rng = np.random.default_rng(1)
    return rng.integers(3, vocab_size, (load.requests, load.prompt_tokens)).tolist()  # type: ignore[no-any-return]


def capture_on(device: torch.device) -> Capture:
    """CUDA's. A dry run has nothing to capture with, and runs the same Python again."""
    return CudaCapture(device) if device.type == "cuda" else lambda run: run


def make_executor(model: Model, load: Load, graphs: bool) -> Executor:
    """With room for the whole load. `graphs`: whether its decodes are captured."""
    limits = Limits(
        num_slots=load.requests,
        num_blocks=load.requests * load.blocks + 1,
        block_size=BLOCK_SIZE,
        max_batched_tokens=MAX_BATCHED_TOKENS,
        max_model_len=load.prompt_tokens + load.output_tokens,
        vocab_size=model.vocab_size,
    )
    kv = KvMemory(model.layers, limits.num_blocks, BLOCK_SIZE, model.kv_dtype, model.device)
    executor = Executor(model, kv, limits)
    if graphs:
        executor.capture_decodes(capture_on(model.device), (load.requests,))
    return executor


def make_plans(load: Load, prompts: list[list[int]]) -> Iterator[Plan]:
    """Prompts in as few steps as the budget allows, then decodes of all rows at once."""
    none = np.empty(0, np.int32)
    blank = Plan(0, none, (), none, none, none, none, none, none)
    at_once = max(1, MAX_BATCHED_TOKENS // load.prompt_tokens)
    seq = 0
    for first in range(0, load.requests, at_once):
        slots = np.arange(first, min(first + at_once, load.requests), dtype=np.int32)
        admitted = tuple(_admission(slot, prompts[slot], load) for slot in slots.tolist())
        counts = np.full(len(slots), load.prompt_tokens, np.int32)
        yield replace(blank, seq=seq, admitted=admitted, slots=slots, num_tokens=counts)
        seq += 1
    slots = np.arange(load.requests, dtype=np.int32)
    for step in range(load.output_tokens - 1):
        yield replace(blank, seq=seq + step, slots=slots, num_tokens=np.ones(load.requests, np.int32))


def _admission(slot: int, prompt: list[int], load: Load) -> Admission:
    blocks: Int32 = 1 + slot * load.blocks + np.arange(load.blocks, dtype=np.int32)
    tokens = np.array(prompt, np.int32)
    return Admission(slot, str(slot), tokens, len(prompt), 0, blocks, Sampling())


def generate(executor: Executor, load: Load, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Runs the load with two plans in flight: seconds, and the tokens of each request."""
    thread = StepThread(executor, torch.get_num_threads())
    lease, credits = Lease(), threading.Semaphore(2)
    outcomes: list[Result | Exception] = []

    def deliver(outcome: Result | Exception) -> None:
        outcomes.append(outcome)
        credits.release()

    started = time.perf_counter()
    for plan in make_plans(load, prompts):
        credits.acquire()
        thread.submit(lease, plan, deliver)
    thread.close().result()
    elapsed = time.perf_counter() - started
    texts: list[list[int]] = [[] for _ in prompts]
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
        for slot, token in zip(outcome.slots.tolist(), outcome.token_ids.tolist(), strict=True):
            texts[slot].append(token)
    return elapsed, texts


def free_memory(device: torch.device) -> None:
    """Gives back what the run before has left: both sides size their KV memory by what is free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure_ours(model: Model, load: Load, graphs: bool) -> tuple[float, list[list[int]]]:
    """Output tokens a second of the second of two runs, and the tokens."""
    free_memory(model.device)
    prompts = make_prompts(load, model.vocab_size)
    executor = make_executor(model, load, graphs)
    generate(executor, load, prompts)
    executor.reset()
    seconds, texts = generate(executor, load, prompts)
    return load.requests * load.output_tokens / seconds, texts


def measure_peer(model: Model, load: Load) -> tuple[float, list[list[int]]]:
    """The same of transformers' continuous batching, with its own choice of attention and CUDA graphs."""
    free_memory(model.device)
    prompts = make_prompts(load, model.vocab_size)
    options = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=load.output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    module: Any = model.module
    module.set_attn_implementation("sdpa")
    try:
        run = module.generate_batch
        run(prompts, generation_config=options)
        started = time.perf_counter()
        answers = run(prompts, generation_config=options)
        seconds = time.perf_counter() - started
    finally:
        module.set_attn_implementation(ATTENTION_NAME)
    texts = [list(answer.generated_tokens) for answer in answers.values()]
    produced = sum(map(len, texts))
    if produced != load.requests * load.output_tokens:
        raise RuntimeError(f"the peer made {produced} tokens, not {load.requests * load.output_tokens}")
    return produced / seconds, texts


@dataclass(frozen=True)
class Idle:
    """Decode steps of one load."""

    step_ms: float
    busy_ms: float  # of which the device computed or copied
    gap_us: float | None  # from the end of a step's work to the next step's, median; None: not seen

    @property
    def share(self) -> float:
        """Of a step's time, in which the device did nothing."""
        return max(0.0, 1 - self.busy_ms / self.step_ms)


# The one copy that each step begins with, as torch's profiler names it.
_FIRST_OF_STEP = "Memcpy HtoD (Pinned -> Device)"


def step_gaps_us(work: Iterable[tuple[str, float, float]]) -> list[float]:
    """Time without work before each step but the first, from names, starts and ends of a device's work."""
    gaps: list[float] = []
    done = None
    steps = 0
    for name, start, end in sorted(work, key=lambda one: one[1]):
        if name == _FIRST_OF_STEP:
            steps += 1
            if steps > 1 and done is not None:
                gaps.append(max(0.0, start - done))
        done = end if done is None else max(done, end)
    return gaps


def measure_idle(model: Model, load: Load, graphs: bool) -> Idle:
    """How long a decode step is, and how much of it the device works: on a CPU all of the forward.

    Run after `measure_ours`, which compiles.
    """
    free_memory(model.device)
    prompts = make_prompts(load, model.vocab_size)
    executor = make_executor(model, load, graphs)
    steps = load.output_tokens - 1
    kinds = [ProfilerActivity.CUDA if executor.overlaps else ProfilerActivity.CPU]
    plans = list(make_plans(load, prompts))
    for plan in plans[:-steps]:
        executor.execute(plan)
    with profile(activities=kinds) as profiler:
        started = time.perf_counter()
        pending = executor.launch(plans[-steps])
        for plan in plans[len(plans) - steps + 1 :]:
            following = executor.launch(plan)
            executor.collect(pending)
            pending = following
        executor.collect(pending)
        wall = time.perf_counter() - started
    events = profiler.key_averages()
    busy = sum(e.self_device_time_total if executor.overlaps else e.self_cpu_time_total for e in events)
    device_work = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA
    ]
    gaps = step_gaps_us(device_work)
    gap = statistics.median(gaps) if len(gaps) == steps - 1 and gaps else None
    return Idle(1e3 * wall / steps, busy / 1e3 / steps, gap)
